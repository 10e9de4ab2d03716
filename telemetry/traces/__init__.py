"""Traces of requests: spans, their export, and spans of workers."""
