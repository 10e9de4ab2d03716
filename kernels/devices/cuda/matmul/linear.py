"""Linear layers: a custom kernel for one token, ``gemm_small_tma``, ``gemm_small`` or cuBLAS for a few, cuBLAS for
more.

For one token a matrix product is bound by reading its weight, and cuBLAS reaches 57 to 90 % of the memory's bandwidth
(H200). Here each program requests a few rows of the weight at once, before it waits for the previous kernel, so that
memory is never idle between two layers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.operators import Norm, PendingResidual
from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.launch import copying, has_gluon, overlapping
from kernels.devices.cuda.matmul import gemm_small, low_rank_one
from kernels.devices.cuda.matmul.autotune import Choices, Shape, Way, in_a_row, spare
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta
from kernels.devices.cuda.matmul.norm_then_linear import Fused
from kernels.devices.cuda.matmul.scaled_residual import Joining, Scaled

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["CudaLinear", "one_token"]

_MAX_INPUTS = 16384  # a longer row does not fit a block's registers
_BLOCK = 2048  # most inputs of a program at a time
_ALIGN = 16
_ALIGNED = 8  # inputs of 16 bits: the copy engine reads rows that begin at multiples of 16 bytes
_FEW = 16  # fewest tokens of a matrix instruction
_SUMMED = 2048  # tokens from which the product itself adds to the stream; with 512 that was not faster
_JOINED = torch.bfloat16  # a stream times a gain before division may overflow float16


@triton.jit
def gemv_kernel(
    x,
    residual,
    gain,
    weight,
    bias,
    out,
    eps,
    outputs,
    inputs: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    normed: tl.constexpr,
    adds: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
):
    """``rows`` outputs a program. ``gated``: of twice ``outputs`` rows of weight, silu of the first half is multiplied
    by the second half. ``normed``: multiply the norm of ``x``. ``adds``: add to ``residual``. ``ahead``: read two tiles
    before the token instead of one.

    The norm is ``gain * x * rsqrt(mean(x^2) + eps)``. A product is linear: the weight is multiplied by ``gain * x``,
    and the result by the rest, which is known when the whole token is read. So the normed token is not rounded, unlike
    with a separate kernel.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = tl.arange(0, block)
    first = weight + row[:, None].to(tl.int64) * inputs + at[None, :]
    if pdl:
        gdc_launch_dependents()
    there = (row < outputs)[:, None]
    total = tl.zeros([rows, block], tl.float32)
    other = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    # Request tiles while the previous kernel ends.
    w = tl.load(first, mask=there & (at < inputs)[None, :], other=0.0, eviction_policy="evict_first")
    if gated:
        second = first + outputs.to(tl.int64) * inputs
        u = tl.load(second, mask=there & (at < inputs)[None, :], other=0.0, eviction_policy="evict_first")
    if ahead and inputs > block:
        mask = there & (block + at < inputs)[None, :]
        next_w = tl.load(first + block, mask=mask, other=0.0, eviction_policy="evict_first")
        if gated:
            next_u = tl.load(second + block, mask=mask, other=0.0, eviction_policy="evict_first")
    if pdl:
        gdc_wait()
    if adds:
        onto = tl.load(residual + row, mask=row < outputs, other=0.0)
    for begin in tl.static_range(0, inputs, block):
        inside = begin + at < inputs
        if begin == block and ahead:
            w = next_w
            if gated:
                u = next_u
        elif begin > 0:
            mask = there & inside[None, :]
            w = tl.load(first + begin, mask=mask, other=0.0, eviction_policy="evict_first")
            if gated:
                u = tl.load(second + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32)
        if normed:
            squares += value * value
            value *= tl.load(gain + begin + at, mask=inside, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * value[None, :]
        if gated:
            other += u.to(tl.float32) * value[None, :]
    result = tl.sum(total, 1)
    if normed:
        scale = tl.rsqrt(tl.sum(squares) / inputs + eps)
        result *= scale
    if biased:
        result += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    if gated:
        up = tl.sum(other, 1)
        if normed:
            up *= scale
        if biased:
            up += tl.load(bias + outputs + row, mask=row < outputs, other=0.0).to(tl.float32)
        # Rounded as the product is where the activation is an operator of its own.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    if adds:  # rounded as the product is where it is added by a kernel of its own
        result = result.to(out.dtype.element_ty).to(tl.float32) + onto.to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < outputs)


