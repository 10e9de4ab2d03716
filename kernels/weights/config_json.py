"""config.json of a Hugging Face directory, read as data: no code of a checkpoint is ever run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.contract.errors import ConfigError
from kernels.contract.model_files import merge_objects
from kernels.weights.wrapped import WRAPPER, language_model

__all__ = ["merge_overrides", "read_json", "read_merged"]


def read_merged(model_path: str | Path, overrides: str) -> dict[str, Any]:
    """``read_json`` with the JSON object ``overrides`` merged over it. Raises ConfigError, saying what to do."""
    return merge_overrides(read_json(model_path), overrides)


def read_json(model_path: str | Path) -> dict[str, Any]:
    """``model_path/config.json``, of a model that also reads images its language model's part. Raises ConfigError,
    saying what to do."""
    path = Path(model_path) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; give a directory with config.json and *.safetensors (a Hugging Face checkpoint)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must be a JSON object; download the checkpoint again")
    if raw.get("quantization_config") is None and (settings := _modelopt(path.with_name("hf_quant_config.json"))):
        raw["quantization_config"] = settings
    return language_model(raw)


def _modelopt(path: Path) -> dict[str, Any]:
    """The ``quantization_config`` that a file of NVIDIA's Model Optimizer stands for; empty without weights that are
    quantized. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); download the checkpoint again") from error
    own = raw.get("quantization") if isinstance(raw, dict) else None
    if not isinstance(own, dict):
        raise ConfigError(f"{path} must be an object with an object quantization; download the checkpoint again")
    return {**own, "quant_method": "modelopt"} if own.get("quant_algo") else {}


def merge_overrides(raw: Mapping[str, Any], overrides: str) -> dict[str, Any]:
    """``raw`` with the JSON object ``overrides`` over it: nested objects are merged key by key, other values replace.
    What they say of ``text_config`` is over a language model's object, of which that is the part; keys beside it win.

    Raises ConfigError, saying what to do.
    """
    try:
        extra = json.loads(overrides or "{}")
    except ValueError as error:
        raise ConfigError(f"the model override arguments are not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("the model override arguments must be a JSON object")
    if WRAPPER in raw and isinstance(text := extra.pop("text_config", None), dict):
        raw = merge_objects(raw, {key: value for key, value in text.items() if key != "architectures"})
    return merge_objects(raw, extra)
