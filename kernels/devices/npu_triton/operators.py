"""Registers the kernels of this folder with the dispatcher, so that graphs and the simulator see one call each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.devices.npu_triton import reference

__all__ = ["NAMESPACE", "REFERENCES", "check_contiguous", "register", "registered"]

NAMESPACE = "troupe"

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "split_norm_rope_cache(Tensor qkv, Tensor? weight, float eps, Tensor cos, Tensor sin, Tensor(a!) key_cache, "
    "Tensor(b!) value_cache, Tensor index, int heads) -> Tensor"
)
_LIBRARY.define("draw(Tensor logits, Tensor draws, Tensor positions) -> (Tensor, Tensor)")

REFERENCES: dict[str, Callable[..., object]] = {
    "split_norm_rope_cache": reference.split_norm_rope_cache,
    "draw": reference.draw,
}
"""What each operator computes, in torch."""


def _queries(qkv: Tensor, *rest: object) -> Tensor:
    heads = rest[-1]
    assert isinstance(heads, int)
    return qkv.new_empty((qkv.shape[0], heads, qkv.shape[2]))


def _tokens(logits: Tensor, draws: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return positions.new_empty(len(logits)), positions.new_empty(len(logits), dtype=torch.bool)


_LIBRARY.impl("split_norm_rope_cache", _queries, "Meta")
_LIBRARY.impl("draw", _tokens, "Meta")


def registered(name: str) -> bool:
    """Whether NPUs have an implementation of the operator."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "PrivateUse1"))


def register(name: str, compute: Callable[..., object]) -> None:
    """Let ``compute`` be the implementation on NPUs."""
    _LIBRARY.impl(name, compute, "PrivateUse1")


def check_contiguous(*args: object) -> None:
    """Raise ValueError unless all tensors are contiguous: the kernels read no strides."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor) and not value.is_contiguous():
            raise ValueError(f"argument {place} of a kernel of {NAMESPACE} is not contiguous: {tuple(value.shape)}")
