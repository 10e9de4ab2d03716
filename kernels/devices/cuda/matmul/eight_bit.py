"""Linear layers with 8-bit weights: custom kernels for a few tokens, PyTorch's 8-bit products for more.

A product of a few tokens is bound by reading the weight. For one token the weight is dequantized in registers, and the
token is not quantized; for 2 to 64 a trial chooses between that and tokens in 8 bits. More tokens are quantized, each
by its own scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.launch import copying, has_gluon, overlapping
from kernels.devices.cuda.matmul import gemm_small, gemm_small_quantized
from kernels.devices.cuda.matmul.autotune import Choices, Shape, Way, in_a_row, spare
from kernels.devices.cuda.matmul.gemm_small_quantized import Form, Tiles, single_suits
from kernels.devices.cuda.matmul.norm_then_linear import Fused
from kernels.devices.cuda.matmul.number_conversions import BYTES, EIGHTHS, wide_conversion
from kernels.weights.quantization.weights import FP8_MAX, Fp8Weight, Int8Weight

__all__ = ["EightBitLinear"]

_MAX_INPUTS = 16384
_ALIGN = 16
_INT8_ROWS = 32  # fewest rows of an int8 product by cuBLAS, above 16
_COLUMNS = 1024
_WORDS = 64
_MIN_INPUTS = 512
_FEW = 16


@triton.jit
def _wide(w, code: tl.constexpr, whole: tl.constexpr, offset: tl.constexpr):
    """Convert int8, or e4m3 stored as int8, to float32: see
    ``kernels.devices.cuda.matmul.number_conversions.wide_conversion``."""
    if code is not None:
        result = tl.inline_asm_elementwise(code, "=r,=r,=r,=r,r", [w], dtype=tl.int32, is_pure=True, pack=4)
        number = result.to(tl.float32, bitcast=True) + offset
    elif whole:
        number = w.to(tl.float32)
    else:
        number = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return number


@triton.jit
def gemv_8bit_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    outputs,
    inputs: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
    code: tl.constexpr,
    offset: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    pdl: tl.constexpr,
):
    """Multiply one token, ``rows`` outputs a program. ``gated``: the weight has twice ``outputs`` rows; silu of the
    first half is multiplied by the second half.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    at = tl.arange(0, block)
    first = weight + row[:, None].to(tl.int64) * inputs + at[None, :]
    there = (row < outputs)[:, None]
    if pdl:
        gdc_launch_dependents()
    total = tl.zeros([rows, block], tl.float32)
    other = tl.zeros([rows, block], tl.float32)
    # Request the first tiles while the previous kernel ends.
    w = tl.load(first, mask=there & (at < inputs)[None, :], other=0, eviction_policy="evict_first")
    if gated:
        second = first + outputs.to(tl.int64) * inputs
        u = tl.load(second, mask=there & (at < inputs)[None, :], other=0, eviction_policy="evict_first")
    if pdl:
        gdc_wait()
    for begin in tl.static_range(0, inputs, block):
        if begin > 0:
            mask = there & (begin + at < inputs)[None, :]
            w = tl.load(first + begin, mask=mask, other=0, eviction_policy="evict_first")
            if gated:
                u = tl.load(second + begin, mask=mask, other=0, eviction_policy="evict_first")
        value = tl.load(x + begin + at, mask=begin + at < inputs, other=0.0).to(tl.float32)[None, :]
        total += _wide(w, code, whole, offset) * value
        if gated:
            other += _wide(u, code, whole, offset) * value
    result = tl.sum(total, 1) * tl.load(scales + row, mask=row < outputs, other=0.0)
    if biased:
        result += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    if gated:
        up = tl.sum(other, 1) * tl.load(scales + outputs + row, mask=row < outputs, other=0.0)
        if biased:
            up += tl.load(bias + outputs + row, mask=row < outputs, other=0.0).to(tl.float32)
        # Rounded as the product is where the activation is an operator of its own.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < outputs)


