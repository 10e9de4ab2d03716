"""Recognizes the quantization scheme of a checkpoint, from its files or from --quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.weights.config_json import read_merged
from kernels.weights.gguf.header import is_gguf, read_header
from kernels.weights.quantization.auto_round import AutoRound
from kernels.weights.quantization.awq import Awq
from kernels.weights.quantization.bitsandbytes import BitsAndBytes
from kernels.weights.quantization.compressed import Compressed
from kernels.weights.quantization.compressed_settings import import_package
from kernels.weights.quantization.fp8 import Fp8
from kernels.weights.quantization.gguf_files import GgufScheme
from kernels.weights.quantization.gptq import Gptq
from kernels.weights.quantization.modelopt import ModelOpt
from kernels.weights.quantization.modelslim import ModelSlim, description_file, read_description
from kernels.weights.quantization.mxfp4 import Mxfp4
from kernels.weights.quantization.online import ONLINE, Online
from kernels.weights.quantization.quark import Quark
from kernels.weights.quantization.scheme import Scheme

__all__ = ["METHODS", "detect_scheme", "preload"]

Reader = Callable[[Mapping[str, Any]], Scheme]

METHODS: dict[str, Reader] = {
    "auto-round": AutoRound,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": Compressed,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": Mxfp4,
    "quark": Quark,
}
"""Makers of schemes by the ``quant_method`` of quantization_config. They raise ConfigError."""


_MODELOPT = ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed")


def detect_scheme(model_path: str | Path, flag: str, overrides: str = "{}") -> Scheme | None:
    """The scheme of the checkpoint in ``model_path``; None for floats. Raises ConfigError, saying what to do.

    ``flag``: the value of --quantization. Empty follows the files. A method must agree with the files, or be one of
    ``ONLINE`` for a float checkpoint; ``unquant`` requires a float checkpoint. A GGUF file may also be dequantized and
    quantized again. ``overrides``: the JSON object that is merged over config.json.
    """
    if is_gguf(model_path):
        if flag in ("", "gguf"):
            return GgufScheme(read_header(model_path))
        if flag not in ("unquant", *ONLINE):
            raise ConfigError(f"this model is a GGUF file, and --quantization asks for {flag}; leave the flag out")
        return _online(flag)
    config = read_merged(model_path, overrides)
    settings = config.get("quantization_config")
    description = description_file(model_path)
    if description is not None:
        return _described(description, settings, flag)
    if not settings:
        return _online(flag)
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json: quantization_config must be an object, and is {settings!r}")
    method = str(settings.get("quant_method", ""))
    method = "modelopt" if method in _MODELOPT else method
    if method not in METHODS:
        raise ConfigError(
            f"this checkpoint is quantized by {method or 'a method that its quantization_config does not name'}; those "
            f"that are read are {', '.join(sorted(METHODS))}: use such a checkpoint, or one in bf16"
        )
    if flag and flag != method:
        raise ConfigError(
            f"this checkpoint is quantized by {method}, and --quantization asks for {flag}; leave the flag out, or "
            "use a checkpoint in bf16"
        )
    if method == "fp8" and "expert_dtype" in config:  # DeepSeek V4 has it beside them
        settings = {"expert_dtype": config["expert_dtype"], **settings}
    return METHODS[method](settings)


def preload(model_path: str | Path, overrides: str = "{}") -> None:
    """Import the package that ``detect_scheme`` will need, if any. That takes seconds. Raises ConfigError."""
    settings = None if is_gguf(model_path) else read_merged(model_path, overrides).get("quantization_config")
    if isinstance(settings, dict) and settings.get("quant_method") == "compressed-tensors":
        import_package()


def _described(file: Path, settings: object, flag: str) -> Scheme:
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method in METHODS:
        raise ConfigError(
            f"{file} says that this checkpoint is quantized by modelslim, and its config.json says by {method}; keep "
            "the one that belongs to the weights"
        )
    if flag not in ("", "modelslim"):
        raise ConfigError(
            f"this checkpoint is quantized by modelslim, and --quantization asks for {flag}; leave the flag out, or "
            "use a checkpoint in bf16"
        )
    return ModelSlim(read_description(file))


def _online(flag: str) -> Scheme | None:
    if flag in ("", "unquant"):
        return None
    if flag not in ONLINE:
        raise ConfigError(
            f"--quantization {flag} is for a checkpoint that was quantized so, and this one is in floats; leave it "
            f"out, or ask for {' or '.join(ONLINE)}, which are made while the weights are loaded"
        )
    return Online(flag)
