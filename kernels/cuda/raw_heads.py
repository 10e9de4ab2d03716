"""New tokens of decodes as a projection gives them: what a part of attention begins with, in registers.

It is what ``kernels.cuda.heads`` does, rounded in the same places, without a kernel of its own. Everything that does
not depend on the projection is read before its end is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

__all__ = ["MOST_ROWS", "RawHeads", "Shape", "begin_raw", "raw_shape"]

MOST_ROWS = 1  # of more, two kernels are quicker where sequences are longer than some hundred tokens


@triton.jit
def _turned(x, over, gain, over_gain, cos, sin, eps, dim: tl.constexpr, normed: tl.constexpr):
    """Heads ``x`` [heads, dims] normed and rotated as ``_place_heads`` does. ``over`` has the two halves of each head
    swapped, ``over_gain`` those of the norm's weight; ``cos``, ``sin`` [1, dims]. Numbers past ``dim`` are zeros.
    """
    low, high = x.to(tl.float32), over.to(tl.float32)
    if normed:
        scale = tl.rsqrt(tl.sum(low * low, 1) / dim + eps)[:, None]
        low = (low * scale * gain).to(x.dtype).to(tl.float32)
        high = (high * scale * over_gain).to(x.dtype).to(tl.float32)
    # Behind a sum, for the compiler moves what is not to where a product needs it: to the registers of each warp.
    return tl.sum(tl.join(low * cos, high * sin), 2).to(x.dtype)


@triton.jit
def begin_raw(
    queries,
    gains,
    cos,
    sin,
    places,
    cache,
    table,
    row,
    kv_head,
    first,
    end,
    begin,
    last,
    eps,
    scale,
    query_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    group_block: tl.constexpr,
    page_size: tl.constexpr,
    lead: tl.constexpr,
    normed: tl.constexpr,
    pdl: tl.constexpr,
):
    """What a part begins with: its queries, the keys and values of the ``lead`` tokens from ``begin`` on, which of
    them it sees, and its sums behind the new token where it is the ``last``, which puts that into the cache.
    """
    group: tl.constexpr = heads // kv_heads
    member = tl.arange(0, group_block)
    head = kv_head * group + member
    at = tl.arange(0, dim_block)
    q_mask = (member < group)[:, None] & (at < dim)[None, :]
    position = begin + tl.arange(0, lead)
    seen = (position >= first) & (position < end)
    page = tl.load(table + position // page_size, mask=seen, other=0).to(tl.int64)
    line = (page * 2 * kv_heads + kv_head) * page_size + position % page_size
    place = cache + line[:, None] * dim + at[None, :]
    there = seen[:, None] & (at < dim)[None, :]
    k = tl.load(place, mask=there, other=0.0)
    v = tl.load(place + kv_heads * page_size * dim, mask=there, other=0.0)
    one = tl.arange(0, 1)
    over = tl.where(at < dim // 2, at + dim // 2, at - dim // 2)  # what a number is turned with
    alone = (one == 0)[:, None] & (at < dim)[None, :]
    q_gain, q_over_gain, k_gain, k_over_gain = 0.0, 0.0, 0.0, 0.0
    if normed:
        own, key = gains + head[:, None] * dim, gains + (heads + kv_head + one)[:, None] * dim
        q_gain = tl.load(own + at[None, :], mask=q_mask, other=0.0).to(tl.float32)
        q_over_gain = tl.load(own + over[None, :], mask=q_mask, other=0.0).to(tl.float32)
        k_gain = tl.load(key + at[None, :], mask=alone, other=0.0).to(tl.float32)
        k_over_gain = tl.load(key + over[None, :], mask=alone, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    own = queries + row * query_stride + head[:, None] * dim
    key = queries + row * query_stride + (heads + kv_head + one)[:, None] * dim
    q = tl.load(own + at[None, :], mask=q_mask, other=0.0)
    q_over = tl.load(own + over[None, :], mask=q_mask, other=0.0)
    new_key = tl.load(key + at[None, :], mask=alone, other=0.0)
    key_over = tl.load(key + over[None, :], mask=alone, other=0.0)
    value = tl.load(key + kv_heads * dim + at[None, :], mask=alone, other=0.0)
    c = tl.load(cos + row * dim + at, mask=at < dim, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * dim + at, mask=at < dim, other=0.0).to(tl.float32)[None, :]
    put = tl.load(places + row)
    q = _turned(q, q_over, q_gain, q_over_gain, c, s, eps, dim, normed)
    new_key = _turned(new_key, key_over, k_gain, k_over_gain, c, s, eps, dim, normed)
    line = (put // page_size * 2 * kv_heads + kv_head) * page_size + put % page_size
    place = cache + (line + one)[:, None] * dim + at[None, :]
    tl.store(place, new_key, mask=alone & last)
    tl.store(place + kv_heads * page_size * dim, value, mask=alone & last)
    score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    top = tl.where(last, score, -float("inf"))
    norm = tl.where(last, 1.0, 0.0) + tl.zeros([group_block], tl.float32)
    total = tl.where(last, value.to(tl.float32), 0.0) + tl.zeros([group_block, dim_block], tl.float32)
    return q, k, v, seen, total, top, norm


@dataclass(frozen=True)
class RawHeads:
    """What places the heads of raw queries, as ``kernels.cuda.heads.place_heads`` does.

    ``gains`` [heads + kv_heads, dim]: of the norm of each head, or None; ``cos``, ``sin`` [rows, 1, dim], the first
    half of ``sin`` negated; ``places`` int64 [rows]: page * page_size + offset of each row's token.
    """

    gains: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor
    places: Tensor


@dataclass(frozen=True)
class Shape:
    """Of programs over raw queries. ``lead``: tokens that each reads before the projection has ended, a power of two
    and at least 64 (32 in float32). ``stages`` of the loop over the rest. ``part``: tokens that a part has at least, a
    multiple of ``lead``, if not 0: as many.
    """

    lead: int
    warps: int
    stages: int = 3
    part: int = 0


def raw_shape(dim_block: int, wide: bool) -> Shape:
    """What is quickest for a row, seen on an H200 with heads of 128."""
    return Shape(32, 4, 2) if wide else Shape(max(64, min(128, 16384 // dim_block)), 4)
