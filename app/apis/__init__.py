"""The HTTP APIs, one package each: bodies, handlers, chunks of streams, and routes."""
