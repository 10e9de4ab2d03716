"""Checkpoints of ``quant_method: auto-round`` (Cheng et al., arXiv 2309.05516), which keep their tensors as GPTQ or AWQ
do: ``packing_format`` says which. ``auto_round:auto_gptq`` is GPTQ's; ``auto_round``, written of asymmetric
weights of 8 bits or of several sizes, and ``auto_round:gptqmodel`` are GPTQ's with zeros as they are (gptq_v2).

``extra_config`` has modules of other sizes, by their names or by patterns that are searched in them: a whole name comes
before all patterns, and of these the first that is found counts. Modules of 16 bits are in floats, and so are those
in which a pattern of ``modules_to_not_convert`` is found, whatever ``extra_config`` says
(auto_round/inference/convert_model.py of https://github.com/intel/auto-round).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from kernels.models.config import ConfigError
from kernels.quantization.awq import Awq
from kernels.quantization.gptq import Gptq
from kernels.quantization.packed import skipped_of
from kernels.quantization.patterns import NoPattern, Patterns
from kernels.quantization.scheme import Files, Scheme, Stored
from kernels.quantization.weights import QuantizedWeight

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
        self._floats = [found for name in skipped_of(settings, skipped) if (found := _search(patterns, name, skipped))]
        self._own: dict[str, Scheme | None] = {}
        extra = settings.get("extra_config") or {}
        if not isinstance(extra, Mapping):
            raise ConfigError(
                f"quantization_config: extra_config must be an object of sizes by module, and is {extra!r}"
            )
        # An empty object says nothing of its own, nor does a pattern that is none.
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
        # Asked for each tensor of a module, and some checkpoints have thousands of patterns.
        self._of = cache(self._scheme_of)
        self.name = f"auto-round, {self._plain.name}"

    def _scheme_of(self, module: str) -> Scheme | None:
        if any(found(module) for found in self._floats):
            return None
        if module in self._own:
            return self._own[module]
        return next((self._own[name] for found, name in self._patterns if found(module)), self._plain)

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


def _search(patterns: Patterns, text: str, field: str) -> Callable[[str], bool] | None:
    """None for what is no regular expression: it names one module alone. Raises ConfigError."""
    try:
        return patterns.search(text, field)
    except NoPattern:
        return None
