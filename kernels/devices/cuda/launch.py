"""Launches Triton kernels of decodes so that each may start while the previous one ends.

A decode at a small batch is a chain of some hundred kernels of a few microseconds. With programmatic dependent launch
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0) the blocks of a
kernel start while those of its predecessor finish, and wait in ``gdc_wait`` on the device for its results. Every kernel
here calls ``gdc_wait`` before it reads or writes anything that another kernel of the step writes or reads. Data of
earlier steps may be read before: a step starts with a copy or the start of a graph, which no later kernel overtakes.

Kernels of adapters differ. ``matmul.low_rank_one`` and ``matmul.low_rank_few`` read the adapters' places and the number
of the pass early, which kernels before the previous one wrote. The product launched after ``low_rank_few`` reads its
tokens once a flag is set, which the former sets after ``gdc_wait``, and calls ``gdc_wait`` itself before it writes. A
layer has one flag. So a layer must not run again before a kernel that starts only when all before it have ended, as
those of torch do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from kernels.contract.errors import UnsupportedError
from kernels.devices.cuda.errors import DeviceError, explain

__all__ = [
    "attempted",
    "copying",
    "has_gluon",
    "has_large_shared_memory",
    "is_precompiling",
    "multiprocessors",
    "overlapping",
    "precompiling",
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
    """Whether the device has the copy engine (TMA) and the matrix instructions (wgmma) of compute capability 9.0; later
    ones have other instructions.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a block has enough shared memory for large tiles of any head dimension (228 KiB on
    compute capability 9.0 and 10.0, 164 on 8.0, 100 on 8.6, 8.9 and 12.0).
    """
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)  # the type stub lacks the attribute
    return bool(properties.shared_memory_per_block_optin >= 200 << 10)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; an H200's if there is no device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def has_gluon(module: str) -> bool:
    """Whether this Triton has the version of Gluon that ``module`` of this package uses: Gluon is not stable. It has no
    interpreter.
    """
    try:
        if find_spec("triton.experimental.gluon") is None:
            return False
    except ImportError:
        return False
    try:
        import_module(f"kernels.devices.cuda.{module}")
    except Exception as error:
        _tell_missing(module, error)
        return False
    return True


def attempted(launch: Callable[..., _Found], *arguments: object) -> _Found | None:
    """The result of ``launch``, whose kernel is in Gluon. None if this Triton cannot compile it: this is logged once,
    it is not called again, and the caller launches another kernel. Raises errors of the device.
    """
    if launch in _missing:
        return None
    try:
        return launch(*arguments)
    except Exception as error:
        if isinstance(error, UnsupportedError | DeviceError) or explain(error, "") is not None:
            raise
        _missing.add(launch)
        _tell_missing(launch.__module__.removeprefix("kernels.devices.cuda."), error)
        return None


def _tell_missing(module: str, error: Exception) -> None:
    import triton

    reason = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    _log.warning(
        "The kernel of kernels.devices.cuda.%s cannot be compiled by Triton %s; a slower one is used (%s).",
        module,
        triton.__version__,
        reason,
    )


def is_precompiling() -> bool:
    """Whether the current passes only compile kernels (``kernels.devices.cuda.precompile``): their results are
    meaningless.
    """
    return _looking


@contextmanager
def precompiling() -> Iterator[None]:
    """A context in which ``is_precompiling`` is true."""
    global _looking
    _looking = True
    try:
        yield
    finally:
        _looking = False
