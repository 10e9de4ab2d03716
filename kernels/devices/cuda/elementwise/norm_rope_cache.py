"""The norm and rotation of new queries and keys, and the write to the KV cache, in one kernel.

Queries and keys are normed if the model does so (Qwen3), and rotated. Queries stay in place; keys and values are
written to the cache. A layer's cache is [pages, 2, kv_heads, page_size, dim], so that the part of a page that belongs
to one key head is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.attention.cache_8bit import Cache8bit
from kernels.devices.cuda.launch import overlapping
from kernels.weights.quantization.cache import max_value

__all__ = ["RopeCacheEpilogue", "norm_rope_cache"]


@triton.jit(do_not_specialize=["tokens"])
def norm_rope_cache_kernel(
    given,
    qkv,
    weight,
    cos,
    sin,
    cache,
    scales,
    offsets,
    index,
    eps,
    tokens,
    apart,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    half_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    normed: tl.constexpr,
    kept: tl.constexpr,
    largest: tl.constexpr,
    parts: tl.constexpr,
    pdl: tl.constexpr,
):
    """``parts``: number of parts of ``given`` float32, ``apart`` elements from each other, to sum and round; 0: use
    ``qkv``."""
    half: tl.constexpr = dim // 2
    head = tl.program_id(1)
    token = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    there = token < tokens
    at = tl.arange(0, half_block)
    mask = there[:, None] & (at < half)[None, :]
    turned = head < heads + kv_heads
    if normed:
        gamma = weight + head * dim + at
        low_gamma = tl.load(gamma, mask=turned & (at < half), other=0.0)
        high_gamma = tl.load(gamma + half, mask=turned & (at < half), other=0.0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    # Issue all loads before using any of them.
    place = tl.load(index + token, mask=there & (head >= heads), other=0)
    angle = token[:, None] * dim + at[None, :]
    c = tl.load(cos + angle, mask=turned & mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned & mask, other=0.0).to(tl.float32)
    first = qkv + (token[:, None] * (heads + 2 * kv_heads) + head) * dim + at[None, :]
    if parts > 0:
        number = given + (token[:, None] * (heads + 2 * kv_heads) + head) * dim + at[None, :]
        low = tl.load(number, mask=mask, other=0.0)
        high = tl.load(number + half, mask=mask, other=0.0)
        for part in tl.static_range(1, parts):
            low += tl.load(number + part * apart, mask=mask, other=0.0)
            high += tl.load(number + part * apart + half, mask=mask, other=0.0)
        low, high = low.to(qkv.dtype.element_ty), high.to(qkv.dtype.element_ty)
    else:
        low = tl.load(first, mask=mask, other=0.0)
        high = tl.load(first + half, mask=mask, other=0.0)
    if turned:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if normed:
            size = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / dim
            scale = tl.rsqrt(size + eps)[:, None]
            # Rounded as the norm's output is where it is an operator of its own.
            x = (x * scale * low_gamma.to(tl.float32)).to(low.dtype).to(tl.float32)
            y = (y * scale * high_gamma.to(tl.float32)).to(low.dtype).to(tl.float32)
        low = (x * c + y * s).to(low.dtype)
        high = (y * c - x * s).to(high.dtype)
    if head < heads:
        tl.store(first, low, mask=mask)
        tl.store(first + half, high, mask=mask)
    else:
        page, offset = place // page_size, place % page_size
        # Head `heads + h` is key head h: slot h of the page; values follow the keys in both.
        line = (page * (2 * kv_heads) + (head - heads)) * page_size + offset
        to = cache + line[:, None] * dim + at[None, :]
        if kept == 0:
            tl.store(to, low.to(cache.dtype.element_ty), mask=mask)
            tl.store(to + half, high.to(cache.dtype.element_ty), mask=mask)
        else:
            x, y = low.to(tl.float32), high.to(tl.float32)
            if kept == 1:  # a scale for the token, not finite where one of its numbers is not
                bits = tl.max(tl.maximum(tl.abs(x).to(tl.int32, bitcast=True), tl.abs(y).to(tl.int32, bitcast=True)), 1)
                size = bits.to(tl.float32, bitcast=True) / largest  # compared as integers, NaN is larger than infinity
                size = tl.where(size < 1e-30, 1e-30, size).to(scales.dtype.element_ty)
                tl.store(scales + line, size, mask=there)
                x, y = x / size.to(tl.float32)[:, None], y / size.to(tl.float32)[:, None]
            else:
                own = (head - heads) * dim + at
                x = x / tl.load(scales + own, mask=at < half, other=1.0)[None, :]
                y = y / tl.load(scales + own + half, mask=at < half, other=1.0)[None, :]
                x = x + tl.load(offsets + own, mask=at < half, other=0.0)[None, :]
                y = y + tl.load(offsets + own + half, mask=at < half, other=0.0)[None, :]
            x = tl.minimum(tl.maximum(x, -largest), largest)
            y = tl.minimum(tl.maximum(y, -largest), largest)
            if cache.dtype.element_ty == tl.int8:  # to the nearest, to even: all whole numbers are this far apart there
                x = (x + 12582912.0) - 12582912.0
                y = (y + 12582912.0) - 12582912.0
            tl.store(to, x.to(cache.dtype.element_ty), mask=mask)
            tl.store(to + half, y.to(cache.dtype.element_ty), mask=mask)


@dataclass(frozen=True, eq=False)
class RopeCacheEpilogue:
    """``heads`` queries, and keys and values for ``cache`` [pages, 2, kv_heads, page_size, dim], of the token's dtype,
    at ``index`` int64 [1]; ``cos``, ``sin`` [1, 1, dim]: see ``norm_rope_cache``."""

    heads: int
    cos: Tensor
    sin: Tensor
    cache: Tensor
    index: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """An empty tensor for the queries, [1, heads, dim]."""
        return x.new_empty((1, self.heads, self.cache.shape[4]))

    def suits(self, rows: int) -> bool:
        """Whether programs of ``rows`` rows have both halves of their pairs in one head."""
        return self.cache.shape[4] % rows == 0


def norm_rope_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor | Cache8bit,
    index: Tensor,
    parts: Tensor | None = None,
    alone: bool = False,
) -> None:
    """``qkv`` [tokens, heads + 2 * kv_heads, dim], its queries changed in place; ``cos``, ``sin`` [tokens, 1, dim].

    ``weight`` [heads + kv_heads, dim]: of the norm of each head, or None. ``index`` int64 [tokens]: page * page_size +
    offset of each token. The first half of ``sin`` is negated. ``cache`` [pages, 2, kv_heads, page_size, dim], or a
    ``Cache8bit``. ``parts`` float32 [parts, tokens, (heads + 2 * kv_heads) * dim], dense: summands of ``qkv``, which
    is then computed and rounded here. ``alone``: whether sums of a token must not depend on the number of tokens.
    """
    tokens, every, dim = qkv.shape
    block = 1 if tokens <= 64 or alone else 8
    pdl = overlapping(qkv.device)
    values, scales, offsets, kept = cache, None, None, 0
    if isinstance(cache, Cache8bit):
        values = cache.values
        if cache.scales is not None:
            scales, kept = cache.scales, 1
        elif cache.fixed is not None:
            scales, offsets, kept = cache.fixed.scales, cache.fixed.offsets, 2
            offsets = torch.zeros_like(scales) if offsets is None else offsets
    assert isinstance(values, Tensor)
    norm_rope_cache_kernel[(triton.cdiv(tokens, block), every)](
        qkv if parts is None else parts,
        qkv,
        qkv if weight is None else weight,
        cos,
        sin,
        values,
        values if scales is None else scales,
        values if offsets is None else offsets,
        index,
        eps,
        tokens,
        0 if parts is None else parts.stride(0),
        heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        values.shape[3],
        block,
        weight is not None,
        kept,
        max_value(values.dtype) if kept else 0.0,
        0 if parts is None else len(parts),
        pdl,
        num_warps=1 if block == 1 else 4,
        launch_pdl=pdl,
    )
