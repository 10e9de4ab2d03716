"""Reading a text as it arrives, by generators that read like a grammar, and the grammar of JSON.

``yield from self.until(mark)`` passes text on and returns after the mark, whatever pieces the text comes in. So a
stream and a whole answer give the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

import msgspec

__all__ = ["IncompleteCall", "ParseError", "Reading", "Sink", "TextReader", "decoded"]

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads text and returns a T; it yields when it needs more text."""

Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_DEPTH = 64
_LONGEST_NAME = 256


class ParseError(Exception):
    """The text does not follow the format. What was read of it since the last mark becomes content."""


class IncompleteCall(ParseError):
    """The text ends in the middle of a call."""

    def __init__(self) -> None:
        super().__init__("it is not complete")


class TextReader:
    """A text that arrives in pieces, and the methods that read it.

    A subclass adds each piece to ``_text`` and resumes the reading that waits for it; at the end it sets ``_ended``.
    """

    def __init__(self) -> None:
        self._text = ""  # not read yet
        self._ended = False
        self._read: list[str] | None = None  # read and not passed on yet, if it may become content again
        self._calling = False  # a call has begun, and not ended

    def more(self) -> Reading[bool]:
        """Wait for more text; False at the end."""
        if self._ended:
            return False
        yield
        return True

    def _at_end(self) -> bool:
        return self._ended and not self._text

    def take(self, count: int, *, mark: bool = False) -> str:
        """Read characters that have arrived. A ``mark`` never becomes content again."""
        text, self._text = self._text[:count], self._text[count:]
        if self._read is not None and not mark:
            self._read.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Make what was read last the next text again."""
        self._text = text + self._text
        if self._read:
            self._read = ["".join(self._read).removesuffix(text)]

    def peek(self) -> Reading[str]:
        """The next character; raises ParseError at the end."""
        while not self._text:
            if not (yield from self.more()):
                raise IncompleteCall
        return self._text[0]

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Read as long as the pattern, which matches any number of characters, does."""
        while True:
            match = pattern.match(self._text)
            assert match is not None
            text = self.take(match.end())
            if sink is not None and text:
                sink(text)
            if self._text or not (yield from self.more()):
                return

    def space(self) -> Reading[None]:
        yield from self.run(_SPACE)

    def until(self, marks: tuple[str, ...], sink: Sink) -> Reading[str]:
        """Pass text on up to the next mark and read the mark; returns it, or "" at the end.

        In a call the begin of a mark at the end is no text: the answer was cut there.
        """
        while True:
            at, mark = min(((at, mark) for mark in marks if (at := self._text.find(mark)) >= 0), default=(-1, ""))
            if mark:
                if at:
                    sink(self.take(at))
                return self.take(len(mark), mark=True)
            keep = max((_begun(self._text, mark) for mark in marks), default=0)
            if self._ended and not self._calling:
                keep = 0
            if len(self._text) > keep:
                sink(self.take(len(self._text) - keep))
            if not (yield from self.more()):
                return ""

    def name_until(self, *marks: str) -> Reading[tuple[str, str]]:
        """A name before one of the marks, and the mark; raises ParseError if there is none."""
        parts: list[str] = []

        def sink(text: str) -> None:
            parts.append(text)
            if sum(map(len, parts)) > _LONGEST_NAME or "<" in text or "\n" in text:
                raise ParseError(f"{''.join(parts)[:32]!r} is no name")

        mark = yield from self.until(marks, sink)
        if not mark:
            raise IncompleteCall
        return "".join(parts), mark

    def skip(self, *words: str) -> Reading[str]:
        """Read the one of the words that comes next; returns it, or "" if none does."""
        while True:
            for word in words:
                if self._text.startswith(word):
                    return self.take(len(word), mark=True)
            if not any(word.startswith(self._text) for word in words) or not (yield from self.more()):
                return ""

    def expect(self, *words: str) -> Reading[str]:
        """Read white space and one of the words; raises ParseError if something else follows."""
        yield from self.space()
        word = yield from self.skip(*words)
        if not word and self._ended and any(word.startswith(self._text) for word in words):
            raise IncompleteCall
        if not word:
            raise ParseError(f"expected {' or '.join(words)}")
        return word

    def symbol(self, *symbols: str) -> Reading[str]:
        """Read white space and one of these characters, which become content again if the call is none."""
        yield from self.space()
        symbol = yield from self.peek()
        if symbol not in symbols:
            raise ParseError(f"expected {' or '.join(symbols)}")
        return self.take(1)

    # -- JSON

    def json_value(self, sink: Sink, depth: int = 0) -> Reading[None]:
        """Pass a JSON value on as it arrives; raises ParseError where it ends to be one.

        Raw control characters and unknown escapes in strings, which models write, are escaped.
        """
        yield from self.space()
        first = yield from self.peek()
        if depth > _DEPTH:
            raise ParseError("it is nested too deeply")
        if first == '"':
            yield from self.json_string(sink)
        elif first in "{[":
            yield from self._json_container(sink, depth)
        else:
            yield from self._json_scalar(sink)

    def json_string(self, sink: Sink) -> Reading[None]:
        sink((yield from self.symbol('"')))
        while True:
            yield from self.run(_STRING_RUN, sink)
            char = yield from self.peek()
            if char == "\\":
                yield from self._json_escape(sink)
            else:
                self.take(1)
                sink(char if char == '"' else f"\\u{ord(char):04x}")
                if char == '"':
                    return

    def text_string(self) -> Reading[str]:
        """A JSON string, decoded; raises ParseError."""
        parts: list[str] = []
        yield from self.json_string(parts.append)
        return decoded("".join(parts), str)

    def _json_escape(self, sink: Sink) -> Reading[None]:
        while len(self._text) < (6 if self._text.startswith("\\u") else 2):
            if not (yield from self.more()):
                break
        escape = re.match(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})', self._text)
        if escape is not None:
            sink(self.take(escape.end()))
        elif len(self._text) > 1:
            self.take(1)
            sink("\\\\")
        else:
            self.take(1)  # cut in the middle

    def _json_container(self, sink: Sink, depth: int) -> Reading[None]:
        opening = self.take(1)
        closing = "}" if opening == "{" else "]"
        sink(opening)
        yield from self._json_space(sink)
        if (yield from self.peek()) == closing:
            sink(self.take(1))
            return
        while True:
            if opening == "{":
                yield from self.json_string(sink)
                yield from self._json_space(sink)
                sink((yield from self.symbol(":")))
                yield from self._json_space(sink)
            yield from self.json_value(sink, depth + 1)
            yield from self._json_space(sink)
            symbol = yield from self.symbol(",", closing)
            sink(symbol)
            if symbol == closing:
                return
            yield from self._json_space(sink)

    def _json_space(self, sink: Sink) -> Reading[None]:
        yield from self.run(_SPACE, sink)

    def _json_scalar(self, sink: Sink) -> Reading[None]:
        parts: list[str] = []
        yield from self.run(_SCALAR_RUN, parts.append)
        text = "".join(parts)
        if _SCALAR.fullmatch(text) is None:
            if self._at_end():
                sink(text)
                raise IncompleteCall
            raise ParseError(f"{text[:32]!r} is no JSON value")
        sink(text)


def decoded(text: str, kind: type[T]) -> T:
    """The value of a JSON text; raises ParseError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ParseError(str(error)) from None


def _begun(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    return next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
