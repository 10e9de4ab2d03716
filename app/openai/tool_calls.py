"""Tool calls in what a model writes, in the form of Hermes and Qwen: a block of JSON for each call,

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Nothing of it is evaluated and no pattern is searched: the text is read once, from its beginning to its end.
"""

from __future__ import annotations

from collections.abc import Collection
from secrets import token_hex
from typing import Any, Literal

import msgspec

__all__ = ["MARKS", "CalledFunction", "ToolCall", "ToolCallReader", "ends_in_thought"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
MARKS = (_OPEN, _CLOSE, _THINK, _THOUGHT)
"""What the reader looks for. Tokenizers may have them as special tokens."""
_PIECE = 1024


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # an object as JSON, the way the model wrote it


class ToolCall(msgspec.Struct):
    """A call as OpenAI's API tells it; ``index`` is its place among the calls of its choice, told in streams."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class ToolCallReader:
    """Takes the text of one choice apart as it comes. ``names``: the tools that may be called.

    A block that is not a call of one of them stays text, to the letter, and so does what stands in a thought: one that
    the text begins with, or, ``thinking``, that was begun before it. Elsewhere the mark of a thought is a word like
    others. Unless ``parallel``, calls after the first are left out. White space behind a call belongs to it.
    """

    def __init__(self, names: Collection[str], *, parallel: bool = True, thinking: bool = False) -> None:
        self.calls = 0
        self._names = names
        self._parallel = parallel
        self._held = ""  # what may be the beginning of a mark
        self._until = _THOUGHT if thinking else ""  # the mark that ends the block or the thought that is being read
        self._first = not thinking  # only white space has come so far
        self._block: list[str] = []
        self._behind = False  # only white space has come since the last call

    def read(self, text: str) -> tuple[str, list[ToolCall]]:
        """What is text, and which calls are whole, now that this piece is here."""
        told: list[str] = []
        calls: list[ToolCall] = []
        for at in range(0, len(text), _PIECE):  # a mark costs no more than a piece, however long the text is
            self._held += text[at : at + _PIECE]
            while self._step(told, calls):
                pass
        return "".join(told), calls

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left at the choice's end. A block whose end mark is missing may still be a call."""
        told: list[str] = []
        calls: list[ToolCall] = []
        if self._until == _CLOSE:
            self._block.append(self._held)
            self._end_block("", told, calls)
        else:
            told.append(self._held)
        self._held = self._until = ""
        return "".join(told), calls

    def _step(self, told: list[str], calls: list[ToolCall]) -> bool:
        """Go on behind the next mark; False when it is not here yet."""
        if self._behind:
            self._held = self._held.lstrip()
            self._behind = not self._held
        if self._first and (word := self._held.lstrip()):
            self._first = word.startswith(_THINK[: len(word)])
        marks = (self._until,) if self._until else (_OPEN, _THINK) if self._first else (_OPEN,)
        at, mark = min(((at, mark) for mark in marks if (at := self._held.find(mark)) >= 0), default=(-1, ""))
        if not mark:
            at = len(self._held) - max(_begun(self._held, mark) for mark in marks)
        (self._block if self._until == _CLOSE else told).append(self._held[:at])
        self._held = self._held[at + len(mark) :]
        if mark == _CLOSE:
            self._end_block(mark, told, calls)
        elif mark in (_THINK, _THOUGHT):
            told.append(mark)
        if mark:
            self._first = False
            self._until = {_OPEN: _CLOSE, _THINK: _THOUGHT}.get(mark, "")
        return bool(mark)

    def _end_block(self, mark: str, told: list[str], calls: list[ToolCall]) -> None:
        block, self._block = "".join(self._block), []
        function = self._function(block)
        if function is None:
            told.append(f"{_OPEN}{block}{mark}")
            return
        self._behind = True
        if self._parallel or not self.calls:
            calls.append(ToolCall(f"call_{token_hex(12)}", function, index=self.calls))
            self.calls += 1

    def _function(self, block: str) -> CalledFunction | None:
        try:
            written = msgspec.json.decode(block, type=_Written)
            arguments = bytes(written.arguments)
            if arguments.startswith(b'"'):  # some models write the object as a string of JSON
                arguments = msgspec.json.decode(arguments, type=str).encode()
            msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        return CalledFunction(written.name, arguments.decode()) if written.name in self._names else None


def ends_in_thought(prompt: str) -> bool:
    """Whether a prompt, of which this is the end, leaves the model within a thought, as some templates do."""
    return prompt.rstrip().endswith(_THINK)


def _begun(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
