"""Finds regular expressions in a text that arrives in pieces, in linear time and with bounded memory.

An expression becomes its position automaton (Glushkov 1961): one position for each character of the expression, no
empty transitions. A set of positions is one integer, so a character costs two look-ups, whatever the expression is.
Python's ``re`` backtracks, so an expression of a request could take it forever.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["MAX_HELD_CHARS", "PatternError", "StopPattern", "StopPatterns"]

MAX_HELD_CHARS = 512
"""Characters that are held back because they may start a match."""

_MAX_POSITIONS = 256
_MAX_PARTS = 4096
_MAX_DEPTH = 32
_MAX_CACHED = 1024

_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX = {"x": 2, "u": 4, "U": 8}

Test = Callable[[str], bool]


class PatternError(ValueError):
    """An expression that is wrong, too large or not available. Its text says what to do."""


class _Set(NamedTuple):
    """One character of a text."""

    test: Test


class _All(NamedTuple):
    """Parts one after another."""

    parts: tuple[Node, ...]


class _Any(NamedTuple):
    """One of several parts."""

    parts: tuple[Node, ...]


class _Repeat(NamedTuple):
    """``maximum`` None: without an end."""

    part: Node
    minimum: int
    maximum: int | None


Node = _Set | _All | _Any | _Repeat


class _Part(NamedTuple):
    """Positions of a part of the automaton, as bits: those it begins with and those it ends with."""

    empty: bool  # whether it matches the empty text
    first: int
    last: int


class StopPattern:
    """An expression that was read.

    It has Python's syntax without what needs more than a finite automaton or looks around: no anchors but ``$`` at the
    end (the end of the text so far, which is where every match ends), no look-around, no references back. ``(?i)`` and
    ``(?s)`` may start it. Raises :class:`PatternError`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        node = _Reader(text).read()
        self._tests: list[Test] = []
        self._follow: list[int] = []
        self._parts = 0
        whole = self._add(node)
        if whole.empty:
            raise PatternError("it matches the empty text, so every answer would end at once. Make a part of it needed")
        before = [0] * len(self._tests)
        for place, follow in enumerate(self._follow):
            for after in _bits(follow):
                before[after] |= 1 << place
        self._before = before
        self.first, self.last = whole.first, whole.last
        self._masks: dict[str, int] = {}
        self._next: dict[int, int] = {}

    def step(self, live: int, char: str) -> int:
        """The positions that a match may have reached after ``char``; ``live``: before it. A match may start at each
        character."""
        after = self._next.get(live)
        if after is None:
            after = self.first | self._union(live, self._follow)
            if len(self._next) >= _MAX_CACHED:
                self._next.clear()
            self._next[live] = after
        return after & self._mask(char)

    def length(self, text: str) -> int:
        """The length of the longest match that ends where ``text`` ends; 0: none."""
        result, live = 0, self.last
        for count, char in enumerate(reversed(text), 1):
            live &= self._mask(char)
            if not live:
                break
            if live & self.first:
                result = count
            live = self._union(live, self._before)
        return result

    def _mask(self, char: str) -> int:
        """The positions that ``char`` fits."""
        mask = self._masks.get(char)
        if mask is None:
            mask = sum(1 << place for place, test in enumerate(self._tests) if test(char))
            if len(self._masks) >= _MAX_CACHED:
                self._masks.clear()
            self._masks[char] = mask
        return mask

    @staticmethod
    def _union(live: int, sets: Sequence[int]) -> int:
        result = 0
        for place in _bits(live):
            result |= sets[place]
        return result

    # -- construction

    def _add(self, node: Node) -> _Part:
        self._parts += 1
        if self._parts > _MAX_PARTS or len(self._tests) >= _MAX_POSITIONS:
            raise PatternError(
                f"with its repetitions written out it has more than {_MAX_POSITIONS} characters. Shorten it"
            )
        match node:
            case _Set(test):
                place = 1 << len(self._tests)
                self._tests.append(test)
                self._follow.append(0)
                return _Part(False, place, place)
            case _All(parts):
                whole = _Part(True, 0, 0)
                for part in parts:
                    whole = self._join(whole, self._add(part))
                return whole
            case _Any(parts):
                added = [self._add(part) for part in parts]
                first = last = 0
                for one in added:
                    first, last = first | one.first, last | one.last
                return _Part(any(one.empty for one in added), first, last)
            case _Repeat(part, minimum, maximum):
                return self._repeat(part, minimum, maximum)

    def _repeat(self, node: Node, minimum: int, maximum: int | None) -> _Part:
        whole = _Part(True, 0, 0)
        for _ in range(minimum):
            whole = self._join(whole, self._add(node))
        if maximum is None:
            part = self._add(node)
            self._connect(part.last, part.first)
            return self._join(whole, part._replace(empty=True))
        rest = _Part(True, 0, 0)
        for _ in range(maximum - minimum):  # from the last one on: each is entered only after the one before it
            rest = self._join(self._add(node), rest)._replace(empty=True)
        return self._join(whole, rest)

    def _join(self, one: _Part, two: _Part) -> _Part:
        self._connect(one.last, two.first)
        return _Part(
            one.empty and two.empty,
            one.first | two.first if one.empty else one.first,
            one.last | two.last if two.empty else two.last,
        )

    def _connect(self, from_: int, to: int) -> None:
        if to:
            for place in _bits(from_):
                self._follow[place] |= to


