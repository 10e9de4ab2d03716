"""What happens to the heads of new tokens between the projection and attention, in one kernel.

Queries and keys are normed where the model does that (Qwen3), and rotated; queries stay where they are, keys and values
go to their place in the cache. A layer's cache is [pages, 2, kv_heads, page_size, dim], so that what one key head has
in a page lies in one piece.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import overlapping

__all__ = ["place_heads"]


@triton.jit(do_not_specialize=["tokens"])
def _place_heads(
    qkv,
    weight,
    cos,
    sin,
    cache,
    index,
    eps,
    tokens,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    half_block: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
    normed: tl.constexpr,
    pdl: tl.constexpr,
):
    half: tl.constexpr = dim // 2
    head = tl.program_id(1)
    token = (tl.program_id(0) * block + tl.arange(0, block)).to(tl.int64)
    there = token < tokens
    at = tl.arange(0, half_block)
    mask = there[:, None] & (at < half)[None, :]
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    first = qkv + (token[:, None] * (heads + 2 * kv_heads) + head) * dim + at[None, :]
    low = tl.load(first, mask=mask, other=0.0)
    high = tl.load(first + half, mask=mask, other=0.0)
    if head < heads + kv_heads:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if normed:
            size = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / dim
            scale = tl.rsqrt(size + eps)[:, None]
            gamma = weight + head * dim + at
            # Rounded as the norm's output is where it is an operator of its own.
            x = (x * scale * tl.load(gamma, mask=at < half, other=0.0).to(tl.float32)).to(low.dtype).to(tl.float32)
            y = (
                (y * scale * tl.load(gamma + half, mask=at < half, other=0.0).to(tl.float32))
                .to(low.dtype)
                .to(tl.float32)
            )
        angle = token[:, None] * dim + at[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        low = (x * c + y * s).to(low.dtype)
        high = (y * c - x * s).to(high.dtype)
    if head < heads:
        tl.store(first, low, mask=mask)
        tl.store(first + half, high, mask=mask)
    else:
        place = tl.load(index + token, mask=there, other=0)
        page, offset = place // page_size, place % page_size
        # Head `heads + h` is key head h: slot h of the page; values follow the keys in both.
        to = cache + ((page * (2 * kv_heads) + (head - heads)) * page_size + offset)[:, None] * dim + at[None, :]
        tl.store(to, low, mask=mask)
        tl.store(to + half, high, mask=mask)


def place_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    index: Tensor,
) -> None:
    """``qkv`` [tokens, heads + 2 * kv_heads, dim], its queries changed in place; ``cos``, ``sin`` [tokens, 1, dim].

    ``weight`` [heads + kv_heads, dim]: of the norm of each head, or None. ``index`` int64 [tokens]: page * page_size +
    offset of each token. The first half of ``sin`` is negated. ``cache`` [pages, 2, kv_heads, page_size, dim].
    """
    tokens, every, dim = qkv.shape
    block = 1 if tokens <= 64 else 8
    pdl = overlapping(qkv.device)
    _place_heads[(triton.cdiv(tokens, block), every)](
        qkv,
        qkv if weight is None else weight,
        cos,
        sin,
        cache,
        index,
        eps,
        tokens,
        heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        cache.shape[3],
        block,
        weight is not None,
        pdl,
        num_warps=1 if block == 1 else 4,
        launch_pdl=pdl,
    )
