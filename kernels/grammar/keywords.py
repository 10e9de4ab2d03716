"""JSON schemas for xgrammar: keywords that it ignores without a word are refused, and lengths become patterns."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.grammar import GrammarError

__all__ = ["adapt_schema"]

_IGNORED = frozenset(
    {
        *("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies", "multipleOf", "contentSchema"),
        *("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_NOTHING = ("uniqueItems", False)
_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems", "propertyNames")


_LENGTHS = ("minLength", "maxLength")
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
_TYPED = {
    **dict.fromkeys(("pattern", "minLength", "maxLength", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
}
"""Keywords that it ignores where ``type`` does not say that they apply."""


def adapt_schema(schema: object) -> None:
    """Change a schema in place. Raises GrammarError that names the keywords that would be ignored.

    Its own texts of a bounded length may hold raw control characters, which JSON forbids.
    """
    parts = list(_parts(schema))
    found = {name for part in parts for name in part if name in _IGNORED and (name, part[name]) != _NOTHING}
    names = {id(part.get("propertyNames")) for part in parts}
    for part in parts:
        found.update(_ignored_here(part, is_name=id(part) in names))
        target = part.get("$ref")
        if isinstance(target, str) and target != "#" and not target.startswith("#/"):
            found.add("$ref to other places than #/...")
        lengths = [name for name in _LENGTHS if name in part]
        if lengths and ("pattern" in part or "format" in part):
            found.update(f"{name} beside pattern or format" for name in lengths)
        elif lengths and part.get("type") == "string":
            minimum, maximum = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{minimum},{maximum}}}$'
    if found:
        raise GrammarError(f"xgrammar does not support {', '.join(sorted(found))}; use --grammar-backend llguidance")


def _ignored_here(part: dict[str, object], *, is_name: bool) -> Iterator[str]:
    """Keywords that it ignores because of what else is there, or is not. ``is_name``: the schema is one of names."""
    kinds = part.get("type")
    if not kinds and not is_name and not {"enum", "const", "$ref"} & part.keys():
        yield from (f"{name} without a type" for name in _TYPED if name in part)
    choices = part.get("allOf")
    if isinstance(choices, list) and len(choices) > 1:
        yield "allOf of several schemas"
    if "format" in part and part["format"] not in _FORMATS and kinds in ("string", None):
        yield f"format {str(part['format'])[:32]}"
    properties, required = part.get("properties") or {}, part.get("required") or []
    if isinstance(properties, dict) and isinstance(required, list) and not set(map(str, required)) <= set(properties):
        yield "required beside other names than those of properties"
    values = part.get("enum", [part["const"]] if "const" in part else [])
    if kinds and isinstance(values, list) and any(_kind(value) not in _kinds(kinds) for value in values):
        yield "type beside an enum or const of another"


def _kinds(value: object) -> set[str]:
    kinds = {value} if isinstance(value, str) else {str(each) for each in value} if isinstance(value, list) else set()
    return kinds | ({"integer"} if "number" in kinds else set())


def _kind(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _parts(schema: object) -> Iterator[dict[str, object]]:
    """The schema and all schemas in it. Iterative: depth cannot exhaust the stack."""
    left = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _SCHEMAS:
            inner = part.get(name)
            left += inner.values() if isinstance(inner, dict) else ()
        for name in _LISTS:
            inner = part.get(name)
            left += inner if isinstance(inner, list) else ()
        for name in _ONE:
            inner = part.get(name)
            left += inner if isinstance(inner, list) else [inner]
