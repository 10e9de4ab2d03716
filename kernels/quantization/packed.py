"""Whole numbers that checkpoints keep several to an int32, lowest bits first, and the groups that share a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.load_error import LoadError
from kernels.models.config import ConfigError
from kernels.quantization.scheme import Stored
from kernels.quantization.weights import GroupedWeight

__all__ = ["FLOATS", "WholeBits", "bits_of", "group_of", "grouped", "groups_of", "skipped_of", "stored_words", "unpack"]

FLOATS = ("F16", "BF16", "F32")
"""What scales are stored as."""

WholeBits = Literal[4, 8]


def bits_of(settings: Mapping[str, Any], *names: str) -> WholeBits:
    """The size of a weight that one of ``names`` gives. Raises ConfigError."""
    found = next((settings[name] for name in names if name in settings), None)
    if found == 4:
        return 4
    if found == 8:
        return 8
    raise ConfigError(
        f"quantization_config: {names[0]} must be 4 or 8, and is {found!r}; use a checkpoint of 4 or 8 bit weights"
    )


def group_of(settings: Mapping[str, Any], *names: str) -> int | None:
    """Inputs that share a scale, None: all of an output. Raises ConfigError."""
    found = next((settings[name] for name in names if name in settings), None)
    if found == -1:
        return None
    if type(found) is int and found > 0:
        return found
    raise ConfigError(f"quantization_config: {names[0]} must be a size, or -1 for all inputs, and is {found!r}")


def skipped_of(settings: Mapping[str, Any], *names: str) -> list[str]:
    """The modules that one of ``names`` lists. Raises ConfigError."""
    name = next((name for name in names if settings.get(name)), names[0])
    found = settings.get(name) or []
    if not isinstance(found, list | tuple) or not all(isinstance(module, str) for module in found):
        raise ConfigError(f"quantization_config: {name} must be a list of modules, and is {found!r}")
    return list(found)


def groups_of(module: str, group: int | None, inputs: int) -> int:
    """Groups of a projection. Raises LoadError."""
    if group is None:
        return 1
    if inputs % group:
        raise LoadError(
            f"{module} has {inputs} inputs, which are no whole number of groups of {group}: quantization_config does "
            "not belong to these weights; check that both come from one model"
        )
    return inputs // group


def stored_words(*shape: int) -> Stored:
    """A tensor of words."""
    return Stored(("I32",), (shape,))


def unpack(words: Tensor, bits: WholeBits, dimension: int, places: Sequence[int] | None = None) -> Tensor:
    """``words`` int32 of two dimensions -> uint8, ``dimension`` 32 / bits times as long.

    ``places``: where in its word each number stands, from the lowest; None: in their order.
    """
    each = 32 // bits
    shifts = torch.tensor(range(each) if places is None else places, dtype=torch.int32) * bits
    found = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    if dimension == 0:
        return found.transpose(1, 2).flatten(0, 1)
    return found.flatten(1)


def grouped(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: WholeBits, order: Tensor | None = None
) -> GroupedWeight:
    """Of ``values`` uint8 [outputs, inputs], ``scales`` and ``zeros`` uint8 [outputs, groups]. ``order``: of the
    columns, when they do not come as the inputs do."""
    group = values.shape[1] // scales.shape[1]
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    zeros = None if zeros is None else zeros.contiguous()
    return GroupedWeight(values.contiguous(), scales.float().contiguous(), zeros, group, bits, order)