@triton.jit
def quantize_rows_kernel(
    x, out, scales, stride, inputs, max_value: tl.constexpr, block: tl.constexpr, whole: tl.constexpr, pdl: tl.constexpr
):
    """Quantize one token a program, with the maximum mapped to ``max_value``. The scale is not finite if the token is
    not."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0)  # compared as integers, NaN is larger than infinity
    scale = bits.to(tl.float32, bitcast=True) / max_value
    scale = tl.where(scale < 1e-30, 1e-30, scale)
    value = value / scale
    if whole:
        value = tl.floor(value + 0.5)
    value = tl.minimum(tl.maximum(value, -max_value), max_value)
    tl.store(out + row * inputs + at, value.to(out.dtype.element_ty), mask=at < inputs)
    tl.store(scales + row, scale)


@triton.jit
def scale_rows_kernel(
    sums,
    tokens,
    scales,
    bias,
    out,
    outputs,
    columns: tl.constexpr,
    biased: tl.constexpr,
    pdl: tl.constexpr,
):
    """Dequantize integer sums."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    here = at < outputs
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(sums + row * outputs + at, mask=here, other=0).to(tl.float32)
    value = value * (tl.load(tokens + row) * tl.load(scales + at, mask=here, other=0.0))
    if biased:
        value += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + at, value.to(out.dtype.element_ty), mask=here)


