"""Operators whose result for a token is the same, bit by bit, whatever other tokens are in the step."""
