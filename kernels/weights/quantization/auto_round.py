"""Checkpoints of ``quant_method: auto-round`` (Cheng et al., arXiv 2309.05516), in the layout of GPTQ or AWQ.

``packing_format`` names the layout. ``auto_round:auto_gptq`` is GPTQ's. ``auto_round`` (asymmetric weights of 8 bits or
of mixed sizes) and ``auto_round:gptqmodel`` are GPTQ's with zero points stored unchanged (gptq_v2).

``extra_config`` gives other sizes to some modules, by name or by a pattern that is searched in the name. A full name
wins over patterns; among patterns the first match counts. Modules of 16 bits stay in floats. So do modules that match a
pattern of ``modules_to_not_convert``, which wins over ``extra_config``
(auto_round/inference/convert_model.py of https://github.com/intel/auto-round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.weights.quantization.awq import Awq
from kernels.weights.quantization.gptq import Gptq
from kernels.weights.quantization.packed import skipped_of
from kernels.weights.quantization.patterns import NoPattern, Patterns
from kernels.weights.quantization.scheme import Files, Scheme, StoredTensor
from kernels.weights.quantization.weights import QuantizedWeight
from kernels.weights.tensors import Tensors, TensorSpec

__all__ = ["AutoRound"]

_PACKINGS: dict[str, type[Awq] | type[Gptq]] = {
    "auto_round:auto_gptq": Gptq,
    "auto_round:auto_awq": Awq,
    "auto_round:gptqmodel": Gptq,
    "auto_round": Gptq,
}
_ZEROS_AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel")


class AutoRound(Scheme):
    """``settings``: quantization_config. Raises ConfigError."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        packing = str(settings.get("packing_format", "auto_round:auto_gptq"))
        packing = packing if packing.startswith("auto_round") else f"auto_round:{packing}"
        if packing not in _PACKINGS:
            raise ConfigError(
                f"quantization_config: packing_format {packing!r} is not read; use a checkpoint in "
                f"{' or '.join(_PACKINGS)}"
            )
        if settings.get("data_type", "int") != "int" or settings.get("act_bits", 16) not in (16, 32, None):
            raise ConfigError(
                "quantization_config: of auto-round, whole weights (data_type int) with floats as inputs (act_bits 16) "
                "are read; use such a checkpoint"
            )
        make, whole = _PACKINGS[packing], {**settings, "modules_to_not_convert": (), "dynamic": {}}
        if packing in _ZEROS_AS_THEY_ARE:
            whole["checkpoint_format"] = "gptq_v2"
        self._plain: Scheme = make(whole)
        patterns, skipped = Patterns(), "modules_to_not_convert"
        self._floats = [
            result for name in skipped_of(settings, skipped) if (result := _search(patterns, name, skipped))
        ]
        self._own: dict[str, Scheme | None] = {}
        extra = settings.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise ConfigError(
                f"quantization_config: extra_config must be an object of sizes by module, and is {extra!r}"
            )
        # An empty object and an invalid pattern have no effect.
        searches = {name: _search(patterns, name, "extra_config") for name in extra}
        self._patterns = [(search, name) for name, search in searches.items() if extra[name] and search is not None]
        for name, sizes in extra.items():
            bits = sizes.get("bits", whole.get("bits")) if isinstance(sizes, Mapping) else None
            if type(bits) is not int:
                raise ConfigError(
                    f"quantization_config: extra_config must give {name!r} an object with whole bits, and gives "
                    f"{sizes!r}"
                )
            search = searches[name]
            names_head = name == "lm_head" or (search is not None and search("lm_head"))
            own = {**whole, **sizes, "lm_head": names_head}
            self._own[name] = None if bits >= 16 else make(own)
        # Cached: it is looked up for each tensor of a module, and some checkpoints have thousands of patterns.
        self._of = cache(self._scheme_of)
        self.name = f"auto-round, {self._plain.name}"

    def _scheme_of(self, module: str) -> Scheme | None:
        if any(result(module) for result in self._floats):
            return None
        if module in self._own:
            return self._own[module]
        return next((self._own[name] for result, name in self._patterns if result(module)), self._plain)

    def tensors(self, weight: TensorSpec) -> dict[str, StoredTensor] | None:
        scheme = self._of(weight.module)
        return None if scheme is None else scheme.tensors(weight)

    def read(self, files: Files, weight: TensorSpec) -> QuantizedWeight | Tensor:
        scheme = self._of(weight.module)
        assert scheme is not None, "it has tensors"
        return scheme.read(files, weight)

    def ignores(self, name: str, tensors: Tensors) -> bool:
        scheme = self._of(name.rpartition(".")[0])
        return scheme is not None and scheme.ignores(name, tensors)


def _search(patterns: Patterns, text: str, field: str) -> Callable[[str], bool] | None:
    """A search for the pattern ``text``. An invalid pattern matches only the module of that name. Raises
    ConfigError."""
    try:
        return patterns.search(text, field)
    except NoPattern:
        return None