class StopPatterns:
    """Finds the match that is complete first; of several that end together, the longest."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [StopPattern(text) for text in dict.fromkeys(patterns)]
        self._live = [0] * len(self._patterns)
        self._tails = [""] * len(self._patterns)  # the text since no match was under way, at most MAX_HELD_CHARS of it

    def __bool__(self) -> bool:
        return bool(self._patterns)

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may start a match."""
        return max(map(len, self._tails), default=0)

    def feed(self, text: str) -> tuple[int, int, str] | None:
        """Add text; returns the number of characters of ``text`` up to the end of the found match, the length of the
        match (at most :data:`MAX_HELD_CHARS`) and its pattern."""
        for place, char in enumerate(text):
            result: tuple[int, str] | None = None
            for index, pattern in enumerate(self._patterns):
                live = self._live[index] = pattern.step(self._live[index], char)
                self._tails[index] = (self._tails[index] + char)[-MAX_HELD_CHARS:] if live else ""
                if live & pattern.last:
                    length = pattern.length(self._tails[index]) or MAX_HELD_CHARS
                    result = max(result or (0, ""), (length, pattern.text))
            if result is not None:
                return place + 1, *result
        return None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


_FLAGS = re.compile(r"\(\?([is]+)\)")
_COUNT = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")


class _Reader:
    """Reads one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        flags = _FLAGS.match(text)
        if flags is not None:
            self._at = flags.end()
        self._fold = flags is not None and "i" in flags[1]
        self._dot_all = flags is not None and "s" in flags[1]

    def read(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternError(f"a ) at character {self._at + 1} closes nothing. Write \\) for the character itself")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early. Complete it")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Node:
        choices = [self._row()]
        while self._peek() == "|":
            self._at += 1
            choices.append(self._row())
        return choices[0] if len(choices) == 1 else _Any(tuple(choices))

    def _row(self) -> Node:
        parts: list[Node] = []
        while (char := self._peek()) and char not in "|)":
            if char == "$" and not self._depth and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                break
            parts.append(self._counted(self._atom()))
        return parts[0] if len(parts) == 1 else _All(tuple(parts))

    def _counted(self, node: Node) -> Node:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            node = _Repeat(node, 1 if char == "+" else 0, 1 if char == "?" else None)
        elif (count := _COUNT.match(self._text, self._at)) and (count[1] or count[3]):
            self._at = count.end()
            minimum = int(count[1] or 0)
            maximum = int(count[3]) if count[3] else None if count[2] else minimum
            if maximum is not None and maximum < minimum:
                raise PatternError(f"{count[0]} ends below its start. Swap the numbers")
            if max(minimum, maximum or 0) > _MAX_POSITIONS:
                raise PatternError(f"{count[0]} repeats more than {_MAX_POSITIONS} times. Repeat less often")
            node = _Repeat(node, minimum, maximum)
        else:
            return node
        if self._peek() == "?":  # the first end of a match counts, so a lazy repetition finds the same
            self._at += 1
        if (char := self._peek()) and char in "*+?":
            raise PatternError(f"{char} at character {self._at + 1} repeats a repetition. Leave it out")
        return node

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return _Set(self._class())
        if char == "\\":
            return _Set(self._escape())
        if char == ".":
            return _Set((lambda _: True) if self._dot_all else (lambda char: char != "\n"))
        if char in "*+?":
            raise PatternError(
                f"{char} at character {self._at} repeats nothing. Write \\{char} for the character itself"
            )
        if char in "^$":
            raise PatternError(f"the anchor {char} at character {self._at} is not available. Leave it out")
        return _Set(self._range(char, char))

    def _group(self) -> Node:
        if self._text.startswith("?", self._at):
            if not self._text.startswith("?:", self._at):
                raise PatternError(
                    f"the group (?{self._text[self._at + 1 : self._at + 2]} at character {self._at} is not available; "
                    "look-around, names and references are not. Use (?:...)"
                )
            self._at += 2
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"its groups are more than {_MAX_DEPTH} deep. Flatten it")
        node = self._choice()
        self._depth -= 1
        if self._peek() != ")":
            raise PatternError("a group is not closed. Add a )")
        self._at += 1
        return node

    def _range(self, low: str, high: str) -> Test:
        if not self._fold:
            return (lambda char: char == low) if low == high else (lambda char: low <= char <= high)
        return lambda char: any(low <= form <= high for form in (char, char.lower(), char.upper()))

    def _escape(self, *, in_class: bool = False) -> Test:
        char = self._take()
        if char.lower() in "dws":
            kinds: dict[str, Test] = {
                "d": lambda char: unicodedata.category(char) == "Nd",
                "w": lambda char: char.isalnum() or char == "_",
                "s": str.isspace,
            }
            kind = kinds[char.lower()]
            return kind if char.islower() else lambda char: not kind(char)
        if char in "bBAZz" and not (in_class and char == "b"):
            raise PatternError(f"the anchor \\{char} is not available. Leave it out")
        if char.isdigit() and char != "0":
            raise PatternError(f"the reference \\{char} is not available. Write the group out")
        literal = self._literal(char)
        return self._range(literal, literal)

    def _literal(self, char: str) -> str:
        """The character that an escape stands for."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "b":
            return "\b"
        if char == "0":
            return "\0"
        if char in _HEX:
            digits = self._text[self._at : self._at + _HEX[char]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[char]}}}", digits) or int(digits, 16) > 0x10FFFF:
                raise PatternError(f"\\{char} needs {_HEX[char]} hexadecimal digits of a character. Add them")
            self._at += _HEX[char]
            return chr(int(digits, 16))
        if char.isalpha():
            raise PatternError(f"the escape \\{char} is not known. Write the character itself")
        return char

    def _class(self) -> Test:
        negated = self._peek() == "^"
        self._at += negated
        tests: list[Test] = []
        start = self._at
        while (char := self._take()) != "]" or self._at - 1 == start:
            if char == "\\" and self._peek() and self._peek() in "dwsDWS":
                tests.append(self._escape(in_class=True))
                continue
            low = high = self._literal(self._take()) if char == "\\" else char
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                high = self._take()
                if high == "\\":
                    high = self._take()
                    if high in "dwsDWS":
                        raise PatternError(f"a range to \\{high} has no end. Use a character")
                    high = self._literal(high)
                if high < low:
                    raise PatternError(f"the range {low}-{high} ends before its start. Swap the characters")
            tests.append(self._range(low, high))
        if negated:
            return lambda char: not any(test(char) for test in tests)
        return lambda char: any(test(char) for test in tests)
