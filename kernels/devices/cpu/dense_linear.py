"""Linear layers on the CPU. bf16 goes through the native products, or through oneDNN with the weight reordered once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.devices.cpu.native_experts import ExpertProduct
from kernels.devices.cpu.operators import Native, NativeWeight
from kernels.devices.cpu.recording import NotNative

__all__ = ["CpuLinear", "PackedLinear", "PlainLinear", "TiedLinear", "bf16_is_fast", "can_pack", "make_linear"]

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
        result: Tensor = self._call(x, self.weight, self.bias, "none", self._scalars, "")
        return result


class NativeLinear:
    """``x @ weight.T + bias`` by the native products. bf16."""

    def __init__(self, native: Native, weight: Tensor, bias: Tensor | None) -> None:
        self.native = native
        self.weight = NativeWeight(native, weight)
        self.bias = bias

    def __call__(self, x: Tensor, gated: bool = False) -> Tensor:
        return self.native.linear(x, self.weight, self.bias, gated)


class CpuLinear:
    """A linear layer that goes over to the native products once they are there.

    ``shared``: its weight is needed as it is, too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, shared: bool, native: Native | None) -> None:
        self.native = native
        self._fits = weight.dtype == torch.bfloat16 and Native.fits_linear(weight)
        self.call: PlainLinear | PackedLinear | NativeLinear
        if native is not None and self._fits:
            self.call = NativeLinear(native, weight, bias)
        else:
            self.call = make_linear(weight, bias, shared)

    def __call__(self, x: Tensor) -> Tensor:
        if self.native is not None and self.native.recording and not isinstance(self.call, NativeLinear):
            raise NotNative("a linear layer's shape")
        return self.call(x)

    def gated(self, x: Tensor) -> Tensor | None:
        """``silu(gates) * others`` of the outputs' halves in one operator; None: there is none."""
        if isinstance(self.call, NativeLinear) and Native.fits_gated(self.call.weight.outputs):
            return self.call(x, gated=True)
        return None

    def product(self, gated: bool) -> ExpertProduct | None:
        """The product as part of an expert; None if there is no native one."""
        if not isinstance(self.call, NativeLinear):
            return None
        weight = self.call.weight
        return ExpertProduct(weight, self.call.bias, gated=gated and Native.fits_gated(weight.outputs))

    def weights(self) -> list[Tensor]:
        """Weight and bias as they are kept. Raises UnsupportedError if they cannot be overwritten."""
        if isinstance(self.call, PackedLinear):
            raise UnsupportedError("their weights are packed by oneDNN, as there are no native operators")
        weight = self.call.weight.memory if isinstance(self.call, NativeLinear) else self.call.weight
        return [weight] if self.call.bias is None else [weight, self.call.bias]

    def adopt(self, native: Native) -> None:
        """Compute by ``native`` from now on, where it can."""
        self.native = native
        if self._fits and not isinstance(self.call, NativeLinear):
            weight = self.call.weight
            self.call = NativeLinear(native, weight.to_dense() if weight.is_mkldnn else weight, self.call.bias)


class TiedLinear(CpuLinear):
    """A linear layer whose ``weight`` is looked up by its rows, too.

    A large one is kept once: as it is, or, from the moment at which there are native products, as they want it.
    """

    def __init__(self, weight: Tensor, native: Native | None) -> None:
        self.table: Tensor | None = weight
        super().__init__(weight, None, True, native)
        self._keep_one()

    def adopt(self, native: Native) -> None:
        super().adopt(native)
        self._keep_one()

    def _keep_one(self) -> None:
        if self.table is not None and self.table.nbytes > SHARED_PACK_BYTES and isinstance(self.call, NativeLinear):
            self.table = None

    def lookup(self, ids: Tensor) -> Tensor:
        """``ids`` int [tokens] -> [tokens, inputs], the bits of ``weight``."""
        if self.table is None:
            assert isinstance(self.call, NativeLinear)
            return self.call.native.lookup(ids, self.call.weight)
        if self.native is not None and self.native.recording:
            return self.native.embed(self.table, len(ids))
        return F.embedding(ids, self.table)


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
