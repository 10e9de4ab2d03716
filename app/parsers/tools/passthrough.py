"""No format: calls stay in the text as the model writes them, for clients that read them themselves."""

from __future__ import annotations

from app.parsers.base import StreamingParser

__all__ = ["PassthroughParser"]


class PassthroughParser(StreamingParser):
    """Finds nothing."""
