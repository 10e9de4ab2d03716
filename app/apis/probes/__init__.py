"""Probes, metrics, version and load."""
