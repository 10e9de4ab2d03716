"""Formats of tool calls, one file each."""
