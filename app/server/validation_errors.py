"""Validation errors for clients: the field, the expected value, the given value, and the remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ["FieldError", "describe_validation_error"]

_AT = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`, got `(?P<got>[^`]*)`")
_BOUND = re.compile(r"Expected `(?P<kind>[^`]*)` (?P<length>of length )?(?P<sign><=|>=|<|>) (?P<limit>-?[\d.]+)")
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>[^`]*)`")

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_UNITS = {"str": "characters", "array": "entries", "object": "entries"}
_REMEDIES = {"str": "Shorten it.", "array": "Send fewer.", "object": "Send fewer."}

_LIKENESS = 0.8
"""Least similarity of a suggested name. It is lower than for the fields of a body, since one object has few names."""

_ABSENT = object()


class FieldError(msgspec.Struct, frozen=True):
    """``path``: the field, as in ``messages[0].role``; empty for the body itself. ``message``: whole sentences."""

    path: str
    message: str
    code: str = "invalid_type"


def describe_validation_error(error: str, kind: type[msgspec.Struct], body: object) -> FieldError:
    """The error for msgspec's sentence. ``kind``: the struct that ``body`` (plain JSON values) does not match."""
    result = _AT.search(error)
    steps = list(_steps(result.group("path"))) if result else []
    is_key = bool(result and result.group("key"))
    sentence = error[: result.start()] if result else error
    if (field := _FIELD.match(sentence)) is not None:
        path = _path([*steps, field.group("name")])
        if field.group("what") == "missing required":
            return FieldError(path, f"{path}: this field is required. Add it.", "missing_field")
        near = _most_similar(field.group("name"), _expected(kind, steps))
        if near is None:
            return FieldError(path, f"{path}: there is no such field here. Leave it out.", "unsupported_parameter")
        remedy = f"the most similar is {near}. Correct the name, or omit it."
        return FieldError(path, f"{path}: there is no such field; {remedy}", "unsupported_parameter")
    path = _path(steps)
    start = f"{path}: " if path else "The body: "
    explanation = _explanation(sentence, _expected(kind, steps), _ABSENT if is_key else _at(body, steps), is_key)
    # What null means in an entry of a list is not a default: a message without content says nothing.
    has_default = "null" in _allowed(sentence) and not any(isinstance(step, int) for step in steps)
    return FieldError(path, start + explanation + (" Leave the field out for its default." if has_default else ""))


def _allowed(sentence: str) -> list[str]:
    """msgspec's names of the types that a value of a wrong type may have instead; empty for other errors."""
    wrong = _EXPECTED.match(sentence)
    return [] if wrong is None else wrong.group("kinds").split(" | ")


def _explanation(sentence: str, expected: tuple[inspect.Type, ...], value: object, is_key: bool) -> str:
    subject = "every name in it must be" if is_key else "must be"
    choices = [str(choice) for kind in expected if isinstance(kind, inspect.LiteralType) for choice in kind.values]
    if choices and (sentence.startswith("Invalid enum value") or "got `" in sentence):
        given = "" if value is _ABSENT else f", not {_shown(value)}"
        return f"must be one of {', '.join(choices)}{given}. Choose one of them."
    if (wrong := _EXPECTED.match(sentence)) is not None:
        kinds = [_KINDS.get(kind, kind) for kind in _allowed(sentence)]
        named = " or ".join(name for name in kinds if name != "null")
        given = _shown(value) if isinstance(value, bool) else _KINDS.get(wrong.group("got"), wrong.group("got"))
        shown = f" ({_shown(value)})" if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
        return f"{subject} {named or 'null'}; you gave {given}{shown}."
    if (bound := _BOUND.match(sentence)) is not None:
        kind, sign, limit = bound.group("kind", "sign", "limit")
        quantity = "at most" if sign.startswith("<") else "at least"
        if not bound.group("length"):
            given = "" if value is _ABSENT else f"; you gave {_shown(value)}"
            return f"{subject} {quantity} {limit}{given}. Send a number within the limit."
        units = _UNITS.get(kind, "entries") if int(limit) != 1 else {"str": "character"}.get(kind, "entry")
        given = f"; you gave {len(value)}" if isinstance(value, (str, list, dict)) else ""
        remedy = _REMEDIES.get(kind, "Send fewer.") if quantity == "at most" else "Send more."
        where = "in each of its names, " if is_key else ""
        return f"{where}{quantity} {limit} {units}{given}. {remedy}"
    if "out of range" in sentence:
        return "holds a number that is out of range. Send a smaller one."
    return "has a value that is not valid here. See GET /openapi.json for what it takes."


def _most_similar(name: str, expected: tuple[inspect.Type, ...]) -> str | None:
    """The field of the expected structs whose name is nearly ``name``."""
    known = [f.encode_name for kind in expected if isinstance(kind, inspect.StructType) for f in kind.fields]
    return next(iter(difflib.get_close_matches(name[:64], known, n=1, cutoff=_LIKENESS)), None)


def _shown(value: object) -> str:
    """A value as JSON in ASCII, shortened to a line."""
    text = json.dumps(value)
    return text if len(text) <= 64 else f"{text[:60]} ..."


def _steps(path: str) -> Iterator[str | int]:
    """``.messages[0].role`` as parts; ``...`` for any member of an object."""
    for step in _STEP.finditer(path):
        name, index = step.group("name", "index")
        yield name if name is not None else index if index == "..." else int(index)


def _path(steps: list[str | int]) -> str:
    path = ""
    for step in steps:
        if step == "...":
            break
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _at(body: Any, steps: list[str | int]) -> object:
    """The value at a path, if it can be found."""
    for step in steps:
        if step == "...":
            return _ABSENT
        try:
            body = body[step]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return body


def _expected(kind: type[msgspec.Struct], steps: list[str | int]) -> tuple[inspect.Type, ...]:
    """The alternatives of the schema at a path."""
    result = _alternatives(inspect.type_info(kind))
    for step in steps:
        inner: list[inspect.Type] = []
        for option in result:
            if isinstance(option, inspect.StructType) and isinstance(step, str):
                inner += [field.type for field in option.fields if field.encode_name == step]
            elif isinstance(option, inspect.ListType) and isinstance(step, int):
                inner.append(option.item_type)
            elif isinstance(option, inspect.DictType):
                inner.append(option.value_type)
        result = tuple(one for each in inner for one in _alternatives(each))
    return result


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(one for each in kind.types for one in _alternatives(each))
    return (kind,)
