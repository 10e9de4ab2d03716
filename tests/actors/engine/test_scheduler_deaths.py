"""What a worker's death means to the scheduler: when it was, however late it hears of it, and whose fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal, JournalEntry
from actors.boards.stream_buffer import StreamBuffer
from actors.boards.suspects import Rerun
from actors.caching.cache_manager import CacheManager
from actors.protocol import (
    CompileGrammar,
    DetokenizerProtocol,
    Emit,
    Flush,
    FlushOutputs,
    OpenSequence,
    PrefixMatch,
    ResetCache,
    SchedulerProtocol,
    SequenceOutput,
    SequenceSpec,
    Step,
    Submit,
    WorkerProtocol,
    WorkerReady,
)
from actors.protocol.requests import SamplingParams
from actors.runtime import Actor, ActorRef, ActorSystem, ChildCrash, Deferred, handles
from actors.scheduling import PlannerConfig
from actors.scheduling.scheduler import Scheduler, SchedulerLinks
from actors.scheduling.testing import model_info
from actors.workers.worker import StaleStep
from kernels.contract.grammar import Grammar
from kernels.contract.step import SlotSampling, StepResult
from telemetry.timeline import RequestTimeline, Timelines
from tests.kits.waiting import PATIENCE, until


class Silent(Actor[WorkerProtocol]):
    """A worker that answers a step when the test says what."""

    def __init__(
        self,
        steps: list[tuple[int, Deferred[StepResult]]],
        messages: list[Step],
        compiles: list[tuple[Grammar, Deferred[str]]],
    ) -> None:
        self._steps, self._messages, self._compiles = steps, messages, compiles

    @handles
    def compile_grammar(self, message: CompileGrammar) -> Deferred[str]:
        self._compiles.append((message.grammar, self.context.system.loop.create_future()))
        return self._compiles[-1][1]

    @handles
    def step(self, message: Step) -> Deferred[StepResult]:
        self._messages.append(message)
        self._steps.append((message.epoch, self.context.system.loop.create_future()))
        return self._steps[-1][1]


class Slow(CacheManager):
    """A cache that knows its next worker when the test says so."""

    def __init__(self, board: HealthBoard, known: asyncio.Event) -> None:
        super().__init__(board)
        self._known = known

    @handles
    async def reset(self, message: ResetCache) -> None:
        if self._made is not None:
            await self._known.wait()
        super().reset(message)


class Last(CacheManager):
    """A cache in whose hands a step is planned when the worker dies."""

    def __init__(self, board: HealthBoard) -> None:
        super().__init__(board)
        self._board = board

    @handles
    def open(self, message: OpenSequence) -> PrefixMatch:
        if self._board.died_at(0) is None:
            self._board.worker_lost(self.context.clock.monotonic())
        return super().open(message)


class Drain(Actor[DetokenizerProtocol]):
    def __init__(self, reported: list[SequenceOutput], fences: list[FlushOutputs], fenced: list[asyncio.Event]) -> None:
        self._reported = reported
        self._fences = fences
        self._fenced = fenced

    @handles
    def emit(self, message: Emit) -> None:
        self._reported.extend(message.outputs)

    @handles
    async def flush(self, message: FlushOutputs) -> None:
        self._fences.append(message)
        for event in self._fenced:
            await event.wait()


@dataclass
class Rig:
    system: ActorSystem
    scheduler: ActorRef[SchedulerProtocol]
    board: HealthBoard
    journal: Journal
    steps: list[tuple[int, Deferred[StepResult]]]
    messages: list[Step]  # of the steps
    compiles: list[tuple[Grammar, Deferred[str]]]
    reported: list[SequenceOutput]
    fences: list[FlushOutputs]
    fenced: list[asyncio.Event]  # what a fence waits for

    def ready(self, epoch: int) -> None:
        self.board.worker = (model_info(num_pages=9, page_size=16), epoch)
        self.scheduler.offer(WorkerReady(*self.board.worker))

    def now(self) -> float:
        return self.system.clock.monotonic()

    async def later(self) -> float:
        """A time that is over, after all that has happened."""
        moment = self.now() + 1e-6
        await until(lambda: self.now() > moment)
        return moment

    async def submit(self, number: int = 1, grammar: Grammar | None = None) -> JournalEntry:
        prompt, sampling = np.arange(8, dtype=np.int32).tobytes(), SlotSampling(grammar=grammar)
        spec = SequenceSpec(sequence=number, prompt=prompt, sampling=sampling, max_tokens=9)
        timeline = Timelines().open(str(number), operation="text_completion", model="")
        entry = JournalEntry(number, 0, spec, SamplingParams(), StreamBuffer(timeline, 1), timeline, [0], [])
        self.journal.open(entry)
        await self.scheduler.tell(Submit(sequences=(spec,)))
        return entry

    async def drain(self) -> None:
        """Wait until the scheduler has handled its messages: the faster lanes, then the slowest."""
        await self.scheduler.ask(Flush(), timeout=PATIENCE)
        load = self.board.scheduler
        await self.scheduler.tell(Submit(sequences=()))
        await until(lambda: self.board.scheduler is not load, "it took nothing")

    async def sent(self, epoch: int) -> Deferred[StepResult]:
        await until(lambda: [each for each, _ in self.steps if each == epoch], "no step was sent")
        return next(step for each, step in self.steps if each == epoch)


@asynccontextmanager
async def rigged(cache_of: Callable[[HealthBoard], CacheManager] = CacheManager) -> AsyncIterator[Rig]:
    board, journal = HealthBoard(), Journal()
    steps: list[tuple[int, Deferred[StepResult]]] = []
    messages: list[Step] = []
    compiles: list[tuple[Grammar, Deferred[str]]] = []
    reported: list[SequenceOutput] = []
    fences: list[FlushOutputs] = []
    fenced: list[asyncio.Event] = []
    async with ActorSystem() as system:
        cache = await system.spawn(lambda: cache_of(board), name="cache")
        detokenizer = await system.spawn(lambda: Drain(reported, fences, fenced), name="detokenizer")
        worker = await system.spawn(lambda: Silent(steps, messages, compiles), name="worker-0")
        config = PlannerConfig(max_running=2, max_slots=3, step_tokens=64, max_prefill_tokens=64, overlap=False)
        scheduler = await system.spawn(
            lambda: Scheduler(
                config,
                SchedulerLinks(cache, detokenizer, worker),
                journal=journal,
                board=board,
                step_timeout=600.0,
            ),
            name="scheduler",
        )
        rig = Rig(system, scheduler, board, journal, steps, messages, compiles, reported, fences, fenced)
        rig.ready(0)
        await rig.drain()
        yield rig


def deaths(timeline: RequestTimeline) -> list[tuple[float, object]]:
    return [(mark.at, mark.attributes["in_step"]) for mark in timeline.marks if mark.name == "worker_died"]


@pytest.mark.parametrize("reported_by", ["by a step", "by the next incarnation"])
@pytest.mark.parametrize("token", ["before the death", "on its way at the death"])
async def test_the_mark_is_of_the_death_or_of_a_stream_that_began_after_it(reported_by: str, token: str) -> None:
    async with rigged() as rig:
        entry = await rig.submit()
        step = await rig.sent(0)
        began, died = rig.now(), await rig.later()
        entry.begin_decode(began if token == "before the death" else died + 1e-6)
        rig.board.worker_lost(died)
        if reported_by == "by the next incarnation":  # which the step's failure is behind
            rig.ready(1)
        step.set_exception(ChildCrash("killed"))
        await until(lambda: entry.worker_deaths, "no request was blamed")
        if reported_by == "by a step":
            rig.ready(1)
        await rig.sent(1)
        assert deaths(entry.timeline) == [(died if token == "before the death" else died + 1e-6, True)]
        assert entry.worker_deaths == 1
        assert [mark.name for mark in entry.timeline.marks] == ["worker_died", "resumed"]


async def test_requests_to_a_dead_worker_wait_for_the_next_incarnation() -> None:
    async with rigged() as rig:
        rig.board.worker_lost(await rig.later())
        entry = await rig.submit()
        await rig.drain()
        assert rig.board.scheduler is not None
        assert (rig.steps, rig.board.scheduler.waiting) == ([], 1)
        rig.ready(1)
        await rig.sent(1)
        rig.scheduler.offer(WorkerReady(model_info(num_pages=9, page_size=16), 0))  # of the ended epoch
        await rig.drain()
        assert [epoch for epoch, _ in rig.steps] == [1]
        assert (entry.worker_deaths, entry.timeline.marks) == (0, [])


def slots(message: Step) -> int:
    return len(message.batch.slots) // 4


async def test_a_new_worker_compiles_a_grammar_before_its_sequence_runs() -> None:
    async with rigged() as rig:
        await rig.submit()
        await rig.submit(2, Grammar("regex", "ab"))
        first = await rig.sent(0)
        assert not rig.compiles  # the engine let the first worker compile it
        rig.board.worker_lost(await rig.later())
        first.set_exception(ChildCrash("killed"))
        rig.ready(1)
        step = await rig.sent(1)
        await rig.drain()
        [(grammar, answer)] = rig.compiles
        assert (grammar.text, [slots(each) for each in rig.messages if each.epoch == 1]) == ("ab", [1])
        assert rig.board.scheduler is not None
        assert rig.board.scheduler.waiting == 1
        answer.set_result("")
        tokens = np.ones(1, dtype=np.int32).tobytes()
        step.set_result(StepResult(rig.messages[-1].batch.number, accepted=tokens, tokens=tokens))
        await until(lambda: len(rig.messages) >= 3, "no further step was sent")
        await until(lambda: slots(rig.messages[-1]) == 2 or rig.messages[-1].batch.admitted, "it does not run")


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        ("too much", "invalid", "too much"),
        (CompileGrammar.BUSY, "error", "again later"),
        (StaleStep("late"), "error", "again"),
    ],
    ids=str,
)
async def test_a_grammar_that_is_not_compiled_again_ends_its_sequence(
    answer: str | StaleStep, reason: str, message: str
) -> None:
    async with rigged() as rig:
        rig.board.worker_lost(await rig.later())
        await rig.submit(1, Grammar("regex", "ab"))
        await rig.drain()
        rig.ready(1)
        await until(lambda: rig.compiles, "it is not compiled")
        if isinstance(answer, str):
            rig.compiles[0][1].set_result(answer)
        else:
            rig.compiles[0][1].set_exception(answer)
        await until(lambda: rig.reported, "it does not end")
        ended = rig.reported[0].ended
        assert ended is not None
        assert (ended.reason, message in ended.message) == (reason, True)
        assert not rig.steps


async def test_no_step_goes_to_a_worker_that_died_while_it_was_planned() -> None:
    async with rigged(Last) as rig:
        entry = await rig.submit()
        await rig.drain()
        assert rig.board.died_at(0) is not None
        assert rig.steps == []
        rig.ready(1)
        await rig.sent(1)
        assert entry.worker_deaths == 0


@pytest.mark.parametrize("first", ["the refusal", "the next epoch"])
async def test_a_step_that_a_dead_worker_was_sent_blames_no_request(first: str) -> None:
    """While a process is being ended, its death is not reported yet."""
    async with rigged() as rig:
        died = await rig.later()
        entry = await rig.submit()
        step = await rig.sent(0)
        rig.board.worker_lost(died)
        stale = StaleStep("Step 1 is of epoch 0, this is 1.")
        if first == "the refusal":
            step.set_exception(stale)
            await until(lambda: deaths(entry.timeline), "the refusal was not reported")
        rig.ready(1)
        await rig.sent(1)
        if first == "the next epoch":
            await rig.drain()
            step.set_exception(stale)
            await rig.drain()
        assert [epoch for epoch, _ in rig.steps] == [0, 1]
        assert entry.worker_deaths == 0
        assert deaths(entry.timeline) == [(entry.timeline.started, False)]


async def test_a_step_whose_answer_came_before_the_death_blames_no_request() -> None:
    async with rigged() as rig:
        entry = await rig.submit()
        step = await rig.sent(0)
        step.set_result(StepResult(1, accepted=b"", tokens=b""))  # it waits behind what comes by the faster lane
        rig.board.worker_lost(rig.now())
        rig.ready(1)
        await rig.sent(1)
        assert entry.worker_deaths == 0
        assert [blamed for _, blamed in deaths(entry.timeline)] == [False]


@pytest.mark.parametrize("reported_by", ["by a step", "by the next incarnation"])
async def test_a_request_not_run_again_is_ended_though_the_cache_is_silent(reported_by: str) -> None:
    known = asyncio.Event()
    async with rigged(lambda board: Slow(board, known)) as rig:
        entry = await rig.submit()
        for _ in range(2):
            rig.journal.suspects.died({entry.sequence: Rerun(8, decode=False)})
        step = await rig.sent(0)
        rig.board.worker_lost(rig.now())
        if reported_by == "by the next incarnation":
            rig.ready(1)
        step.set_exception(ChildCrash("killed"))
        await until(lambda: rig.reported, "no output arrived")
        (ended,) = [word.ended for word in rig.reported]
        assert ended is not None
        assert (ended.reason, "ran this request alone" in ended.message) == ("error", True)
        known.set()


async def test_a_worker_that_dies_while_it_loads_had_no_batch() -> None:
    async with rigged() as rig:
        await rig.submit()
        await rig.sent(0)
        died = await rig.later()
        rig.board.worker_lost(died)
        assert rig.board.read_batch is not None
        assert rig.board.read_batch(died) == (1,)
        assert rig.board.read_batch(died + 1.0) == ()


async def test_only_a_death_that_narrows_the_suspects_down_does_not_count() -> None:
    async with rigged() as rig:
        await rig.submit()
        step = await rig.sent(0)
        counted = []
        for epoch in (0, 1):
            rig.board.worker_lost(rig.now())
            counted.append(rig.board.last_death_counts())
            step.set_exception(ChildCrash("killed"))
            rig.ready(epoch + 1)
            step = await rig.sent(epoch + 1)
        rig.board.worker_lost(rig.now())
        rig.board.worker_lost(rig.now())  # one that had not loaded
        counted.append(rig.board.last_death_counts())
        assert counted == [True, False, True]
        assert [message.idle_work_first for message in rig.messages] == [False, True, True]


async def test_workers_that_die_before_they_are_sent_a_step_blame_no_request() -> None:
    """They are loaded, and the scheduler has not heard of it."""
    async with rigged() as rig:
        await rig.submit()
        step = await rig.sent(0)
        counted = []
        for epoch in range(4):
            rig.board.worker = (model_info(num_pages=9, page_size=16), epoch)
            rig.board.worker_lost(rig.now())
            counted.append(rig.board.last_death_counts())
        step.set_exception(ChildCrash("killed"))
        rig.ready(4)
        await rig.sent(4)
        assert (rig.reported, counted) == ([], [True] * 4)


async def test_a_condemned_choice_takes_the_others_of_its_request_with_it() -> None:
    async with rigged() as rig:
        first = await rig.submit()
        step = await rig.sent(0)
        other = JournalEntry(2, 1, first.spec, first.params, first.stream, first.timeline, [0], [])
        rig.journal.open(other)
        await rig.scheduler.tell(Submit(sequences=(msgspec.structs.replace(first.spec, sequence=2),)))
        await rig.drain()
        for _ in range(2):
            rig.journal.suspects.died({1: Rerun(8, decode=False)})
        rig.board.worker_lost(rig.now())
        step.set_exception(ChildCrash("killed"))
        await until(lambda: rig.reported, "no output arrived")
        assert {word.sequence for word in rig.reported if word.ended is not None} == {1, 2}


async def test_a_death_while_the_scheduler_restarts_forgets_no_suspect() -> None:
    async with rigged() as rig:
        await rig.submit()
        await rig.sent(0)
        rig.journal.suspects.died({1: Rerun(8, decode=False)})
        fenced = asyncio.Event()
        rig.fenced.append(fenced)
        rig.system.crash_actor(rig.scheduler, ChildCrash("on purpose"))
        await until(lambda: rig.fences, "it did not start again")
        rig.board.worker_lost(rig.now())
        assert rig.board.last_death_counts()
        assert 1 in rig.journal.suspects
        fenced.set()
        rig.ready(1)
        await rig.sent(1)


async def test_a_condemned_sequence_ends_though_the_scheduler_dies_first() -> None:
    async with rigged() as rig:
        await rig.submit()
        await rig.sent(0)
        for _ in range(2):
            rig.journal.suspects.died({1: Rerun(8, decode=False)})
        rig.board.worker_lost(rig.now())
        assert not rig.board.last_death_counts()
        rig.system.crash_actor(rig.scheduler, ChildCrash("on purpose"))
        await until(lambda: rig.reported, "no output arrived")
        assert [word.ended.reason for word in rig.reported if word.ended is not None] == ["error"]


def journal_entry(number: int) -> JournalEntry:
    prompt = np.arange(8, dtype=np.int32).tobytes()
    spec = SequenceSpec(sequence=number, prompt=prompt, sampling=SlotSampling(), max_tokens=9)
    timeline = Timelines().open(str(number), operation="text_completion", model="")
    return JournalEntry(number, 0, spec, SamplingParams(), StreamBuffer(timeline, 1), timeline, [0], [])


def test_suspects_that_move_keep_their_groups_and_ended_ones_go() -> None:
    first, second = Journal(), Journal()
    for number in range(1, 9):
        first.open(journal_entry(number))
    first.suspects.died({number: Rerun(8, decode=False) for number in range(1, 9)})
    first.move(range(1, 9), second)
    assert (len(first), len(first.suspects), len(second), len(second.arriving)) == (0, 0, 8, 8)
    second.drop(3)
    second.arrived(range(1, 9))
    assert (len(second.arriving), len(second.suspects)) == (0, 7)
    suspects, _ = second.suspects.cohorts({})
    assert suspects.members == {1, 2, 4}
