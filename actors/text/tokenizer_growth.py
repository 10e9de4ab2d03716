"""Bounds how much the steps of tokenizer.json can lengthen a text: chained steps multiply and could fill the memory."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from actors.text.model_files import ModelPathError

__all__ = ["MAX_GROWTH", "check_growth"]

MAX_GROWTH = 64.0
"""Most growth of a text, as a factor. Usual tokenizers stay below 10."""

_ZERO_WIDTH = re.compile(r"\(\?[=!<]|\\[bBAzZGK]|[\^$]")
"""Pattern elements that can match between two characters even if the pattern does not match an empty text."""


class _Steps(msgspec.Struct):
    """The parts of tokenizer.json that change a text or its tokens."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_growth(file: Path) -> None:
    """Raise :class:`ModelPathError`, naming the file, if a tokenizer.json can lengthen a text too much."""
    try:
        steps = msgspec.json.decode(file.read_bytes(), type=_Steps)
        encoding = _growth([steps.normalizer, steps.pre_tokenizer], byte_level=2.0) * _growth(steps.post_processor)
        decoding = _growth(steps.decoder)
    except (msgspec.DecodeError, OSError, RecursionError, UnicodeDecodeError) as error:
        raise ModelPathError(f"{file} cannot be read as a tokenizer: {error}") from error
    for growth, how in ((encoding, "encodes"), (decoding, "decodes")):
        if growth > MAX_GROWTH:
            raise ModelPathError(
                f"{file} is refused: the steps by which it {how} may make a text {growth:.3g} times as long, and at "
                f"most {MAX_GROWTH:.0f} are accepted. Is the file from a source that you trust?"
            )


def _growth(step: Any, byte_level: float = 1.0) -> float:
    """Upper bound of the growth factor of ``step``. ``byte_level``: the factor of a ByteLevel step."""
    if isinstance(step, list):
        return prod(_growth(each, byte_level) for each in step)
    if not isinstance(step, dict):
        return 1.0
    if "single" in step:  # a template, which may repeat its sequence
        return max(1.0, *(str(step.get(form)).count("Sequence") for form in ("single", "pair")))
    own = 1.0
    if step.get("type") == "ByteLevel":
        own = byte_level
    elif isinstance(content := step.get("content"), str):
        own = max(1.0, _replacement(step.get("pattern"), len(content)))
    elif isinstance(prepended := step.get("prepend"), str):
        own = 1.0 + len(prepended)  # for each piece of text between special tokens
    return own * prod(_growth(inner, byte_level) for inner in step.values() if isinstance(inner, list))


def _replacement(pattern: Any, size: int) -> float:
    """Growth factor of replacing each match of ``pattern`` by ``size`` characters."""
    if isinstance(pattern, dict) and isinstance(regex := pattern.get("Regex"), str):
        return size + _may_be_empty(regex) * (size > 0)
    literal = pattern.get("String") if isinstance(pattern, dict) else pattern
    length = len(literal) if isinstance(literal, str) else 0
    return size / length if length else 1.0 + size


def _may_be_empty(regex: str) -> bool:
    try:
        return bool(_ZERO_WIDTH.search(regex)) or re.fullmatch(regex, "") is not None
    except (re.error, RecursionError, OverflowError):  # another dialect
        return True
