"""Weights that are stored in floats, quantized while they are loaded: int8 or e4m3, a scale for each output; inputs are
rounded token by token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.quantization.scheme import Files, Scheme, Stored
from kernels.quantization.weights import QuantizedWeight, quantize_fp8, quantize_int8

__all__ = ["ONLINE", "Online"]

ONLINE: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_int8, "fp8": quantize_fp8}


class Online(Scheme):
    """``kind`` of ``ONLINE`` for every projection of the layers; the output of the model stays as it is."""

    def __init__(self, kind: str) -> None:
        self.name = f"{kind}, from floats"
        self._quantize = ONLINE[kind]

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        return None

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        raise AssertionError("nothing is stored quantized")

    def convert(self, module: str, weight: Tensor) -> QuantizedWeight | None:
        return None if module == "lm_head" else self._quantize(weight)
