"""Captures graphs on an NPU, one for each number of rows, and replays them.

A graph also captures host values. Attention reads the lengths of sequences on the host to plan its work, so every
attention call of the graph is updated before a replay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernels.devices.graphs import cause_of, first_error, without_collections
from kernels.devices.npu.errors import first_code
from kernels.devices.npu.fused_attention import FusedPart
from kernels.devices.npu.tree_attention import TreePart

__all__ = ["CapturedGraphs", "Plans"]

_log = logging.getLogger("troupe.kernels.npu")

_OUT_OF_STREAMS = (207005, 207007, 207008)

Plans = Callable[[FusedPart | TreePart], object]
"""Makes the attention plan of a step from one call."""

_Result = TypeVar("_Result")


class CapturedGraphs(Generic[_Result]):
    """Captures for each of ``sizes``, the largest first, in one memory pool, what ``prepare`` makes for it.

    Sizes that cannot be captured are logged and run without a graph. ``agree``: see ``CaptureRequest``. ``attends``:
    whether the graphs have attention, whose lengths are fed. ``what``: they run, for the log.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        prepare: Callable[[int], Callable[[], _Result]],
        agree: Callable[[bool], bool] = bool,
        attends: bool = True,
        what: str = "decode",
    ) -> None:
        self._graphs: dict[int, tuple[torch.npu.NPUGraph, _Result]] = {}
        self._agree, self._attends, self._what = agree, attends, what
        self._replayed = torch.npu.Event()
        self._capture(sizes, prepare)

    @property
    def sizes(self) -> list[int]:
        """Those that were captured, ascending."""
        return sorted(self._graphs)

    def result(self, size: int) -> _Result:
        """What the graph of ``size`` writes."""
        return self._graphs[size][1]

    def replay(self, size: int, lengths: list[int] | None = None) -> _Result:
        """The result of the graph of ``size``, overwritten by its next replay. ``lengths``: of the rows' keys."""
        graph, result = self._graphs[size]
        # Replay first: its attention waits for the lengths, and the device runs the preceding operators while a
        # separate stream updates them. That stream must not overtake the previous replay, which may still wait for or
        # read its own lengths.
        graph.replay()
        if self._attends:
            graph.graph_dispatch_mode.update_stream.wait_event(self._replayed)
            names = "actual_seq_lengths_kv", "actual_seq_kvlen"  # of the operator's two versions
            graph.update(cpu_update_input=[dict.fromkeys(names, lengths)])  # one entry for all calls
            self._replayed.record()
        return result

    def _capture(self, sizes: Sequence[int], prepare: Callable[[int], Callable[[], _Result]]) -> None:
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
            _log.warning("ASCEND_LAUNCH_BLOCKING=1 forbids graphs: decodes run without.")
            return
        pool = None
        for size in sorted(sizes, reverse=True):
            run = prepare(size)
            before = torch.npu.current_stream()
            graph: torch.npu.NPUGraph | None = None
            failure: RuntimeError | None = None
            try:
                graph = torch.npu.NPUGraph()  # takes a stream for updates, which may not be available
                for _ in range(2):  # the first use creates kernels and communicators, which cannot be captured
                    run()
                torch.npu.synchronize()
                with without_collections(), torch.npu.graph(graph, pool=pool, auto_dispatch_capture=self._attends):
                    result = run()
                if self._attends and not graph.graph_dispatch_mode.graph_dispatch_records:
                    raise RuntimeError("attention was captured with constant lengths that no update would change")
            except RuntimeError as error:
                _leave(graph, before)
                failure = error
            if not self._agree(failure is None):
                self._explain(size, failure or RuntimeError("another rank could not"))
                return
            assert graph is not None
            pool = pool or graph.pool()
            self._graphs[size] = graph, result

    def _explain(self, size: int, error: RuntimeError) -> None:
        hint = "--disable-cuda-graph silences this"
        if first_code(str(first_error(error))) in _OUT_OF_STREAMS:
            hint = "the device has no stream left for it: lower --cuda-graph-max-bs or shorten --cuda-graph-bs"
        left = f"graphs of {self.sizes} rows are used" if self._graphs else f"each {self._what} runs without a graph"
        _log.warning(
            "The %s of %d rows could not be captured into a graph (%s); %s. %s",
            self._what,
            size,
            cause_of(error),
            left,
            hint,
        )


def _leave(graph: torch.npu.NPUGraph | None, stream: torch.npu.Stream) -> None:
    """Clean up after a failed capture: restore the current stream and leave the mode that intercepts attention, which
    would wait for an event that is never recorded."""
    torch.npu.set_stream(stream)
    mode = getattr(graph, "graph_dispatch_mode", None)
    if mode is not None and mode in _get_current_dispatch_mode_stack():
        mode.__exit__(None, None, None)
