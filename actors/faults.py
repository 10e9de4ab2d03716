"""Injected faults: how tests make an engine fail at a named point.

    with FaultPlan() as plan:
        async with Engine(model="path/of/a/model", faults=plan) as engine:
            plan.add(Fault("decode", "kill", nth=3))  # the worker's process dies in its third decode step from now

Only a program that embeds the engine can give it a plan. No argument, environment variable, route or message leads
here; an engine without a plan has no injector, and each point costs it one comparison with None.

A plan is a directory with a file a fault, because it has to reach the engine's child processes while they run. The
first process that meets a fault takes its file away and lets it happen: it happens once, whatever is restarted because
of it. A fault with a ``mark`` stays, and happens in each step with a request that is marked: such a request is harmful.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

import msgspec

from kernels.contract.npu_simulator import active_simulator
from kernels.contract.step import StepBatch

__all__ = ["Fault", "FaultInjector", "FaultPlan", "InjectedFault", "Kind", "Stage"]

Stage = Literal["render", "admission", "queue", "prefill", "decode", "detokenize", "stream", "drain"]
"""Where: the renderer's process; the task that admits a request; the scheduler as it takes one; the worker's process
before a step with, and without, prompt tokens; the detokenizer between the news of two sequences; the task that reads a
stream; the drain."""

Kind = Literal["exception", "memory", "device_memory", "hang", "slow", "kill", "device", "link"]
"""What: an exception; MemoryError; torch's OutOfMemoryError; waiting for ever, or for a time; SIGKILL to the process;
a fault of the simulated device; the end of all TCP connections, by which ranks talk. The engine's own process is
spared: what is killed from its stages is its worker."""

_FOREVER = 3600.0


class InjectedFault(RuntimeError):
    """The exception of a fault."""


class Fault(msgspec.Struct, frozen=True):
    """``nth``: how often one process passes the stage, from now on, until it happens. ``seconds``: of ``slow``.
    ``operator``: of ``device``, as in TROUPE_NPU_FAULT, counted from when it happens: ``lost@3``, ``hang@1@hccl``.
    ``mark``: a token id. The fault happens whenever a request with this token in its prompt prefills, or decodes, as
    ``stage`` says."""

    stage: Stage
    kind: Kind
    nth: int = 1
    seconds: float = 0.5
    operator: str = "aicore@1"
    mark: int | None = None


class FaultPlan:
    """The faults to come of one engine and its children. Close it after the engine."""

    def __init__(self, *faults: Fault) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="troupe-faults-")
        self._numbers = itertools.count()
        for fault in faults:
            self.add(fault)

    @property
    def path(self) -> str:
        """Where injectors look."""
        return self._directory.name

    def add(self, fault: Fault) -> None:
        """Let it happen from now on. Raises ValueError for a stage or a kind that there is not."""
        if fault.stage not in get_args(Stage) or fault.kind not in get_args(Kind) or fault.nth < 1:
            raise ValueError(f"{fault} is no fault: see Stage and Kind for what there is; nth counts from 1")
        if fault.mark is not None and fault.stage not in ("prefill", "decode"):
            raise ValueError(f"{fault} has a mark: its stage must be prefill or decode")
        name = f"{next(self._numbers):06}"
        # Renamed when it is complete: an injector may look at any time.
        draft = Path(self.path, name)
        draft.write_bytes(msgspec.msgpack.encode(fault))
        draft.rename(draft.with_suffix(f".{fault.stage}"))

    def pending(self) -> int:
        """Faults that have not happened."""
        return len(os.listdir(self.path))

    def clear(self) -> None:
        """Forget those that have not happened."""
        for name in os.listdir(self.path):
            _take(os.path.join(self.path, name))

    def close(self) -> None:
        self._directory.cleanup()

    def __enter__(self) -> FaultPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class FaultInjector:
    """Lets the faults of a plan happen in one process. ``victim``: the process that ``kill`` kills, if there is one."""

    def __init__(self, path: str, victim: Callable[[], int | None] = os.getpid) -> None:
        self._path = path
        self._victim = victim
        self._passed: dict[str, int] = {}  # by file
        self._prompts: dict[int, frozenset[int]] = {}  # tokens, by slot

    def strike_step(self, batch: StepBatch) -> None:
        """Pass the stage of a worker's step."""
        for admission in batch.admitted:
            self._prompts[admission.slot] = frozenset(memoryview(admission.tokens).cast("i")[: admission.prompt_length])
        admitted = {admission.slot for admission in batch.admitted}
        slots, counts = memoryview(batch.slots).cast("i"), memoryview(batch.counts).cast("i")
        prefills = {slot for slot, count in zip(slots, counts, strict=True) if count > 1} | admitted
        rows: dict[Stage, set[int]] = {"prefill": prefills, "decode": set(slots) - prefills}
        for stage, members in rows.items():
            self._strike(self._due(stage, frozenset().union(*(self._prompts.get(slot, ()) for slot in members))))
        self.strike("prefill" if prefills else "decode")

    def strike(self, stage: Stage) -> None:
        """Pass a stage, outside an event loop or where the loop is to suffer too."""
        self._strike(self._due(stage))

    def _strike(self, faults: list[Fault]) -> None:
        for fault in faults:
            if fault.kind in ("hang", "slow"):
                time.sleep(_FOREVER if fault.kind == "hang" else fault.seconds)
            else:
                self._happen(fault)

    async def strike_async(self, stage: Stage) -> None:
        """Pass a stage; only the task that does so is held up."""
        for fault in self._due(stage):
            if fault.kind in ("hang", "slow"):
                await asyncio.sleep(_FOREVER if fault.kind == "hang" else fault.seconds)
            else:
                self._happen(fault)

    def _due(self, stage: Stage, prompts: frozenset[int] | None = None) -> list[Fault]:
        """What happens now: the faults without a mark or, with ``prompts``, those with a mark among these tokens."""
        due: list[Fault] = []
        for name in sorted(os.listdir(self._path)):
            if not name.endswith(f".{stage}"):
                continue
            path = os.path.join(self._path, name)
            try:
                fault = msgspec.msgpack.decode(Path(path).read_bytes(), type=Fault)
            except FileNotFoundError:
                continue  # another process has met it
            if (fault.mark is None) is not (prompts is None):
                continue
            if prompts is not None and fault.mark not in prompts:
                continue
            self._passed[name] = self._passed.get(name, 0) + 1
            if fault.mark is not None:
                due.append(fault)
                continue
            if self._passed[name] >= fault.nth and _take(path):
                due.append(fault)
        return due

    def _happen(self, fault: Fault) -> None:
        where = f"injected at {fault.stage}"
        if fault.kind == "kill":
            if (victim := self._victim()) is not None:
                os.kill(victim, signal.SIGKILL)
        elif fault.kind == "exception":
            raise InjectedFault(where)
        elif fault.kind == "device":
            if (simulator := active_simulator()) is None:
                raise InjectedFault(f"{where}: there is no simulated device; start the engine with npu_simulator")
            if fault.operator.startswith("oom"):
                sys.modules["torch"].npu.empty_cache()  # what the allocator keeps would do for a long time
            simulator.faults.plan_text(fault.operator)
        elif fault.kind == "link":
            _cut_links()
        elif fault.kind == "device_memory" and "torch" in sys.modules:
            error: type[Exception] = sys.modules["torch"].OutOfMemoryError
            raise error(where)
        else:
            raise MemoryError(where)


def _cut_links() -> None:
    """End every TCP connection of this process."""
    for name in os.listdir("/proc/self/fd"):
        # An OSError: it is no socket, or not connected.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                link.shutdown(socket.SHUT_RDWR)


def _take(path: str) -> bool:
    """Whether the file was there and no other process has taken it."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
