"""RMS norm, alone or fused with the preceding addition, in one pass over a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["Before", "CudaNorm", "norm_embeddings_and_states", "norm_pair"]


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    stride,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
):
    at = tl.arange(0, block)
    here = at < width
    row = tl.program_id(0).to(tl.int64)
    gamma = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * stride + at, mask=here, other=0.0)
    if adds:
        value = (value.to(tl.float32) + tl.load(residual + row * width + at, mask=here, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(residual + row * width + at, value, mask=here)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out + row * width + at, (wide * scale * gamma).to(value.dtype), mask=here)


@triton.jit
def norm_pair_kernel(
    first,
    second,
    first_weight,
    second_weight,
    out,
    first_eps,
    second_eps,
    first_stride,
    second_stride,
    width: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Norm one of two concatenated inputs of a token."""
    at = tl.arange(0, block)
    here = at < width
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    if side == 0:
        gamma = tl.load(first_weight + at, mask=here, other=0.0).to(tl.float32)
        value = tl.load(first + row * first_stride + at, mask=here, other=0.0)
        eps = first_eps
    else:
        gamma = tl.load(second_weight + at, mask=here, other=0.0).to(tl.float32)
        value = tl.load(second + row * second_stride + at, mask=here, other=0.0)
        eps = second_eps
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out + (row * 2 + side) * width + at, (wide * scale * gamma).to(value.dtype), mask=here)


@triton.jit
def embed_norm_pair_kernel(
    ids,
    table,
    states,
    positions,
    frequencies,
    token_weight,
    state_weight,
    out,
    cos,
    sin,
    token_eps,
    state_eps,
    factor,
    table_stride,
    states_stride,
    vocab,
    width: tl.constexpr,
    block: tl.constexpr,
    dim: tl.constexpr,
    dim_block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Compute one of a token's three parts: its normed embedding, its normed state, or its angles."""
    at = tl.arange(0, block)
    here = at < width
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 2:
        turn = tl.arange(0, dim_block)
        inside = turn < dim
        frequency = tl.load(frequencies + turn, mask=inside, other=0.0)
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        angle = tl.load(positions + row).to(tl.float32) * frequency
        tl.store(cos + row * dim + turn, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=inside)
        tl.store(sin + row * dim + turn, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=inside)
    else:
        if part == 0:
            gamma = tl.load(token_weight + at, mask=here, other=0.0).to(tl.float32)
            eps = token_eps
        else:
            gamma = tl.load(state_weight + at, mask=here, other=0.0).to(tl.float32)
            eps = state_eps
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        if part == 0:
            number = tl.load(ids + row).to(tl.int64)
            known = (number >= 0) & (number < vocab)
            value = tl.load(table + number * table_stride + at, mask=here & known, other=0.0)
        else:
            value = tl.load(states + row * states_stride + at, mask=here, other=0.0)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
        tl.store(out + (row * 2 + part) * width + at, (wide * scale * gamma).to(value.dtype), mask=here)


@dataclass(frozen=True, eq=False)
class Before:
    """The norm before a product of one token, for fused kernels: of its sum with ``residual`` [1, inputs], contiguous
    and of the token's dtype, times ``gain`` [inputs]. ``residual`` None: the token is the sum.
    """

    residual: Tensor | None
    gain: Tensor
    eps: float


class CudaNorm:
    """``weight * x / sqrt(mean(x^2) + eps)``, computed in float32. ``weight``: [dim], or [heads, dim].

    A weight for each head is applied by ``kernels.devices.cuda.elementwise.norm_rope_cache``.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.ndim > 1:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return (wide * scale * self.weight.float()).to(x.dtype)
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        return self._launch(rows, rows, adds=False).view(x.shape)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._launch(x, residual, adds=True), residual

    def _launch(self, x: Tensor, residual: Tensor, adds: bool) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(residual)
        block = triton.next_power_of_2(width)
        pdl = overlapping(x.device)
        rms_norm_kernel[(rows,)](
            x,
            residual,
            self.weight,
            out,
            self.eps,
            x.stride(0),
            width,
            block,
            adds,
            pdl,
            num_warps=max(1, min(16, block // 256)),
            launch_pdl=pdl,
        )
        return out


def norm_pair(first: Tensor, first_norm: CudaNorm, second: Tensor, second_norm: CudaNorm) -> Tensor:
    """``first`` and ``second`` [tokens, width] of one dtype, each normed, side by side: [tokens, 2 * width]."""
    tokens, width = first.shape
    out = first.new_empty((tokens, 2 * width))
    block, pdl = triton.next_power_of_2(width), overlapping(first.device)
    norm_pair_kernel[(tokens, 2)](
        first,
        second,
        first_norm.weight,
        second_norm.weight,
        out,
        first_norm.eps,
        second_norm.eps,
        first.stride(0),
        second.stride(0),
        width,
        block,
        pdl,
        num_warps=max(1, min(16, block // 256)),
        launch_pdl=pdl,
    )
    return out


def norm_embeddings_and_states(
    ids: Tensor,
    table: Tensor,
    token_norm: CudaNorm,
    states: Tensor,
    state_norm: CudaNorm,
    positions: Tensor,
    frequencies: Tensor,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm_pair`` of the rows ``ids`` [tokens] of ``table`` [vocab, width] and ``states`` [tokens, width], of one
    dtype and dense within their rows; and ``kernels.devices.cuda.elementwise.angles`` of ``positions``, in that
    dtype."""
    tokens, width = states.shape
    dim = len(frequencies)
    out = states.new_empty((tokens, 2 * width))
    cos, sin = states.new_empty((2, tokens, 1, dim))
    block, pdl = triton.next_power_of_2(width), overlapping(states.device)
    embed_norm_pair_kernel[(tokens, 3)](
        ids,
        table,
        states,
        positions,
        frequencies,
        token_norm.weight,
        state_norm.weight,
        out,
        cos,
        sin,
        token_norm.eps,
        state_norm.eps,
        factor,
        table.stride(0),
        states.stride(0),
        len(table),
        width,
        block,
        dim,
        triton.next_power_of_2(dim),
        pdl,
        num_warps=max(1, min(16, block // 256)),
        launch_pdl=pdl,
    )
    return out, cos, sin
