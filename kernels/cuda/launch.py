"""How Triton kernels of decodes are launched: each may start while the one before it ends.

A decode at a small batch is a chain of some hundred kernels of a few microseconds. With programmatic dependent launch
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0) the blocks of a
kernel come up while those of its predecessor finish, and wait on the device, in ``gdc_wait``, for its results. Every
kernel here calls ``gdc_wait`` before it reads or writes anything that another kernel of the step writes or reads. What
earlier steps wrote may be read before: a step begins with a copy or the begin of a graph, which nothing behind it
overtakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["copying", "has_gluon", "look_ahead", "looking_ahead", "multiprocessors", "overlapping", "roomy"]

_looking = False


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
def has_gluon() -> bool:
    """Whether Triton has Gluon, which some kernels are written in. There is no interpreter for it."""
    try:
        return find_spec("triton.experimental.gluon") is not None
    except ImportError:
        return False


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
