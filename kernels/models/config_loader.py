"""The sizes of a model, from a Hugging Face directory or from a GGUF file."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.gguf_description import describe, named
from kernels.models.pooling import read_pooling
from kernels.models.registry import LANGUAGE_MODEL_SIZES, UnknownArchitecture, find, language_architecture
from kernels.weights.config_json import merge_overrides
from kernels.weights.config_json import read_json as read_config_json
from kernels.weights.gguf.header import read_header
from kernels.weights.wrapped import WRAPPER

__all__ = ["CodeChoice", "parse_config", "read_config", "read_json"]


_log = logging.getLogger("troupe.kernels")


@dataclass(frozen=True)
class CodeChoice:
    """Whose code runs a model. ``choice``: native | transformers | auto. Others as in ``CodeModel``."""

    choice: str = "native"
    trusted: bool = False
    quantization: str = ""
    dummy: bool = False
    seed: int = 0


def read_config(
    model_path: str | Path,
    overrides: str = "{}",
    quantized: bool = False,
    *,
    is_embedding: bool = False,
    code: CodeChoice = CodeChoice(),
) -> ModelConfig:
    """Parse ``model_path/config.json`` with the JSON object ``overrides`` merged over it.

    ``model_path`` may also be a GGUF file, whose metadata says the same. ``quantized``: whether weights may be
    quantized; ``kernels.weights.quantization.detect`` finds how. ``is_embedding``: see ``read_pooling``. Raises
    ConfigError, saying what to do.
    """
    raw = merge_overrides(read_json(model_path), overrides)
    if code.choice == "transformers":
        return _read_code(model_path, raw, is_embedding, code)
    try:
        config = parse_config(raw, quantized)
        if outer := raw.get(WRAPPER):
            _log.info("%s: its language model is run, by %s; it reads no images", outer, config.architecture)
    except UnknownArchitecture as error:
        if code.choice != "auto":
            raise
        try:
            return _read_code(model_path, raw, is_embedding, code)
        except ConfigError as reason:
            raise ConfigError(
                f"{error.named}, nor can transformers' modeling code run it: {reason}; {error.known}"
            ) from reason
    except ConfigError as error:
        if Path(model_path).is_file():
            raise named(error, model_path, raw["model_type"]) from error
        raise
    pooling = read_pooling(Path(model_path), raw, is_embedding)
    if pooling is None:
        return config
    longest = min(config.max_positions, pooling.max_tokens or config.max_positions)
    return dataclasses.replace(config, pooling=pooling, max_positions=longest)


def _read_code(model_path: str | Path, raw: Mapping[str, Any], is_embedding: bool, code: CodeChoice) -> ModelConfig:
    from kernels.models.fallback import model as fallback

    if read_pooling(Path(model_path), raw, is_embedding) is not None:
        raise ConfigError(
            "transformers' modeling code is run to generate text alone; models that embed, score or classify need a "
            "native family (--model-impl native)"
        )
    config = fallback.config(
        model_path, raw, trusted=code.trusted, quantization=code.quantization, dummy=code.dummy, seed=code.seed
    )
    _log.warning(
        "%s runs by transformers' modeling code, eagerly: it is slower than a native family%s",
        config.architecture,
        "; --trust-remote-code lets Python files of the checkpoint run in this process, with all rights of this user"
        if code.trusted and raw.get("auto_map")
        else "",
    )
    return config


def read_json(model_path: str | Path) -> dict[str, Any]:
    """The object of config.json, of a GGUF file the one that it stands for. Raises ConfigError, saying what to do."""
    if Path(model_path).is_file():
        return describe(read_header(model_path))
    raw = read_config_json(model_path)
    inner = language_architecture(raw)
    if inner is None:
        return raw
    return {**LANGUAGE_MODEL_SIZES.get(raw["model_type"], {}), **raw, "architectures": [inner]}


def parse_config(raw: Mapping[str, Any], quantized: bool = False) -> ModelConfig:
    """Check a config.json object. Raises ConfigError, naming the key."""
    names = raw.get("architectures") or []
    architecture, family = find(names if isinstance(names, list) else [names])
    if raw.get("quantization_config") and not quantized:
        raise ConfigError("this checkpoint is quantized (quantization_config); use the bf16 or fp32 checkpoint instead")
    return family.config(ConfigReader(raw, architecture))
