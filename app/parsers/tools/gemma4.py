"""Tool calls as Gemma 4 writes them; keys are bare, and a token of its own stands around strings:

<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>

FunctionGemma writes ``<start_function_call>``, ``<end_function_call>`` and, around strings, ``<escape>``.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from app.parsers.base import StreamingParser
from app.parsers.text_reader import IncompleteCall, ParseError, Reading, Sink
from app.parsers.tools.lark import Rules, Schema, placed
from app.parsers.tools.parameters import members

__all__ = ["FunctionGemmaParser", "Gemma4Parser"]

_DEPTH = 64
_BARE = re.compile(r"[^,}\]<]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}


class Gemma4Parser(StreamingParser):
    """Strings may be JSON, too: grammars ask for JSON values. Words without quotes are strings, None is null."""

    QUOTE: ClassVar[str] = '<|"|>'
    OPEN = ("<|tool_call>",)
    MARKS = ("<tool_call|>",)
    TOKENS = (QUOTE,)

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        yield from self.expect("call:")
        name, _ = yield from self.name_until("{")
        self.begin_call(name.strip())
        yield from self._members(self.add_arguments, 0)
        self.end_call()

    def _members(self, sink: Sink, depth: int) -> Reading[None]:
        """The members of an object after its start, and its end."""
        sink("{")
        yield from self.space()
        first = True
        while (yield from self.peek()) != "}":
            if not first:
                sink(", ")
            first = False
            yield from self._key(sink)
            yield from self._value(sink, depth + 1)
            if (yield from self.symbol(",", "}")) == "}":
                self.put_back("}")
            yield from self.space()
        self.take(1)
        sink("}")

    def _key(self, sink: Sink) -> Reading[None]:
        if (yield from self.peek()) == '"':
            yield from self.json_string(sink)
            yield from self.symbol(":")
        elif (yield from self.skip(self.QUOTE)):
            yield from self._string(sink)
            yield from self.symbol(":")
        else:
            key, _ = yield from self.name_until(":")
            sink(_json(key.strip()))
        sink(": ")

    def _value(self, sink: Sink, depth: int) -> Reading[None]:
        yield from self.space()
        if depth > _DEPTH:
            raise ParseError("it is nested too deeply")
        if (yield from self.skip(self.QUOTE)):
            yield from self._string(sink)
            return
        first = yield from self.peek()
        if first == "{":
            self.take(1)
            yield from self._members(sink, depth)
        elif first == "[":
            yield from self._items(sink, depth)
        elif first == '"':
            yield from self.json_string(sink)
        else:
            yield from self._bare(sink)

    def _bare(self, sink: Sink) -> Reading[None]:
        """A number, or words."""
        parts: list[str] = []
        yield from self.run(_BARE, parts.append)
        text = "".join(parts).strip()
        if not self._text:  # cut: what begins as a number or word may go on as another
            raise IncompleteCall
        if not text or self._text[0] == "<":
            raise ParseError(f"{text[:32]!r} is no value")
        sink(text if _NUMBER.fullmatch(text) else _WORDS.get(text.lower(), _json(text)))

    def _items(self, sink: Sink, depth: int) -> Reading[None]:
        sink(self.take(1))
        yield from self.space()
        first = True
        while (yield from self.peek()) != "]":
            if not first:
                sink(", ")
            first = False
            yield from self._value(sink, depth + 1)
            if (yield from self.symbol(",", "]")) == "]":
                self.put_back("]")
            yield from self.space()
        sink(self.take(1))

    def _string(self, sink: Sink) -> Reading[None]:
        """A string after its start, and its end."""
        sink('"')
        if not (yield from self.until((self.QUOTE,), lambda text: sink(_json(text)[1:-1]))):
            raise IncompleteCall
        sink('"')

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        end = rules.text(f"}}{cls.MARKS[0]}")
        written, alone = end, end  # what follows a value, and what stands where there is none yet
        for key, part, needed in reversed(list(members(schema))):
            value = f"{rules.text(f'{key}:')} {rules.json(placed(part, schema))} {written}"
            written, alone = (
                rules.add(f'"," {value}' + ("" if needed else f" | {written}")),
                rules.add(value + ("" if needed else f" | {alone}")),
            )
        return f"{rules.text(f'call:{name}{{')} {alone}"


class FunctionGemmaParser(Gemma4Parser):
    QUOTE = "<escape>"
    OPEN = ("<start_function_call>",)
    MARKS = ("<end_function_call>",)
    TOKENS = (QUOTE,)


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()
