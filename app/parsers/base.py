"""The base class of all formats: it reads the text of one choice once, as it arrives, and finds marks in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from secrets import token_hex
from typing import ClassVar, Literal

import msgspec

__all__ = ["CalledFunction", "StreamingParser", "ToolCall"]

_PIECE = 1024


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # a JSON object, as the model wrote it


class ToolCall(msgspec.Struct):
    """A call in the form of OpenAI's API. ``index``: its position among the calls of its choice, set in streams."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class StreamingParser(ABC):
    """Splits the text of one choice into text and tool calls.

    A format declares its marks, says which of them it expects next, and handles the text before and behind them. No
    pattern is searched and nothing is evaluated: the cost is linear in the length of the text.

    ``names``: the tools that may be called. Calls of other tools stay text. Unless ``parallel``, only the first call is
    returned. ``thinking``: the prompt has begun a thought.
    """

    MARKS: ClassVar[tuple[str, ...]]
    """All marks of the format. Tokenizers may have them as special tokens."""

    def __init__(self, names: Collection[str], *, parallel: bool = True, thinking: bool = False) -> None:
        self.calls = 0
        self._names = names
        self._parallel = parallel
        self._thinking = thinking
        self._held = ""  # may be the beginning of a mark
        self._text: list[str] = []
        self._complete: list[ToolCall] = []

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add a piece of the choice; return the text and the calls that are complete with it."""
        for at in range(0, len(text), _PIECE):  # a mark costs at most a piece, for any length of the text
            self._held += text[at : at + _PIECE]
            while self._step():
                pass
        return self._take()

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the choice. A call without its end mark may still be a call."""
        held, self._held = self._held, ""
        self.on_end(held)
        return self._take()

    def add_text(self, text: str) -> None:
        self._text.append(text)

    def add_call(self, function: CalledFunction) -> None:
        """Add a call with an id, unless the choice may have one call only and has it."""
        if self._parallel or not self.calls:
            self._complete.append(ToolCall(f"call_{token_hex(12)}", function, index=self.calls))
            self.calls += 1

    @abstractmethod
    def expected(self, held: str) -> tuple[str, tuple[str, ...]]:
        """The held text without what the format skips, and the marks to look for in it."""

    @abstractmethod
    def on_text(self, text: str) -> None:
        """Text before the next mark."""

    @abstractmethod
    def on_mark(self, mark: str) -> None:
        """A mark behind that text."""

    @abstractmethod
    def on_end(self, held: str) -> None:
        """The end of the choice. ``held``: the last characters, which are no complete mark."""

    def _step(self) -> bool:
        """Advance behind the next mark; False if it has not arrived."""
        self._held, marks = self.expected(self._held)
        at, mark = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=(-1, ""))
        if not mark:
            at = len(self._held) - max(_begun(self._held, mark) for mark in marks)
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        self.on_text(text)
        if mark:
            self.on_mark(mark)
        return bool(mark)

    def _take(self) -> tuple[str, list[ToolCall]]:
        text, self._text = "".join(self._text), []
        calls, self._complete = self._complete, []
        return text, calls


def _begun(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