def _tiling(inputs: int, gated: bool, normed: bool, adds: bool) -> tuple[int, int, int, bool]:
    """Rows and numbers of a row that a program takes at a time, its warps, and whether it reads two tiles ahead."""
    if adds and not gated and _BLOCK < inputs <= 2 * _BLOCK:  # measured: whole rows, all of a program's at once
        return 4, 2 * _BLOCK, 8, False
    block = min(_BLOCK, triton.next_power_of_2(inputs))
    # Measured: 8 KiB of weight a program in flight and a vector of 16 bytes a thread.
    rows = max(1, min(8, 4096 // block // (2 if gated else 1)))
    if normed and inputs > _BLOCK:  # measured: so few programs as read the token and the gain
        return 2 * rows, block, 8, True
    return rows, block, 4, False


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    before: Before | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``x`` [1, inputs] -> [1, outputs], after the norm ``before``, or added to ``residual`` [1, outputs]."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if gated else outputs
    rows, block, warps, ahead = _tiling(inputs, gated, before is not None, residual is not None)
    out = x.new_empty((1, outputs))
    pdl = overlapping(x.device)
    gemv_kernel[(triton.cdiv(outputs, rows),)](
        x,
        x if residual is None else residual,
        x if before is None else before.gain,
        weight,
        weight if bias is None else bias,
        out,
        0.0 if before is None else before.eps,
        outputs,
        inputs,
        rows,
        block,
        bias is not None,
        gated,
        before is not None,
        residual is not None,
        ahead,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def one_token(x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` is one token that the kernel for one token supports."""
    return len(x) == 1 and weight.shape[1] <= _MAX_INPUTS and weight.shape[1] % _ALIGN == 0 and x.is_contiguous()


def _carried(x: Tensor, weight: Tensor) -> bool:
    """Whether ``kernels.devices.cuda.matmul.gemm_small_tma`` can multiply 2 to 64 tokens by the weight."""
    if weight.element_size() != 2 or weight.shape[1] % _ALIGNED or (x.data_ptr() | weight.data_ptr()) % 16:
        return False
    rows = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % _ALIGNED == 0
    return (
        rows
        and weight.is_contiguous()
        and x.dtype == weight.dtype
        and copying(x.device)
        and has_gluon("matmul.gemm_small_tma")
    )


class CudaLinear:
    """``x @ weight.T + bias`` with the weight as it is, [outputs, inputs]; sums in float32.

    ``gated``: ``silu(x @ gate.T) * (x @ up.T)``, the weight [2 * outputs, inputs] being gate | up, each with its bias.
    ``choices``: measures the fastest product of a few tokens; without it, measurements on an H200 decide. ``delta``:
    what adapters add to the product, if the pass has some.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        choices: Choices | None = None,
        gated: bool = False,
        *,
        delta: CudaLowRankDelta | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._delta = delta
        self._gated, self._choices = gated, choices
        self._arrived = gemm_small.counters(weight)
        self._described: TensorDescriptor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.takes_one(x):
            return self._one(x)
        if self.delta is not None:
            return self._bulk(x) if self._bulks(x) else self._many(x)
        if not 1 < len(x) <= gemm_small.MAX_TOKENS:
            return self._many(x)
        if not _carried(x, self.weight):
            x = x.contiguous()  # so that slices of wider rows use the same implementations
        if self._choices is None:
            if _carried(x, self.weight):
                return self._bulk(x)
            return self._narrow(x) if gemm_small.suits(x, self.weight, self._gated) else self._many(x)
        # cuBLAS kernels do not let the next kernel start early, which a trial of consecutive products shows only in
        # part: where it was about as fast, whole steps took 2 to 5 us more for each such product.
        return self._choices.run(self._tried(x), self._ways(x), lambda: self._trial(x), "bulk")

    @property
    def delta(self) -> CudaLowRankDelta | None:
        """What adapters add to the product in this pass."""
        return None if self._delta is None or self._delta.context.idle else self._delta

    def takes_one(self, x: Tensor) -> bool:
        """Whether ``x`` is one token that a kernel for one token supports."""
        return one_token(x, self.weight) and (self.delta is None or self.delta.joins)

    def _one(self, x: Tensor, before: Before | None = None, residual: Tensor | None = None) -> Tensor:
        delta = self.delta
        if delta is None:
            return _multiply(x, self.weight, self.bias, self._gated, before, residual)
        return low_rank_one.multiply(
            x, self.weight, self.bias, self._gated, delta.one(), before=before, residual=residual
        )

    def leaves(self, x: Tensor) -> bool:
        """Whether ``left`` supports these tokens."""
        return self.bias is None and not self._gated and self._bulks(x)

    def left(self, x: Tensor | Scaled) -> Tensor:
        """The product of a few tokens or, if it is split, its parts, float32 [parts, tokens, outputs], which the next
        kernel sums in order and rounds."""
        return self._bulk(x, left=True)

    def divided(self, x: Scaled) -> Tensor | None:
        """The product of the norm ``x.norm`` by ``gemm_small_tma``, never in parts; None if that kernel does not
        support it."""
        return self._bulk(x) if self._bulks(x.rows) else None

    def into(self, x: Tensor, residual: Tensor, following: Norm | None) -> tuple[PendingResidual, Tensor] | None:
        """As ``kernels.devices.cuda.matmul.residual_linear.Joins``."""
        if not self.takes_one(x):
            return self._few_into(x, residual, following) if len(x) < _SUMMED else self._many_into(x, residual)
        if not residual.is_contiguous() or residual.dtype != x.dtype:
            return None
        return None, self._one(x, residual=residual)

    def _many_into(self, x: Tensor, residual: Tensor) -> tuple[PendingResidual, Tensor] | None:
        """By cuBLAS with the sum: then the next norm reads and writes half as much, which determines its time."""
        if self._gated or self.bias is not None or not residual.is_contiguous() or residual.dtype != x.dtype:
            return None
        if self.delta is not None:
            self.delta(x, residual)
        return None, residual.addmm_(x, self.weight.t())

    def _few_into(self, x: Tensor, residual: Tensor, following: Norm | None) -> tuple[PendingResidual, Tensor] | None:
        if self._gated or residual.dtype != _JOINED or not residual.is_contiguous() or not self._bulks(x):
            return None
        scaled = None
        if isinstance(following, CudaNorm) and following.weight.ndim == 1 and following.weight.is_contiguous():
            scaled = Scaled.room(following, residual)
        self._bulk(x, joining=Joining(residual, scaled))
        return scaled, residual

    def _bulks(self, x: Tensor) -> bool:
        """Whether ``gemm_small_tma`` is the fastest known way to multiply these tokens."""
        if len(x) > gemm_small.MAX_TOKENS or self.takes_one(x) or not _carried(x, self.weight):
            return False
        if self.delta is not None:
            return self.delta.extends
        if self._choices is None or len(x) == 1:
            return len(x) > 1
        return self._choices.name(self._tried(x), lambda: self._trial(x), "bulk") in (None, "bulk")

    def _tried(self, x: Tensor) -> Shape:
        return ("in a row", *self.shape, max(_FEW, triton.next_power_of_2(len(x))), x.dtype)

    def _ways(self, x: Tensor) -> dict[str, Way]:
        """Implementations for a few tokens, by name."""
        ways: dict[str, Way] = {"cuBLAS": lambda: self._many(x)}
        if _carried(x, self.weight):  # ``gemm_small`` was no faster on an H200
            ways["bulk"] = partial(self._bulk, x)
        elif gemm_small.able(x, self.weight):
            for name, split in gemm_small.split_options(len(x), self.weight, self._gated).items():
                ways[name] = partial(self._narrow, x, split)
        return ways

    def _trial(self, x: Tensor) -> dict[str, Way]:
        return in_a_row([layer._ways(x) for layer in (self, *self.copies())], lambda: swiglu(x))

    def copies(self) -> list[CudaLinear]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        return [CudaLinear(self.weight.clone(), self.bias, None, self._gated) for _ in range(spare(self.weight))]

    def fused_with_norm(self, x: Tensor, before: Before) -> dict[str, Fused]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``: without an addition to the stream."""
        if before.residual is not None or not self.takes_one(x):
            return {}
        return {"within": lambda: (self._one(x, before), x)}

    @property
    def shape(self) -> Shape:
        """The key of the layer in autotuning."""
        return ("16 bits gated" if self._gated else "16 bits", *self.weight.shape)

    def _narrow(self, x: Tensor, split: gemm_small.GemmSplit | None = None) -> Tensor:
        return gemm_small.multiply(x, self.weight, self.bias, self._arrived, self._gated, split)

    def _bulk(self, x: Tensor | Scaled, left: bool = False, joining: Joining | None = None) -> Tensor:
        from kernels.devices.cuda.matmul import gemm_small_tma

        if self._described is None:
            self._described = gemm_small_tma.described(self.weight)
        extension = None if self.delta is None else self.delta.extension(x.rows if isinstance(x, Scaled) else x)
        given = x, self._described, self.bias, self._arrived, self._gated, left
        return gemm_small_tma.multiply(*given, joining=joining, extension=extension)

    def _many(self, x: Tensor) -> Tensor:
        if self.delta is None:
            result = F.linear(x, self.weight, self.bias)
        elif self.bias is None:  # the product adds itself to what adapters add, which takes it no longer
            result = self.delta.alone(x).addmm_(x, self.weight.t())
        else:
            result = self.delta(x, F.linear(x, self.weight, self.bias))
        return swiglu(result) if self._gated else result
