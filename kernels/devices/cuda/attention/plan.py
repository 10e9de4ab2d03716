"""The attention plan of a step: one launch for its decodes, one for its draft tokens, one for its prefills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.cache_8bit import Cache8bit, scale_found, scale_queries
from kernels.devices.cuda.attention.decode import PLAIN, DecodeScratch, attend_decodes, split_count
from kernels.devices.cuda.attention.prefill import PrefillBlocks, attend_prefills, plan_prefills
from kernels.devices.cuda.attention.verify import HEADER, attend_drafts, draft_splits
from kernels.devices.cuda.invariant_kernels import attend_decodes_alone, attend_drafts_alone, attend_prompts_alone
from kernels.devices.cuda.launch import attempted, copying, has_gluon
from kernels.devices.row_attention import CapAndSinks

__all__ = ["AttentionPlan", "DecodeRows", "DraftRows", "attention", "plan_attention", "plan_draft"]

_MANY = 8  # rows
_MAX_ROWS = 1024
_EVEN = (128, 512)
"""From this number of rows on, with fewer than 4 queries a key head, ``decode`` balances as well and was faster."""
_TILES = 32
_SHORT = 8192 + 256
"""With more tiles of draft tokens, or longer sequences, reading keys and values again in each tile costs more than the
second kernel that it saves. In a graph the length is the maximum of a row."""

Put = Callable[[npt.NDArray[np.int32]], Tensor]


@dataclass(frozen=True)
class DecodeRows:
    """``state`` int32 [rows, 1 + columns]: the tokens of a row in the cache, then its pages. They are written before
    the step's first kernel, and so are all tokens that a row attends to but its newest
    (``kernels.devices.cuda.launch``). Consecutive passes without a copy or the start of a graph between them use
    ``DraftRows``. ``splits``: number of parts of split sequences. ``own_pages`` int32 [rows, columns]: of layers with
    another page table than that of ``state``.
    """

    state: Tensor
    splits: int
    own_pages: Tensor | None = None

    @property
    def pages(self) -> Tensor:
        """The pages of each row, int32 [rows, columns]."""
        return self.state[:, 1:] if self.own_pages is None else self.own_pages


@dataclass(frozen=True)
class DraftRows:
    """Rows of up to ``tokens`` tokens. ``state`` int32 [rows, HEADER + columns]: each row's numbers, then its pages.

    ``bits`` int64 [rows, tokens]: the mask of each query from the row's root on; None: causal. ``context``: the most
    cached tokens of a row, which determines the split. ``early``: whether ``state``, ``bits`` and the keys and values
    of all tokens but the row's own are written before the step's first kernel:
    ``kernels.devices.cuda.attention.verify_sm90`` reads them before the previous kernels have ended. ``end``: tokens of
    the step before those of prompts; 0: without prompts.
    """

    state: Tensor
    bits: Tensor | None
    tokens: int
    context: int
    early: bool = False
    end: int = 0


@dataclass(frozen=True)
class AttentionPlan:
    """Rows by kind; None if there are none. ``window``: as ``ModelConfig.windows``. ``rows``: the
    planned rows, None in a graph.
    """

    decodes: DecodeRows | None
    prefills: PrefillBlocks | None
    window: int
    drafts: DraftRows | None = None
    rows: AttentionRows | None = None


def plan_attention(rows: AttentionRows, window: int, kv_heads: int, put: Put) -> AttentionPlan:
    """``put``: copies an array to the device."""
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
    tokens = triton.next_power_of_2(int(counts.max()))  # otherwise each number of tokens would compile another kernel
    return DraftRows(put(state), rows.tree, tokens, int(lengths.max()), end=rows.decodes + int(counts.sum()))


def plan_draft(
    starts: Tensor,
    pages: Tensor,
    tokens: int,
    bits: Tensor | None,
    roots: Tensor | None,
    window: int,
    page_size: int,
) -> AttentionPlan:
    """As ``Attention.plan_draft``: all data is on the device."""
    rows, columns = pages.shape
    state = torch.empty((rows, HEADER + columns), dtype=torch.int32, device=pages.device)
    state[:, 0] = torch.arange(rows, device=pages.device) * tokens
    state[:, 1] = tokens
    state[:, 2] = starts if bits is None or roots is None else roots
    state[:, 3] = starts + tokens
    state[:, HEADER:] = pages
    return AttentionPlan(None, None, window, DraftRows(state, bits, tokens, columns * page_size))


def attention(
    queries: Tensor,
    cache: Tensor | Cache8bit,
    plan: AttentionPlan,
    scale: float,
    scratch: DecodeScratch | None,
    extra: CapAndSinks = PLAIN,
) -> Tensor:
    """``queries`` [tokens, heads, dim] -> [tokens, heads * dim]. ``scratch``: None for batch-invariant results
    (``kernels.devices.cuda.invariant_kernels``), which know no ``extra``."""
    if isinstance(cache, Cache8bit):
        if cache.fixed is None:
            return _attention(queries, cache.values, cache.scales, plan, scale, scratch, extra).flatten(1)
        result = _attention(scale_queries(queries, cache.fixed), cache.values, None, plan, scale, scratch, extra)
        return scale_found(result, cache.fixed).flatten(1)
    return _attention(queries, cache, None, plan, scale, scratch, extra).flatten(1)


def _spreads(queries: Tensor, cache: Tensor, scales: Tensor | None) -> bool:
    """Whether ``kernels.devices.cuda.attention.decode_persistent`` supports the rows, and they are enough for it to be
    faster."""
    rows, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    group = heads // kv_heads
    return (
        _MANY <= rows <= _MAX_ROWS
        and not (group < 4 and _EVEN[0] < rows < _EVEN[1])
        and scales is None
        and queries.dtype == cache.dtype
        and queries.element_size() == 2
        and dim in (64, 128)
        and page_size % 64 == 0
        and group <= 16
        and queries.stride(0) % dim == 0
        and copying(queries.device)
        and has_gluon("attention.decode_persistent")
    )


def _is_few(queries: Tensor, cache: Tensor, scales: Tensor | None, drafts: DraftRows) -> bool:
    """Whether ``kernels.devices.cuda.attention.verify_sm90`` supports the rows, and they are few and short enough for
    it to be faster."""
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
        and has_gluon("attention.verify_sm90")
    )


def _specializes(queries: Tensor, cache: Tensor, scales: Tensor | None, plan: PrefillBlocks, window: int) -> bool:
    """Whether ``kernels.devices.cuda.attention.prefill_warp_specialized`` supports the rows and is faster."""
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
        and has_gluon("attention.prefill_warp_specialized")
    )


def _spread() -> Callable[..., Tensor]:
    from kernels.devices.cuda.attention import decode_persistent

    return decode_persistent.attend_many


def _few() -> Callable[..., Tensor]:
    from kernels.devices.cuda.attention import verify_sm90

    return verify_sm90.attend_few


def _specialized() -> Callable[..., Tensor]:
    from kernels.devices.cuda.attention import prefill_warp_specialized

    return prefill_warp_specialized.attend_prompts


def _attention(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    plan: AttentionPlan,
    scale: float,
    scratch: DecodeScratch | None,
    extra: CapAndSinks,
) -> Tensor:
    tokens, heads, dim = queries.shape
    out = queries.new_empty((tokens, heads, dim))
    plain = extra.is_plain and plan.window >= 0  # which kernels for compute capability 9.0 are for
    if scratch is None:
        return _attend_alone(queries, cache, scales, plan, scale, out)
    some = plan.decodes
    if some is not None:
        state = some.state
        draft_queries = queries[: len(state)]
        result = out[: len(state)]
        given = draft_queries, cache, some.pages, state[:, 0], plan.window, scale
        spreads = plain and _spreads(draft_queries, cache, scales)
        if not spreads or attempted(_spread(), *given, scratch, result) is None:
            attend_decodes(*given, some.splits, scratch, result, scales, extra)
    drafts = plan.drafts
    if drafts is not None:
        _attend_drafts(queries, cache, scales, drafts, plan.window, scale, scratch, out, extra)
    if plan.prefills is not None:
        specializes = plain and _specializes(queries, cache, scales, plan.prefills, plan.window)
        if not specializes or attempted(_specialized(), queries, cache, plan.prefills, scale, out) is None:
            attend_prefills(queries, cache, plan.prefills, plan.window, scale, out, scales, extra)
    return out


def _attend_alone(
    queries: Tensor, cache: Tensor, scales: Tensor | None, plan: AttentionPlan, scale: float, out: Tensor
) -> Tensor:
    given, drafts = (queries, cache, scales), plan.drafts
    if plan.decodes is not None:
        attend_decodes_alone(*given, plan.decodes.state, plan.decodes.pages, plan.window, scale, out)
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
    extra: CapAndSinks,
) -> None:
    queries = queries[: drafts.end or None]  # scratch holds sums of each
    given = queries, cache, drafts.state, drafts.bits, drafts.tokens, window, scale
    few = extra.is_plain and window >= 0 and _is_few(queries, cache, scales, drafts)
    if few and attempted(_few(), *given, scratch, out, drafts.early) is not None:
        return
    heads, kv_heads = queries.shape[1], cache.shape[2]
    splits = draft_splits(len(drafts.state), drafts.tokens, heads // kv_heads, kv_heads, drafts.context)
    attend_drafts(*given, splits, scratch, out, scales, drafts.early, drafts.end > 0, extra)
