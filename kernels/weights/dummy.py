"""Dummy weights, for measurements (``--load-format dummy``)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.weights.quantization.scheme import StoredTensor
from kernels.weights.tensors import Part, Role, Tensors

__all__ = ["DummyWeights"]

_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes by their names in safetensors."""


class DummyWeights:
    """Weights from a seed and each tensor's name, independent of the order of reads. Norms are ones, biases and
    indices zeros."""

    def __init__(self, seed: int, tensors: Tensors, stored: Mapping[str, StoredTensor]) -> None:
        self._seed = seed
        self._tensors = tensors
        self._stored = stored

    def has(self, name: str) -> bool:
        return name in self._stored and not self._stored[name].optional

    def read(self, name: str) -> Tensor:
        """A tensor of a quantized projection: random integers, or small scales."""
        stored = self._stored[name]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        shape, dtype = stored.shapes[0], _DTYPES[stored.dtypes[0]]
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.rand(shape, generator=generator).mul_(1e-3).add_(1e-3).to(dtype)
        whole = torch.randint(0, 112, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
        return whole.view(dtype)

    def fill(self, name: str, target: Tensor, part: Part | None) -> None:
        spec = self._tensors[name]
        if spec.role is Role.NORM:
            target.fill_(1.0)
        elif spec.role in (Role.BIAS, Role.INDICES):
            target.zero_()
        else:
            seed = zlib.crc32(f"{self._seed} {name}".encode())  # the CPU's generator uses 32 bits of a seed
            generator = torch.Generator(target.device).manual_seed(seed)
            whole = target if part is None else target.new_empty(spec.shape)
            if spec.role in (Role.NIBBLES, Role.EXPONENTS):
                whole.random_(0, 112, generator=generator)  # on the device: there are billions of them
            else:
                whole.normal_(0.0, 0.02, generator=generator)
            if part is not None:
                target.copy_(part.narrow(whole))
