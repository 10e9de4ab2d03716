"""Soc: the Ascend generation of a device, from the version number of its runtime."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.contract.errors import UnsupportedError

__all__ = ["Soc", "soc_of"]

_GENERATIONS = (("A2", 220, 225), ("A3", 250, 255), ("A5", 260, 260))


@dataclass(frozen=True)
class Soc:
    """``generation``: A2 (910B), A3 (910_93) or A5 (950). ``name``: that of the device, such as Ascend910B3."""

    generation: str
    name: str

    @property
    def nz_weights(self) -> bool:
        """Whether 16-bit weights may be stored in the cube unit's tiles; the A5 runtime disables internal formats."""
        return self.generation != "A5"

    @property
    def microscaling(self) -> bool:
        """Whether the device multiplies MXFP8: e4m3 values whose blocks share a power of two."""
        return self.generation == "A5"

    @property
    def fuses_experts(self) -> bool:
        """Whether one operator runs int8 experts up to their activation; its documentation names A2 and A3 only."""
        return self.generation != "A5"

    @property
    def exchanges_experts(self) -> bool:
        """Whether operators send tokens to the ranks of their experts; torch_npu's documentation names A2 and A3
        only."""
        return self.generation != "A5"

    @property
    def rotates_queries_and_keys(self) -> bool:
        """Whether one operator rotates queries and keys; its limits are documented for A2 and A3."""
        return self.generation != "A5"

    @property
    def projects_latent(self) -> bool:
        """Whether one operator makes latent queries and vectors of tokens; its documentation names A2 and A3 only."""
        return self.generation != "A5"

    @property
    def splits_mixed_steps(self) -> bool:
        """Whether decodes and prefills of a step use separate attention calls."""
        return self.generation == "A5"

    @property
    def filters_logits(self) -> bool:
        """Whether there is a kernel for top-k and top-p; its documentation names A2 and A3 only."""
        return self.generation != "A5"


def soc_of(version: int, name: str) -> Soc:
    """The SoC of ``version``, as returned by torch.npu.get_soc_version(). Raises UnsupportedError for other
    generations."""
    for generation, first, last in _GENERATIONS:
        if first <= version <= last:
            return Soc(generation, name)
    raise UnsupportedError(
        f"this NPU ({name}, SoC version {version}) is not supported; supported are Atlas A2, A3 and A5: "
        "use --device cpu"
    )
