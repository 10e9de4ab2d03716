"""``silu(gate) * up``, and with a clamped gate."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping
from kernels.devices.experts import ClampedGate

__all__ = ["clamped_swiglu", "swiglu"]

_BLOCK = 1024


@triton.jit
def swiglu_kernel(
    x, out, alpha, limit, inner: tl.constexpr, block: tl.constexpr, clamped: tl.constexpr, pdl: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = at < inner
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x + row * 2 * inner + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + at, mask=here, other=0.0).to(tl.float32)
    if clamped:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        result = gate * tl.sigmoid(alpha * gate) * up
    else:
        result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * inner + at, result.to(out.dtype.element_ty), mask=here)


def swiglu(x: Tensor) -> Tensor:
    """``x`` [tokens, 2 * n] = gate | up -> [tokens, n], computed in float32."""
    return _launch(x, 0.0, 0.0, False)


def clamped_swiglu(x: Tensor, gate: ClampedGate) -> Tensor:
    """``gate`` of ``x`` [tokens, 2 * n] -> [tokens, n], computed in float32."""
    return _launch(x, gate.alpha, gate.limit, True)


def _launch(x: Tensor, alpha: float, limit: float, clamped: bool) -> Tensor:
    tokens, both = x.shape
    inner = both // 2
    out = x.new_empty((tokens, inner))
    pdl = overlapping(x.device)
    swiglu_kernel[(tokens, triton.cdiv(inner, _BLOCK))](
        x, out, alpha, limit, inner, _BLOCK, clamped, pdl, num_warps=4, launch_pdl=pdl
    )
    return out
