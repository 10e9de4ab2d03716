"""The structure of a tool's parameters: a JSON Schema of an object. Only the schema is checked, no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["closed", "find_schema_error", "without_nulls"]

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)  # type: ignore[operator, call-overload]


_SHAPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"must be one of {', '.join(_TYPES)}, or a list of them"),
    "required": (_is_names, "must be a list of property names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "must be a list of at least one value"),
    **dict.fromkeys(
        ("title", "description", "format", "pattern", "$ref"),
        (lambda value: isinstance(value, str), "must be a string"),
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "must be a number")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "must be a whole number of at least 0"),
    ),
}
"""Keyword -> a check of its value's shape, and the name of that shape."""

_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_SHOWN_NAME = 64
"""Characters of a property name in a path: every schema below the property has its own path."""


def find_schema_error(schema: dict[str, Any]) -> tuple[str, str] | None:
    """The first error in a tool's parameters: its path (``.properties.city.type``), and the description.

    Keywords with a null value count as omitted, as some clients send them. An empty schema accepts any object.
    """
    if schema and schema.get("type") != "object":
        return ".type", "must be 'object', because a call's arguments are an object"
    level: list[tuple[str, object]] = [("", schema)]
    while level:
        deeper: list[tuple[str, object]] = []
        for path, one in level:
            if isinstance(one, bool):
                continue
            if not isinstance(one, dict):
                return path, "must be a JSON Schema: an object, or true or false"
            for keyword, value in one.items():
                if value is None:
                    continue
                here = f"{path}.{keyword}"
                fits, shape = _SHAPES.get(keyword, (None, ""))
                if fits is not None and not fits(value):
                    return here, shape
                if keyword in _LIST and not (isinstance(value, list) and value):
                    return here, "must be a list of at least one schema"
                if keyword in _NAMED and not isinstance(value, dict):
                    return here, "must be an object of schemas by name"
                deeper.extend(_inner(here, keyword, value))
        level = deeper
    return None


def _inner(path: str, keyword: str, value: Any) -> Iterator[tuple[str, object]]:
    """The schemas in the value of a keyword."""
    if keyword in _NAMED:
        yield from ((f"{path}.{name[:_SHOWN_NAME]}", inner) for name, inner in value.items())
    elif keyword in _LIST or (keyword == "items" and isinstance(value, list)):
        yield from ((f"{path}[{number}]", inner) for number, inner in enumerate(value))
    elif keyword in _ONE:
        yield path, value


def without_nulls(schema: Any) -> Any:
    """A schema without the keywords whose value is null, as grammars read it."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        if value is None and keyword not in ("const", "default"):
            continue
        if keyword in _NAMED and isinstance(value, dict):
            value = {name: without_nulls(inner) for name, inner in value.items()}
        elif (keyword in _LIST or keyword == "items") and isinstance(value, list):
            value = [without_nulls(inner) for inner in value]
        elif keyword in _ONE:
            value = without_nulls(value)
        result[keyword] = value
    return result


_OPENS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"}
)
"""Keywords beside ``properties`` that may speak of other properties."""


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others, where it does not speak of others.

    What matches it matches ``schema``. A small model that may invent arguments at times does not stop.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(items, dict):
        result["items"] = closed(items)
    if isinstance(properties, dict) and properties and _OPENS.isdisjoint(schema):
        required = schema.get("required")
        result["properties"] = {name: closed(inner) for name, inner in properties.items()}
        if not isinstance(required, list) or set(map(str, required)) <= set(properties):
            result["additionalProperties"] = False
    return result
