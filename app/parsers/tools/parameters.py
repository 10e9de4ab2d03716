"""The part that formats with a tag for each parameter share: values become JSON by the types of the tool's schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from app.parsers.base import Cut, Malformed, Reading, StreamingParser

__all__ = ["ParameterParser", "as_json", "types_of"]


class ParameterParser(StreamingParser):
    """Text values are passed on as they arrive; others when they are complete, because their type decides their form.

    ``NEWLINES``: each value stands on lines of its own.
    """

    NEWLINES = False

    def parameters_call(self, name: str, members: Callable[[], Reading[None]]) -> Reading[None]:
        """A call whose parameters ``members`` reads, one after the other, with :meth:`parameter`."""
        self.begin_call(name)
        self._name, self._members = name.strip(), 0
        try:
            yield from members()
        except Cut:
            raise
        except Malformed:
            read = self._read
            self._close()
            self._read = read
            raise
        self._close()
        self.end_call()

    def _close(self) -> None:
        self.add_arguments("}" if self._members else "{}")

    def parameter(self, key: str, *ends: str, text: bool | None = None) -> Reading[str]:
        """A value up to one of the end marks, which is returned. ``text``: whether it is text or JSON; None asks the
        schema."""
        self.add_arguments((", " if self._members else "{") + _quoted(key.strip()) + ": ")
        self._members += 1
        types = types_of((self.parameters(self._name).get("properties") or {}).get(key.strip()))
        if self.NEWLINES:
            yield from self.skip("\n")
        if text or (text is None and types == {"string"}):
            self.add_arguments('"')
            tail = ""

            def sink(piece: str) -> None:
                nonlocal tail
                said, tail = tail + piece, ""
                if self.NEWLINES and said.endswith("\n"):
                    said, tail = said[:-1], "\n"
                self.add_arguments(_quoted(said)[1:-1])

            end = yield from self.until(ends, sink)
            if not end:
                raise Cut
            self.add_arguments('"')
            return end
        parts: list[str] = []
        end = yield from self.until(ends, parts.append)
        if not end:
            self.add_arguments("".join(parts).lstrip())  # no value yet, as the call is not complete
            raise Cut
        self.add_arguments(as_json("".join(parts), set() if text is False else types))
        return end


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    if given:
        return {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = [types_of(each) for each in schema[keyword]]
            return set().union(*parts) if all(parts) else set()
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {_type(value) for value in values} if isinstance(values, list) else set()


def _type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def as_json(text: str, types: set[str]) -> str:
    """A value as JSON: as the text reads if its type is allowed, else a string."""
    written = text.strip()
    written = _PYTHON.get(written, written)
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return _quoted(text.strip("\n"))
    kind = _type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if fits and kind == "string" and not types:
        return written
    if not fits and "string" in types:
        return _quoted(text.strip("\n"))
    return written


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
