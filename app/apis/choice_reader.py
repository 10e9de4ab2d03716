"""Reads the text of one choice by the model's format, and counts the tokens of its thought."""

from __future__ import annotations

from collections.abc import Sequence

from app.parsers.base import StreamingParser
from app.parsers.events import Piece

__all__ = ["ChoiceReader"]


class ChoiceReader:
    """A parser with a count of tokens. ``end_of_thought``: the id of the mark's token, if it is one token; otherwise
    the count is an estimate by characters."""

    def __init__(self, parser: StreamingParser, end_of_thought: int | None) -> None:
        self._parser = parser
        self._end = end_of_thought
        self._tokens = 0
        self._thought: int | None = None

    def read(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Add a piece of the choice; returns what is certain with it."""
        if self._thought is None and self._end is not None and self._end in token_ids:
            self._thought = self._tokens + list(token_ids).index(self._end)
        self._tokens += len(token_ids)
        return self._parser.read(text)

    def end(self) -> list[Piece]:
        """The rest of the choice."""
        return self._parser.end()

    @property
    def calls(self) -> int:
        return self._parser.calls

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought so far, with its first mark if the model wrote it."""
        if not self._parser.thought:
            return 0
        if self._end is None:
            return self._parser.reasoning_tokens(self._tokens)
        return self._tokens if self._thought is None else self._thought
