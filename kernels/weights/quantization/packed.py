"""Integers that checkpoints pack into int32, lowest bits first, and the groups that share a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.weights.quantization.scheme import StoredTensor
from kernels.weights.quantization.weights import GroupedWeight

__all__ = ["FLOATS", "WholeBits", "bits_of", "group_of", "grouped", "groups_of", "skipped_of", "stored_words", "unpack"]

FLOATS = ("F16", "BF16", "F32")
"""The dtypes of stored scales."""

WholeBits = Literal[4, 8]


def bits_of(settings: Mapping[str, Any], *names: str) -> WholeBits:
    """The bits of a weight, from the first of the settings ``names`` that is there. Raises ConfigError."""
    found = next((settings[name] for name in names if name in settings), None)
    if found == 4:
        return 4
    if found == 8:
        return 8
    raise ConfigError(
        f"quantization_config: {names[0]} must be 4 or 8, and is {found!r}; use a checkpoint of 4 or 8 bit weights"
    )


def group_of(settings: Mapping[str, Any], *names: str) -> int | None:
    """The number of inputs that share a scale; None: all inputs of an output. Raises ConfigError."""
    found = next((settings[name] for name in names if name in settings), None)
    if found == -1:
        return None
    if type(found) is int and found > 0:
        return found
    raise ConfigError(f"quantization_config: {names[0]} must be a size, or -1 for all inputs, and is {found!r}")


def skipped_of(settings: Mapping[str, Any], *names: str) -> list[str]:
    """The modules that stay in floats, from one of the settings ``names``. Raises ConfigError."""
    name = next((name for name in names if settings.get(name)), names[0])
    found = settings.get(name) or []
    if not isinstance(found, list | tuple) or not all(isinstance(module, str) for module in found):
        raise ConfigError(f"quantization_config: {name} must be a list of modules, and is {found!r}")
    return list(found)


def groups_of(module: str, group: int | None, inputs: int) -> int:
    """The number of groups of a projection. Raises LoadError."""
    if group is None:
        return 1
    if inputs % group:
        raise LoadError(
            f"{module} has {inputs} inputs, which are no whole number of groups of {group}: quantization_config does "
            "not belong to these weights; check that both come from one model"
        )
    return inputs // group


def stored_words(*shape: int) -> StoredTensor:
    """A stored tensor of int32 words."""
    return StoredTensor(("I32",), (shape,))


def unpack(words: Tensor, bits: WholeBits, dimension: int, places: Sequence[int] | None = None) -> Tensor:
    """Unpack ``words`` int32 of two dimensions -> uint8, with ``dimension`` 32 / bits times as long.

    ``places``: the position of each number in its word, counted from the lowest bits; None: in order.
    """
    each = 32 // bits
    shifts = torch.tensor(range(each) if places is None else places, dtype=torch.int32) * bits
    result = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if dimension == 0:
        return result.transpose(1, 2).flatten(0, 1)
    return result.flatten(1)


def grouped(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: WholeBits, order: Tensor | None = None
) -> GroupedWeight:
    """A weight of ``values`` uint8 [outputs, inputs], ``scales`` and ``zeros`` uint8 [outputs, groups]. ``order``: the
    input of each column (act-order); None: in order."""
    group = values.shape[1] // scales.shape[1]
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    zeros = None if zeros is None else zeros.contiguous()
    return GroupedWeight(values.contiguous(), scales.float().contiguous(), zeros, group, bits, order)
