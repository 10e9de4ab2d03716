"""The scheduler decides which sequences run in the next step."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from actors.runtime import Lane, Message
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.step import SlotSampling, StepResult
from kernels.contract.tasks import Generate, Task

__all__ = [
    "Abort",
    "Continue",
    "Flush",
    "GrammarCompiled",
    "HandOver",
    "Pause",
    "SchedulerLoad",
    "SchedulerProtocol",
    "SequenceSpec",
    "StepDone",
    "StepFailed",
    "Submit",
    "TextStopped",
    "WorkerReady",
]


class SchedulerProtocol:
    """Decides which sequences run next."""


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request, as the scheduler needs it. ``output``: tokens that were already sent."""

    sequence: int
    prompt: bytes  # int32 token ids
    output: bytes = b""  # int32 token ids
    sampling: SlotSampling
    max_tokens: int  # output tokens in all, at least 1
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # end-of-sequence (unless ignored) and stop token ids
    priority: int = 0
    arrival: float = 0.0  # clock seconds, kept over preemption and restarts
    deadline: float | None = None  # clock seconds
    start_by: float | None = None  # clock seconds; a sequence that has not been on the device by then ends
    salt: bytes = b""  # keeps prefixes of different tenants apart
    adapter: int = 0  # number of the adapter that it runs with; 0: none. The salt keeps its prefixes apart
    task: Task = Generate()
    tenant: str = ""  # the client's name: tenants get equal shares of the engine


class Submit(Message[SchedulerProtocol, None], frozen=True):
    """Take these sequences into the queue. A sequence already known is left alone.

    ``moved``: whether they come from another replica, so that the workers here have not compiled their grammars.
    """

    sequences: tuple[SequenceSpec, ...]
    moved: bool = False


class HandOver(Message[SchedulerProtocol, None], frozen=True):
    """The workers have died: let other replicas run the live sequences. Nothing happens while workers are alive."""

    lane: ClassVar[Lane] = Lane.CONTROL


class Abort(Message[SchedulerProtocol, None], frozen=True):
    """Drop sequences wherever they are. Unknown ones are ignored."""

    lane: ClassVar[Lane] = Lane.CONTROL
    sequences: tuple[int, ...]


class TextStopped(Message[SchedulerProtocol, None], frozen=True):
    """The detokenizer found a stop string (or cannot go on): these sequences need no more tokens."""

    lane: ClassVar[Lane] = Lane.CONTROL
    sequences: tuple[int, ...]


class WorkerReady(Message[SchedulerProtocol, None], frozen=True):
    """A worker has loaded its model: (again) an empty cache of ``info.num_pages`` pages and empty slots.

    ``epoch`` counts the loads of the workers. A step and its answer carry it: what an earlier epoch answers is ignored.
    """

    lane: ClassVar[Lane] = Lane.CONTROL
    info: ModelInfo
    epoch: int


class StepDone(Message[SchedulerProtocol, None], frozen=True):
    """A worker's reply to a step, piped into the scheduler's own mailbox."""

    result: StepResult
    epoch: int


class StepFailed(Message[SchedulerProtocol, None], frozen=True):
    """A step got no answer: the worker died, missed the deadline or refused."""

    number: int
    epoch: int
    reason: str
    worker_died: bool


class GrammarCompiled(Message[SchedulerProtocol, None], frozen=True):
    """A rank's reply to CompileGrammar for sequences that are held until then, piped into the scheduler's mailbox."""

    grammar: Grammar
    epoch: int
    answer: str


class SchedulerLoad(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    waiting_tokens: int
    steps: int
    steps_in_flight: int
    preemptions: int
    last_step_age: float  # seconds since the last step finished while there is work; 0 when idle
    paused: bool = False  # no step is planned until Continue


class Flush(Message[SchedulerProtocol, bool], frozen=True):
    """Empty the prefix cache; False (and nothing done) while sequences run or wait.

    In a pause sequences may wait: they hold no pages.
    """

    lane: ClassVar[Lane] = Lane.CONTROL


class Pause(Message[SchedulerProtocol, None], frozen=True):
    """Plan no more steps. Answered when no step is in flight.

    ``retract``: running sequences then return to the queue and release their pages. Sequences may come and be aborted
    meanwhile. A pause outlives the scheduler's restarts.
    """

    lane: ClassVar[Lane] = Lane.CONTROL
    retract: bool = False


class Continue(Message[SchedulerProtocol, None], frozen=True):
    """End a pause. Nothing happens without one."""

    lane: ClassVar[Lane] = Lane.CONTROL
