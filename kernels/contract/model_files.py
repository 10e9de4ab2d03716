"""GGUF files in the engine's process: metadata, and the equivalent Hugging Face configuration.

No torch. Readers are imported by name at first use.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

__all__ = ["LENGTH_KEYS", "GgufHeader", "gguf_config", "gguf_generation_config", "read_gguf_header", "read_gguf_text"]

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
"""What config.json calls the most tokens of a sequence."""

_HEADER = "kernels.weights.gguf.header"
_DESCRIPTION = "kernels.models.gguf_description"


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
