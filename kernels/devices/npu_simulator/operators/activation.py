"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.devices.npu_simulator.constraints import dtypes, require
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []


def swiglu_rules(input: Tensor, dim: int = -1) -> None:
    """Vendor: three floating dtypes, 1 to 8 dimensions, an even split dimension."""
    dtypes("npu_swiglu", (torch.float16, torch.bfloat16, torch.float32), input=input)
    require(1 <= input.dim() <= 8, "npu_swiglu", "input", f"has {input.dim()} dimensions, 1 to 8 are allowed")
    require(input.shape[dim] % 2 == 0, "npu_swiglu", "input", f"dimension {dim} of {tuple(input.shape)} must be even")


@reference("npu_swiglu", rules=swiglu_rules)
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half, computed in float32."""
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)
