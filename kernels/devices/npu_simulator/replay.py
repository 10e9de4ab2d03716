"""Replays: the kept calls of a graph run again, and wait where the graph waits for an external event."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kernels.devices.npu_simulator.dispatch import Engine
from kernels.devices.npu_simulator.recording import Graph, Run, Value, ValueTask, Word

__all__ = ["Replays"]

OK = 0
AICORE_EXCEPTION, SYNC_TIMEOUT = 507015, 507046

Refuse = Callable[[int, str], int]
"""Says why, and gives the code back."""


class Replays:
    """All replays that wait, by stream. ``patience``: seconds to wait for a stuck one. Who calls holds ``lock``."""

    def __init__(self, engine: Engine, lock: threading.RLock, refuse: Refuse) -> None:
        self.engine, self.cann = engine, engine.cann
        self.patience = 10.0
        self._refuse = refuse
        self._waiting: dict[int, deque[Run]] = {}
        self._moved = threading.Condition(lock)

    def waits(self, stream: int) -> bool:
        """Whether a replay on the stream waits."""
        return stream in self._waiting

    def unfed(self, graph: Graph) -> int:
        """How many replays of the graph have not ended."""
        return sum(run.graph is graph for queue in self._waiting.values() for run in queue)

    def begin(self, graph: Graph, stream: int) -> int:
        """Run it as far as it goes."""
        queue = self._waiting.setdefault(stream, deque())
        if not queue:
            self.cann.attend(1)
        queue.append(Run(graph))
        return self._pump()

    def drop(self, graph: Graph) -> bool:
        """Forget the graph's replays that have not ended; whether there were any."""
        result = self.unfed(graph) > 0
        for stream, queue in list(self._waiting.items()):
            kept = deque(run for run in queue if run.graph is not graph)
            self._waiting[stream] = kept
            if not kept:
                del self._waiting[stream]
                self.cann.attend(-1)
        if result:
            self._pump()
        return result

    def crash(self, graph: Graph, message: str) -> int:
        """An error of a graph on the device is raised as the device's error."""
        self.cann.fail(graph.device, AICORE_EXCEPTION, f"graph {graph.number}: {message}")
        return AICORE_EXCEPTION

    def write(self, word: Word) -> int:
        """An external event is recorded."""
        Value.from_address(word.address).value = word.value
        return self._pump()

    def wait_for(self, task: ValueTask) -> int:
        """Until an external event is recorded by another thread."""
        return self._until(task.holds, "a stream waits for an external event that was never recorded")

    def wait(self, stream: int) -> int:
        """Until no replay waits on ``stream`` (0: on any stream), or 507046. Other threads go on meanwhile."""
        return self._until(
            lambda: stream not in self._waiting if stream else not self._waiting,
            "a replay waits for an external event that was never recorded: update the graph for every replay",
        )

    def _until(self, done: Callable[[], bool], otherwise: str) -> int:
        deadline = time.monotonic() + self.patience
        while not done():
            if not self._moved.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                return self._refuse(SYNC_TIMEOUT, otherwise)
        return OK

    def _pump(self) -> int:
        """Run what can run, until every replay has ended, failed or waits."""
        code, moved = OK, True
        while moved:
            moved = False
            for stream, queue in list(self._waiting.items()):
                while queue:
                    steps = self._advance(queue[0])
                    moved = moved or steps != 0
                    if steps < 0:
                        code = self.cann.error(queue[0].graph.device)
                    elif queue[0].position < len(queue[0].graph.tasks):
                        break  # it waits
                    queue.popleft()
                if not queue and self._waiting.pop(stream, None) is not None:
                    self.cann.attend(-1)
        self._moved.notify_all()
        return code

    def _advance(self, run: Run) -> int:
        """Tasks run, -1 when one failed."""
        start = run.position
        while run.position < len(run.graph.tasks):
            task = run.graph.tasks[run.position]
            if isinstance(task, ValueTask):
                if task.kind == "write":
                    Value.from_address(task.address).value = task.value
                elif not task.holds():
                    break
            else:
                if self.engine.faults is not None:
                    self.engine.faults.before(task.operator.name, run.graph.device)
                if self.cann.error(run.graph.device):
                    return -1
                try:
                    task.run()
                except Exception as error:
                    if not self.cann.error(run.graph.device):  # a collective has said itself what went wrong
                        self.crash(run.graph, f"{task.operator.name}: {error}")
                    return -1
            run.position += 1
        return run.position - start
