"""The attention of one step over the paged cache: its decodes in one launch, its prefills in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.cuda.decode import DecodeScratch, attend_decodes, split_count
from kernels.cuda.prefill import PrefillBlocks, attend_prefills, plan_prefills
from kernels.platforms.base import AttentionRows

__all__ = ["AttentionPlan", "DecodeRows", "attention", "plan_attention"]

Put = Callable[[npt.NDArray[np.int32]], Tensor]


@dataclass(frozen=True)
class DecodeRows:
    """``state`` int32 [rows, 1 + columns]: the tokens of a row in the cache, then its pages. ``splits``: the parts that
    sequences are cut into.
    """

    state: Tensor
    splits: int


@dataclass(frozen=True)
class AttentionPlan:
    """What is None has no rows. ``window``: tokens a query sees, 0 for all."""

    decodes: DecodeRows | None
    prefills: PrefillBlocks | None
    window: int


def plan_attention(rows: AttentionRows, window: int, kv_heads: int, put: Put) -> AttentionPlan:
    """``put``: how an array gets to the device."""
    count = rows.decodes
    decodes = prefills = None
    if count:
        state = np.empty((count, 1 + rows.pages.shape[1]), dtype=np.int32)
        state[:, 0] = rows.starts[:count] + 1
        state[:, 1:] = rows.pages[:count]
        decodes = DecodeRows(put(state), split_count(count, kv_heads, int(state[:, 0].max())))
    if count < len(rows.counts):
        prefills = plan_prefills(rows, count, put)
    return AttentionPlan(decodes, prefills, window)


def attention(queries: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, scratch: DecodeScratch) -> Tensor:
    """``queries`` [tokens, heads, dim] -> [tokens, heads * dim]."""
    tokens, heads, dim = queries.shape
    out = queries.new_empty((tokens, heads, dim))
    some = plan.decodes
    if some is not None:
        state = some.state
        asked = queries[: len(state)]
        attend_decodes(
            asked, cache, state[:, 1:], state[:, 0], plan.window, scale, some.splits, scratch, out[: len(state)]
        )
    if plan.prefills is not None:
        attend_prefills(queries, cache, plan.prefills, plan.window, scale, out)
    return out.view(tokens, heads * dim)
