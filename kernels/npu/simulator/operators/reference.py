"""The table of reference implementations, and what a reference must be.

A reference takes CPU tensors with the argument names, defaults and order of the vendor's schema (held against it when
the operator is taken over), states the rules of its arguments first, and returns what the device would: new tensors,
and those that the schema marks as written, written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["REFERENCES", "Reference", "reference"]


@dataclass(frozen=True)
class Reference:
    """``rules`` sees shapes, dtypes and host values only (tensors may be meta) and raises ConstraintError.

    ``like``: the overload whose meta kernel says what this one returns or writes, when it has none of its own.
    ``host``: it only answers a question of the host; it is never part of a graph. ``generations``: where it exists.
    """

    compute: Callable[..., Any]
    rules: Callable[..., None] | None
    like: str | None
    host: bool
    generations: tuple[str, ...]


REFERENCES: dict[str, Reference] = {}
"""By name: ``npu_rms_norm`` or, for an overload, ``npu_fused_infer_attention_score.out``."""


def reference(
    name: str,
    *,
    rules: Callable[..., None] | None = None,
    like: str | None = None,
    host: bool = False,
    generations: tuple[str, ...] = ("A2", "A3", "A5"),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table."""

    def enter(compute: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES[name] = Reference(compute, rules, like, host, generations)
        return compute

    return enter
