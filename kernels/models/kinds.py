"""A model with one layer of each kind: what launches the same kernels as all of it, in less time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor

from kernels.models.decoder import Decoder

__all__ = ["one_of_each_kind"]

Cache = TypeVar("Cache")


def one_of_each_kind(model: Decoder, caches: list[Cache]) -> tuple[Decoder, list[Cache]]:
    """The model and its layers' ``caches`` without the layers that are like one before them. Where results of layers
    are captured, all: it matters which."""
    if model.captures:
        return model, caches
    kinds: dict[Hashable, int] = {}
    for index, layer in enumerate(model.layers):
        kinds.setdefault((index > 0, _kind(layer, {id(model.platform)})), index)  # the first is behind none
    some = copy(model)
    some.layers = [model.layers[index] for index in kinds.values()]
    return some, [caches[index] for index in kinds.values()]


def _kind(part: Any, seen: set[int]) -> Hashable:
    """What parts of layers are to have in common, down to where tensors begin. ``seen``: what need not be looked at."""
    if isinstance(part, Tensor):
        return part.dtype, part.shape, part.stride(), part.data_ptr() % 16
    if isinstance(part, list | tuple):
        return type(part), *(_kind(one, seen) for one in part)
    if isinstance(part, Mapping):
        return type(part), *((str(name), _kind(one, seen)) for name, one in part.items())
    if not hasattr(part, "__dict__"):
        return (type(part), part) if isinstance(part, Hashable) else type(part)
    if id(part) in seen:
        return type(part)
    seen.add(id(part))
    if isinstance(part, FunctionType):  # a layer may be one, of others that it holds
        return part.__code__, *(_kind(cell.cell_contents, seen) for cell in part.__closure__ or ())
    return type(part), _kind(vars(part), seen)
