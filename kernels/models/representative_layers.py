"""Reduces a model to one layer of each kind, which launches the same kernels in less time."""

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
    shared = {id(model.device), *map(id, vars(model.device).values())}  # the device and its capabilities
    kinds: dict[Hashable, int] = {}
    for index, layer in enumerate(model.layers):
        kinds.setdefault((index > 0, _kind(layer, set(shared))), index)  # no layer precedes the first
    some = copy(model)
    some.layers = [model.layers[index] for index in kinds.values()]
    return some, [caches[index] for index in kinds.values()]


def _kind(part: Any, seen: set[int]) -> Hashable:
    """The properties that parts of like layers share, down to where tensors begin. ``seen``: ids of parts to skip."""
    if isinstance(part, Tensor):
        return part.dtype, part.shape, part.stride(), part.data_ptr() % 16
    if isinstance(part, list | tuple):
        return type(part), *(_kind(one, seen) for one in part)
    if isinstance(part, Mapping):
        return type(part), *((str(name), _kind(one, seen)) for name, one in part.items())
    if not hasattr(part, "__dict__"):
        return (type(part), part) if isinstance(part, Hashable) else (type(part),)
    if id(part) in seen:
        return (type(part),)
    seen.add(id(part))
    if isinstance(part, FunctionType):  # a layer may be one, of others that it holds
        return part.__code__, *(_kind(cell.cell_contents, seen) for cell in part.__closure__ or ())
    return type(part), _kind(vars(part), seen)
