"""Options of an engine's metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["ADAPTER", "CUSTOM_LABEL", "ForeignNames", "MetricOptions", "token_buckets"]

ForeignNames = Literal["sglang", "vllm"]

CUSTOM_LABEL = "troupe.label."
"""The prefix of request attributes that are custom labels: ``troupe.label.team`` fills the label ``team``."""

ADAPTER = "troupe.adapter"
"""The attribute of a request with the name of its LoRA adapter."""

_MAX_BUCKETS = 200


class MetricOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of buckets are ascending; an empty tuple selects the default ones."""

    enabled: bool = True
    foreign_names: tuple[ForeignNames, ...] = ()
    first_token_buckets: tuple[float, ...] | None = None  # seconds
    inter_token_buckets: tuple[float, ...] | None = None  # seconds
    duration_buckets: tuple[float, ...] | None = None  # seconds
    collect_tokens: bool = False
    prompt_token_buckets: tuple[float, ...] | None = None
    generation_token_buckets: tuple[float, ...] | None = None
    custom_labels: tuple[str, ...] = ()
    adapters: bool = False  # the metrics with custom labels have the label ``adapter``, too


def token_buckets(rule: Sequence[str]) -> tuple[float, ...] | None:
    """Bounds of token counts by SGLang's rules: ``default``; ``tse MIDDLE BASE COUNT`` (the middle, and COUNT / 2
    bounds on both sides at distances BASE, BASE², …); ``custom 1 10 100``. None for the default bounds.

    Raises ValueError that explains the rules.
    """
    if not rule or list(rule) == ["default"]:
        return None
    kind, *words = rule
    try:
        numbers = [float(word) for word in words]
        if kind == "custom" and numbers:
            bounds = set(numbers)
        elif kind == "tse" and len(numbers) == 3:
            middle, base, count = numbers
            sides = math.ceil(count / 2)
            if base <= 1 or not 0 < sides <= _MAX_BUCKETS / 2:
                raise ValueError
            distances = [base**power for power in range(1, sides + 1)]
            bounds = {middle, *(middle + far for far in distances), *(max(0.0, middle - far) for far in distances)}
        else:
            raise ValueError
        if len(bounds) > _MAX_BUCKETS or not all(math.isfinite(bound) and bound >= 0 for bound in bounds):
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(
            f"must be default, or tse MIDDLE BASE COUNT (as in tse 1000 2 8), or custom and at most {_MAX_BUCKETS} "
            f"numbers (as in custom 10 50 100), not {' '.join(rule)[:100]!r}"
        ) from None
    return tuple(sorted(bounds))
