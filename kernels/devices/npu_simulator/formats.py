"""Storage formats: a weight in the NZ format of the matrix unit.

The wheel's allocation determines the tensor's format, its size in memory and the result of get_npu_format(). Here the
bytes stay in row order, so speed and padding are not simulated. Operations that fail on the device fail here too: NZ
tensors cannot be sliced or viewed with another rank. On A5, whose runtime disables private formats, and
without ``allow_internal_format``, the result is a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.dispatch import Engine, Operator
from kernels.devices.npu_simulator.memory import NZ, is_npu

__all__ = ["FORMAT_CASTS", "FormatCast"]

ND = 2
DIVISORS = {torch.float16: (16, 16), torch.bfloat16: (16, 16), torch.int8: (16, 32)}
FORMAT_CASTS = ("npu_format_cast", "npu_format_cast.Tensor", "npu_format_cast_", "npu_format_cast_.acl_format")


class FormatCast(Operator):
    """npu_format_cast and its in-place and by-example forms."""

    def __init__(self, engine: Engine, overload: Any) -> None:
        super().__init__(engine, overload, self.refuse, None)

    @staticmethod
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConstraintError("npu_format_cast", "input", "cannot be part of a graph: cast before the capture")

    def __call__(self, input: Tensor, wanted: Tensor | int, **options: Any) -> Any:
        self.engine.calls[self.name] = self.engine.calls.get(self.name, 0) + 1
        if self.attention.value:
            done, result = self.engine.interrupted(self, (input, wanted), options)
            if done:
                return result
        if any(option is not None for option in options.values()):
            raise ConstraintError("npu_format_cast", next(iter(options)), "is not simulated: leave it out")
        chosen = torch_npu.get_npu_format(wanted) if isinstance(wanted, Tensor) else wanted
        if chosen not in (ND, NZ) or not is_npu(input):
            raise ConstraintError("npu_format_cast", "acl_format", f"{chosen} is not simulated: use ND (2) or NZ (29)")
        if chosen == NZ:
            self.check(input)
            if self.engine.cann.spec.generation == "A5":
                chosen = ND
        made = torch_npu.empty_with_format(input.shape, dtype=input.dtype, device=input.device, acl_format=chosen)
        if torch_npu.get_npu_format(made) == NZ:
            self.engine.aliases.nz.add(made)  # first: the address may belong to a freed tensor
        self.engine.aliases.of(made).copy_(self.engine.aliases.of(input))
        if not self.overload._schema.name.endswith("_"):
            return made
        input.set_(made)
        return input

    def check(self, input: Tensor) -> None:
        """16-bit and 8-bit types only, and dimensions divisible by the tiles."""
        divisors = DIVISORS.get(input.dtype)
        if divisors is None or input.dim() < 2:
            rule = f"NZ takes float16, bfloat16 and int8 of 2 or more dimensions, not {input.dtype} of {input.dim()}"
            raise ConstraintError("npu_format_cast", "input", rule)
        if any(size % divisor for size, divisor in zip(input.shape[-2:], divisors, strict=True)):
            rule = f"NZ tiles of {divisors} must divide {tuple(input.shape[-2:])}: keep this weight in ND"
            raise ConstraintError("npu_format_cast", "input", rule)
