"""Writes checkpoints of integers packed into words, in the documented layouts of AWQ, GPTQ and compressed-tensors.
``dequantized``: the floats that each represents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Rounded",
    "awq",
    "dequantized",
    "four_bit_bytes",
    "four_bit_pairs",
    "gptq",
    "int8_rows",
    "packed",
]

Change = Callable[[str, Tensor], dict[str, Tensor]]

AWQ_ORDER = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}
"""The output at the i-th place of a word, from the lowest bits."""


@dataclass(frozen=True)
class Rounded:
    """``w = (values - zeros) * scales``: values [outputs, inputs], the others [outputs, groups]; ``index`` [inputs]
    is the group of an input."""

    values: Tensor
    zeros: Tensor
    scales: Tensor
    index: Tensor

    @classmethod
    def of(cls, weight: Tensor, bits: int, group: int, symmetric: bool = False, shuffled: bool = False) -> Rounded:
        inputs, most = weight.shape[1], (1 << bits) - 1
        index = torch.arange(inputs) // group
        if shuffled:
            index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        parts = [weight[:, index == i] for i in range(inputs // group)]
        if symmetric:
            scales = torch.stack([part.abs().amax(1) for part in parts], 1) * 2 / most
            zeros = torch.full(scales.shape, 1 << (bits - 1))
        else:
            low = torch.stack([part.amin(1) for part in parts], 1)
            scales = (torch.stack([part.amax(1) for part in parts], 1) - low) / most
            zeros = (-low / scales).round().clamp(0, most).long()
        scales = scales.half().float()
        values = (weight / scales[:, index]).round().long() + zeros[:, index]
        return cls(values.clamp(0, most), zeros, scales, index)

    def floats(self) -> Tensor:
        return (self.values - self.zeros[:, self.index]) * self.scales[:, self.index]


def words(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Numbers [rows, n] -> int32 [rows, n * bits / 32]."""
    each = 32 // bits
    found = torch.zeros(values.shape[0], values.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        found |= values[:, (order[place] if order else place) :: each] << bits * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def awq(bits: int, group: int) -> Change:
    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        rounded = Rounded.of(weight, bits, group)
        return {
            f"{module}.qweight": words(rounded.values.t(), bits, AWQ_ORDER[bits]),
            f"{module}.qzeros": words(rounded.zeros.t(), bits, AWQ_ORDER[bits]),
            f"{module}.scales": rounded.scales.t().half(),
        }

    return change


def gptq(bits: int, group: int, shuffled: bool = False, less: int = 1) -> Change:
    """``less``: subtracted from the zeros; 0 in gptq_v2."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        rounded = Rounded.of(weight, bits, group, shuffled=shuffled)
        return {
            f"{module}.qweight": words(rounded.values, bits).t(),
            f"{module}.qzeros": words((rounded.zeros.t() - less) & ((1 << bits) - 1), bits),
            f"{module}.scales": rounded.scales.t().half(),
            f"{module}.g_idx": rounded.index.int(),
        }

    return change


def packed(bits: int, group: int, symmetric: bool = True, shuffled: bool = False) -> Change:
    """pack-quantized."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        rounded = Rounded.of(weight, bits, group, symmetric, shuffled)
        found = {
            f"{module}.weight_packed": words(rounded.values, bits),
            f"{module}.weight_scale": rounded.scales.half(),
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            found[f"{module}.weight_zero_point"] = words(rounded.zeros.t(), bits).t()
        if shuffled:
            found[f"{module}.weight_g_idx"] = rounded.index.int()
        return found

    return change


def int8_rows(scale: float | None = None, offset: int | None = None) -> Change:
    """int-quantized, a scale for each output. ``scale``, ``offset``: static quantization of inputs."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 127
        found = {f"{module}.weight": (weight / scales).round().to(torch.int8), f"{module}.weight_scale": scales}
        if scale is not None:
            found[f"{module}.input_scale"] = torch.tensor([scale])
        if offset is not None:
            found[f"{module}.input_zero_point"] = torch.tensor([offset], dtype=torch.int8)
        return found

    return change


def four_bit_pairs(alpha: float | None = None) -> Change:
    """int-quantized of 4 bits as Ascend's tools write it: two outputs a byte, a scale for each output. ``alpha``: the
    share of their maximum to which inputs of down projections are clipped, with scales in 64 bits."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 7
        values = (weight / scales).round().clamp(-7, 7)
        whole, bias = values.to(torch.int8), (8 * values * scales).sum(1)
        found = {f"{module}.weight": (whole[::2] & 15) | (whole[1::2] << 4), f"{module}.weight_scale": scales}
        if alpha is None:
            return found | {f"{module}.scale_bias": bias[:, None], f"{module}.weight_offset": torch.zeros_like(scales)}
        found[f"{module}.weight_scale"] = scales.view(torch.int32).to(torch.int64)
        return found | {f"{module}.bias": bias, f"{module}.alpha": torch.tensor([alpha])}

    return change


def four_bit_bytes(group: int) -> Change:
    """int-quantized of 4 bits as llm-compressor writes it: a byte for each, a scale for a group."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        parts = weight.unflatten(1, (-1, group))
        scales = parts.abs().amax(2) / 7
        values = (parts / scales[:, :, None]).round().clamp(-8, 7).flatten(1)
        return {f"{module}.weight": values.to(torch.int8), f"{module}.weight_scale": scales}

    return change


def dequantized(bits: int, group: int, symmetric: bool = False, shuffled: bool = False) -> Change:
    """The floats."""

    def change(module: str, weight: Tensor) -> dict[str, Tensor]:
        return {f"{module}.weight": Rounded.of(weight, bits, group, symmetric, shuffled).floats()}

    return change
