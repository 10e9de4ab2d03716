"""The attention of one step over the paged cache: its decodes in one launch, its drafts and its prefills in others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from kernels.cuda.decode import DecodeScratch, attend_decodes, split_count
from kernels.cuda.invariant import attend_decodes_alone, attend_drafts_alone, attend_prompts_alone
from kernels.cuda.launch import attempted, copying, has_gluon
from kernels.cuda.narrow_cache import NarrowCache, scale_found, scale_queries
from kernels.cuda.prefill import PrefillBlocks, attend_prefills, plan_prefills
from kernels.cuda.verify import HEADER, attend_drafts, draft_splits
from kernels.platforms.rows import AttentionRows

__all__ = ["AttentionPlan", "DecodeRows", "DraftRows", "attention", "plan_attention", "plan_guesses"]

_MANY = 8  # rows
_MOST = 1024
_EVEN = (128, 512)
"""Between so many rows of fewer than 4 queries to a key head, programs of a row each are as even, and were quicker."""
_TILES = 32
_SHORT = 8192 + 256
"""With more tiles of drafts, or in longer sequences, what each tile reads again of the other tiles' keys and values
takes longer than the second kernel that it saves. In a graph the length is the most that a row may have."""

Put = Callable[[npt.NDArray[np.int32]], Tensor]


@dataclass(frozen=True)
class DecodeRows:
    """``state`` int32 [rows, 1 + columns]: the tokens of a row in the cache, then its pages. They are there before the
    step's first kernel, and so is all that a row sees but its newest token (``kernels.cuda.launch``): passes that
    follow one another with neither a copy nor the begin of a graph between them have ``DraftRows``. ``splits``: the
    parts that sequences are cut into.
    """

    state: Tensor
    splits: int


@dataclass(frozen=True)
class DraftRows:
    """Rows of up to ``tokens`` tokens. ``state`` int32 [rows, HEADER + columns]: each row's numbers, then its pages.

    ``bits`` int64 [rows, tokens]: what each query sees from the row's root on; None: all up to its own token.
    ``context``: the most tokens a row may have in the cache, which says how sequences are cut. ``early``: whether
    ``state`` and ``bits`` are there before the step's first kernel, and so are the keys and values of all tokens but
    the row's own: ``kernels.cuda.drafts`` reads them before the kernels in front have ended. ``end``: tokens of the
    step behind which there are only prompts'; 0: there are none.
    """

    state: Tensor
    bits: Tensor | None
    tokens: int
    context: int
    early: bool = False
    end: int = 0


@dataclass(frozen=True)
class AttentionPlan:
    """What is None has no rows. ``window``: tokens a query sees, 0 for all. ``rows``: those that it was made of, None
    in a graph.
    """

    decodes: DecodeRows | None
    prefills: PrefillBlocks | None
    window: int
    drafts: DraftRows | None = None
    rows: AttentionRows | None = None


def plan_attention(rows: AttentionRows, window: int, kv_heads: int, put: Put) -> AttentionPlan:
    """``put``: how an array gets to the device."""
    count, short = rows.decodes, rows.decodes + rows.verifies
    decodes = drafts = prefills = None
    if count:
        state = np.empty((count, 1 + rows.pages.shape[1]), dtype=np.int32)
        state[:, 0] = rows.starts[:count] + 1
        state[:, 1:] = rows.pages[:count]
        decodes = DecodeRows(put(state), split_count(count, kv_heads, int(state[:, 0].max())))
    if count < short:
        drafts = _plan_drafts(rows, put)
    if short < len(rows.counts):
        prefills = plan_prefills(rows, short, put)
    return AttentionPlan(decodes, prefills, window, drafts, rows)


def _plan_drafts(rows: AttentionRows, put: Put) -> DraftRows:
    some = slice(rows.decodes, rows.decodes + rows.verifies)
    counts, lengths = rows.counts[some], rows.starts[some] + rows.counts[some]
    state = np.empty((rows.verifies, HEADER + rows.pages.shape[1]), dtype=np.int32)
    state[:, 0] = rows.decodes + np.cumsum(counts) - counts
    state[:, 1] = counts
    state[:, 2] = rows.starts[some] if rows.tree is None or rows.roots is None else rows.roots
    state[:, 3] = lengths
    state[:, HEADER:] = rows.pages[some]
    tokens = triton.next_power_of_2(int(counts.max()))  # each number of tokens would have a kernel of its own
    return DraftRows(put(state), rows.tree, tokens, int(lengths.max()), end=rows.decodes + int(counts.sum()))


def plan_guesses(
    starts: Tensor,
    pages: Tensor,
    tokens: int,
    bits: Tensor | None,
    roots: Tensor | None,
    window: int,
    page_size: int,
) -> AttentionPlan:
    """As ``Platform.plan_guesses`` says: every number is the device's."""
    rows, columns = pages.shape
    state = torch.empty((rows, HEADER + columns), dtype=torch.int32, device=pages.device)
    state[:, 0] = torch.arange(rows, device=pages.device) * tokens
    state[:, 1] = tokens
    state[:, 2] = starts if bits is None or roots is None else roots
    state[:, 3] = starts + tokens
    state[:, HEADER:] = pages
    return AttentionPlan(None, None, window, DraftRows(state, bits, tokens, columns * page_size))


