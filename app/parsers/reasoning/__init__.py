"""Formats of reasoning: ``formats`` has all that are two marks, as data; gpt-oss is ``app.parsers.harmony``."""
