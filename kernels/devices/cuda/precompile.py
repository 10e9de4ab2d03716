"""Compiles kernels in parallel at load, before the first step launches them.

Triton compiles a kernel, and its launcher with a C compiler, at the first launch: sequentially, half a second each, for
the few dozen kernels of a model. Passes without launches collect the kernels: each is submitted to a thread pool, once
for each kind of arguments (``triton.AsyncCompileMode``). Most of a compilation runs outside of Python, so the passes
continue meanwhile.
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
from types import ModuleType
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from kernels.devices.cuda.launch import precompiling

__all__ = ["of_each_kind", "precompile_passes"]

_log = logging.getLogger("troupe.kernels.cuda")
_MAX_THREADS = 8

_Size = TypeVar("_Size", int, tuple[int, int])


def precompile_passes(passes: Callable[[], None], device: torch.device, pool: Executor | None = None) -> None:
    """Run ``passes`` and compile the kernels that they would launch; returns when all are compiled and loaded to
    ``device``.

    The passes must not branch on results of kernels. A kernel that cannot be compiled fails at its launch, and passes
    end when memory is short. ``pool``: None for a new thread pool.
    """
    if triton.knobs.runtime.interpret:
        return
    begun = time.perf_counter()
    if pool is not None:
        kernels = _compile(passes, device, pool)
    else:
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="troupe-compile") as own:
            kernels = _compile(passes, device, own)
    _log.info("%d kernels are ready after %.2f s.", kernels, time.perf_counter() - begun)


def _compile(passes: Callable[[], None], device: torch.device, pool: Executor) -> int:
    """Returns the number of kernels."""
    compiling = triton.AsyncCompileMode(_Loading(pool, device), ignore_errors=True)
    # ``compiling`` ends when the last kernel is loaded: until then they are loaded apart.
    with _loading_apart(), compiling as mode, _launching_nothing(), precompiling(), suppress(torch.OutOfMemoryError):
        passes()
    return len(mode.future_kernels)


class _Loading(Executor):
    """An executor on top of ``pool`` that also loads compiled kernels to ``device``."""

    def __init__(self, pool: Executor, device: torch.device) -> None:
        self._pool, self._device = pool, device
        # Kernels of one name mostly share a launcher: the first one compiles it, the others reuse it.
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def submit(self, compiles: Callable[[], Any], /, *arguments: Any, **options: Any) -> Future[Any]:
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
    """A context in which kernels are not launched; each is compiled once for each kind of arguments."""
    own, seen = JITFunction.run, set[Hashable]()

    def run(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        key = (self, *map(_kind, arguments), *sorted(options.items()))
        if key not in seen:
            seen.add(key)
            own(self, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = run  # called by ``kernel[grid]``: there is no hook before a launch that can prevent it
    try:
        yield
    finally:
        JITFunction.run = own


@contextmanager
def _loading_apart() -> Iterator[None]:
    """A context in which launchers are loaded one at a time. All have one module name, and Python gives a file that it
    loads again the module that it loaded last by that name: one that another thread may be about to read."""
    own, lock = triton.runtime.build._load_module_from_path, threading.Lock()

    def load(name: str, path: str) -> ModuleType:
        with lock:
            module = ModuleType(name)
            vars(module).update(vars(own(name, path)))
            return module

    triton.runtime.build._load_module_from_path = load
    try:
        yield
    finally:
        triton.runtime.build._load_module_from_path = own


def _kind(argument: Any) -> Hashable:
    """Kinds of arguments that kernels are compiled separately for, or finer ones."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    base = getattr(argument, "base", None)
    if isinstance(base, Tensor):  # a description for the copy engine
        return base.dtype, *argument.block_shape, str(argument.layout)
    return type(argument), argument


def of_each_kind(sizes: Sequence[_Size]) -> list[_Size]:
    """The first and the last of ``sizes``, rows or (tokens, rows), between each two powers of two of rows: sizes
    between them use no other kernels."""
    result: dict[int, list[_Size]] = {}
    for size in sizes:
        rows = size if isinstance(size, int) else size[1]
        result.setdefault(triton.next_power_of_2(rows), []).append(size)
    return [size for some in result.values() for size in dict.fromkeys((some[0], some[-1]))]
