"""Products of MXFP8 (OCP): e4m3 values with a power of two for each 32 inputs, on A5 only. Scales are
bytes of e8m0, two for each 64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require
from kernels.devices.npu_simulator.operators.reference import reference

__all__ = ["E4M3", "mx_product", "mx_rules"]

E4M3 = torch.float8_e4m3fn
MAX_DIM = 65535
_BLOCK, _PAIR = 32, 64
_LARGEST, _LARGEST_EXPONENT = 448.0, 8
_BIAS, _NO_NUMBER = 127, 255
_E4M3, _E8M0 = 292, 293
"""torch_npu's numbers of these dtypes."""


def mx_quant_rules(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> None:
    """Vendor: floats of one to seven dimensions; for float32 the quantized dimension has at least 32. Simulated is only
    quantization to e4m3 along the last dimension with the OCP's scales."""
    name = "npu_dynamic_mx_quant"
    dtypes(name, (torch.float16, torch.bfloat16, torch.float32), input=input)
    require(1 <= input.dim() <= 7, name, "input", f"must have one to seven dimensions, has {input.dim()}")
    narrow = input.dtype == torch.float32 and input.shape[-1] < _BLOCK
    require(not narrow, name, "input", f"in float32 must have rows of {_BLOCK} or more, has shape {tuple(input.shape)}")
    wanted = {
        "axis": (axis if axis < 0 else axis - input.dim(), -1),
        "round_mode": (round_mode, "rint"),
        "dst_type": (dst_type, _E4M3),
        "block_size": (block_size, _BLOCK),
        "scale_alg": (scale_alg, 0),
        "dst_type_max": (dst_type_max, 0.0),
        "max_low_bound": (max_low_bound, 0.0),
    }
    for argument, (given, value) in wanted.items():
        require(given == value, name, argument, f"{given!r} is not simulated: {value!r} is")


@reference("npu_dynamic_mx_quant", rules=mx_quant_rules, generations=("A5",))
def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = 296,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """e4m3 of the input's shape, and e8m0 as uint8 [..., ceil(inputs / 64), 2]: the exponent of a block's maximum minus
    that of e4m3's maximum. Values saturate."""
    inputs = input.shape[-1]
    wide = torch.nn.functional.pad(input.float(), (0, -inputs % _PAIR)).unflatten(-1, (-1, _BLOCK))
    largest = wide.abs().amax(-1)
    exponents = largest.frexp().exponent - 1 - _LARGEST_EXPONENT
    exponents = torch.where(largest > 0, exponents, -_BIAS).clamp(-_BIAS, _BIAS)
    held = (wide / torch.exp2(exponents.float())[..., None]).clamp(-_LARGEST, _LARGEST)
    scales = torch.where(largest.isfinite(), exponents + _BIAS, _NO_NUMBER).to(torch.uint8)
    return held.flatten(-2)[..., :inputs].to(E4M3), scales.unflatten(-1, (-1, 2))


def mx_rules(
    name: str,
    x: Tensor,
    weight: Tensor,
    scales: tuple[str, Tensor | None, int | None],
    token_scales: tuple[str, Tensor | None, int | None],
) -> None:
    """Vendor: e4m3 [M, K] by [..., K, N], dimensions of up to 65535, with scales of one byte [M, ceil(K / 64), 2] and
    [..., ceil(K / 64), N, 2] that are declared as e8m0 by torch_npu's number. Facts 4.2: both the weight and its scales
    are transposed views, or neither is; both engines use K divisible by 64.

    ``scales`` and ``token_scales``: (argument name, tensor, declared dtype).
    """
    dtypes(name, (E4M3,), x=x, weight=weight)
    contiguous(name, x=x)
    fits = x.dim() == 2 and weight.shape[-2] == x.shape[1]
    require(fits, name, "weight", f"must be [{x.shape[-1]}, N], has shape {tuple(weight.shape)}")
    *experts, inputs, outputs = weight.shape
    require(max(inputs, outputs) <= MAX_DIM, name, "weight", f"has a dimension above {MAX_DIM}: {tuple(weight.shape)}")
    require(inputs % _PAIR == 0, name, "x", f"must have inputs that {_PAIR} divides, has {inputs}")
    shapes = ((*experts, inputs // _PAIR, outputs, 2), (len(x), inputs // _PAIR, 2))
    for (argument, value, said), shape in zip((scales, token_scales), shapes, strict=True):
        require(value is not None and tuple(value.shape) == shape, name, argument, f"must be {list(shape)}")
        assert value is not None
        dtypes(name, (torch.uint8, torch.float8_e8m0fnu), **{argument: value})
        require(said == _E8M0, name, f"{argument}_dtype", f"must be torch_npu.float8_e8m0fnu ({_E8M0}), is {said}")
    assert scales[1] is not None
    assert token_scales[1] is not None
    contiguous(name, **{token_scales[0]: token_scales[1]})
    plain = weight.is_contiguous() and scales[1].is_contiguous()
    turned = weight.mT.is_contiguous() and scales[1].transpose(-3, -2).is_contiguous()
    require(plain or turned, name, scales[0], "and the weight must both be transposed views, or both be contiguous")


def mx_product(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """The product [M, N] of scaled values, with sums in float32."""

    def factors(found: Tensor) -> Tensor:
        """[rows, inputs / 64, 2] -> [rows, inputs]"""
        powers = found.contiguous().view(torch.uint8).view(torch.float8_e8m0fnu).float()
        return powers.flatten(1).repeat_interleave(_BLOCK, 1)

    return (x.float() * factors(scales)) @ (weight.float() * factors(weight_scales.transpose(0, 1)).t())
