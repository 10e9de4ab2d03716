"""Linear layers of quantized weights on the CPU."""

from __future__ import annotations

from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.devices.cpu.native_blocks import NativeBlocks
from kernels.devices.cpu.native_experts import ExpertProduct
from kernels.devices.cpu.native_fp8 import NativeFp8
from kernels.devices.cpu.native_grouped import NativeGrouped
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.operators import Native
from kernels.devices.cpu.recording import NotNative
from kernels.weights.quantization.gguf_weight import GgufWeight
from kernels.weights.quantization.int8 import Int8Linear
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight

__all__ = ["CpuBlocksLinear", "CpuGroupedLinear", "CpuInt8Linear"]


class CpuInt8Linear:
    """Products of whole numbers: native ones once they are there, PyTorch's until then."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, native: Native | None) -> None:
        self.bias = bias
        self.native: Native | None = None
        self._plain: Int8Linear | None = Int8Linear(weight, bias)
        self._packed: NativeInt8 | None = None
        if native is not None:
            self.adopt(native)

    @property
    def extra_bytes(self) -> int:
        """Taken beside the weight's own, until there are native products."""
        return 0 if self._plain is None else self._plain.extra_bytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.native is not None:
            if self._packed is not None:
                return self.native.linear_int8(x, self._packed, self.bias)
            if self.native.recording:
                raise NotNative("a quantized layer's shape")
        assert self._plain is not None
        return self._plain(x)

    def gated(self, x: Tensor) -> Tensor | None:
        """As CpuLinear's."""
        if self.native is None or self._packed is None or not Native.fits_gated(self._packed.outputs):
            return None
        return self.native.linear_int8(x, self._packed, self.bias, gated=True)

    def product(self, gated: bool) -> ExpertProduct | None:
        """As CpuLinear's."""
        if self._packed is None:
            return None
        return ExpertProduct(self._packed, self.bias, gated=gated and Native.fits_gated(self._packed.outputs))

    def weights(self) -> list[Tensor]:
        """As CpuLinear's. A static scale of tokens is in the native operator itself."""
        if self._packed is None or self._packed.scale:
            raise UnsupportedError("their int8 weights have static scales of tokens, or no native operators")
        return _kept([self._packed.memory], self.bias)

    def adopt(self, native: Native) -> None:
        """Compute by ``native`` from now on, where it can."""
        self.native = native
        if self._plain is not None and NativeInt8.fits(self._plain.weight):
            self._packed = NativeInt8(native.library, self._plain.weight)
            self._plain = None


class CpuGroupedLinear:
    """Native products with whole weights of 4 or 8 bits, or of e4m3, of which groups share a scale."""

    def __init__(self, weight: GroupedWeight | Fp8Weight, bias: Tensor | None, native: Native) -> None:
        self.bias = bias
        self.native = native
        self._packed: NativeGrouped | NativeFp8
        if isinstance(weight, Fp8Weight):
            self._packed = NativeFp8(native.library, weight)
        else:
            self._packed = NativeGrouped(native.library, weight)

    @property
    def nbytes(self) -> int:
        return self._packed.memory.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.native.linear_grouped(x, self._packed, self.bias)

    def gated(self, x: Tensor) -> Tensor | None:
        """As CpuLinear's."""
        if not Native.fits_gated(self._packed.outputs):
            return None
        return self.native.linear_grouped(x, self._packed, self.bias, gated=True)

    def product(self, gated: bool) -> ExpertProduct:
        """As CpuLinear's."""
        return ExpertProduct(self._packed, self.bias, gated=gated and Native.fits_gated(self._packed.outputs))

    def weights(self) -> list[Tensor]:
        """As CpuLinear's."""
        order = self._packed.order if isinstance(self._packed, NativeGrouped) else None
        return _kept([self._packed.memory] if order is None else [self._packed.memory, order], self.bias)


class CpuBlocksLinear:
    """Native products with the blocks of GGUF files."""

    def __init__(self, weight: GgufWeight | GroupedWeight, bias: Tensor | None, native: Native) -> None:
        self.bias = bias
        self.native = native
        self._packed = NativeBlocks(native.library, weight)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.native.linear_blocks(x, self._packed, self.bias)

    def gated(self, x: Tensor) -> Tensor | None:
        """As CpuLinear's."""
        if not self._fits_gated:
            return None
        return self.native.linear_blocks(x, self._packed, self.bias, gated=True)

    def product(self, gated: bool) -> ExpertProduct:
        """As CpuLinear's."""
        return ExpertProduct(self._packed, self.bias, gated=gated and self._fits_gated)

    def weights(self) -> list[Tensor]:
        """As CpuLinear's."""
        return _kept([rows.memory for rows in self._packed.rows], self.bias)

    @property
    def _fits_gated(self) -> bool:
        return len(self._packed.rows) == 1 and Native.fits_gated(self._packed.outputs)

    def lookup(self, ids: Tensor) -> Tensor:
        """``ids`` int [tokens] -> [tokens, inputs], rows of a weight of one type."""
        (rows,) = self._packed.rows
        return self.native.lookup(ids, rows)


def _kept(weights: list[Tensor], bias: Tensor | None) -> list[Tensor]:
    return weights if bias is None else [*weights, bias]
