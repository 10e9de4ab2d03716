"""Formats of thoughts, one file each."""
