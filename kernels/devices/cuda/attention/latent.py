"""Attention over a latent cache (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1): decodes, draft tokens and prompts.

All heads read the same vectors: the heads of a row's queries are the lines of one tile, a vector is read once for the
scores and for the sum, and its first numbers are its value. Rows are split over programs as in
``kernels.devices.cuda.attention.decode``; a second kernel combines their parts, one program for each line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import AttentionPlan
from kernels.devices.cuda.attention.prefill import TILE
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.launch import has_large_shared_memory, multiprocessors, overlapping

__all__ = ["LINES", "attend_latent"]

_DECODES, _DRAFTS, _PROMPTS = 0, 1, 2
LINES: Final = 64
"""Lines of a program, each one head of one query, of prompts."""
_FEW_LINES, _MANY_LINES = 16, LINES
_FEW_BLOCK, _MANY_BLOCK, _SMALL_BLOCK = 64, 64, 32
_FEW_STAGES, _MANY_STAGES = 3, 2
_FEW_WARPS, _MANY_WARPS = 4, 8
_MAX_SPLITS = 128
_JOINED, _MIN_JOINED = 4096, 64  # numbers that a program combines, of how many numbers of a line at least
_FEW_EACH, _MANY_EACH = 2, 1
"""Programs of a multiprocessor."""


@triton.jit
def _row(state, row, kind: tl.constexpr, pages, page_stride, state_stride, header: tl.constexpr):
    """A row's first token in the step, number of tokens, first position, tokens in the cache, and its page table."""
    own = state + row.to(tl.int64) * state_stride
    if kind == 0:
        length = tl.load(own)
        return row, 1, length - 1, length, own + 1
    elif kind == 1:
        return tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3), own + header
    else:
        count, first = tl.load(own + 2), tl.load(own + 3)
        return tl.load(own + 1), count, first, first + count, pages + tl.load(own).to(tl.int64) * page_stride


