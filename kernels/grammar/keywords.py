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
_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "additionalItems", "propertyNames")


_LENGTHS = ("minLength", "maxLength")


def adapt_schema(schema: object) -> None:
    """Change a schema in place. Raises GrammarError that names the keywords that would be ignored.

    Its own texts of a bounded length may hold raw control characters, which JSON forbids.
    """
    parts = list(_parts(schema))
    found = {name for part in parts for name in part if name in _IGNORED}
    for part in parts:
        target = part.get("$ref")
        if isinstance(target, str) and target != "#" and not target.startswith("#/"):
            found.add("$ref to other places than #/...")
        lengths = [name for name in _LENGTHS if name in part]
        if lengths and ("pattern" in part or "format" in part):
            found.update(f"{name} beside pattern or format" for name in lengths)
        elif lengths and part.get("type") == "string":
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'
    if found:
        raise GrammarError(f"xgrammar does not support {', '.join(sorted(found))}; use --grammar-backend llguidance")


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
