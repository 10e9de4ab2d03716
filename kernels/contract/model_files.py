"""What the engine's process reads of a model's files: metadata of GGUF files, their equivalent Hugging Face
configuration, and pooling.

No torch. Readers are imported by name at first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from kernels.contract.pooling import PoolingConfig

__all__ = [
    "LENGTH_KEYS",
    "GgufHeader",
    "gguf_config",
    "gguf_generation_config",
    "has_family",
    "merge_objects",
    "read_gguf_header",
    "read_gguf_text",
    "read_pooling",
]

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
)
"""What config.json calls the most tokens of a sequence."""

_HEADER = "kernels.weights.gguf.header"
_DESCRIPTION = "kernels.models.gguf_description"
_POOLING = "kernels.models.pooling"
_REGISTRY = "kernels.models.registry"


class GgufHeader(Protocol):
    """The header of a GGUF file."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Numbers, strings and lists by key."""
        ...


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises GgufError."""
    return cast(GgufHeader, import_module(_HEADER).read_header(path))


def read_gguf_text(path: Path, key: str) -> str | None:
    """The text of one key; None without it. Reads no further than that key. Raises GgufError."""
    return cast("str | None", import_module(_HEADER).read_text(path, key))


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The equivalent of config.json. Raises GgufError, naming the key."""
    return cast("dict[str, Any]", import_module(_DESCRIPTION).describe(header))


def gguf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """The equivalent of generation_config.json."""
    return cast("dict[str, Any]", import_module(_DESCRIPTION).generation_defaults(header))


def has_family(config: Mapping[str, Any]) -> bool:
    """Whether a family runs a model with this config.json; others may run by transformers' modeling code."""
    names = config.get("architectures") or []
    return bool(import_module(_REGISTRY).has_family(names if isinstance(names, list) else [names]))


def merge_objects(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` over it: nested objects are merged key by key, other values replace."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge_objects(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def read_pooling(directory: Path, config: Mapping[str, Any], is_embedding: bool = False) -> PoolingConfig | None:
    """The pooling of the model in ``directory``, whose config.json is ``config``; None for a model that generates text.

    ``is_embedding``: whether a model that could generate text makes vectors of its last tokens instead. Raises
    ConfigError.
    """
    return cast("PoolingConfig | None", import_module(_POOLING).read_pooling(directory, config, is_embedding))