@triton.jit
def _stretch(
    total,
    top,
    norm,
    q,
    q_rope,
    cache,
    table,
    seen,
    first,
    query,
    begin,
    end,
    length,
    scale,
    tree: tl.constexpr,
    width: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    rope_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """Attend to blocks ``begin .. end`` of vectors. ``seen``: bits of a tree from position ``first`` on."""
    at = tl.arange(0, dim_block)
    rope_at = tl.arange(0, rope_block)
    offset = tl.arange(0, block)
    for index in tl.range(begin, end, num_stages=stages):
        position = index * block + offset
        if page_size % block == 0:
            page = tl.load(table + index * block // page_size).to(tl.int64)
            line = page * page_size + (index * block) % page_size + offset
        else:
            page = tl.load(table + position // page_size, mask=position < length, other=0).to(tl.int64)
            line = page * page_size + position % page_size
        place = cache + line[:, None] * width
        if dim == dim_block:
            k = tl.load(place + at[None, :])
        else:
            k = tl.load(place + at[None, :], mask=(at < dim)[None, :], other=0.0)
        k_rope = tl.load(place + dim + rope_at[None, :], mask=(rope_at < width - dim)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=precision)
        score = tl.dot(q_rope, tl.trans(k_rope), score, input_precision=precision) * scale
        if masked:
            node = position - first
            if tree:
                left = seen[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.uint64)[None, :]
                visible = (node < 0)[None, :] | (((left & 1) != 0) & ((node >= 0) & (node < 64))[None, :])
            else:
                visible = node[None, :] <= query[:, None]
            score = tl.where(visible, score, -float("inf"))
        above = tl.maximum(top, tl.max(score, 1))
        if masked:
            above = tl.maximum(above, -1e30)  # all positions of a block may be masked for a query
        weight = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        norm = norm * shrink + tl.sum(weight, 1)
        total = tl.dot(weight.to(k.dtype), k, total * shrink[:, None], input_precision=precision)
        top = above
    return total, top, norm


@triton.jit(
    do_not_specialize=["page_stride", "state_stride", "bits_stride", "tiles", "splits"],
    do_not_specialize_on_alignment=["pages", "state"],
)
def latent_attention_kernel(
    queries,
    rotated,
    cache,
    state,
    pages,
    bits,
    out,
    partial,
    stats,
    scale,
    query_stride,
    head_stride,
    rotated_stride,
    rotated_head_stride,
    page_stride,
    state_stride,
    bits_stride,
    tiles,
    splits,
    kind: tl.constexpr,
    tree: tl.constexpr,
    header: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    rope_block: tl.constexpr,
    lines: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (row * tiles + tile, split). ``tiles``: of a row's lines, each of which is one head of one query."""
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    split = tl.program_id(1)
    at = tl.arange(0, dim_block)
    rope_at = tl.arange(0, rope_block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token, count, first, length, table = _row(state, row, kind, pages, page_stride, state_stride, header)
    line = tile * lines + tl.arange(0, lines)
    query = line // heads
    there = query < count
    if kind == 2:  # nothing behind a tile's last query is read
        length = tl.minimum(length, first + (tile * lines + lines - 1) // heads + 1)
    seen = tl.full([lines], 0, tl.uint64)
    if tree:
        seen = tl.load(bits + row.to(tl.int64) * bits_stride + query, mask=there, other=1).to(tl.uint64, bitcast=True)
    blocks = (length + block - 1) // block
    share = (blocks + splits - 1) // splits
    used = (blocks + share - 1) // share
    if (split < used) & (tile * lines < count * heads):
        begin = split * share
        end = tl.minimum(begin + share, blocks)
        place = token.to(tl.int64) * heads + line
        of, head = (token + query).to(tl.int64), line % heads
        own = queries + (of * query_stride + head * head_stride)[:, None]
        q = tl.load(own + at[None, :], mask=there[:, None] & (at < dim)[None, :], other=0.0)
        own = rotated + (of * rotated_stride + head * rotated_head_stride)[:, None]
        q_rope = tl.load(own + rope_at[None, :], mask=there[:, None] & (rope_at < width - dim)[None, :], other=0.0)
        top = tl.full([lines], -float("inf"), tl.float32)
        norm = tl.zeros([lines], tl.float32)
        total = tl.zeros([lines, dim_block], tl.float32)
        clear = first + 1  # every query sees the positions before
        if kind == 2:
            clear += tile * lines // heads
        elif tree:
            clear = first
        clear = tl.minimum(tl.maximum(clear // block, begin), end)
        total, top, norm = _stretch(
            total, top, norm, q, q_rope, cache, table, seen, first, query, begin, clear, length, scale, tree, width,
            dim, dim_block, rope_block, page_size, block, False, precision, stages,
        )  # fmt: skip
        total, top, norm = _stretch(
            total, top, norm, q, q_rope, cache, table, seen, first, query, clear, end, length, scale, tree, width,
            dim, dim_block, rope_block, page_size, block, True, precision, stages,
        )  # fmt: skip
        mask = there[:, None] & (at < dim)[None, :]
        if used == 1:
            total = total / norm[:, None]
            tl.store(out + place[:, None] * dim + at[None, :], total.to(out.dtype.element_ty), mask=mask)
        else:
            part = place * splits + split
            tl.store(partial + part[:, None] * dim + at[None, :], total, mask=mask)
            tl.store(stats + part * 2, top, mask=there)
            tl.store(stats + part * 2 + 1, norm, mask=there)


@triton.jit(
    do_not_specialize=["state_stride", "tokens", "splits"],
    do_not_specialize_on_alignment=["state"],
)
def latent_join_kernel(
    state,
    out,
    partial,
    stats,
    state_stride,
    tokens,
    splits,
    kind: tl.constexpr,
    header: tl.constexpr,
    heads: tl.constexpr,
    dim: tl.constexpr,
    joined: tl.constexpr,
    block: tl.constexpr,
    splits_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (row * tokens + query, head, part of the numbers). ``splits_block``: a power of two from ``splits``
    on."""
    row = tl.program_id(0) // tokens
    query = tl.program_id(0) % tokens
    at = tl.program_id(2) * joined + tl.arange(0, joined)
    part = tl.arange(0, splits_block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token, count, _, length, _ = _row(state, row, kind, state, 0, state_stride, header)
    blocks = (length + block - 1) // block
    share = (blocks + splits - 1) // splits
    used = (blocks + share - 1) // share
    if (query < count) & (used > 1):
        line = (token + query).to(tl.int64) * heads + tl.program_id(1)
        there = part < used
        top = tl.load(stats + (line * splits + part) * 2, mask=there, other=-float("inf"))
        norm = tl.load(stats + (line * splits + part) * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (at < dim)[None, :]
        total = tl.load(partial + (line * splits + part)[:, None] * dim + at[None, :], mask=mask, other=0.0)
        grow = tl.exp2(top - tl.max(top, 0))
        result = tl.sum(total * grow[:, None], 0) / tl.sum(norm * grow, 0)
        tl.store(out + line * dim + at, result.to(out.dtype.element_ty), mask=at < dim)


def attend_latent(
    queries: Tensor, rotated: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, scratch: DecodeScratch
) -> Tensor:
    """Causal attention of ``queries`` [tokens, heads, dim] with their ``rotated`` parts [tokens, heads, rope_dim] over
    ``cache`` [pages, page_size, dim + rope_dim], contiguous -> [tokens, heads, dim]. Numbers of a head stand side by
    side.
    """
    out = queries.new_empty(queries.shape)
    launch = _Launch(queries, rotated, cache, scale, scratch, out)
    if plan.decodes is not None:
        launch(plan.decodes.state, None, None, _DECODES, 1)
    if plan.drafts is not None:
        launch(plan.drafts.state, None, plan.drafts.bits, _DRAFTS, plan.drafts.tokens)
    if plan.prefills is not None:
        launch(plan.prefills.blocks, plan.prefills.pages, None, _PROMPTS, TILE)
    return out


@dataclass(frozen=True)
class _Launch:
    queries: Tensor
    rotated: Tensor
    cache: Tensor
    scale: float
    scratch: DecodeScratch
    out: Tensor

    def __call__(self, state: Tensor, pages: Tensor | None, bits: Tensor | None, kind: int, tokens: int) -> None:
        """``state``: of each row of up to ``tokens`` tokens, or each block of a prompt."""
        queries, rotated, (_, page_size, width) = self.queries, self.rotated, self.cache.shape
        total, heads, dim = queries.shape
        many = tokens * heads > _FEW_LINES
        lines = _MANY_LINES if many else _FEW_LINES
        wide = queries.element_size() == 4
        large = has_large_shared_memory(queries.device)
        block = _SMALL_BLOCK // (2 if wide else 1) if wide or not large else _MANY_BLOCK if many else _FEW_BLOCK
        tiles, splits = triton.cdiv(tokens * heads, lines), 1
        partial = stats = self.out
        if kind != _PROMPTS:
            header = 1 if kind == _DECODES else HEADER
            context = (state.shape[1] - header) * page_size
            device = multiprocessors(queries.device) * (_MANY_EACH if many else _FEW_EACH)
            splits = max(1, min(_MAX_SPLITS, device // (len(state) * tiles), triton.cdiv(context, block)))
            partial, stats, _ = self.scratch.room(total, heads, 1, dim, splits)
        dim_block = max(16, triton.next_power_of_2(dim))
        pdl = overlapping(queries.device)
        latent_attention_kernel[(len(state) * tiles, splits)](
            queries,
            rotated,
            self.cache,
            state,
            state if pages is None else pages,
            state if bits is None else bits,
            self.out,
            partial,
            stats,
            self.scale * 1.4426950408889634,
            queries.stride(0),
            queries.stride(1),
            rotated.stride(0),
            rotated.stride(1),
            0 if pages is None else pages.stride(0),
            state.stride(0),
            0 if bits is None else bits.stride(0),
            tiles,
            splits,
            kind,
            bits is not None,
            HEADER,
            heads,
            width,
            dim,
            dim_block,
            max(16, triton.next_power_of_2(width - dim)),
            lines,
            page_size,
            block,
            "ieee" if wide else "tf32",
            _FEW_STAGES if large and not wide and not many else _MANY_STAGES,
            pdl,
            num_warps=_MANY_WARPS if many else _FEW_WARPS,
            launch_pdl=pdl,
        )
        if splits > 1:
            splits_block = triton.next_power_of_2(splits)
            joined = min(dim_block, max(_MIN_JOINED, _JOINED // splits_block))
            latent_join_kernel[(len(state) * tokens, heads, dim_block // joined)](
                state,
                self.out,
                partial,
                stats,
                state.stride(0),
                tokens,
                splits,
                kind,
                HEADER,
                heads,
                dim,
                joined,
                block,
                splits_block,
                pdl,
                num_warps=4,
                launch_pdl=pdl,
            )
