"""``--compilation-config``: vLLM's JSON object, of which the members about graphs are arguments here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.options.errors import ArgumentError

__all__ = ["split_compilation_config"]

_KEYS = {
    "cudagraph_capture_sizes": "cuda-graph-bs",
    "max_cudagraph_capture_size": "cuda-graph-max-bs",
}
_MODES: dict[str, tuple[str, ...]] = {  # the flags that a mode sets
    "NONE": ("disable-cuda-graph",),
    "FULL": (),
    "FULL_AND_PIECEWISE": (),
    "FULL_DECODE_ONLY": ("disable-piecewise-cuda-graph",),
}


def split_compilation_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """The key, the argument's name and its value, for each member that changes something.

    Raises ArgumentError for a mode of graphs that is not built, and for a member that compiles the model.
    """
    for key, value in config.items():
        if key == "cudagraph_mode":
            for flag in _flags(value):
                yield key, flag, True
        elif key in _KEYS:
            yield key, _KEYS[key], value
        elif value and value != "NONE":
            raise ArgumentError(
                f"{key[:64]}: compiling the model is not built yet; leave it out; known are cudagraph_mode, "
                f"{', '.join(_KEYS)}"
            )


def _flags(mode: object) -> tuple[str, ...]:
    if mode is None:
        return ()
    flags = _MODES.get(str(mode).upper())
    if flags is None:
        raise ArgumentError(
            f"cudagraph_mode must be {', '.join(_MODES)}, not {str(mode)[:64]!r}: graphs hold whole steps, "
            "with attention"
        )
    return flags
