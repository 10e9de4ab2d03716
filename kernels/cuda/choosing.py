"""Which of several ways to make a product is the quickest: measured once for each shape, while a model is loaded."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.cuda.launch import looking_ahead
from kernels.device_memory import device_memory

__all__ = ["Choices", "Shape", "Way", "Ways", "in_a_row", "spare"]

_log = logging.getLogger("troupe.kernels.cuda")

Shape: TypeAlias = tuple[str | int | torch.dtype, ...]
"""What tells products apart: their kind, sizes and tokens."""

Way: TypeAlias = Callable[[], Tensor]
Ways: TypeAlias = Mapping[str, Way]

_ROUNDS = 7
_FLUSHED = 256 << 20  # bytes: several times what the L2 cache holds
_AHEAD = 4  # times that they are written, so that the host has launched a way's graph before it begins
_MARGIN = 0.03  # by which a way must be quicker than the first
_AFTER = 5 / 3  # microseconds a product that it must be quicker by than the preferred one, for what a trial hides
_COPIES = 2  # of a layer that is tried
_ROOM = 2 * _COPIES  # times a weight's bytes that have to be free for them
_ROUNDING = 0.1  # of a product's norm: more than inputs of 8 bits differ by from inputs of 16


class Row(dict[str, Way]):
    """Ways of which each makes ``products`` in a row."""

    products = 1


class Choices:
    """Of one device. The first of the ways to make a product is what is taken where they are about as quick, unless
    another is preferred, where another says something else, and where nothing can be measured, within the capture of a
    graph.
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
        """The product, by the quickest of the ``ways``. All give the same, but for rounding. ``trial``: as of
        ``name``, if not the ways themselves. ``preferred``: the way that has to be beaten, where it is there."""
        chosen = self.name(shape, trial or (lambda: ways), preferred)
        return ways[chosen]() if chosen is not None else next(iter(ways.values()))()

    def name(self, shape: Shape, trial: Callable[[], Ways], preferred: str = "") -> str | None:
        """The quickest way; None where that is not known. ``trial``: the ways as they may be tried, any number of
        times; each may do more than the product, all the same."""
        chosen = self._chosen.get(shape)
        if looking_ahead():
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
        """``way`` as a graph, as it is in a step: a host that is slow, or at work, would be timed instead of the
        device. Itself where it cannot be captured."""
        if self._device.type != "cuda" or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            return way
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                way()  # what libraries keep for a stream is not to be the graph's
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    way()
                finally:
                    graph.capture_end()
        except RuntimeError:
            return way
        finally:  # also of what ran before it failed: products of one weight count their parts at one place
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay


def spare(weight: Tensor) -> int:
    """How many copies of a layer with such a ``weight`` there is memory for, of those that are wanted to try it."""
    room = device_memory(weight.device).free if weight.is_cuda else 0
    return _COPIES if room > _ROOM * weight.nbytes else 0


def in_a_row(layers: Sequence[Ways], between: Callable[[], object]) -> Row:
    """Each way of the first of ``layers``, and after it the same of the others, which have weights of their own; with
    ``between`` before, between and behind them. So products follow one another in a step: one that starts early takes
    room from the one before it, which does not show where it is alone.
    """

    def row(name: str) -> Tensor:
        between()
        product = layers[0][name]()
        for layer in layers[1:]:
            between()
            layer[name]()
        between()
        return product

    found = Row({name: partial(row, name) for name in layers[0]})
    found.products = len(layers)
    return found


def made(shape: Shape, ways: Ways) -> dict[str, Tensor]:
    """The products of all ways that there are here. The first has to be; for another the compiler may be too old, or
    memory too short."""
    first, told = next(iter(ways)), " x ".join(map(str, shape))
    found: dict[str, Tensor] = {}
    for name, way in ways.items():
        try:
            found[name] = way()
        except torch.OutOfMemoryError:
            if name == first:
                raise
            if not looking_ahead():  # it will be tried
                _log.warning("Product %s: there is no memory to try %s, which is not taken.", told, name)
        except Exception as error:
            if name == first:
                raise
            _log.warning("Product %s: %s cannot be made here and is not taken (%s).", told, name, error)
    return found


def agreeing(shape: Shape, products: Mapping[str, Tensor]) -> list[str]:
    """Those whose product is the first's, but for rounding. The others are told of: they are wrong here."""
    name, product = next(iter(products.items()))
    first = product.float()
    if not bool(first.isfinite().all()):
        return [name]
    limit = _ROUNDING * first.norm()
    found = [other for other, product in products.items() if bool((product.float() - first).norm() <= limit)]
    if wrong := [other for other in products if other not in found]:
        told = " x ".join(map(str, shape))
        _log.warning("Product %s: %s differs from %s and is not taken.", told, ", ".join(wrong), name)
    return found


def choose(shape: Shape, times: Mapping[str, float], preferred: str = "", products: int = 1) -> str:
    """The quickest by ``times`` of so many ``products`` in microseconds, or the ``preferred``, else the first, where
    that is about as quick."""
    first = preferred if preferred in times else next(iter(times))
    quickest = min(times, key=times.__getitem__)
    beaten = (1 - _MARGIN) * times[first] - (_AFTER * products if first == preferred else 0.0)
    found = quickest if times[quickest] < beaten else first
    told = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
    _log.info("Product %s: %s; %s is taken.", " x ".join(map(str, shape)), told, found)
    return found
