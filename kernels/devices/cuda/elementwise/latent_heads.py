"""What stands between the projections of latent attention (MLA) and its scores, in one kernel: queries and the key's
rotated part are rotated, latent vectors are normed and written to the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["place_latent"]

_HEADS = 16  # that a program rotates


@triton.jit
def latent_rope_cache_kernel(
    queries,
    vectors,
    weight,
    cos,
    sin,
    cache,
    index,
    eps,
    query_stride,
    vector_stride,
    heads: tl.constexpr,
    each: tl.constexpr,
    plain: tl.constexpr,
    rank: tl.constexpr,
    rank_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (token, part): ``each`` heads of its queries, or last its vector."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = tl.arange(0, half_block)
    here = at < half
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    angle = token * 2 * half + at
    cos_1 = tl.load(cos + angle, mask=here, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + half, mask=here, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=here, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + half, mask=here, other=0.0).to(tl.float32)
    if part * each < heads:
        head = part * each + tl.arange(0, each)
        place = queries + token * query_stride + (head * (plain + 2 * half) + plain)[:, None] + at[None, :]
        mask = (head < heads)[:, None] & here[None, :]
        one = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        two = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, (one * cos_1[None, :] + two * sin_1[None, :]).to(queries.dtype.element_ty), mask=mask)
        tl.store(place + half, (two * cos_2[None, :] + one * sin_2[None, :]).to(queries.dtype.element_ty), mask=mask)
    else:
        number = tl.arange(0, rank_block)
        inside = number < rank
        own = vectors + token * vector_stride
        to = cache + tl.load(index + token) * (rank + 2 * half)
        latent = tl.load(own + number, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.load(weight + number, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent) / rank + eps)
        tl.store(to + number, (latent * scale * gamma).to(cache.dtype.element_ty), mask=inside)
        key_1 = tl.load(own + rank + at, mask=here, other=0.0).to(tl.float32)
        key_2 = tl.load(own + rank + half + at, mask=here, other=0.0).to(tl.float32)
        tl.store(to + rank + at, (key_1 * cos_1 + key_2 * sin_1).to(cache.dtype.element_ty), mask=here)
        tl.store(to + rank + half + at, (key_2 * cos_2 + key_1 * sin_2).to(cache.dtype.element_ty), mask=here)


def place_latent(
    queries: Tensor, vectors: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: Tensor, index: Tensor
) -> None:
    """Rotate the last numbers of ``queries`` [tokens, heads, plain_dim + rope_dim] in place, heads side by side. Write
    ``vectors`` [tokens, rank + rope_dim] to ``index`` int64 [tokens] of ``cache`` [pages, page_size, rank + rope_dim]:
    the first numbers normed by ``weight`` [rank] and ``eps``, the last rotated. ``cos``, ``sin`` [tokens, 1, rope_dim].
    """
    tokens, heads, width = queries.shape
    rope = cos.shape[-1]
    rank, each = vectors.shape[1] - rope, min(_HEADS, triton.next_power_of_2(heads))
    pdl = overlapping(queries.device)
    latent_rope_cache_kernel[(tokens, triton.cdiv(heads, each) + 1)](
        queries,
        vectors,
        weight,
        cos,
        sin,
        cache,
        index,
        eps,
        queries.stride(0),
        vectors.stride(0),
        heads,
        each,
        width - rope,
        rank,
        triton.next_power_of_2(rank),
        rope // 2,
        triton.next_power_of_2(rope // 2),
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
