"""Checkpoints of ``quant_method: auto-round`` (Cheng et al., arXiv 2309.05516), which keep their tensors as GPTQ or AWQ
do: ``packing_format`` says which. ``extra_config`` has modules of other sizes; those of 16 bits are in floats.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from kernels.models.config import ConfigError
from kernels.quantization.awq import Awq
from kernels.quantization.gptq import Gptq
from kernels.quantization.scheme import Files, Scheme, Stored
from kernels.quantization.weights import QuantizedWeight

__all__ = ["AutoRound"]

_PACKINGS: dict[str, type[Awq] | type[Gptq]] = {"auto_gptq": Gptq, "auto_awq": Awq}


class AutoRound(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        packing = str(settings.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round:")
        if packing not in _PACKINGS:
            raise ConfigError(
                f"quantization_config: packing_format {packing!r} is not read; use a checkpoint in "
                f"{' or '.join(f'auto_round:{name}' for name in _PACKINGS)}"
            )
        if settings.get("data_type", "int") != "int" or settings.get("act_bits", 16) < 16:
            raise ConfigError(
                "quantization_config: of auto-round, whole weights (data_type int) with floats as inputs (act_bits 16) "
                "are read; use such a checkpoint"
            )
        make, whole = _PACKINGS[packing], {**settings, "modules_to_not_convert": (), "dynamic": {}}
        self._plain: Scheme = make(whole)
        self._own: list[tuple[str, Scheme | None]] = []
        for name, sizes in (settings.get("extra_config") or {}).items():
            in_floats = isinstance(sizes, Mapping) and sizes.get("bits", 4) >= 16
            self._own.append((name, None if in_floats else make({**whole, **sizes, "lm_head": name == "lm_head"})))
        self.name = f"auto-round, {self._plain.name}"

    def _of(self, module: str) -> Scheme | None:
        for name, scheme in self._own:
            if module == name or _matches(name, module):
                return scheme
        return self._plain

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        scheme = self._of(module)
        return None if scheme is None else scheme.tensors(module, shape)

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        scheme = self._of(module)
        assert scheme is not None, "it has tensors"
        return scheme.read(files, module, shape)

    def ignores(self, name: str, shapes: Collection[str]) -> bool:
        scheme = self._of(name.rpartition(".")[0])
        return scheme is not None and scheme.ignores(name, shapes)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        return False
