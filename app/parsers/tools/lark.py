"""Rules of a grammar in llguidance's dialect of Lark, for answers with tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from actors.protocol.requests import LIMITS

__all__ = ["ANNOTATIONS", "ANY", "Rules", "Schema", "Unenforceable", "moved", "placed", "refers", "regex", "resolved"]

Schema = dict[str, Any]

ANY = "/(?s:.*)/"
"""A terminal of any text."""

_SPACE = " ?"
"""White space between parts of a call's JSON. Small models that may write more of it at times write nothing else."""

_DEPTH, _MAX_RULES = 8, 2000

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_FORMATS = {
    "date": rf"([0-9]{{4}}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|[0-9]{{4}}-(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    rf"[0-9]{{4}}-02-(0[1-9]|1[0-9]|2[0-8])|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
    "email": r"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)+",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class Unenforceable(Exception):
    """A schema asks for what calls in a format cannot be held to; the message names it."""


class Rules:
    """Rules of one grammar by their names. ``tokens``: the ids of marks that are one token, which text cannot hold."""

    def __init__(self, tokens: Mapping[str, int | None]) -> None:
        self._ids = {mark: token for mark, token in tokens.items() if token is not None}
        self._marks = re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or "(?!)")
        self.lines: list[str] = []
        self._size = 0

    def add(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        """A new rule, or terminal; its name. Raises Unenforceable where the grammar is too long."""
        self._size += len(body)
        if self._size > LIMITS.grammar_bytes:
            raise Unenforceable(f"schemas that make a grammar of more than {LIMITS.grammar_bytes} bytes")
        name = f"{'T' if terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The parts of a text, and the ids of those that are marks of one token."""
        at = 0
        for match in self._marks.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], None
            yield match[0], self._ids[match[0]]
            at = match.end()
        if at < len(text):
            yield text[at:], None

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def text(self, text: str) -> str:
        """A text as it is."""
        return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in self.parts(text))

    def json(self, schema: Schema | bool, space: str | None = _SPACE, compact: bool = False) -> str:
        """JSON of a schema. ``space``: the pattern of white space; ``compact``: none."""
        options: Schema = {"whitespace_pattern": space}
        if compact:
            options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        given = schema if isinstance(schema, dict) else {}
        return self.add(f"%json {msgspec.json.encode(given | {'x-guidance': options}).decode()}")

    def before(self, start: str, mark: str, without: tuple[str, ...] = ()) -> str:
        """A text that matches the terminal ``start``, and the ``mark`` after it, which it does not contain, nor the
        texts ``without``."""
        start = self.excluding(start, *without)
        (first, token), *rest = self.parts(mark)
        if token is not None:
            return f"{start} {self.text(mark)}"
        if rest:
            whole = self.add(f"{start} {json.dumps(first)}", terminal=True)
            return f"{whole} {self.text(mark[len(first) :])}"
        whole = self.add(f"{self.excluding(start, mark)} {json.dumps(mark)}", terminal=True)
        return self.add(whole, lazy=True)

    def excluding(self, start: str, *without: str) -> str:
        """A terminal of the texts of ``start`` in which none of these marks is: a model can spell those that are one
        token with others, too."""
        result = " & ".join([start, *(f"~/(?s:.*){regex(text)}(?s:.*)/" for text in dict.fromkeys(without))])
        return self.add(result, terminal=True)

    def string(self, schema: Any, root: Schema, depth: int = 0) -> str:
        """A terminal of the texts, without quotes, that a schema of strings allows. Raises Unenforceable."""
        schema = resolved(schema, root)
        if depth > _DEPTH or len(self.lines) > _MAX_RULES:
            raise Unenforceable("a schema of that many parts")
        parts = [ANY]
        for keyword, value in schema.items():
            if value is None or keyword in ANNOTATIONS or keyword in ("type", "minLength", "maxLength"):
                continue
            match keyword:
                case "enum" | "const":
                    texts = value if keyword == "enum" else [value]
                    parts.append(f"({' | '.join(json.dumps(text) for text in texts)})")
                case "pattern":
                    parts.append(f"/{_anchored(value)}/")
                case "format" if value in _FORMATS:
                    parts.append(f"/{_FORMATS[value]}/")
                case "anyOf" | "oneOf":
                    parts.append(f"({' | '.join(self.string(each, root, depth + 1) for each in value)})")
                case "allOf":
                    parts += [self.string(each, root, depth + 1) for each in value]
                case _:
                    raise Unenforceable(f"{keyword}{f' {value}' if keyword == 'format' else ''} of a string")
        if schema.get("minLength") or schema.get("maxLength") is not None:
            max_length = schema.get("maxLength")
            parts.append(
                f"/(?s:.{{{int(schema.get('minLength') or 0)},{'' if max_length is None else int(max_length)}}})/"
            )
        return self.add(" & ".join(parts[1:] or parts), terminal=True)


def regex(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.sub(r"[.^$*+?{}\[\]\\|()/\-&~#]", r"\\\g<0>", text).replace("\n", "\\n")


def _anchored(pattern: str) -> str:
    """JSON Schema's pattern, which matches a part, as one of the whole text. Raises Unenforceable."""
    bare = re.sub(r"\\.|\[(\\.|[^\]])*\]", "_", pattern)
    while bare != (bare := re.sub(r"\([^()]*\)", "_", bare)):
        pass
    begins, ends = bare.startswith("^"), bare.endswith("$")
    if "|" in bare and (begins or ends):
        raise Unenforceable(f"pattern {pattern[:64]!r} with alternatives outside of parentheses")
    inner = pattern[begins : len(pattern) - ends]
    inner = re.sub(r"\\d", "[0-9]", inner)
    inner = re.sub(r"(?<!\\)/", r"\\/", inner)
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def refers(schema: Any) -> bool:
    """Whether a schema has references."""
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(refers, schema.values()))
    return isinstance(schema, list) and any(map(refers, schema))


def moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root are those to ``place``."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: moved(value, place) for key, value in schema.items()}
    if isinstance(target := schema.get("$ref"), str) and (target == "#" or target.startswith("#/")):
        result["$ref"] = place + target[1:]
    return result


def resolved(schema: Any, root: Any) -> Schema:
    """A schema with its references resolved in ``root``; what stands beside a reference is added."""
    for _ in range(32):
        target = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(target, str):
            break
        result = root
        for name in target.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            result = result.get(name) if isinstance(result, dict) else None
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**result, **beside} if isinstance(result, dict) else {}
    return schema if isinstance(schema, dict) else {}


def placed(schema: Any, root: Schema) -> Schema:
    """A part of ``root`` as a schema of its own."""
    if not refers(schema):
        return schema if isinstance(schema, dict) else {}
    return {**moved(schema, "#/$defs/root"), "$defs": {"root": moved(root, "#/$defs/root")}}
