"""Integer weights of 4 bits for inputs of 8 bits (W4A8), as Ascend's tools store them: two outputs a byte."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.weights.quantization.packed import grouped
from kernels.weights.quantization.scheme import StoredTensor
from kernels.weights.quantization.weights import GroupedWeight, Int8Weight

__all__ = ["four_by_eight", "signed", "stored_pairs"]


def stored_pairs(shape: tuple[int, int]) -> StoredTensor:
    """A weight [outputs, inputs] with two outputs a byte or, as other tools write it, one."""
    outputs, inputs = shape
    return StoredTensor(("I8",), ((outputs // 2, inputs), shape) if outputs % 2 == 0 else (shape,))


def signed(name: str, stored: Tensor, outputs: int) -> Tensor:
    """Unpack such a tensor -> int8 [outputs, inputs]. The first of a byte's two outputs is in its low half. Raises
    LoadError, which names the tensor ``name``."""
    if stored.shape[0] == outputs:
        if bool((stored < -8).any() or (stored > 7).any()):
            raise LoadError(f"{name} must be integers of -8 to 7, and is not; was it rounded to 4 bits?")
        return stored
    if bool(((stored >= -8) & (stored <= 7)).all()) and bool(stored.any()):
        raise LoadError(
            f"{name} has rows for half of its {outputs} outputs, and no byte of them holds two: the others are "
            "missing; download it again"
        )
    halves = torch.stack((stored & 15, (stored >> 4) & 15), 1).flatten(0, 1)
    return (halves ^ 8) - 8


def four_by_eight(values: Tensor, scales: Tensor, clip: Tensor | None = None) -> Int8Weight | GroupedWeight:
    """A W4A8 weight of ``values`` int8 [outputs, inputs], -8 to 7, and ``scales`` f32 [outputs, groups]. Tokens are
    quantized one by one. ``clip``: see QuantizedWeight.

    A weight with one scale an output becomes an Int8Weight: the products are the same, and every device has kernels for
    them.
    """
    if scales.shape[1] == 1:
        return Int8Weight(values, scales.flatten(), clip=clip)
    unsigned = (values + 8).to(torch.uint8)
    return dataclasses.replace(grouped(unsigned, scales, None, 4), activation="dynamic", clip=clip)
