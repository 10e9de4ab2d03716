"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: a block of JSON for each call,

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from app.parsers.base import CalledFunction, StreamingParser
from app.parsers.reasoning import think

__all__ = ["HermesParser"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CLOSING = {_OPEN: _CLOSE, think.BEGIN: think.END}


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class HermesParser(StreamingParser):
    """A block that is no call of a given tool stays text, unchanged, and so does everything inside of a thought.

    A thought is recognized at the beginning of the text only, or if the prompt has begun it. White space behind a call
    is dropped.
    """

    MARKS = (_OPEN, _CLOSE, think.BEGIN, think.END)

    def __init__(self, names: Collection[str], *, parallel: bool = True, thinking: bool = False) -> None:
        super().__init__(names, parallel=parallel, thinking=thinking)
        self._until = think.END if thinking else ""  # the mark that ends the current block or thought
        self._first = not thinking  # only white space has arrived
        self._block: list[str] = []
        self._after_call = False  # only white space has arrived since the last call

    def expected(self, held: str) -> tuple[str, tuple[str, ...]]:
        if self._after_call:
            held = held.lstrip()
            self._after_call = not held
        if self._first and (word := held.lstrip()):
            self._first = word.startswith(think.BEGIN[: len(word)])
        return held, (self._until,) if self._until else (_OPEN, think.BEGIN) if self._first else (_OPEN,)

    def on_text(self, text: str) -> None:
        if self._until == _CLOSE:
            self._block.append(text)
        else:
            self.add_text(text)

    def on_mark(self, mark: str) -> None:
        if mark == _CLOSE:
            self._end_block(mark)
        elif mark in (think.BEGIN, think.END):
            self.add_text(mark)
        self._first = False
        self._until = _CLOSING.get(mark, "")

    def on_end(self, held: str) -> None:
        if self._until == _CLOSE:
            self._block.append(held)
            self._end_block("")
        else:
            self.add_text(held)
        self._until = ""

    def _end_block(self, mark: str) -> None:
        block, self._block = "".join(self._block), []
        function = self._function(block)
        if function is None:
            self.add_text(f"{_OPEN}{block}{mark}")
            return
        self._after_call = True
        self.add_call(function)

    def _function(self, block: str) -> CalledFunction | None:
        """The call in a block; None if the block is no call of a given tool."""
        try:
            written = msgspec.json.decode(block, type=_Written)
            arguments = bytes(written.arguments)
            if arguments.startswith(b'"'):  # some models write the object as a string of JSON
                arguments = msgspec.json.decode(arguments, type=str).encode()
            msgspec.json.decode(arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        return CalledFunction(written.name, arguments.decode()) if written.name in self._names else None
