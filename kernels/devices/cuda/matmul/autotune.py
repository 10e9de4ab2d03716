"""Autotuning: measures the fastest implementation of a product once for each shape, at load."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.devices.cuda.launch import is_precompiling
from kernels.devices.graphs import without_collections
from kernels.devices.staged_memory import device_memory

__all__ = ["Choices", "Shape", "Way", "Ways", "in_a_row", "spare"]

_log = logging.getLogger("troupe.kernels.cuda")

Shape: TypeAlias = tuple[str | int | torch.dtype, ...]
"""A product's kind, sizes and tokens."""

Way: TypeAlias = Callable[[], Tensor]
Ways: TypeAlias = Mapping[str, Way]

_ROUNDS = 7
_FLUSHED = 256 << 20  # bytes: several times what the L2 cache holds
_AHEAD = 4  # writes of that memory, so that the host has launched the graph before it starts
_MARGIN = 0.03  # relative gain over the first implementation that is required
_AFTER = (
    5 / 3
)  # microseconds a product by which another must beat the preferred one, for effects that a trial does not show
_COPIES = 2  # copies of a layer in a trial
_ROOM = 2 * _COPIES  # required free memory for them, in multiples of the weight
_ROUNDING = 0.1  # relative to a product's norm: more than the difference between 8-bit and 16-bit inputs


class Row(dict[str, Way]):
    """Implementations, each of which runs ``products`` products in a row."""

    products = 1


class Choices:
    """Chooses kernels on one device. The first implementation is used if all are about as fast and none is preferred,
    if its result differs from another's, or if nothing can be measured, during the capture of a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chosen: dict[Shape, str] = {}
        self._seen: set[Shape] = set()  # while looking ahead
        self._stream: torch.cuda.Stream | None = None  # one for all: the libraries keep memory for each

    def run(
        self,
        shape: Shape,
        ways: Ways,
        trial: Callable[[], Ways] | None = None,
        preferred: str = "",
    ) -> Tensor:
        """The product by the fastest of the ``ways``, whose results are equal up to rounding. ``trial``: as in
        ``name``, if not the ways themselves. ``preferred``: the one that others have to beat, if present."""
        chosen = self.name(shape, trial or (lambda: ways), preferred)
        return ways[chosen]() if chosen is not None else next(iter(ways.values()))()

    def name(self, shape: Shape, trial: Callable[[], Ways], preferred: str = "") -> str | None:
        """The name of the fastest implementation; None if unknown. ``trial``: implementations for the measurement,
        which can run any number of times; each may do more than the product, if all do the same."""
        chosen = self._chosen.get(shape)
        if is_precompiling():
            if chosen is None and shape not in self._seen:
                self._seen.add(shape)
                made(shape, trial())
            return chosen
        if chosen is None and not torch.cuda.is_current_stream_capturing():
            chosen = self._chosen[shape] = self._quickest(shape, trial(), preferred)
        return chosen

    def _quickest(self, shape: Shape, row: Ways, preferred: str) -> str:
        same = agreeing(shape, made(shape, row))
        ways = {name: self._captured(row[name]) for name in same}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=self._device)
        marks = []
        for _ in range(_ROUNDS):
            for name, way in ways.items():
                for _ in range(_AHEAD):
                    flushed.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                way()
                end.record()
                marks.append((name, begin, end))
        torch.cuda.synchronize(self._device)
        for name, begin, end in marks[len(ways) :]:
            taken[name].append(begin.elapsed_time(end) * 1e3)
        times = {name: statistics.median(some) for name, some in taken.items()}
        return choose(shape, times, preferred, row.products if isinstance(row, Row) else 1)

    def _captured(self, way: Way) -> Callable[[], object]:
        """``way`` as a graph, as in a step: otherwise a slow or busy host would be timed instead of the device. ``way``
        itself if it cannot be captured."""
        if self._device.type != "cuda" or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            return way
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                way()  # so that per-stream state of libraries is not part of the graph
                with without_collections():
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        way()
                    finally:
                        graph.capture_end()
        except RuntimeError:
            return way
        finally:  # also after a failure: products of one weight share their counters of parts
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


def spare(weight: Tensor) -> int:
    """The number of copies of a layer with this ``weight`` that fit into memory, of those for a trial."""
    room = device_memory(weight.device).free if weight.is_cuda else 0
    return _COPIES if room > _ROOM * weight.nbytes else 0


def in_a_row(layers: Sequence[Ways], between: Callable[[], object]) -> Row:
    """Each implementation on the first of ``layers``, then on the others, which have separate weights, with ``between``
    around each. This imitates a step: a kernel that starts early takes resources from the previous one, which a single
    product does not show.
    """

    def row(name: str) -> Tensor:
        between()
        product = layers[0][name]()
        for layer in layers[1:]:
            between()
            layer[name]()
        between()
        return product

    result = Row({name: partial(row, name) for name in layers[0]})
    result.products = len(layers)
    return result


def made(shape: Shape, ways: Ways) -> dict[str, Tensor]:
    """The products of all available implementations. The first must work; for others the compiler may be too old or
    memory too short."""
    first, label = next(iter(ways)), " x ".join(map(str, shape))
    result: dict[str, Tensor] = {}
    for name, way in ways.items():
        try:
            result[name] = way()
        except torch.OutOfMemoryError:
            if name == first:
                raise
            if not is_precompiling():  # it will be tried
                _log.warning("GEMM %s: candidate %s was skipped: out of memory.", label, name)
        except Exception as error:
            if name == first:
                raise
            _log.warning("GEMM %s: candidate %s was skipped: it is not available here (%s).", label, name, error)
    return result


def agreeing(shape: Shape, products: Mapping[str, Tensor]) -> list[str]:
    """The implementations whose product equals the first one up to rounding. The others are wrong here and are
    logged."""
    name, product = next(iter(products.items()))
    first = product.float()
    if not bool(first.isfinite().all()):
        return [name]
    limit = _ROUNDING * first.norm()
    result = [other for other, product in products.items() if bool((product.float() - first).norm() <= limit)]
    if wrong := [other for other in products if other not in result]:
        label = " x ".join(map(str, shape))
        _log.warning("GEMM %s: candidate %s was skipped: it differs from %s.", label, ", ".join(wrong), name)
    return result


def choose(shape: Shape, times: Mapping[str, float], preferred: str = "", products: int = 1) -> str:
    """The fastest by ``times`` of ``products`` products in microseconds, or the ``preferred`` one, or else the first,
    if that is about as fast."""
    first = preferred if preferred in times else next(iter(times))
    quickest = min(times, key=times.__getitem__)
    beaten = (1 - _MARGIN) * times[first] - (_AFTER * products if first == preferred else 0.0)
    result = quickest if times[quickest] < beaten else first
    timings = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    _log.info("GEMM %s: %s; %s is used.", " x ".join(map(str, shape)), timings, result)
    return result
