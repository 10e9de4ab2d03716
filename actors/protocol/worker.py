"""A worker runs the model, or one rank of it, on one device."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from actors.runtime import Message
from kernels.contract.config import RunnerConfig
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepBatch, StepResult
from kernels.contract.topology import WorkerId

__all__ = [
    "CompileGrammar",
    "Load",
    "LoadAdapter",
    "LoadProgress",
    "LoadRefused",
    "NumberedAdapter",
    "Step",
    "UnloadAdapter",
    "WorkerConfig",
    "WorkerEventsProtocol",
    "WorkerLoaded",
    "WorkerProtocol",
]


class NumberedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: the number that admissions give, its name, and the directory of its files on node 0.

    ``source``: ``owner/name@revision`` of the hub, which a node without this directory downloads; empty: none.
    """

    index: int
    name: str
    path: str
    source: str = ""


class WorkerProtocol:
    """Runs the model on one device."""


class Load(Message[WorkerProtocol, None], frozen=True):
    """Load the model, together with the other ranks of its group. A worker of another incarnation ignores it.

    ``incarnation``: of the worker. ``epoch``: of the group. ``rendezvous``: of the ranks, as in RunnerConfig.
    ``adapters``: to load with the model. In the first epoch one that cannot be loaded refuses the load; later, when its
    files may be gone, the worker reports it, and only its own requests fail.
    """

    timed: ClassVar[bool] = False  # it has a time of its own: WorkerConfig.load_timeout
    incarnation: int
    epoch: int
    rendezvous: str = ""
    adapters: tuple[NumberedAdapter, ...] = ()


class Step(Message[WorkerProtocol, StepResult], frozen=True):
    """Run one step. A worker that did not load for ``epoch`` refuses: the batch's slots belong to another epoch. Every
    rank of a group runs it; only rank 0's answer holds results.

    ``idle_work_first``: reply after the step's idle work, not before it. Suspects of a death run in such steps,
    so that work that kills the worker belongs to the step that it came from.
    """

    batch: StepBatch
    epoch: int
    idle_work_first: bool = False


class CompileGrammar(Message[WorkerProtocol, str], frozen=True):
    """Compile a grammar before a request with it is submitted. The reply is empty, or says why there is none.

    ``timeout``: seconds. ``BUSY`` is the reply where others took them.
    """

    BUSY: ClassVar[str] = "busy"

    grammar: Grammar
    timeout: float


class LoadAdapter(Message[WorkerProtocol, str], frozen=True):
    """Load an adapter between two steps, unless it is loaded. The reply is empty, or says what is wrong with it."""

    timed: ClassVar[bool] = False  # the caller sets its time
    adapter: NumberedAdapter


class UnloadAdapter(Message[WorkerProtocol, None], frozen=True):
    """Forget an adapter, as soon as no slot uses it. An unknown one is ignored."""

    timed: ClassVar[bool] = False
    index: int


class WorkerEventsProtocol:
    """Events that a worker reports unasked."""


class LoadProgress(Message[WorkerEventsProtocol, None], frozen=True):
    worker: WorkerId
    stage: str  # import | weights | cache | warmup
    fraction: float  # of the whole load, 0 .. 1


class WorkerLoaded(Message[WorkerEventsProtocol, None], frozen=True):
    """The model is loaded and the cache allocated: the worker takes steps of this epoch. ``failed``: the numbers of the
    adapters that it could not load again, with the reasons."""

    worker: WorkerId
    info: ModelInfo
    epoch: int
    failed: dict[int, str] = msgspec.field(default_factory=dict)


class LoadRefused(Message[WorkerEventsProtocol, None], frozen=True):
    """The model cannot be loaded as the arguments ask; ``reason`` says what to change.

    ``permanent``: a new start meets the same refusal. Otherwise it may find more free memory.
    """

    worker: WorkerId
    reason: str
    permanent: bool
    epoch: int


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is started with. ``load_timeout``: seconds that loading the model may take. ``download_dir``:
    the cache directory of adapters from the hub; None: the hub's default."""

    runner: RunnerConfig
    worker: WorkerId = WorkerId(0)
    load_timeout: float = 1800.0
    download_dir: str | None = None
    faults: str = ""  # a test's plan of faults; see actors.faults
