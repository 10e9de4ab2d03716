"""How a draft's weights are quantized: by a scheme of its own, or as the target's are while they are loaded."""

from __future__ import annotations

from pathlib import Path

from kernels.gguf.header import is_gguf
from kernels.models.config import ConfigError, read_json
from kernels.quantization.modelslim import description_file
from kernels.quantization.online import ONLINE
from kernels.quantization.recognise import recognise
from kernels.quantization.scheme import Scheme
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig

__all__ = ["draft_scheme"]


def draft_scheme(path: str | Path, config: RunnerConfig, settings: SpeculativeSettings) -> Scheme | None:
    """Of the draft in ``path``; None for floats. ``config``: of the target. Raises ConfigError, saying what to do."""
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
        return recognise(path, asked)
    except ConfigError as error:
        raise ConfigError(f"--speculative-draft-model-quantization, the draft in {path}: {error}") from error
