"""Matrix products and attention whose results for a token are the same, bit by bit, whatever else a step runs.

Elsewhere what is quickest decides in which order sums are taken: one token is multiplied by another kernel than
sixteen, and a sequence is cut into more parts where there are fewer of them. Here a number is always added up in one
order: the inputs of a product from first to last by the same instruction, the keys of a sequence from block to block,
each block beginning at the same position. A block of which a query sees nothing changes nothing: it adds zeros to sums
multiplied by one. (He et al., "Defeating Nondeterminism in LLM Inference", 2025, says why batches matter.)
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.attention.prefill import TILE, PrefillBlocks
from kernels.devices.cuda.attention.verify import HEADER, ones
from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.launch import has_large_shared_memory, overlapping

__all__ = ["InvariantLinear", "attend_decodes_alone", "attend_drafts_alone", "attend_prompts_alone"]

_LINES: Final = 64
"""Lines of a tile: queries times the heads that share a key head. Decodes and prompts have the same number, since the
matrix unit is used in another way for fewer."""
_FEW: Final = 16
"""Tokens that the matrix unit takes at once, at least."""
_PART = tl.constexpr(2048)
"""Inputs whose sum is taken by itself."""
_ADDED: Final = 512  # outputs of a program that adds up parts
_DECODES = tl.constexpr(0)
_DRAFTS = tl.constexpr(1)
_PROMPTS = tl.constexpr(2)


@triton.jit
def _sum(
    x,
    weight,
    row,
    token,
    tokens,
    stride,
    outputs,
    first,
    inputs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """Over the ``_PART`` inputs from ``first`` on: float32 [rows, columns]."""
    at = tl.arange(0, block)
    total = tl.zeros([rows, columns], tl.float32)
    for begin in tl.range(first, min(first + _PART, inputs), block, num_stages=stages):
        inside = begin + at < inputs
        w = tl.load(
            weight + row[:, None].to(tl.int64) * inputs + (begin + at)[None, :],
            mask=(row < outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        there = (token < tokens)[:, None] & inside[None, :]
        value = tl.load(x + token[:, None] * stride + (begin + at)[None, :], mask=there, other=0.0)
        total = tl.dot(w, tl.trans(value), total, input_precision=precision)
    return total


@triton.jit(do_not_specialize=["tokens"])
def invariant_gemm_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    stride,
    outputs,
    inputs: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    left: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    """``rows`` outputs of ``columns`` tokens. ``left``: of one part of the inputs, which goes to ``out`` float32
    [parts, tokens, outputs]."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = (tl.program_id(1) * columns + tl.arange(0, columns)).to(tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    mask = (row < outputs)[:, None] & (token < tokens)[None, :]
    if left:
        part = tl.program_id(2)
        total = _sum(
            x,
            weight,
            row,
            token,
            tokens,
            stride,
            outputs,
            part * _PART,
            inputs,
            rows,
            columns,
            block,
            precision,
            stages,
        )
        to = out + (part * tokens + token)[None, :] * outputs + row[:, None]
        tl.store(to, total, mask=mask)
    else:
        total = tl.zeros([rows, columns], tl.float32)
        for first in tl.range(0, inputs, _PART):
            total += _sum(
                x, weight, row, token, tokens, stride, outputs, first, inputs, rows, columns, block, precision, stages
            )
        if biased:
            total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + token[None, :] * outputs + row[:, None], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def invariant_sum_kernel(
    parts,
    bias,
    out,
    tokens,
    outputs,
    count: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    pdl: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    token = tl.program_id(1).to(tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([block], tl.float32)
    for part in tl.static_range(count):
        total += tl.load(parts + (part * tokens + token) * outputs + at, mask=at < outputs, other=0.0)
    if biased:
        total += tl.load(bias + at, mask=at < outputs, other=0.0).to(tl.float32)
    tl.store(out + token * outputs + at, total.to(out.dtype.element_ty), mask=at < outputs)


def _cut(x: Tensor) -> tuple[int, int, int, int, int]:
    """Outputs and tokens of a program, inputs at a time, warps and stages."""
    if x.element_size() == 4:
        return 32, 16, 32, 4, 2
    stages = 4 if has_large_shared_memory(x.device) else 2
    if len(x) <= _FEW:
        return 64, _FEW, 128, 4, stages
    if len(x) <= 256 or not has_large_shared_memory(x.device):
        return 64, 64, 64, 4, stages
    return 128, 128, 64, 8, stages


class InvariantLinear:
    """``x @ weight.T + bias`` with the weight as it is, [outputs, inputs]. Sums are float32, taken in the order of the
    inputs over ``_PART`` of these and then over such parts: of few tokens each part is a program's.

    ``gated``: ``silu(x @ gate.T) * (x @ up.T)``, the weight [2 * outputs, inputs] being gate | up, each with its bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool = False) -> None:
        self.weight = weight.contiguous()
        self.bias = bias
        self._gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        outputs, inputs = self.weight.shape
        out = x.new_empty((len(x), outputs))
        rows, columns, block, warps, stages = _cut(x)
        parts = triton.cdiv(inputs, _PART.value) if columns == _FEW and x.element_size() == 2 else 1
        left = x.new_empty((parts, len(x), outputs), dtype=torch.float32) if parts > 1 else out
        bias, biased = self.weight if self.bias is None else self.bias, self.bias is not None
        pdl = overlapping(x.device)
        invariant_gemm_kernel[(triton.cdiv(outputs, rows), triton.cdiv(len(x), columns), parts)](
            x,
            self.weight,
            bias,
            left,
            len(x),
            x.stride(0),
            outputs,
            inputs,
            rows,
            columns,
            block,
            biased,
            parts > 1,
            "ieee",
            stages,
            pdl,
            num_warps=warps,
            launch_pdl=pdl,
        )
        if parts > 1:
            grid = triton.cdiv(outputs, _ADDED), len(x)
            invariant_sum_kernel[grid](
                left, bias, out, len(x), outputs, parts, _ADDED, biased, pdl, num_warps=4, launch_pdl=pdl
            )
        return swiglu(out) if self._gated else out


@triton.jit(do_not_specialize=["state_stride", "page_stride", "bits_stride", "tiles"])
def invariant_attention_kernel(
    queries,
    cache,
    scales,
    state,
    pages,
    bits,
    out,
    scale,
    window: tl.constexpr,
    query_stride,
    state_stride,
    page_stride,
    bits_stride,
    tiles,
    kind: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    each: tl.constexpr,
    lines: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    tree: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    scaled: tl.constexpr,
    pdl: tl.constexpr,
):
    """A tile of ``each`` queries of a row, for the query heads of one key head. ``state``: of the ``kind`` of rows.

    ``tree``: of one query, whose path stands anywhere behind the row's root. Its keys are read as if they followed one
    another, as they will when they are accepted.
    """
    group: tl.constexpr = heads // kv_heads
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first_query = (tl.program_id(0) % tiles) * each
    kv_head = tl.program_id(1)
    line = tl.arange(0, lines)
    query = first_query + line // group
    head = kv_head * group + line % group
    at = tl.arange(0, dim_block)
    offset = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    own = state + row * state_stride
    table = pages + row * page_stride
    if kind == _DECODES:
        token, count = row, 1
        root = tl.load(own) - 1
    elif kind == _DRAFTS:
        token = tl.load(own).to(tl.int64)
        count = tl.load(own + 1)
        root = tl.load(own + 2)
    else:
        table = pages + tl.load(own).to(tl.int64) * page_stride
        token = tl.load(own + 1).to(tl.int64)
        count = tl.load(own + 2)
        root = tl.load(own + 3)
    if first_query < count:
        there = (line < each * group) & (query < count)
        place = token + query
        last = root + tl.minimum(query, count - 1)  # position that a query sees, all up to it
        end = root + tl.minimum(first_query + each, count)
        if tree:
            path = tl.load(bits + row * bits_stride + first_query).to(tl.uint64, bitcast=True)
            node = tl.arange(0, 64)
            before = path & ((tl.full([64], 1, tl.int64) << node) - 1).to(tl.uint64, bitcast=True)
            turn = tl.where(((path >> node.to(tl.uint64)) & 1) != 0, ones(before), 1 << 30)
            end = root + tl.sum((turn < 64).to(tl.int32), 0)
            last = tl.zeros([lines], tl.int32) + end - 1
        mask = there[:, None] & (at < dim)[None, :]
        q = tl.load(queries + place[:, None] * query_stride + head[:, None] * dim + at[None, :], mask=mask, other=0.0)
        first = 0
        if window > 0:
            first = tl.maximum(tl.min(last, 0) + 1 - window, 0) // block
        top = tl.full([lines], -float("inf"), tl.float32)
        norm = tl.zeros([lines], tl.float32)
        total = tl.zeros([lines, dim_block], tl.float32)
        for index in tl.range(first, (end + block - 1) // block, num_stages=stages):
            position = index * block + offset
            where = position
            if tree:
                hidden = (turn[None, :] == (position - root)[:, None]).to(tl.int32)
                where = tl.minimum(position, root) + tl.sum(hidden * node[None, :], 1)
            page = tl.load(table + where // page_size, mask=position < end, other=0).to(tl.int64)
            spot = (page * 2 * kv_heads + kv_head) * page_size + where % page_size
            keys = cache + spot[:, None] * dim + at[None, :]
            inside = (position < end)[:, None] & (at < dim)[None, :]
            k = tl.load(keys, mask=inside, other=0.0).to(q.dtype)
            v = tl.load(keys + kv_heads * page_size * dim, mask=inside, other=0.0).to(q.dtype)
            score = tl.dot(q, tl.trans(k), input_precision=precision) * scale
            if scaled:
                score = score * tl.load(scales + spot).to(tl.float32)[None, :]
            seen = position[None, :] <= last[:, None]
            if window > 0:
                seen = seen & (position[None, :] > last[:, None] - window)
            score = tl.where(seen, score, -float("inf"))
            above = tl.maximum(tl.maximum(top, tl.max(score, 1)), -1e30)  # a block may hide all keys from a query
            weight = tl.exp2(score - above[:, None])
            shrink = tl.exp2(top - above)
            norm = norm * shrink + tl.sum(weight, 1)
            if scaled:
                weight = weight * tl.load(scales + spot + kv_heads * page_size).to(tl.float32)[None, :]
            total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision=precision)
            top = above
        result = out + place[:, None] * heads * dim + head[:, None] * dim + at[None, :]
        tl.store(result, (total / norm[:, None]).to(out.dtype.element_ty), mask=mask)


def _attend(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    kind: tl.constexpr,
    state: Tensor,
    pages: Tensor,
    bits: Tensor | None,
    end: int,
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """``end``: queries of a row."""
    _, heads, dim = queries.shape
    _, _, kv_heads, page_size, _ = cache.shape
    group, wide = heads // kv_heads, queries.element_size() == 4
    each = max(1, _LINES // group) if bits is None else 1
    tiles = triton.cdiv(end, each)
    pdl = overlapping(queries.device)
    invariant_attention_kernel[(len(state) * tiles, kv_heads)](
        queries,
        cache,
        cache if scales is None else scales,
        state,
        pages,
        state if bits is None else bits,
        out,
        scale * 1.4426950408889634,
        window,
        queries.stride(0),
        state.stride(0),
        pages.stride(0),
        0 if bits is None else bits.stride(0),
        tiles,
        kind.value,
        heads,
        kv_heads,
        dim,
        max(16, triton.next_power_of_2(dim)),
        each,
        max(_LINES, triton.next_power_of_2(group)),
        page_size,
        32 if wide else 64,
        bits is not None,
        "ieee" if wide else "tf32",
        2 if has_large_shared_memory(queries.device) else 1,
        scales is not None,
        pdl,
        num_warps=8 if wide else 4,
        launch_pdl=pdl,
    )


def attend_decodes_alone(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    state: Tensor,
    pages: Tensor,
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """The first rows of ``queries`` [tokens, heads, dim], one for each of ``state`` int32 [rows, 1 + columns] and
    ``pages`` int32 [rows, columns], as ``DecodeRows``; into ``out`` likewise, dense. ``cache``, ``scales`` and
    ``window`` as ``attend_decodes``."""
    _attend(queries, cache, scales, _DECODES, state, pages, None, 1, window, scale, out)


def attend_drafts_alone(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    state: Tensor,
    bits: Tensor | None,
    tokens: int,
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """``state`` int32 [rows, HEADER + columns], ``bits`` and ``tokens`` as ``attend_drafts``."""
    _attend(queries, cache, scales, _DRAFTS, state, state[:, HEADER:], bits, tokens, window, scale, out)


def attend_prompts_alone(
    queries: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    plan: PrefillBlocks,
    window: int,
    scale: float,
    out: Tensor,
) -> None:
    """``plan``: as ``attend_prefills``."""
    _attend(queries, cache, scales, _PROMPTS, plan.blocks, plan.pages, None, TILE, window, scale, out)