def attention(
    queries: Tensor, cache: Tensor | NarrowCache, plan: AttentionPlan, scale: float, scratch: DecodeScratch | None
) -> Tensor:
    """``queries`` [tokens, heads, dim] -> [tokens, heads * dim]. ``scratch``: None: each query's result is the same
    whatever else there is (``kernels.cuda.invariant``)."""
    if isinstance(cache, NarrowCache):
        if cache.fixed is None:
            return _attention(queries, cache.values, cache.scales, plan, scale, scratch).flatten(1)
        found = _attention(scale_queries(queries, cache.fixed), cache.values, None, plan, scale, scratch)
        return scale_found(found, cache.fixed).flatten(1)
    return _attention(queries, cache, None, plan, scale, scratch).flatten(1)


def _spreads(queries: Tensor, cache: Tensor, scales: Tensor | None) -> bool:
    """Whether ``kernels.cuda.spread`` takes these, and there are rows enough that it is quicker."""
    rows, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    group = heads // kv_heads
    return (
        _MANY <= rows <= _MOST
        and not (group < 4 and _EVEN[0] < rows < _EVEN[1])
        and scales is None
        and queries.dtype == cache.dtype
        and queries.element_size() == 2
        and dim in (64, 128)
        and page_size % 64 == 0
        and group <= 16
        and queries.stride(0) % dim == 0
        and copying(queries.device)
        and has_gluon("spread")
    )


def _is_few(queries: Tensor, cache: Tensor, scales: Tensor | None, drafts: DraftRows) -> bool:
    """Whether ``kernels.cuda.drafts`` takes these, and they are few and short enough that it is quicker."""
    _, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    group = heads // kv_heads
    return (
        group <= 16
        and drafts.context <= _SHORT
        and len(drafts.state) * -(-drafts.tokens // max(1, 16 // group)) * kv_heads <= _TILES
        and scales is None
        and queries.dtype == cache.dtype
        and queries.element_size() == 2
        and dim in (64, 128)
        and page_size % 64 == 0
        and queries.stride(0) % 8 == 0
        and copying(queries.device)
        and has_gluon("drafts")
    )


def _specializes(queries: Tensor, cache: Tensor, scales: Tensor | None, plan: PrefillBlocks, window: int) -> bool:
    """Whether ``kernels.cuda.specialized`` takes these, and is quicker with them."""
    _, _, _, page_size, dim = cache.shape
    return (
        plan.full
        and not window
        and scales is None
        and queries.dtype == cache.dtype
        and queries.element_size() == 2
        and dim == 128
        and page_size % 64 == 0
        and queries.stride(0) % 8 == 0
        and copying(queries.device)
        and has_gluon("specialized")
    )


def _spread() -> Callable[..., Tensor]:
    from kernels.cuda import spread  # in Gluon, which Triton may lack

    return spread.attend_many


def _few() -> Callable[..., Tensor]:
    from kernels.cuda import drafts  # as above

    return drafts.attend_few


def _specialized() -> Callable[..., Tensor]:
    from kernels.cuda import specialized  # as above

    return specialized.attend_prompts


def _attention(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    plan: AttentionPlan,
    scale: float,
    scratch: DecodeScratch | None,
) -> Tensor:
    tokens, heads, dim = queries.shape
    out = queries.new_empty((tokens, heads, dim))
    if scratch is None:
        return _attend_alone(queries, cache, scales, plan, scale, out)
    some = plan.decodes
    if some is not None:
        state = some.state
        asked = queries[: len(state)]
        found = out[: len(state)]
        given = asked, cache, state[:, 1:], state[:, 0], plan.window, scale
        if not _spreads(asked, cache, scales) or attempted(_spread(), *given, scratch, found) is None:
            attend_decodes(*given, some.splits, scratch, found, scales)
    drafts = plan.drafts
    if drafts is not None:
        _attend_drafts(queries, cache, scales, drafts, plan.window, scale, scratch, out)
    if plan.prefills is not None:
        specializes = _specializes(queries, cache, scales, plan.prefills, plan.window)
        if not specializes or attempted(_specialized(), queries, cache, plan.prefills, scale, out) is None:
            attend_prefills(queries, cache, plan.prefills, plan.window, scale, out, scales)
    return out


def _attend_alone(
    queries: Tensor, cache: Tensor, scales: Tensor | None, plan: AttentionPlan, scale: float, out: Tensor
) -> Tensor:
    given, drafts = (queries, cache, scales), plan.drafts
    if plan.decodes is not None:
        attend_decodes_alone(*given, plan.decodes.state, plan.window, scale, out)
    if drafts is not None:
        attend_drafts_alone(*given, drafts.state, drafts.bits, drafts.tokens, plan.window, scale, out)
    if plan.prefills is not None:
        attend_prompts_alone(*given, plan.prefills, plan.window, scale, out)
    return out


def _attend_drafts(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    drafts: DraftRows,
    window: int,
    scale: float,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    queries = queries[: drafts.end or None]  # there is room for sums of each
    given = queries, cache, drafts.state, drafts.bits, drafts.tokens, window, scale
    if _is_few(queries, cache, scales, drafts) and attempted(_few(), *given, scratch, out, drafts.early) is not None:
        return
    heads, kv_heads = queries.shape[1], cache.shape[2]
    splits = draft_splits(len(drafts.state), drafts.tokens, heads // kv_heads, kv_heads, drafts.context)
    attend_drafts(*given, splits, scratch, out, scales, drafts.early, drafts.end > 0)
