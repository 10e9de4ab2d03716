"""Constraints on an answer that must call tools, or whose calls must match the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from app.parsers.base import StreamingParser

__all__ = ["ToolConstraint", "forced_calls", "native_calls", "strict_calls"]

Schema = dict[str, Any]

_SPACE = " ?"
"""White space between parts of a call's JSON. Small models that may write more of it at times write nothing else."""


class ToolConstraint(msgspec.Struct, frozen=True):
    """A grammar by its kind and text (see ``kernels.contract.grammar``)."""

    kind: Literal["ebnf", "json_schema", "structural_tag"]
    text: str
    whitespace: str | None = None


def forced_calls(tools: Mapping[str, Schema], *, named: bool, parallel: bool) -> ToolConstraint:
    """Calls and nothing else, as JSON for :class:`app.parsers.tools.json_calls.JsonParser`, whatever the model's own
    format is: one call (``named``), or a list of at least one and, unless ``parallel``, at most one."""
    root: Schema = {}
    calls = [_call(name, schema, root) for name, schema in tools.items()]
    if named:
        [schema] = calls
    else:
        schema = {"type": "array", "items": {"anyOf": calls} if len(calls) > 1 else calls[0], "minItems": 1}
        if not parallel:
            schema["maxItems"] = 1
    return ToolConstraint("json_schema", msgspec.json.encode(schema | root).decode(), _SPACE)


def native_calls(
    form: type[StreamingParser],
    tools: Mapping[str, Schema],
    tokens: Mapping[str, int | None],
    *,
    forced: bool,
    single: bool = False,
) -> ToolConstraint | None:
    """Calls in the model's own format, in llguidance's dialect of Lark.

    ``tokens``: the ids of marks that are one token. ``forced``: nothing but calls, one, or unless ``single`` at least
    one. Otherwise text, in which each call matches its tool's schema: the mark of a call must then be one token. None
    if this cannot be said, as where a format's calls are no JSON.
    """
    if not forced and tokens.get(form.OPEN[0] if form.OPEN else "") is None:
        return None
    rules: list[str] = []
    for number, (name, schema) in enumerate(tools.items()):
        frame = form.frame(name)
        if frame is None:
            return None
        begin, end = (_literals(part, tokens) for part in frame)
        arguments = {**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": _SPACE}}
        rules.append(f"call{number}: {begin} arguments{number} {end}")
        rules.append(f"arguments{number}: %json {msgspec.json.encode(arguments).decode()}")
    before, behind = (_literals(part, tokens) for part in form.SECTION)
    more = "" if single else ' ("\\n"? call)*'
    calls = f"{before} call{more} {behind}"
    start = f"start: {calls}" if forced else f"start: TEXT ({calls} TEXT)*"
    text = [] if forced else ["TEXT: /(.|\\n)*/"]
    call = f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}"
    return ToolConstraint("ebnf", "\n".join((start, *text, call, *rules)))


def _literals(text: str, tokens: Mapping[str, int | None]) -> str:
    """A text as Lark: marks that are one token by their ids."""
    marks = [mark for mark, token in tokens.items() if token is not None and mark in text]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(f"<[{tokens[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


def strict_calls(form: type[StreamingParser], tools: Mapping[str, Schema]) -> ToolConstraint | None:
    """Text in which each call in the format matches its tool's schema, where the format's mark of a call is text; None
    if the format's calls are no JSON."""
    frames = {name: form.frame(name) for name in tools}
    structures = [
        {"begin": frame[0], "schema": tools[name] or {"type": "object"}, "end": frame[1]}
        for name, frame in frames.items()
        if frame is not None
    ]
    if not structures:
        return None
    return ToolConstraint(
        "structural_tag", msgspec.json.encode({"structures": structures, "triggers": [form.OPEN[0]]}).decode()
    )


def _call(name: str, schema: Schema, root: Schema) -> Schema:
    """The schema of one call. Definitions that the tool's schema refers to are added to ``root``."""
    arguments = schema or {"type": "object"}
    if _refers(arguments):
        definitions = root.setdefault("$defs", {})
        place = f"tool{len(definitions)}"
        definitions[place] = _moved(arguments, f"#/$defs/{place}")
        arguments = {"$ref": f"#/$defs/{place}"}
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _refers(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root are those to ``place``."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(target := schema.get("$ref"), str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = place + target[1:]
    return moved
