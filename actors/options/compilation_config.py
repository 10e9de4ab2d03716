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
_KNOWN = f"known are cudagraph_mode, {', '.join(_KEYS)}"
_ALL, _PROMPTS = "disable-cuda-graph", "disable-piecewise-cuda-graph"
_MODES: dict[str, dict[str, bool]] = {  # the flags that a mode sets, also to override those of a configuration file
    "NONE": {_ALL: True},
    "FULL": {_ALL: False, _PROMPTS: False},
    "FULL_AND_PIECEWISE": {_ALL: False, _PROMPTS: False},
    "FULL_DECODE_ONLY": {_ALL: False, _PROMPTS: True},
}
_COMPILING = frozenset(
    (
        *("mode", "level", "backend", "custom_ops", "splitting_ops", "compile_sizes", "pass_config", "use_inductor"),
        *("inductor_compile_config", "inductor_passes", "cache_dir", "debug_dump_path"),
    )
)
"""Members that compile the model, unless they are off."""


def split_compilation_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """The key, the argument's name and its value, for each member that changes something.

    Raises ArgumentError for a mode of graphs that is not built, a member that compiles the model, and an unknown one.
    """
    for key, value in config.items():
        if key == "cudagraph_mode":
            for flag, is_set in _flags(value).items():
                yield key, flag, is_set
        elif key in _KEYS:
            yield key, _KEYS[key], value
        elif key.partition(".")[0] not in _COMPILING:
            raise ArgumentError(f"{key[:64]}: there is no such member; {_KNOWN}")
        elif value and value != "NONE":
            raise ArgumentError(f"{key[:64]}: compiling the model is not built yet; leave it out; {_KNOWN}")


def _flags(mode: object) -> dict[str, bool]:
    if mode is None:
        return {}
    flags = _MODES.get(str(mode).upper())
    if flags is None:
        raise ArgumentError(
            f"cudagraph_mode must be {', '.join(_MODES)}, not {str(mode)[:64]!r}: graphs hold whole steps, "
            "with attention"
        )
    return flags
