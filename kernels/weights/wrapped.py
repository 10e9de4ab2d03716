"""The language model inside a checkpoint that also reads images: its part of config.json, and the names of its tensors.

Vendors and versions of transformers keep it under different names: ``language_model.model.layers``,
``model.language_model.layers`` or plain ``model.layers``. Here they are those of a language model alone. Other tensors
(towers of images and sound, projectors) keep their names and are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["WRAPPER", "is_adapter", "language_model", "plain_name", "wrapped_names"]

WRAPPER = "language_model_of"
"""The key of config.json's object that names the architecture around the language model."""

_PREFIXES = (
    ("model.language_model.lm_head", "lm_head"),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)
_OUTER = ("architectures", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "eos_token_id")
_MODULES = ("ignore", "ignored_layers", "modules_to_not_convert")


def plain_name(name: str) -> str:
    """The name of a tensor or module of the language model, without what is around it. Adapters for images and sound
    stand beside a ``base_layer`` in Phi-4's files."""
    name = name.replace(".base_layer.", ".")
    return next((new + name.removeprefix(old) for old, new in _PREFIXES if name.startswith(old)), name)


def wrapped_names(module: str) -> tuple[str, ...]:
    """The names that a module of the language model may have inside a checkpoint that also reads images."""
    return tuple(old + module.removeprefix(new) for old, new in _PREFIXES if module.startswith(new))


def is_adapter(name: str) -> bool:
    """Whether a tensor is of an adapter for images or sound, which text does not need."""
    return name.endswith((".vision.weight", ".speech.weight")) and (".lora_A." in name or ".lora_B." in name)


def language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The object of config.json as one of the language model alone; unchanged where there is nothing around it.

    ``architectures`` stay those of the file, whose first one is also in ``WRAPPER``.
    """
    text, names = raw.get("text_config"), raw.get("architectures")
    if not isinstance(text, Mapping):
        if "vision_config" not in raw:
            return dict(raw)
        text = raw  # Qwen2-VL's files
    outer = {key: raw[key] for key in _OUTER if raw.get(key) is not None}
    result = outer | {key: value for key, value in text.items() if value is not None or key not in outer}
    result |= {key: raw[key] for key in ("tie_word_embeddings",) if raw.get(key) is not None}
    if raw.get("model_type") == "clip":
        result |= _clip(raw)
    result["architectures"] = names
    result[WRAPPER] = str(names[0]) if isinstance(names, list) and names else ""
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := result.get(key), Mapping):
            result[key] = _for_text(rope)
    if isinstance(settings := result.get("quantization_config"), Mapping):
        result["quantization_config"] = _plain_settings(settings)
    return result


def _plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """quantization_config with the names of modules without what is around them. Those in patterns stay: see
    ``kernels.weights.quantization.patterns``."""
    result = {key: _plain_names(value) if key in _MODULES else value for key, value in settings.items()}
    if isinstance(extra := result.get("extra_config"), Mapping):
        result["extra_config"] = {plain_name(name): sizes for name, sizes in extra.items()}
    if isinstance(groups := result.get("config_groups"), Mapping):
        result["config_groups"] = {
            name: {**group, "targets": _plain_names(group["targets"])}
            if isinstance(group, Mapping) and "targets" in group
            else group
            for name, group in groups.items()
        }
    return result


def _plain_names(names: object) -> object:
    return [plain_name(one) if isinstance(one, str) else one for one in names] if isinstance(names, list) else names


def _clip(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What CLIP's files say apart: ``text_config_dict`` of older ones is over ``text_config``, also in that it leaves
    ``eos_token_id`` at transformers' default, and a text's projection has the size that it shares with images."""
    older = raw.get("text_config_dict")
    shared = {"projection_dim": raw["projection_dim"] if raw.get("projection_dim") is not None else 512}
    return {"eos_token_id": 49407, **older, **shared} if isinstance(older, Mapping) else shared


def _for_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rotation without the sections of images: text has the same position in all of them."""
    result = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    for key in ("type", "rope_type"):
        if result.get(key) == "mrope":
            result[key] = "default"
    return result
