"""Checkpoints of ``quant_method: awq`` (Lin et al., arXiv 2306.00978), in AutoAWQ's ``gemm`` layout.

A projection is stored as ``qweight`` int32 [inputs, outputs / 8], ``qzeros`` int32 [groups, outputs / 8] and ``scales``
[groups, outputs]; ``w = (q - z) * scale``. A word holds eight outputs of 4 bits or four of 8 bits, the even ones in its
lower half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.packed import (
    FLOATS,
    WholeBits,
    bits_of,
    group_of,
    grouped,
    groups_of,
    skipped_of,
    stored_words,
    unpack,
)
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import GroupedWeight
from kernels.weights.tensors import Role, TensorSpec

__all__ = ["Awq"]

_PLACES: dict[WholeBits, tuple[int, ...]] = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


class Awq(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise ConfigError(
                f"quantization_config: AWQ weights of version {version!r} are laid out for one kernel; use a "
                "checkpoint of version gemm"
            )
        self._bits = bits_of(settings, "bits", "w_bit")
        self._group = group_of(settings, "group_size", "q_group_size")
        self._zeros = settings.get("zero_point", True)
        skipped = skipped_of(settings, "modules_to_not_convert")
        self._skipped = tuple(name.strip(".") for name in skipped)
        self.name = f"awq {self._bits} bit, " + (
            "a scale an output" if self._group is None else f"groups of {self._group}"
        )

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        module = weight.module
        # Full names are compared: "gate" is the router, and not an expert's gate_proj.
        if weight.role is Role.OUTPUT or any(f".{part}." in f".{module}." for part in self._skipped):
            return None
        outputs, inputs = weight.matrix
        words, groups = outputs * self._bits // 32, groups_of(module, self._group, inputs)
        zeros = StoredTensor(("I32",), ((groups, words),), optional=not self._zeros)
        return {
            f"{module}.qweight": stored_words(inputs, words),
            f"{module}.qzeros": zeros,
            f"{module}.scales": StoredTensor(FLOATS, ((groups, outputs),)),
        }

    def read(self, files: Files, weight: TensorSpec) -> GroupedWeight:
        module = weight.module
        places = _PLACES[self._bits]
        values = unpack(files.read(f"{module}.qweight"), self._bits, 1, places).t()
        zeros = None
        if files.has(f"{module}.qzeros"):
            zeros = unpack(files.read(f"{module}.qzeros"), self._bits, 1, places).t()
        return grouped(values, files.read(f"{module}.scales").t(), zeros, self._bits)
