"""JSON schemas of every keyword that a grammar backend follows, about 200 of them."""

from __future__ import annotations

from typing import Any

__all__ = ["LL_ONLY", "SCHEMAS", "UNSUPPORTED", "X_ONLY"]

_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_WORD = {"type": "string", "pattern": "^[a-z]{1,5}$"}
_FLAT: list[Any] = [
    # types
    *({"type": name} for name in ("null", "boolean", "integer")),
    {"type": "number", "minimum": -5, "maximum": 5},
    {"type": "string", "maxLength": 8},
    {"type": ["integer", "null"]},
    {"type": ["boolean", "null"]},
    # enum and const
    *({"enum": values} for values in (["a"], ["a", "b"], [1, 2], [None], [True, "x", 3], ["日本"], [[1], {"a": 2}])),
    *({"const": value} for value in ("x", 5, None, True, [1, "a"], {"a": {"b": [1]}}, 'q"\\', "\n")),
    # strings
    *({"type": "string", "minLength": least, "maxLength": least + 3} for least in range(4)),
    *({"type": "string", "maxLength": most} for most in range(4)),
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^a$", "^[abc]+$", "^[0-9]{3}$", "^(foo|bar)$", "^[A-Z][a-z]{0,4}$", "^a?b*c+$", "^\\d{2}-\\d{2}$",
            "^[^a-z]{2}$", "^(a|b){2,4}$", "^x\\.y$", "^v[0-9]+\\.[0-9]+$", "^[a-f0-9]{8}$", "^$", "^(ab)*$",
        )
    ),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "email")),
    # numbers
    *({"type": "integer", "minimum": low, "maximum": low + span} for low in (-120, -3, 0, 7) for span in (0, 5, 131)),
    *({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9} for low in (-4, 0, 95)),
    *({"type": "number", "minimum": low, "maximum": low + 1.5} for low in (-2.25, 0, 3.5)),
    *({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 2} for low in (-1, 0.5)),
    *({"type": "integer", "minimum": low} for low in (0, 10)),
    *({"type": "integer", "maximum": high} for high in (-1, 100)),
    # arrays
    *({"type": "array", "items": {"type": "boolean"}, "minItems": least, "maxItems": least + 2} for least in range(4)),
    *({"type": "array", "items": {"enum": [1, 2]}, "maxItems": most} for most in (0, 1, 3)),
    {"type": "array", "items": _WORD, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [_WORD, _WORD], "items": False, "minItems": 2, "maxItems": 2},
    # objects
    _PERSON,
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "properties": {"a": {"type": "null"}}},
    *(
        {
            "type": "object",
            "properties": {name: {"type": "boolean"} for name in "abcd"[:count]},
            "required": list("abcd"[:needed]),
            "additionalProperties": False,
        }
        for count in range(1, 5)
        for needed in range(count + 1)
    ),
    {"type": "object", "properties": {"o": _PERSON, "w": _WORD}, "required": ["o"], "additionalProperties": False},
    {"type": "object", "properties": {"a b": {"const": 1}, 'q"': {"const": 2}, "é": {"const": 3}},
     "required": ["a b", 'q"', "é"], "additionalProperties": False},
    {"type": "object", "properties": {"list": {"type": "array", "items": _PERSON, "maxItems": 2}},
     "required": ["list"], "additionalProperties": False},
    # combinations
    {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    {"anyOf": [_PERSON, {"type": "null"}]},
    {"anyOf": [{"const": "a"}, {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "array", "maxItems": 0}]},
    {"oneOf": [{"const": 1}, {"const": "1"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    {"allOf": [_PERSON]},
    {"type": "object", "properties": {"v": {"anyOf": [_WORD, {"type": "null"}]}}, "required": ["v"],
     "additionalProperties": False},
    # references
    {"$defs": {"w": _WORD}, "$ref": "#/$defs/w"},
    {"definitions": {"p": _PERSON}, "type": "array", "items": {"$ref": "#/definitions/p"}, "maxItems": 2},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"},
     "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "next"],
     "additionalProperties": False}}, "$ref": "#/$defs/n"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 3}}, "$ref": "#/$defs/a"},
    # annotations
    {"title": "T", "description": "d", "default": 1, "examples": [1], "type": "integer", "minimum": 0, "maximum": 3},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", "type": "null"},
]  # fmt: skip
_NAMES = ("name", "kind", "size", "tags", "note")


