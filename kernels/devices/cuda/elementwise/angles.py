"""Cosines and sines of a step's positions, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["angles"]


@triton.jit
def rope_angles_kernel(
    positions, frequencies, cos, sin, scale, dim: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    here = at < dim
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=here, other=0.0)
    tl.store(cos + token * dim + at, (tl.cos(angle) * scale).to(cos.dtype.element_ty), mask=here)
    tl.store(sin + token * dim + at, (tl.sin(angle) * scale).to(sin.dtype.element_ty), mask=here)


def angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``scale`` times cos and sin of ``positions`` int64 [tokens] times ``frequencies`` float32 [dim], each
    [tokens, 1, dim] in ``dtype``.
    """
    dim = len(frequencies)
    cos, sin = torch.empty((2, len(positions), 1, dim), dtype=dtype, device=positions.device)
    pdl = overlapping(positions.device)
    rope_angles_kernel[(len(positions),)](
        positions, frequencies, cos, sin, scale, dim, triton.next_power_of_2(dim), pdl, num_warps=1, launch_pdl=pdl
    )
    return cos, sin
