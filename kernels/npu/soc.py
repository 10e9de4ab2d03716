"""Which generation of Ascend a device is, by the number its runtime gives it."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.platforms.base import PlatformError

__all__ = ["Soc", "soc_of"]

_GENERATIONS = (("A2", 220, 225), ("A3", 250, 255), ("A5", 260, 260))


@dataclass(frozen=True)
class Soc:
    """``generation``: A2 (910B), A3 (910_93) or A5 (950). ``name``: the device's own, such as Ascend910B3."""

    generation: str
    name: str

    @property
    def nz_weights(self) -> bool:
        """Whether 16-bit weights may be kept in the cube unit's tiles; the A5 runtime turns internal formats off."""
        return self.generation != "A5"

    @property
    def microscaling(self) -> bool:
        """Whether e4m3 numbers whose blocks share a power of two are multiplied by the device itself."""
        return self.generation == "A5"

    @property
    def splits_mixed_steps(self) -> bool:
        """Whether decodes and prefills go to attention in calls of their own rather than in one."""
        return self.generation == "A5"

    @property
    def filters_logits(self) -> bool:
        """Whether there is a kernel for top-k and top-p; its documentation names A2 and A3 only."""
        return self.generation != "A5"


def soc_of(version: int, name: str) -> Soc:
    """``version`` as torch.npu.get_soc_version() gives it. Raises PlatformError for a generation not built for."""
    for generation, first, last in _GENERATIONS:
        if first <= version <= last:
            return Soc(generation, name)
    raise PlatformError(
        f"this NPU ({name}, SoC version {version}) is none of Atlas A2, A3 or A5, the ones there is support for; "
        "use --device cpu"
    )