def _records() -> list[Any]:
    """Objects as programs declare them, with fields of several types, some optional."""
    fields = [
        _WORD,
        {"enum": ["small", "large"]},
        {"type": "integer", "minimum": 1, "maximum": 20},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    ]
    found: list[Any] = []
    for shift in range(5):
        for needed in range(6):
            properties = {name: fields[(place + shift) % 5] for place, name in enumerate(_NAMES)}
            found.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": list(_NAMES[:needed]),
                    "additionalProperties": False,
                }
            )
    found += [{"type": "array", "items": record, "minItems": 1, "maxItems": 2} for record in found[:20]]
    return found


_MORE: list[Any] = [
    *({"type": "string", "format": name} for name in ("duration", "hostname", "ipv6", "uri")),
    *({"type": "string", "format": "date", "title": title} for title in ("a", "b")),
    *({"type": "object", "patternProperties": {pattern: {"type": "boolean"}}, "additionalProperties": False}
      for pattern in ("^x[0-9]$", "^(a|b)c$", "^[a-z]{1,3}$")),
    *({"type": "object", "minProperties": least, "maxProperties": least + 1, "additionalProperties": {"type": "null"}}
      for least in range(3)),
    *({"type": ["string", "integer"], "maxLength": most, "minimum": 0, "maximum": 5} for most in (1, 3)),
    *({"type": ["array", "null"], "items": {"const": number}, "maxItems": 2} for number in (1, 2)),
    *({"const": number, "minimum": 2} for number in (3, 4)),
    *({"items": {"type": "null"}, "maxItems": most} for most in (1, 2)),
    *({"type": name, "nullable": True, "deprecated": True, "readOnly": True} for name in ("boolean", "null")),
    {"$ref": "#/properties/a", "properties": {"a": {"const": 1}}},
    {"$anchor": "x", "$comment": "c", "type": "null"},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "text/plain", "maxLength": 3},
    *({"type": "array", "prefixItems": [{"const": number}, _WORD], "items": {"type": "boolean"}, "minItems": 2,
       "maxItems": 4} for number in (1, 2)),
    *({"enum": [kind, None], "description": "one of two"} for kind in ("on", "off", 0)),
    *({"type": "number", "enum": values} for values in ([1, 2.5], [0])),
]  # fmt: skip

SCHEMAS: list[Any] = _FLAT + _MORE + _records()
"""Both backends follow them."""

LL_ONLY: list[Any] = [
    *({"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": step} for step in (2, 5, 7)),
    *({"type": "number", "multipleOf": step, "minimum": 0, "maximum": 3} for step in (0.5, 0.25)),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {name: {"const": name}}, "required": [name]} for name in "ab"]},
    {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 3}]},
    {"type": "string", "minLength": 2, "pattern": "^a+$", "maxLength": 4},
    {"type": "string", "format": "date", "minLength": 10},
    {"type": "object", "required": ["z"], "additionalProperties": {"type": "null"}, "maxProperties": 2},
    {"type": "string", "enum": ["a", 1]},
    {"minimum": 3},
    {"maxLength": 2},
]
"""llguidance alone follows these; the other one would in part, or not at all, and they are refused by name."""

X_ONLY: list[Any] = [
    *({"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": {"type": "null"},
       "maxProperties": 2} for pattern in ("^[a-z]{2}$", "^x[0-9]$")),
]  # fmt: skip
"""xgrammar alone follows these."""

UNSUPPORTED: list[tuple[str, Any]] = [
    ("not", {"not": {"type": "string"}}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}),
    ("maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 2}),
    ("if", {"if": {"const": 1}, "then": {"const": 1}}),
    ("then", {"if": {"const": 1}, "then": {"const": 1}}),
    ("else", {"if": {"const": 1}, "else": {"const": 1}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    ("dynamicRef", {"$dynamicRef": "#x"}),
    ("iri", {"type": "string", "format": "iri"}),
    ("idn-email", {"type": "string", "format": "idn-email"}),
    ("regex", {"type": "string", "format": "regex"}),
    ("json-pointer", {"type": "string", "format": "json-pointer"}),
]
"""A keyword that no backend follows, and a schema with it."""