class EightBitLinear:
    """``x @ weight.T + bias``, or ``gated`` as in ``CudaLinear``; int8, or e4m3 on devices that multiply it. ``x``
    bfloat16, float16 too for int8.
    """

    def __init__(
        self,
        weight: Int8Weight | Fp8Weight,
        bias: Tensor | None,
        choices: Choices | None = None,
        gated: bool = False,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._choices, self._gated = choices, gated
        self._whole = isinstance(weight, Int8Weight)
        self._transposed = weight.values.t()
        self._row_scales = weight.scales[None, :]
        self._bytes = weight.values.view(torch.int8)
        self._kind = BYTES if self._whole else EIGHTHS
        self._form: Form | None = None
        outputs, inputs = weight.shape
        if inputs % (2 * _WORDS) == 0 and inputs >= _MIN_INPUTS:
            self._form = Form(self._kind, weight.values.view(torch.int16), weight.scales)
        self._arrived = gemm_small_quantized.counters(outputs, weight.values.device)
        self._counters = gemm_small.counters(weight.values)
        self._described: Any = None  # for the copy engine

    @staticmethod
    def fits(weight: Int8Weight | Fp8Weight, device: torch.device) -> bool:
        """Whether the kernels support the weight."""
        outputs, inputs = weight.shape
        if weight.activation != "dynamic" or outputs % _ALIGN or inputs % _ALIGN or inputs > _MAX_INPUTS:
            return False
        if isinstance(weight, Int8Weight):
            return weight.dtype in (torch.bfloat16, torch.float16)
        able = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
        if not able or weight.block is not None or weight.dtype != torch.bfloat16:
            return False
        return not bool((weight.values.view(torch.uint8) & 127 == 127).any())  # NaN, which a token must show

    def __call__(self, x: Tensor) -> Tensor:
        tokens = len(x)
        if tokens > gemm_small_quantized.MAX_TOKENS or (tokens > 1 and self._form is None):
            return self._many(x if x.stride(1) == 1 else x.contiguous())
        x = x.contiguous()  # so that slices of wider rows use the same implementations
        ways = self._ways(x)
        if self._choices is None:
            return ways["skinny" if "skinny" in ways and 1 < tokens <= _FEW else next(iter(ways))]()
        block = 1 if tokens == 1 else gemm_small_quantized.token_block(tokens)
        return self._choices.run(("in a row", *self.shape, block, x.dtype), ways, lambda: self._trial(x))

    def _ways(self, x: Tensor) -> dict[str, Way]:
        """Implementations for a few tokens, by name."""
        tokens, form = len(x), self._form
        ways: dict[str, Way] = {"rounded": lambda: self._many(x)} if tokens > 1 else {"vector": lambda: self._vector(x)}
        if form is not None:
            if tokens == 1 and single_suits(form, x):
                from kernels.devices.cuda.matmul import gemv_quantized

                ways |= gemv_quantized.ways(x, form, self.bias, self._gated, _WORDS)
            tiles = Tiles(64, _WORDS, 6, 4) if tokens <= _FEW else Tiles(128, _WORDS, 4, 8)
            ways["skinny"] = lambda: gemm_small_quantized.multiply(
                x, form, self.bias, self._arrived, self._gated, tiles
            )
        if tokens > 1 and not self._whole and copying(x.device) and has_gluon("matmul.gemm_small_tma"):
            ways["rounded, by TMA"] = lambda: self._by_tma(x)
        return ways

    def _trial(self, x: Tensor) -> dict[str, Way]:
        return in_a_row([layer._ways(x) for layer in (self, *self.copies())], lambda: swiglu(x))

    def copies(self) -> list[EightBitLinear]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        return [
            EightBitLinear(
                replace(self.weight, values=self.weight.values.clone()), self.bias, self._choices, self._gated
            )
            for _ in range(spare(self.weight.values))
        ]

    @property
    def shape(self) -> Shape:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        return (f"{self._kind} gated" if self._gated else f"{self._kind}", *self.weight.shape)

    def fused_with_norm(self, x: Tensor, before: Before) -> dict[str, Fused]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        if before.residual is None or self._form is None or len(x) > 1 or not single_suits(self._form, x):
            return {}
        from kernels.devices.cuda.matmul import gemv_quantized

        return gemv_quantized.fused(x, self._form, self.bias, self._gated, _WORDS, before)

    def _many(self, x: Tensor) -> Tensor:
        result = self._product(x)
        return swiglu(result) if self._gated else result

    def _product(self, x: Tensor) -> Tensor:
        rows, outputs = len(x), self.weight.shape[0]
        whole, scales = self._rounded(x)
        if not self._whole:
            out = torch._scaled_mm(
                whole, self._transposed, scale_a=scales[:, None], scale_b=self._row_scales, out_dtype=x.dtype
            )
            return out if self.bias is None else out.add_(self.bias)
        sums = torch._int_mm(whole, self._transposed)
        made = x.new_empty((rows, outputs))
        pdl = overlapping(x.device)
        scale_rows_kernel[(rows, triton.cdiv(outputs, _COLUMNS))](
            sums,
            scales,
            self.weight.scales,
            self.weight.scales if self.bias is None else self.bias,
            made,
            outputs,
            _COLUMNS,
            self.bias is not None,
            pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return made

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize ``x``; returns 8-bit values, padded with undefined rows, and scales."""
        rows, inputs = x.shape
        held = max(rows, _INT8_ROWS) if self._whole else rows
        whole = torch.empty((held, inputs), dtype=self.weight.values.dtype, device=x.device)
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
        pdl = overlapping(x.device)
        quantize_rows_kernel[(rows,)](
            x,
            whole,
            scales,
            x.stride(0),
            inputs,
            127.0 if self._whole else FP8_MAX,
            triton.next_power_of_2(inputs),
            self._whole,
            pdl,
            num_warps=8,
            launch_pdl=pdl,
        )
        return whole, scales

    def _by_tma(self, x: Tensor) -> Tensor:
        from kernels.devices.cuda.matmul import gemm_small_tma

        if self._described is None:
            self._described = gemm_small_tma.described(self.weight.values)
        whole, scales = self._rounded(x)
        both = gemm_small_tma.EightBitScales(scales, self.weight.scales, x.dtype)
        return gemm_small_tma.multiply(whole, self._described, self.bias, self._counters, self._gated, scales=both)

    def _vector(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape
        outputs = outputs // 2 if self._gated else outputs
        block = min(2048, triton.next_power_of_2(inputs))
        rows = max(1, min(8, 8192 // block // (2 if self._gated else 1)))  # 8 KiB of weight a program in flight
        out = x.new_empty((1, outputs))
        pdl = overlapping(x.device)
        code, offset = wide_conversion(self._kind) if x.device.type != "cpu" else (None, 0.0)
        gemv_8bit_kernel[(triton.cdiv(outputs, rows),)](
            x,
            self._bytes,
            self.weight.scales,
            self.weight.scales if self.bias is None else self.bias,
            out,
            outputs,
            inputs,
            rows,
            block,
            self._whole,
            code,
            offset,
            self.bias is not None,
            self._gated,
            pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return out
