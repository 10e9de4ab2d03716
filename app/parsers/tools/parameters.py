"""The part that formats with a tag for each parameter share: values become JSON by the types of the tool's schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec

from app.parsers.base import StreamingParser
from app.parsers.text_reader import IncompleteCall, ParseError, Reading
from app.parsers.tools.lark import ANNOTATIONS, ANY, Rules, Schema, Unenforceable, placed, resolved

__all__ = [
    "AlsoJson",
    "ParameterParser",
    "Value",
    "as_json",
    "inner_schema",
    "is_json",
    "members",
    "quoted",
    "types_of",
]

_ALTERNATIVES_DEPTH = 3
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})


class Value:
    """The value of a parameter in a grammar. ``text``: whether it is text as it is, without quotes; else it is JSON.
    ``kinds``: the JSON types that its schema allows; empty if it does not say."""

    def __init__(self, schema: Any, root: Schema, *, typed: bool) -> None:
        self._schema, self._root = schema, root
        kinds = self.kinds = types_of(schema, root)
        free = not set(resolved(schema, root)) - ANNOTATIONS - {"type"}
        self.text = kinds == {"string"} or (free and not typed and (not kinds or kinds == {"string", "null"}))

    def rule(self, rules: Rules, mark: str, *, before: str = "") -> str:
        """The value and the end mark, which text cannot hold; ``before``: what stands between them."""
        if not self.text:
            return f"{rules.json(placed(self._schema, self._root))} {rules.text(before + mark)}"
        free = not set(resolved(self._schema, self._root)) - ANNOTATIONS - {"type"}
        text = ANY if free else rules.string(self._schema, self._root)
        return rules.before(rules.excluding(text, mark), before + mark)


class AlsoJson(StreamingParser):
    """Mixed into a format whose calls may also be JSON, an object or an array, between the same marks."""

    def block(self, mark: str) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) in "[{":
            yield from self.json_calls()
        else:
            yield from super().block(mark)


class ParameterParser(StreamingParser, ABC):
    """Text values are passed on as they arrive; others when they are complete, because their type decides their form.

    ``NEWLINES``: each value stands on lines of its own. ``AROUND``: what may stand around a value. ``TYPED``: the tags
    say whether a value is text.
    """

    NEWLINES: ClassVar[bool] = False
    AROUND: ClassVar[tuple[str, str]] = ("", "")
    TYPED: ClassVar[bool] = False

    def parameters_call(self, name: str, members: Callable[[], Reading[None]]) -> Reading[None]:
        """A call whose parameters ``members`` reads, one after the other, with :meth:`parameter`."""
        self.begin_call(name)
        self._name, self._members = name.strip(), 0
        try:
            yield from members()
        except IncompleteCall:
            raise
        except ParseError:
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
        self.begin_member(key)
        types = self.member_types(key)
        is_text = text or (text is None and types == {"string"})
        if is_text:
            self.add_arguments('"')
        if self.NEWLINES:
            yield from self.skip("\n")
        before, after = self.AROUND
        if before and (yield from self.skip(before)):
            ends = tuple(f"{after}{end}" for end in ends)
        if is_text:
            tail = ""

            def sink(piece: str) -> None:
                nonlocal tail
                complete, tail = tail + piece, ""
                if self.NEWLINES and complete.endswith("\n"):
                    complete, tail = complete[:-1], "\n"
                self.add_arguments(quoted(complete)[1:-1])

            end = yield from self.until(ends, sink)
            if not end:
                raise IncompleteCall
            self.add_arguments('"')
            return end
        parts: list[str] = []
        end = yield from self.until(ends, parts.append)
        if not end:
            self.add_arguments("".join(parts).lstrip())  # no value yet, as the call is not complete
            raise IncompleteCall
        written = "".join(parts)
        written = written.removesuffix("\n") if self.NEWLINES else written
        self.add_arguments(self.value_json(written, set() if text is False else types))
        return end

    def begin_member(self, key: str) -> None:
        """Add the name of a parameter to the arguments; its value follows."""
        self.add_arguments((", " if self._members else "{") + quoted(key.strip()) + ": ")
        self._members += 1

    def member_types(self, key: str) -> set[str]:
        """The JSON types that the schema allows for a parameter; empty if it does not say."""
        schema = self.parameters(self._name)
        return types_of(inner_schema(schema, schema, key.strip()), schema)

    @classmethod
    def value_json(cls, text: str, types: set[str]) -> str:
        """A value that is not text as it is, as JSON."""
        return as_json(text, types)

    @classmethod
    def member_rules(cls, schema: Schema, rules: Rules) -> str:
        """The parameters of a call as part of a grammar. Raises Unenforceable."""
        result: list[str] = []
        for key, part, needed in members(schema):
            if not key.strip() or set(key) & set('<>"\n'):
                raise Unenforceable(f"the name {key[:32]!r}")
            rule = cls.member_rule(key, Value(part, schema, typed=cls.TYPED), rules)
            result.append(rule if needed else f"({rule})?")
        return " ".join(result)

    @classmethod
    @abstractmethod
    def member_rule(cls, key: str, value: Value, rules: Rules) -> str:
        """A parameter as part of a grammar."""


def members(schema: Schema) -> Iterator[tuple[str, Any, bool]]:
    """The properties of an object's schema, and whether each is required.

    Raises Unenforceable for what else it says of the object.
    """
    result = resolved(schema, schema)
    others = {key for key in result if result[key] is not None} - _OF_OBJECTS - ANNOTATIONS
    if others:
        raise Unenforceable(f"{min(others)} of the parameters")
    properties, required = result.get("properties") or {}, result.get("required") or []
    for name in required:
        if name not in properties:
            raise Unenforceable(f"required {name[:32]!r}, which is no property")
    for key, part in properties.items():
        if part is False:
            raise Unenforceable(f"{key[:32]!r}, which has no value")
        yield key, part, key in required


def types_of(schema: Any, root: Any = None, known: dict[str, set[str]] | None = None) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say. ``root``: what it may refer to. ``known``: of what
    was referred to."""
    if not isinstance(schema, dict):
        return set()
    known = {} if known is None else known
    target = schema.get("$ref")
    if isinstance(target, str):
        if target not in known:
            known[target] = set()  # of a schema in itself
            known[target] = types_of(resolved(schema, root), root, known)
        return known[target]
    given = schema.get("type")
    if given:
        return {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = [types_of(each, root, known) for each in schema[keyword]]
            return set().union(*parts) if all(parts) else set()
    if isinstance(schema.get("allOf"), list) and (named := [types_of(each, root, known) for each in schema["allOf"]]):
        return set.intersection(*(each for each in named if each)) if any(named) else set()
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {_type(value) for value in values} if isinstance(values, list) else set()


def inner_schema(schema: Any, root: Any, key: str | None, depth: int = 0) -> Any:
    """The schema of a member of an object, or of the items of a list (``key`` None), also where the schema offers
    alternatives, as for what may be null; None if it does not say."""
    schema = resolved(schema, root)
    found = schema.get("items") if key is None else (schema.get("properties") or {}).get(key)
    if found is None and depth < _ALTERNATIVES_DEPTH:
        parts = (part for keyword in ("anyOf", "oneOf", "allOf") for part in schema.get(keyword) or ())
        inner = (inner_schema(part, root, key, depth + 1) for part in parts)
        found = next((each for each in inner if each is not None), None)
    return schema.get("additionalProperties") if found is None and key is not None else found


def _type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


_PYTHON = {"True": "true", "False": "false", "None": "null"}


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True


def as_json(text: str, types: set[str]) -> str:
    """A value as JSON: as the text reads if its type is allowed, else a string."""
    written = text.strip()
    written = _PYTHON.get(written, written)
    try:
        value = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return quoted(text)
    kind = _type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if fits and kind == "string" and not types:
        return written
    if not fits and "string" in types:
        return quoted(text)
    return written


def quoted(text: str) -> str:
    """A text as a string of JSON."""
    return msgspec.json.encode(text).decode()
