"""Parsers of model output: formats of tool calls and thoughts. ``registry`` has them by name."""
