"""Kernels compiled side by side while a model is loaded, before its first step launches them.

Triton compiles a kernel, and a launcher for it with a C compiler, when it is first launched: one after the other, half
a second each, for the few dozen that a model has. What will be launched is known from passes in which nothing is: each
kernel is handed to a pool of threads instead, once for each kind of arguments (``triton.AsyncCompileMode``). Passes
(Python) run meanwhile; most of a compilation is done outside of Python or by other processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.cuda.launch import look_ahead

__all__ = ["compile_ahead", "of_each_kind"]

_log = logging.getLogger("troupe.kernels.cuda")
_MOST_THREADS = 8

_Size = TypeVar("_Size", int, tuple[int, int])


def compile_ahead(passes: Callable[[], None], device: torch.device, pool: Executor | None = None) -> None:
    """Run ``passes``, and compile what they would launch; back when all of it is compiled and loaded to ``device``.

    Nothing in them may choose by a number that a kernel was to compute. What cannot be compiled is left for its
    launch to tell, and passes end where they find no memory. ``pool``: None for threads of its own.
    """
    if triton.knobs.runtime.interpret:
        return
    begun = time.perf_counter()
    if pool is not None:
        kernels = _compile(passes, device, pool)
    else:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="troupe-compile") as own:
            kernels = _compile(passes, device, own)
    _log.info("%d kernels are ready after %.2f s.", kernels, time.perf_counter() - begun)


def _compile(passes: Callable[[], None], device: torch.device, pool: Executor) -> int:
    """-> how many kernels there are."""
    compiling = triton.AsyncCompileMode(_Loading(pool, device), ignore_errors=True)
    with compiling as mode, _launching_nothing(), look_ahead(), suppress(torch.OutOfMemoryError):
        passes()
    return len(mode.future_kernels)


class _Loading(Executor):
    """Of ``pool``: loads what was compiled to ``device`` too."""

    def __init__(self, pool: Executor, device: torch.device) -> None:
        self._pool, self._device = pool, device
        # Kernels of one name mostly share a launcher: the first has it compiled, the others find it.
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def submit(self, compiles: Callable[[], Any], /, *arguments: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        def load() -> Any:
            kernel = compiles(*arguments, **options)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                with self._turns[kernel.name]:
                    kernel.run  # noqa: B018 - a property that loads
            return kernel

        return self._pool.submit(load)


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Within, a kernel that is called is not launched; the first of each kind of arguments is compiled."""
    own, seen = JITFunction.run, set[Hashable]()

    def run(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = (self, *map(_kind, arguments), *sorted(options.items()))
        if key not in seen:
            seen.add(key)
            own(self, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = run  # what a kernel in brackets calls: there is no hook before a launch that may refuse it
    try:
        yield
    finally:
        JITFunction.run = own


def _kind(argument: Any) -> Hashable:
    """What tells arguments apart that kernels may be compiled anew for, or more."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    base = getattr(argument, "base", None)
    if isinstance(base, Tensor):  # a description for the copy engine
        return base.dtype, *argument.block_shape, str(argument.layout)
    return type(argument), argument


def of_each_kind(sizes: Sequence[_Size]) -> list[_Size]:
    """Of ``sizes``, rows or (tokens, rows), the first and the last between two powers of two of rows: no kernel is for
    some between them alone."""
    found: dict[int, list[_Size]] = {}
    for size in sizes:
        rows = size if isinstance(size, int) else size[1]
        found.setdefault(triton.next_power_of_2(rows), []).append(size)
    return [size for some in found.values() for size in dict.fromkeys((some[0], some[-1]))]
