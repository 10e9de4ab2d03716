"""Linear layers on the CPU. bf16 goes through oneDNN, with the weight reordered once rather than in every call."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

__all__ = ["PackedLinear", "PlainLinear", "bf16_is_fast", "can_pack", "make_linear"]

SHARED_PACK_BYTES = 64 << 20
"""A weight that must also stay unpacked (tied embeddings) is packed as a second copy up to this size."""

# PyTorch's own compiled models call these operators; they stand in no public module, nor in every build.
_bf16_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
_pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class PlainLinear:
    """``x @ weight.T + bias`` with the weight as it is, [outputs, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """``x @ weight.T + bias`` with the weight in oneDNN's blocked layout. bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 1) -> None:
        if _pack is None or _linear is None:
            raise RuntimeError("this PyTorch has no packed linear layers; ask can_pack first")
        self.weight = _pack(weight, rows)  # opaque; rows: the batch size the layout is best for
        self.bias = bias
        self._call = _linear.default
        self._scalars: list[float] = []

    def __call__(self, x: Tensor) -> Tensor:
        return self._call(x, self.weight, self.bias, "none", self._scalars, "")


def bf16_is_fast() -> bool:
    """Whether oneDNN runs bf16 on this processor; without it bf16 is slower than float32."""
    return torch.backends.mkldnn.is_available() and _bf16_supported is not None and bool(_bf16_supported())


def can_pack() -> bool:
    """Whether this PyTorch and this processor run packed bf16 weights."""
    return _pack is not None and _linear is not None and bf16_is_fast()


def make_linear(weight: Tensor, bias: Tensor | None, shared: bool) -> PlainLinear | PackedLinear:
    """Pack bf16 weights where that is possible. ``shared``: someone else keeps the weight as it is."""
    if weight.dtype != torch.bfloat16 or not can_pack() or (shared and weight.nbytes > SHARED_PACK_BYTES):
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias)
