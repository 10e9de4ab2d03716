"""What two nodes compare of their model's files: sizes and headers, not the weights themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

__all__ = ["fingerprint"]

_HEADER_LENGTH = 8
_LONGEST_HEADER = 256 << 20
_GGUF_HEADER = 4 << 20


def fingerprint(model: Path, *, weights: bool = True, prefix: str = "") -> dict[str, str]:
    """Parts of the model in a directory or GGUF file, and a digest or description of each. Blocks.

    The config is compared by its bytes; weights by the names, sizes and headers of their files, which list the name,
    type, shape and offset of each tensor. Unreadable files count as missing. ``weights``: whether they are compared.
    ``prefix``: of the names of parts.
    """
    parts = {f"{prefix}model path": str(model)}
    if model.is_dir():
        parts[f"{prefix}config.json"] = _digest([_bytes(model / "config.json")])
    if weights:
        files = sorted(_weight_files(model))
        size = sum(file.stat().st_size for file in files if file.is_file())
        headers = _digest(part for file in files for part in (file.name.encode(), _header(file)))
        parts[f"{prefix}weights"] = f"{len(files)} files of {size} bytes with headers {headers}"
    return parts


def _weight_files(model: Path) -> set[Path]:
    """The weight files that workers read: the single file, or else those of a vendor's ranks, or of the index."""
    if not model.is_dir():
        return {model}
    single = model / "model.safetensors"
    if single.is_file():
        return {single}
    if divided := {*model.glob("*-TP-[0-9][0-9][0-9].safetensors"), *model.glob("*-TP-common.safetensors")}:
        return divided
    try:
        index = json.loads(_bytes(model / "model.safetensors.index.json"))
        return {model / Path(str(name)).name for name in index["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()  # loading the weights raises the error


def _header(file: Path) -> bytes:
    """The size of a file and its header."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size.to_bytes(8, "little")
            if file.suffix.lower() == ".gguf":
                return size + opened.read(_GGUF_HEADER)
            length = int.from_bytes(opened.read(_HEADER_LENGTH), "little")
            return size + opened.read(min(length, _LONGEST_HEADER))
    except OSError:
        return b""


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
