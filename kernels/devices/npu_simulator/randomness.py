"""Random numbers: a CPU generator that continues where the NPU generator stands.

The NPU draws from Philox streams of its own; the numbers here are the CPU's, seeded with the NPU generator's seed and
offset. So a seed still gives the same draws each time and a manual_seed starts again, but the values are not the NPU's.
"""

from __future__ import annotations

import torch

__all__ = ["default_host_generator", "host_generator"]

STEP = 4  # the offset of an NPU generator moves in steps of four


def host_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for the next draw of ``generator``, which moves on."""
    if generator.device.type != "npu":
        return generator
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    made = torch.Generator()
    made.manual_seed((generator.initial_seed() * 1000003 + offset) & 0x7FFFFFFFFFFFFFFF)
    return made


def default_host_generator(device: int) -> torch.Generator:
    """The same for the default generator of an NPU."""
    return host_generator(torch.npu.default_generators[device])
