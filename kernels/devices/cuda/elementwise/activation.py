"""``silu(gate) * up``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["swiglu"]

_BLOCK = 1024


@triton.jit
def swiglu_kernel(x, out, inner: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = at < inner
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x + row * 2 * inner + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=here)


def swiglu(x: Tensor) -> Tensor:
    """``x`` [tokens, 2 * n] = gate | up -> [tokens, n], computed in float32."""
    tokens, both = x.shape
    inner = both // 2
    out = x.new_empty((tokens, inner))
    pdl = overlapping(x.device)
    swiglu_kernel[(tokens, triton.cdiv(inner, _BLOCK))](x, out, inner, _BLOCK, pdl, num_warps=4, launch_pdl=pdl)
    return out
