"""How a draft's weights are quantized: by a scheme of its own, or as the target's are while they are loaded."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from kernels.gguf.header import is_gguf
from kernels.models.config import ConfigError, read_json
from kernels.quantization.modelslim import description_file
from kernels.quantization.online import ONLINE
from kernels.quantization.recognise import recognise
from kernels.quantization.scheme import Files, Scheme, Shapes, Stored
from kernels.quantization.weights import QuantizedWeight
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig

__all__ = ["draft_scheme"]


class _AsStored(Scheme):
    """``scheme`` for what ``names`` hold in its tensors: tools leave heads in floats and do not say so."""

    def __init__(self, scheme: Scheme, names: Collection[str]) -> None:
        self.name = scheme.name
        self._scheme = scheme
        parts = [name.rpartition(".") for name in names]
        self._floats = {module for module, _, kind in parts if kind == "weight"}
        self._floats -= {module for module, _, kind in parts if kind not in ("weight", "bias")}

    def shapes(self, shapes: Shapes) -> Shapes:
        return self._scheme.shapes(shapes)

    def tensors(self, module: str, shape: tuple[int, int]) -> dict[str, Stored] | None:
        return None if module in self._floats else self._scheme.tensors(module, shape)

    def read(self, files: Files, module: str, shape: tuple[int, int]) -> QuantizedWeight:
        return self._scheme.read(files, module, shape)

    def convert(self, module: str, weight: Tensor) -> QuantizedWeight | None:
        return self._scheme.convert(module, weight)

    def ignores(self, name: str, shapes: Collection[str]) -> bool:
        return self._scheme.ignores(name, shapes)


def draft_scheme(
    path: str | Path, config: RunnerConfig, settings: SpeculativeSettings, names: Collection[str] = ()
) -> Scheme | None:
    """Of the draft in ``path``, whose tensors are ``names``; None for floats. ``config``: of the target. Raises
    ConfigError, saying what to do."""
    stored = is_gguf(path) or description_file(path) is not None or bool(read_json(path).get("quantization_config"))
    asked = settings.quantization
    if not asked and not stored and config.quantization in ONLINE:
        asked = config.quantization
    if stored and settings.algorithm == "DFLASH":
        raise ConfigError(
            f"the draft in {path} is quantized, and a DFLASH draft projects keys and values from weights in floats; "
            "use one in bf16, which --speculative-draft-model-quantization int8 or fp8 may round while it is loaded"
        )
    try:
        found = recognise(path, asked)
    except ConfigError as error:
        raise ConfigError(f"--speculative-draft-model-quantization, the draft in {path}: {error}") from error
    return found if found is None or is_gguf(path) else _AsStored(found, names)
