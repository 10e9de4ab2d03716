"""Keywords of JSON schemas that xgrammar does not follow, and ignores without a word."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.grammar import GrammarError

__all__ = ["check_keywords"]

_IGNORED = frozenset(
    {
        *("uniqueItems", "contains", "minContains", "maxContains", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies", "multipleOf", "contentSchema"),
        *("$dynamicRef", "$recursiveRef", "unevaluatedItems", "unevaluatedProperties"),
    }
)
_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems", "propertyNames")


def check_keywords(schema: object) -> None:
    """Raise GrammarError that names the first keywords that would be ignored."""
    found = sorted({name for part in _parts(schema) for name in part if name in _IGNORED})
    if found:
        raise GrammarError(f"xgrammar does not support {', '.join(found)}; use --grammar-backend llguidance")


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
