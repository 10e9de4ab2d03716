"""Tool calls as Python: Llama 3.2, Llama 4 and others write a list of calls that begins the answer,

[get_weather(city="Oslo", days=2), add(a=1.5, b=None)]
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from app.parsers.base import StreamingParser
from app.parsers.text_reader import IncompleteCall, ParseError, Reading, Sink
from app.parsers.tools.lark import ANNOTATIONS, Rules, Schema, Unenforceable, placed, resolved
from app.parsers.tools.parameters import members, types_of

__all__ = ["Lfm2Parser", "Llama4Parser", "Olmo3Parser", "PythonicParser", "literal_json"]

_NAME = re.compile(r"[\w.-]*", re.ASCII)
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_RUNS = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_DEPTH = 64


class PythonicParser(StreamingParser):
    """Values may be literals only: strings, numbers, True, False, None, lists, tuples and dicts. Nothing is run."""

    SECTION = ("[", "]")
    BETWEEN = '", "'
    STARTS = "["

    def at_start(self) -> Reading[None]:
        yield from self.symbol("[")
        while True:
            yield from self.space()
            yield from self.json_call() if (yield from self.peek()) == "{" else self._call()
            if (yield from self.symbol(",", "]")) == "]":
                return

    def _call(self) -> Reading[None]:
        name = yield from self._word(_NAME)
        yield from self.symbol("(")
        self.begin_call(name)
        opening = "{"
        yield from self.space()
        while (yield from self.peek()) != ")":
            key = yield from self._word(_NAME)
            yield from self.symbol("=")
            self.add_arguments(f"{opening}{_json(key)}: ")
            opening = ", "
            yield from self._value(self.add_arguments)
            if (yield from self.symbol(",", ")")) == ")":
                self.put_back(")")
            yield from self.space()
        self.take(1)
        self.add_arguments("{}" if opening == "{" else "}")
        self.end_call()

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        """Values are JSON, which is read as Python."""
        written, alone = '")"', '")"'  # what follows a value, and what stands where there is none yet
        for key, part, needed in reversed(list(members(schema))):
            if not key.isidentifier():
                raise Unenforceable(f"the name {key[:32]!r}")
            value = f"{rules.text(f'{key}=')} {_literal(part, schema, rules)} {written}"
            written, alone = (
                rules.add(f'", " {value}' + ("" if needed else f" | {written}")),
                rules.add(value + ("" if needed else f" | {alone}")),
            )
        return f"{rules.text(f'{name}(')} {alone}"

    def _word(self, pattern: re.Pattern[str]) -> Reading[str]:
        yield from self.space()
        parts: list[str] = []
        yield from self.run(pattern, parts.append)
        if not parts:
            raise ParseError("expected a name") if self._text else IncompleteCall
        return "".join(parts)

    def _value(self, sink: Sink, depth: int = 0) -> Reading[None]:
        yield from self.space()
        if depth > _DEPTH:
            raise ParseError("it is nested too deeply")
        first = yield from self.peek()
        if first in _RUNS:
            yield from self._string(sink)
        elif first in "[(":
            yield from self._items(sink, depth)
        elif first == "{":
            yield from self._dict(sink, depth)
        else:
            written = yield from self._word(_SCALAR)
            if written not in _WORDS and _NUMBER.fullmatch(written) is None:
                if self._at_end():
                    raise IncompleteCall
                raise ParseError(f"{written[:32]!r} is no value")
            sink(_WORDS.get(written, written))

    def _string(self, sink: Sink) -> Reading[None]:
        quote = self.take(1)
        sink('"')
        while True:
            yield from self.run(_RUNS[quote], lambda text: sink(_json(text)[1:-1]))
            if (yield from self.peek()) == quote:
                self.take(1)
                sink('"')
                return
            self.take(1)
            sink(_json((yield from self._escaped()))[1:-1])

    def _escaped(self) -> Reading[str]:
        """What an escape stands for; one that Python does not know stands for itself."""
        char = yield from self.peek()
        self.take(1)
        if char in _CODE_LENGTHS:
            digits = ""
            while len(digits) < _CODE_LENGTHS[char]:
                digits += yield from self.peek()
                self.take(1)
            try:
                code = chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise ParseError("an escape has no code") from None
            return "\ufffd" if "\ud800" <= code <= "\udfff" else code
        if char in "\\'\"":
            return char
        return _ESCAPES.get(char, "\\" + char)

    def _items(self, sink: Sink, depth: int) -> Reading[None]:
        closing = "]" if self.take(1) == "[" else ")"
        sink("[")
        yield from self.space()
        first = True
        while (yield from self.peek()) != closing:
            if not first:
                sink(", ")
            first = False
            yield from self._value(sink, depth + 1)
            if (yield from self.symbol(",", closing)) == closing:
                self.put_back(closing)
            yield from self.space()
        self.take(1)
        sink("]")

    def _dict(self, sink: Sink, depth: int) -> Reading[None]:
        self.take(1)
        sink("{")
        yield from self.space()
        first = True
        while (char := (yield from self.peek())) != "}":
            if char not in _RUNS:
                raise ParseError("a key is no string")
            if not first:
                sink(", ")
            first = False
            yield from self._string(sink)
            yield from self.symbol(":")
            sink(": ")
            yield from self._value(sink, depth + 1)
            if (yield from self.symbol(",", "}")) == "}":
                self.put_back("}")
            yield from self.space()
        self.take(1)
        sink("}")


class Llama4Parser(PythonicParser):
    """Llama 4 may put marks around the list, or JSON as Llama 3 writes it between them."""

    OPEN = ("<|python_start|>",)
    MARKS = ("<|python_end|>",)
    SECTION = ("<|python_start|>[", "]<|python_end|>")

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) == "{":
            yield from self.json_call()
        else:
            yield from self.at_start()


class Lfm2Parser(Llama4Parser):
    """LFM2 puts other marks around the list, whose calls are JSON where a prompt asks for it; text may follow it."""

    OPEN = ("<|tool_call_start|>",)
    MARKS = ("<|tool_call_end|>",)
    SECTION = ("<|tool_call_start|>[", "]<|tool_call_end|>")


class Olmo3Parser(PythonicParser):
    """Olmo 3 writes a call a line between tags."""

    OPEN = ("<function_calls>",)
    MARKS = ("</function_calls>",)
    SECTION = ("<function_calls>\n", "\n</function_calls>")
    BETWEEN = '"\\n"'
    STARTS = ""

    def at_start(self) -> Reading[None]:
        return
        yield

    def block(self, mark: str) -> Reading[None]:
        (end,) = self.MARKS
        yield from self.space()
        while not (yield from self.skip(end)):
            yield from self._call()
            yield from self.space()


class _LiteralReader(PythonicParser):
    """Reads a literal, which is all of a text."""

    literal: str | None = None

    def answer(self) -> Reading[None]:
        parts: list[str] = []
        yield from self.attempt(self._value(parts.append), expected=False)
        yield from self.space()
        if not self._text:
            self.literal = "".join(parts)
        self._text = ""


def literal_json(text: str) -> str | None:
    """A literal of Python as JSON; None if the text is none."""
    reader = _LiteralReader({})
    reader.read(text)
    reader.end()
    return reader.literal


def _literal(schema: Any, root: Schema, rules: Rules) -> str:
    kinds = types_of(schema, root)
    words = {"boolean": '"True" | "False"', "null": '"None"'}
    if kinds and kinds <= set(words) and not set(resolved(schema, root)) - ANNOTATIONS - {"type"}:
        return f"({' | '.join(words[kind] for kind in sorted(kinds))})"
    return rules.json(placed(schema, root))


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()
