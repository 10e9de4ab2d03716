"""Projects queries, keys and values of one token, rotates them and writes the cache, in one launch.

A program of a one-token product (``kernels.devices.cuda.matmul.linear``) processes a few rows of the weight. Here these
are pairs of elements of a head that rotate together, so that no kernel is needed between projection and attention.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.operators import PendingResidual
from kernels.devices.attention import QkvProjection
from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue, norm_rope_cache
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.launch import overlapping
from kernels.devices.cuda.matmul import low_rank_one
from kernels.devices.cuda.matmul.grouped import GroupedLinear
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.cuda.matmul.scaled_residual import scaled_for
from kernels.devices.linear import norm_of_sum

__all__ = ["CudaQkvProjection", "project"]

_BLOCK: Final = 2048  # inputs at a time, as in other products of one token


@triton.jit
def qkv_gemv_kernel(
    x,
    gain,
    weight,
    bias,
    cos,
    sin,
    cache,
    index,
    out,
    eps,
    heads,
    kv_heads,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    inputs: tl.constexpr,
    pairs: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    normed: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
):
    """``pairs`` of elements of a head: the program's, and those half a head further. ``normed`` and ``ahead``: as in
    ``_vector``.
    """
    half: tl.constexpr = dim // 2
    pair = tl.program_id(0) * pairs
    head, number = pair // half, pair % half + tl.arange(0, pairs)
    of = tl.arange(0, 2 * pairs)
    row = head * dim + pair % half + of % pairs + of // pairs * half
    at = tl.arange(0, block)
    first = weight + row[:, None].to(tl.int64) * inputs + at[None, :]
    if pdl:
        gdc_launch_dependents()
    # Request tiles while the previous kernel ends.
    w = tl.load(first, mask=(at < inputs)[None, :], other=0.0, eviction_policy="evict_first")
    if ahead and inputs > block:
        mask = (block + at < inputs)[None, :]
        next_w = tl.load(first + block, mask=mask, other=0.0, eviction_policy="evict_first")
    if pdl:
        gdc_wait()
    c = tl.load(cos + number).to(tl.float32)
    s = tl.load(sin + number).to(tl.float32)
    place = tl.load(index)
    total = tl.zeros([2 * pairs, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for begin in tl.static_range(0, inputs, block):
        inside = begin + at < inputs
        if begin == block and ahead:
            w = next_w
        elif begin > 0:
            w = tl.load(first + begin, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        value = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
        if normed:
            squares += value * value
            value *= tl.load(gain + begin + at, mask=inside, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * value[None, :]
    result = tl.sum(total, 1)
    if normed:
        result *= tl.rsqrt(tl.sum(squares) / inputs + eps)
    if biased:
        result += tl.load(bias + row).to(tl.float32)
    # Round like the projection before the separate kernel ``norm_rope_cache``.
    result = result.to(out.dtype.element_ty).to(tl.float32).reshape(2, pairs)
    side = tl.arange(0, 2)[:, None]
    if head < heads + kv_heads:
        low = tl.sum(tl.where(side == 0, result, 0.0), 0)
        high = tl.sum(tl.where(side == 1, result, 0.0), 0)
        result = tl.where(side == 0, (low * c + high * s)[None, :], (high * c - low * s)[None, :])
    if head < heads:
        to = out + head * dim
    else:
        # Head `heads + h` is key head h: slot h of the page; values follow the keys in both.
        line = (place // page_size * (2 * kv_heads) + (head - heads)) * page_size + place % page_size
        to = cache + line * dim
    tl.store(to + number[None, :] + side * half, result.to(out.dtype.element_ty))


def _tiling(inputs: int, dim: int, normed: bool) -> tuple[int, int, int, bool]:
    """Pairs and numbers of a row that a program takes at a time, its warps, and whether it reads two tiles ahead."""
    block = min(_BLOCK, triton.next_power_of_2(inputs))
    if not normed or dim % 4:
        return 1, block, 4, False
    return (2, block, 8, True) if inputs > _BLOCK else (2, block, 4, False)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: RopeCacheEpilogue, before: Before | None = None
) -> Tensor:
    """Multiply ``x`` [1, inputs], after the norm ``before``, by ``weight`` [(heads + 2 * kv_heads) * dim, inputs],
    contiguous and of the cache's dtype. Returns the rotated queries [1, heads, dim]; keys and values are written to the
    cache."""
    outputs, inputs = weight.shape
    _, _, kv_heads, page_size, dim = epilogue.cache.shape
    out = epilogue.queries(x)
    pdl = overlapping(x.device)
    pairs, block, warps, ahead = _tiling(inputs, dim, before is not None)
    qkv_gemv_kernel[(outputs // 2 // pairs,)](
        x,
        x if before is None else before.gain,
        weight,
        weight if bias is None else bias,
        epilogue.cos,
        epilogue.sin,
        epilogue.cache,
        epilogue.index,
        out,
        0.0 if before is None else before.eps,
        epilogue.heads,
        kv_heads,
        dim,
        page_size,
        inputs,
        pairs,
        block,
        bias is not None,
        before is not None,
        ahead,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


class CudaQkvProjection(QkvProjection[Any]):
    """One launch for one token without norms of heads, if the projection has 16 bits or more, or 4 bits in groups."""

    def __call__(
        self, x: PendingResidual, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, index: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = isinstance(cache, Tensor) and cache.dtype == residual.dtype and cache.shape[4] == self.dim
        if len(residual) == 1 and self.norm is None and kept:
            result = self._at_once(x, residual, RopeCacheEpilogue(self.heads, cos, sin, cache, index))
            if result is not None:
                return result
        result = self._of_parts(x, residual, cos, sin, cache, index)
        return super().__call__(x, residual, cos, sin, cache, index) if result is None else result

    def _of_parts(
        self, x: PendingResidual, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, index: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The heads of a few tokens: the kernel that places them also adds up the parts of the product."""
        norm, linear = self.projection.norm, self.projection.linear
        if not isinstance(linear, CudaLinear) or not linear.leaves(residual):
            return None
        if self.norm is not None and not isinstance(self.norm, CudaNorm):
            return None
        scaled = scaled_for(norm, x)
        given, total = (scaled, residual) if scaled is not None else norm_of_sum(norm, x, residual)
        projected = linear.left(given)
        tokens, every = len(residual), self.heads + 2 * self.kv_heads
        if projected.ndim == 2:
            qkv = projected.view(tokens, every, self.dim)
            return self.attention.norm_rope_cache(qkv, self.heads, self.norm, cos, sin, cache, index), total
        qkv = residual.new_empty((tokens, every, self.dim))
        weight, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        norm_rope_cache(qkv, self.heads, self.kv_heads, weight, eps, cos, sin, cache, index, projected)
        return qkv[:, : self.heads], total

    def _at_once(
        self, x: PendingResidual, residual: Tensor, epilogue: RopeCacheEpilogue
    ) -> tuple[Tensor, Tensor] | None:
        projection, linear = self.projection, self.projection.linear
        if isinstance(linear, CudaLinear):
            if not linear.takes_one(residual):
                return None
            if linear.delta is not None and not low_rank_one.places_heads(epilogue):
                return None
            if x is None and isinstance(projection, CudaNormThenLinear):
                return self._project(linear, residual, epilogue, projection.before(None)), residual
            normed, total = norm_of_sum(projection.norm, x, residual)
            return self._project(linear, normed, epilogue), total
        if isinstance(x, Tensor) and isinstance(projection, CudaNormThenLinear) and isinstance(linear, GroupedLinear):
            name = projection.quickest(x, residual)
            return None if name is None else linear.project_heads(x, projection.before(residual), name, epilogue)
        return None

    def _project(
        self, linear: CudaLinear, x: Tensor, epilogue: RopeCacheEpilogue, before: Before | None = None
    ) -> Tensor:
        delta = linear.delta
        if delta is None:
            return project(x, linear.weight, linear.bias, epilogue, before)
        given = x, linear.weight, linear.bias, False, delta.one()
        return low_rank_one.multiply(*given, before=before, epilogue=epilogue)
