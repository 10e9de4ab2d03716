"""How Triton kernels of decodes are launched: each may start while the one before it ends.

A decode at a small batch is a chain of some hundred kernels of a few microseconds. With programmatic dependent launch
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0) the blocks of a
kernel come up while those of its predecessor finish, and wait on the device, in ``gdc_wait``, for its results. Every
kernel here calls ``gdc_wait`` before it reads or writes anything that another kernel of the step writes or reads. What
earlier steps wrote may be read before: a step begins with a copy or the begin of a graph, which nothing behind it
overtakes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

import torch

from kernels.cuda.errors import DeviceError, explain
from kernels.platforms.base import PlatformError

__all__ = [
    "attempted",
    "copying",
    "has_gluon",
    "look_ahead",
    "looking_ahead",
    "multiprocessors",
    "overlapping",
    "roomy",
]

_log = logging.getLogger("troupe.kernels.cuda")
_Found = TypeVar("_Found")
_looking = False
_missing: set[Callable[..., object]] = set()


@cache
def overlapping(device: torch.device) -> bool:
    """Whether the device's kernels can start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def copying(device: torch.device) -> bool:
    """Whether the device has the copy engine, and the matrix instructions that read what it brought, of compute
    capability 9.0: those of later ones are others.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def roomy(device: torch.device) -> bool:
    """Whether a block may have so much shared memory that large tiles of heads of any dimension fit (228 KiB on
    compute capability 9.0 and 10.0, 164 on 8.0, 100 on 8.6, 8.9 and 12.0).
    """
    return device.type != "cuda" or torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 200 << 10


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; of an H200 where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def has_gluon(module: str) -> bool:
    """Whether Triton has Gluon as ``module`` of this package is written in it: it is no part of Triton that stays as it
    is. There is no interpreter for it.
    """
    try:
        if find_spec("triton.experimental.gluon") is None:
            return False
    except ImportError:
        return False
    try:
        import_module(f"kernels.cuda.{module}")
    except Exception as error:
        _tell_missing(module, error)
        return False
    return True


def attempted(launch: Callable[..., _Found], *arguments: object) -> _Found | None:
    """What ``launch`` gives, whose kernel is in Gluon. None where this Triton cannot make it: that is told once, it is
    not called again, and something else is to be launched. Raises errors of the device.
    """
    if launch in _missing:
        return None
    try:
        return launch(*arguments)
    except Exception as error:
        if isinstance(error, PlatformError | DeviceError) or explain(error, "") is not None:
            raise
        _missing.add(launch)
        _tell_missing(launch.__module__.rpartition(".")[2], error)
        return None


def _tell_missing(module: str, error: Exception) -> None:
    import triton

    said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    _log.warning(
        "The kernel of kernels.cuda.%s cannot be made by Triton %s, and a slower one is taken (%s).",
        module,
        triton.__version__,
        said,
    )


def looking_ahead() -> bool:
    """Whether passes run in which no kernel of ours is launched (``kernels.cuda.ahead``): what they compute means
    nothing.
    """
    return _looking


@contextmanager
def look_ahead() -> Iterator[None]:
    """Within, ``looking_ahead`` says so."""
    global _looking
    _looking = True
    try:
        yield
    finally:
        _looking = False
