"""The table of reference implementations.

A reference takes CPU tensors with the argument names, defaults and order of the vendor's schema (compared when the
operator is replaced). It checks the rules of its arguments first, and returns the same as the device: new tensors, and
tensors that the schema marks as written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["REFERENCES", "Reference", "reference"]


@dataclass(frozen=True)
class Reference:
    """``rules`` sees shapes, dtypes and host values only (tensors may be meta) and raises ConstraintError.

    ``like``: the overload whose meta kernel describes the results, for an overload without one. ``host``: whether it
    only queries host state and is never part of a graph. ``generations``: those that have the operator. ``shape``: the
    results of meta tensors, where the vendor's meta function refuses calls that its schema allows.
    """

    compute: Callable[..., Any]
    rules: Callable[..., None] | None
    like: str | None
    host: bool
    generations: tuple[str, ...]
    shape: Callable[..., Any] | None = None


REFERENCES: dict[str, Reference] = {}
"""By name: ``npu_rms_norm`` or, for an overload, ``npu_fused_infer_attention_score.out``."""


def reference(
    name: str,
    *,
    rules: Callable[..., None] | None = None,
    like: str | None = None,
    host: bool = False,
    generations: tuple[str, ...] = ("A2", "A3", "A5"),
    shape: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function in the table."""

    def enter(compute: Callable[..., Any]) -> Callable[..., Any]:
        REFERENCES[name] = Reference(compute, rules, like, host, generations, shape)
        return compute

    return enter
