"""The live page: its files, and the feed of actors and requests."""
