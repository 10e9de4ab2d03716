"""Constraints on an answer that must call tools, or whose calls must match the tools' schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from app.parsers.base import StreamingParser
from app.parsers.tools.lark import ANY, Rules, Unenforceable, moved, refers, regex

__all__ = ["AnswerForm", "ToolConstraint", "forced_calls", "native_calls", "strict_calls"]

Schema = dict[str, Any]

_SPACE = " ?"


class ToolConstraint(msgspec.Struct, frozen=True):
    """A grammar by its kind and text (see ``kernels.contract.grammar``). ``covers_thought``: it begins with the first
    token, and contains the thought."""

    kind: Literal["ebnf", "json_schema", "structural_tag"]
    text: str
    whitespace: str | None = None
    covers_thought: bool = False


class AnswerForm(msgspec.Struct, frozen=True):
    """The form of an answer without calls, by its kind in ``kernels.contract.grammar``: json_schema, json_object, regex
    or choice. ``whitespace``: the pattern of white space in JSON; empty: none."""

    kind: str
    text: str
    whitespace: str

    def rule(self, rules: Rules) -> str:
        """Raises Unenforceable."""
        match self.kind:
            case "json_schema" | "json_object":
                schema = msgspec.json.decode(self.text) if self.text else {"type": "object"}
                if schema is False:
                    raise Unenforceable("a schema that is false")
                return rules.json(schema, self.whitespace, compact=not self.whitespace)
            case "regex":
                return rules.add("/" + self.text.replace("\\/", "/").replace("/", "\\/") + "/", terminal=True)
            case "choice":
                return "(" + " | ".join(rules.text(each) for each in msgspec.json.decode(self.text)) + ")"
        raise Unenforceable(f"the form {self.kind}")


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
    other: AnswerForm | None = None,
) -> ToolConstraint:
    """Calls in the model's own format, in llguidance's dialect of Lark. Each matches its tool's schema.

    ``tokens``: the ids of marks that are one token. ``forced``: nothing but calls; otherwise text may stand around
    them, or, with ``other``, the answer is either calls or in that form. ``single``: at most one call. Raises
    Unenforceable where calls in the format cannot be held to a schema.
    """
    rules = Rules(tokens)
    calls = [rules.add(form.call_rule(name, schema, rules)) for name, schema in tools.items()]
    form_rule = None if other is None else other.rule(rules)
    whole = form.answer_rule(calls, rules, forced=forced, other=form_rule)
    start = whole or _answer(form, calls, rules, forced=forced, single=single, other=form_rule)
    return ToolConstraint("ebnf", "\n".join((f"start: {start}", *rules.lines)), covers_thought=whole is not None)


def _answer(
    form: type[StreamingParser], calls: list[str], rules: Rules, *, forced: bool, single: bool, other: str | None
) -> str:
    """The rule of an answer, where calls may stand in the middle of text. Raises Unenforceable."""
    (opener, end), marks = form.section(rules), form.OPEN
    if len(marks) > 1 and not rules.is_token(marks[0]) and rules.is_token(marks[1]):
        opener, marks = opener.replace(marks[0], marks[1]), (marks[1], marks[0])
    call = rules.add(" | ".join(calls))
    between = form.BETWEEN if opener else f"{form.BETWEEN} {rules.text(marks[0])}"
    opener = opener or marks[0]
    mark = next((mark for mark in (*marks, *form.MARKS) if opener.startswith(mark)), opener)
    several = call if single else f"{call} ({between} {call})*"
    inner = rules.add(f"{rules.text(opener[len(mark) :])} {several} {rules.text(end)}")
    begin = f"({rules.text(mark)})?" if form.BARE else rules.text(mark)
    if forced or other is not None:
        return f"{begin} {inner}" + ("" if forced else f" | {other}")
    without = (*marks, mark) if marks else ()
    text = rules.excluding(ANY, *without)
    first = text
    if form.STARTS:
        first = rules.excluding(f"/\\s*([^\\s{regex(form.STARTS)}](?s:.*))?/", *without)
    if not marks:
        return f"{begin} {inner} | {first}"
    tokens = [rules.text(each) for each in form.TEXT_MARKS if any(token is not None for _, token in rules.parts(each))]
    spoken = f"({text} ({' | '.join(tokens)}))* " if tokens else ""
    more = "" if single else f" ({spoken}{rules.before(text, mark)} {inner})*"
    bare = f" | {inner}{more} {spoken}{text}" if form.BARE else ""
    return f"{spoken}{first} | {spoken}{rules.before(first, mark)} {inner}{more} {spoken}{text}{bare}"


def strict_calls(form: type[StreamingParser], tools: Mapping[str, Schema]) -> ToolConstraint:
    """Text in which each call in the format matches its tool's schema, as a structural tag, which any backend takes.
    Raises Unenforceable."""
    structures = []
    for name, schema in tools.items():
        frame = form.frame(name)
        begin = form.OPEN[0] if form.OPEN and form.SECTION[0] in ("", form.OPEN[0]) else ""
        if frame is None or not form.OPEN or not (begin + frame[0]).startswith(form.OPEN[0]):
            raise Unenforceable("this format's calls are enforced with --grammar-backend llguidance only")
        structures.append({"begin": begin + frame[0], "schema": schema or {"type": "object"}, "end": frame[1]})
    tag = {"structures": structures, "triggers": [form.OPEN[0]]}
    return ToolConstraint("structural_tag", msgspec.json.encode(tag).decode())


def _call(name: str, schema: Schema, root: Schema) -> Schema:
    """The schema of one call. Definitions that the tool's schema refers to are added to ``root``."""
    arguments = schema or {"type": "object"}
    if refers(arguments):
        definitions = root.setdefault("$defs", {})
        place = f"tool{len(definitions)}"
        definitions[place] = moved(arguments, f"#/$defs/{place}")
        arguments = {"$ref": f"#/$defs/{place}"}
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
