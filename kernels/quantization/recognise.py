"""Which scheme a checkpoint has: from what its own files say, or from what the user asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernels.gguf.header import is_gguf, read_header
from kernels.models.config import ConfigError, read_merged
from kernels.quantization.auto_round import AutoRound
from kernels.quantization.awq import Awq
from kernels.quantization.compressed import Compressed
from kernels.quantization.compressed_settings import import_package
from kernels.quantization.fp8 import Fp8
from kernels.quantization.gguf_files import GgufScheme
from kernels.quantization.gptq import Gptq
from kernels.quantization.modelslim import ModelSlim, description_file, read_description
from kernels.quantization.online import ONLINE, Online
from kernels.quantization.scheme import Scheme

__all__ = ["METHODS", "import_ahead", "recognise"]

Reader = Callable[[Mapping[str, Any]], Scheme]

METHODS: dict[str, Reader] = {
    "auto-round": AutoRound,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "gptq": Gptq,
}
"""``quant_method`` of quantization_config -> what makes the scheme of that object. Raises ConfigError."""


def recognise(model_path: str | Path, asked: str, overrides: str = "{}") -> Scheme | None:
    """The scheme of the checkpoint in ``model_path``; None for floats. Raises ConfigError, saying what to do.

    ``asked``: of --quantization, empty to do as the files say: must agree with them, or names one of ``ONLINE`` for a
    checkpoint in floats; unquant: they must be floats. ``overrides``: a JSON object that was merged over config.json.
    A GGUF file's weights may also be made floats of, and be quantized anew.
    """
    if is_gguf(model_path):
        if asked in ("", "gguf"):
            return GgufScheme(read_header(model_path))
        if asked not in ("unquant", *ONLINE):
            raise ConfigError(f"this model is a GGUF file, and --quantization asks for {asked}; leave the flag out")
        return _online(asked)
    settings = read_merged(model_path, overrides).get("quantization_config")
    description = description_file(model_path)
    if description is not None:
        return _described(description, settings, asked)
    if not settings:
        return _online(asked)
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json: quantization_config must be an object, and is {settings!r}")
    method = str(settings.get("quant_method", ""))
    if method not in METHODS:
        raise ConfigError(
            f"this checkpoint is quantized by {method or 'a method that its quantization_config does not name'}; those "
            f"that are read are {', '.join(sorted(METHODS))}: use such a checkpoint, or one in bf16"
        )
    if asked and asked != method:
        raise ConfigError(
            f"this checkpoint is quantized by {method}, and --quantization asks for {asked}; leave the flag out, or "
            "use a checkpoint in bf16"
        )
    return METHODS[method](settings)


def import_ahead(model_path: str | Path, overrides: str = "{}") -> None:
    """Import the package that ``recognise`` will need, if any, which takes seconds. Raises ConfigError."""
    settings = None if is_gguf(model_path) else read_merged(model_path, overrides).get("quantization_config")
    if isinstance(settings, dict) and settings.get("quant_method") == "compressed-tensors":
        import_package()


def _described(file: Path, settings: object, asked: str) -> Scheme:
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method in METHODS:
        raise ConfigError(
            f"{file} says that this checkpoint is quantized by modelslim, and its config.json says by {method}; keep "
            "the one that belongs to the weights"
        )
    if asked not in ("", "modelslim"):
        raise ConfigError(
            f"this checkpoint is quantized by modelslim, and --quantization asks for {asked}; leave the flag out, or "
            "use a checkpoint in bf16"
        )
    return ModelSlim(read_description(file))


def _online(asked: str) -> Scheme | None:
    if asked in ("", "unquant"):
        return None
    if asked not in ONLINE:
        raise ConfigError(
            f"--quantization {asked} is for a checkpoint that was quantized so, and this one is in floats; leave it "
            f"out, or ask for {' or '.join(ONLINE)}, which are made while the weights are loaded"
        )
    return Online(asked)
