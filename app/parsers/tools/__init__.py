"""Formats of tool calls, one file each. ``app.parsers.registry`` has them by name."""
