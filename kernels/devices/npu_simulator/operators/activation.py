"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.devices.npu_simulator.constraints import dtypes, require
from kernels.devices.npu_simulator.operators.quantization import quantize_tokens
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


def dequant_rules(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> None:
    """Documented: [tokens, 2 * n] in int32 or bfloat16, activated on the left or right. Simulated is bfloat16 with a
    scale by token."""
    name = "npu_dequant_swiglu_quant"
    dtypes(name, (torch.bfloat16,), x=x)
    require(x.dim() == 2, name, "x", f"must have two dimensions, has {x.dim()}")
    require(x.shape[-1] % 2 == 0, name, "x", f"has rows of {x.shape[-1]}, which must be even")
    for argument, value in (
        ("weight_scale", weight_scale),
        ("activation_scale", activation_scale),
        ("bias", bias),
        ("quant_scale", quant_scale),
        ("quant_offset", quant_offset),
        ("group_index", group_index),
        ("dst_type", dst_type),
        ("round_mode", round_mode),
        ("activate_dim", activate_dim),
    ):
        require(value is None, name, argument, "is not simulated: leave it out")
    require(activate_left, name, "activate_left", "must be True: the gate comes first")
    require(quant_mode == 1, name, "quant_mode", f"{quant_mode} is not simulated: 1, a scale by token, is")
    require(swiglu_mode == 0, name, "swiglu_mode", f"{swiglu_mode} is not simulated: 0 is")


@reference("npu_dequant_swiglu_quant", rules=dequant_rules, generations=("A2", "A3"))
def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in float32, quantized from there: int8 [tokens, n], and a float32 scale for each token."""
    gate, up = x.float().chunk(2, -1)
    return quantize_tokens(F.silu(gate) * up)
