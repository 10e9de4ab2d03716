"""Microscaled floats of 4, 6 and 8 bits: groups of inputs share a power of two (OCP Microscaling Formats, 1.0).

All are kept in e4m3, which every device can multiply. That is exact: each number of e2m1 (4 bits) and e2m3 (6 bits) is
also a number of e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.weights.quantization.scheme import Files

__all__ = ["MX_GROUP", "exponents", "from_e2m1", "from_e2m3"]

MX_GROUP = 32
"""Inputs that share a power of two."""

_NO_NUMBER = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M3 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2**e for e in range(3) for m in range(8)))


def exponents(files: Files, name: str) -> Tensor:
    """The shared powers of two, e8m0. Raises LoadError if one is NaN."""
    result = files.read(name).view(torch.uint8)
    if bool((result == _NO_NUMBER).any()):
        raise LoadError(f"{name} contains NaN (byte {_NO_NUMBER}); download it again")
    return result.view(torch.float8_e8m0fnu)


def from_e2m1(packed: Tensor) -> Tensor:
    """uint8 [outputs, inputs / 2] -> e4m3 [outputs, inputs]. The first of a byte's two numbers is in its low half."""
    return _numbers(torch.stack((packed & 15, packed >> 4), -1).flatten(1), _E2M1)


def from_e2m3(packed: Tensor) -> Tensor:
    """uint8 [outputs, inputs * 3 / 4] -> e4m3 [outputs, inputs]. Three bytes hold four numbers, lowest bits first."""
    one, two, three = packed.unflatten(1, (-1, 3)).unbind(-1)
    four = one & 63, one >> 6 | (two & 15) << 2, two >> 4 | (three & 3) << 4, three >> 2
    return _numbers(torch.stack(four, -1).flatten(1), _E2M3)


def _numbers(codes: Tensor, sizes: tuple[float, ...]) -> Tensor:
    """The numbers of ``codes`` uint8: a sign bit, then an index into ``sizes``. Python translates the bytes: torch
    would convert indices to 64 bits first and take ten times as long."""
    table = torch.tensor((*sizes, *(-size for size in sizes))).to(torch.float8_e4m3fn).view(torch.uint8)
    result = bytearray(codes.contiguous().numpy()).translate(bytes(table.tolist()).ljust(256, b"\0"))
    return torch.frombuffer(result, dtype=torch.uint8).view(codes.shape).view(torch.float8_e4m3fn)
