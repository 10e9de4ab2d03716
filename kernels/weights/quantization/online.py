"""Online quantization: float weights are quantized at load to int8 or e4m3, with a scale for each output.

Inputs are quantized token by token.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import QuantizedWeight, quantize_fp8, quantize_int8
from kernels.weights.tensors import Role, TensorSpec

__all__ = ["ONLINE", "Online"]

ONLINE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_int8, "fp8": quantize_fp8}


class Online(Scheme):
    """Quantizes every projection of the layers to ``kind``, one of ``ONLINE``. The output layer stays as it is."""

    def __init__(self, kind: str) -> None:
        self.name = f"{kind}, from floats"
        self._quantize = ONLINE[kind]

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        return None

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight:
        raise AssertionError("nothing is stored quantized")

    def convert(self, weight: TensorSpec, floats: Tensor) -> QuantizedWeight | None:
        return None if weight.role is Role.OUTPUT else self._quantize(floats)
