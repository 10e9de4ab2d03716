"""Scheduler: keeps the worker supplied with steps and passes their results to the detokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from actors.boards.expert_recorder import ExpertRecorder
from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal
from actors.boards.suspects import Verdict
from actors.faults import FaultInjector
from actors.protocol import (
    Abort,
    CacheProtocol,
    CompileGrammar,
    Continue,
    DetokenizerProtocol,
    Emit,
    Ended,
    Flush,
    FlushCache,
    FlushOutputs,
    GrammarCompiled,
    HandOver,
    OpenSequence,
    Pause,
    PrefixMatch,
    ResetCache,
    SchedulerProtocol,
    SequenceOutput,
    Step,
    StepDone,
    StepFailed,
    Submit,
    TextStopped,
    WorkerProtocol,
    WorkerReady,
)
from actors.runtime import Actor, ActorDied, ActorRef, ChildCrash, Deferred, current_traceparent, handles
from actors.scheduling.config import PlannerConfig
from actors.scheduling.lockstep import Lockstep, Turn
from actors.scheduling.planner import CacheMessage, CacheReply, Planner, StepPlan
from actors.scheduling.timeline_writer import TimelineWriter
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepBatch, StepResult
from telemetry.metrics.steps import StepShape
from telemetry.traces.worker_spans import STEP_ROW

if TYPE_CHECKING:
    from telemetry.traces.tracing import Tracing

__all__ = ["Scheduler", "SchedulerLinks"]

_log = logging.getLogger("troupe.scheduler")

T = TypeVar("T")

_CACHE_TIMEOUT_SECONDS = 30.0

_MAX_COMPILES = 4
"""Grammars of held sequences that the worker is asked to compile at a time."""
_COMPILE_SECONDS = 60.0
_NO_EPOCH = -1

_QUARANTINED = (
    "The model's worker died while it ran this request, and again when it ran this request alone, "
    "so the request is not run a third time. Change the request or send it again later; if it fails again, report it."
)


_NOT_COMPILED = (
    f"The request's grammar was not compiled again within {_COMPILE_SECONDS:g} s of a restart, because others were "
    "before it. Send the request again later."
)


class SchedulerLinks(msgspec.Struct, frozen=True, eq=False):
    """The actors that a scheduler sends messages to. ``worker``: rank 0; ``peers``: the other ranks."""

    cache: ActorRef[CacheProtocol]
    detokenizer: ActorRef[DetokenizerProtocol]
    worker: ActorRef[WorkerProtocol]
    peers: tuple[ActorRef[WorkerProtocol], ...] = ()


class Scheduler(Actor[SchedulerProtocol]):
    """An actor around :class:`Planner`.

    After every message it plans as many steps as may be in flight. Results of the worker arrive in its own mailbox, so
    no handler waits for the device. ``hand_over``: lets other replicas run live sequences; returns those that moved.
    ``lockstep``: with data-parallel attention, who sends the steps of all replicas.
    """

    def __init__(
        self,
        config: PlannerConfig,
        links: SchedulerLinks,
        *,
        journal: Journal,
        board: HealthBoard,
        step_timeout: float,
        tracing: Tracing | None = None,
        faults: FaultInjector | None = None,
        recorder: ExpertRecorder | None = None,
        hand_over: Callable[[], Sequence[int]] = tuple,
        lockstep: Lockstep | None = None,
    ) -> None:
        self._lockstep = lockstep
        self._results = 0  # after which nothing is planned yet
        self._hand_over = hand_over
        self._recorder = recorder
        self._experts = 0, 0  # the model's ModelInfo.experts
        self._planner = Planner(config, journal.suspects)
        self._planner.paused = journal.paused
        self._journal = journal
        self._timeline_writer = TimelineWriter(journal, links.worker.name, tracing)
        self._cache = links.cache
        self._worker = links.worker
        self._peers = links.peers
        self._detokenizer = links.detokenizer
        self._board = board
        self._step_timeout = step_timeout
        self._faults = faults
        self._epoch: int | None = None
        self._sent: dict[int, float] = {}  # send times of the steps without a result ...
        self._sent_epoch: int | None = None  # ... of this epoch
        self._verdicts: dict[int, Verdict] = {}  # of the deaths since the last worker was taken, by epoch
        self._compiling: dict[Grammar, list[str]] = {}  # of held sequences: the answers of the ranks so far
        self._pauses: list[tuple[Pause, asyncio.Future[None]]] = []  # that wait for the steps in flight

    async def started(self) -> None:
        self._board.forget_steps()
        self._board.read_batch = self._batch_at
        self._board.attribute_death = None
        if self._lockstep is not None:
            self._lockstep.join(self._board.replica, self._launch_empty, lambda: self.context.is_alive)
        if self.context.incarnation > 0:
            # Outputs of the last incarnation must be in the journal before the journal is read.
            await self._detokenizer.ask(FlushOutputs(), timeout=_CACHE_TIMEOUT_SECONDS)
        now = self.context.clock.monotonic()
        entries = list(self._journal.live())
        if entries:
            self._timeline_writer.resumed(entries, now)
            await self._emit(self._planner.submit(tuple(entry.resume_spec() for entry in entries), now))
            self._journal.arrived([entry.sequence for entry in entries])
        await self._emit(self._quarantine(now))
        self._board.attribute_death = self._attribute_death  # only now: the planner must know which suspects live
        ready = self._board.worker
        if ready is not None:
            await self._take_worker(*ready)
        elif entries:
            self._leave_to_others()
        await self._schedule()

    # -- requests

    @handles
    async def submit(self, message: Submit) -> None:
        if self._faults is not None:
            await self._faults.strike_async("queue")
        # Aborts take the faster lane: a sequence that is not in the journal was aborted before it arrived here.
        specs = tuple(spec for spec in message.sequences if spec.sequence in self._journal)
        outputs = self._planner.submit(specs, self.context.clock.monotonic(), hold=message.moved)
        if message.moved:
            self._journal.arrived([spec.sequence for spec in specs])
        await self._schedule(outputs)

    @handles
    async def abort(self, message: Abort) -> None:
        await self._schedule(self._planner.abort(message.sequences))

    @handles
    async def text_stopped(self, message: TextStopped) -> None:
        self._planner.text_stopped(message.sequences)
        await self._schedule()

    # -- the worker

    @handles
    async def worker_ready(self, message: WorkerReady) -> None:
        await self._take_worker(message.info, message.epoch)
        await self._schedule()

    async def _take_worker(self, info: ModelInfo, epoch: int) -> None:
        if epoch == self._epoch or self._board.died_at(epoch) is not None:
            return
        # If no failed step has reported the end of the previous epoch (its report is after this message, or no step
        # was in flight), do it here. Condemned sequences end now, in case the cache does not answer below.
        if self._epoch is not None:
            await self._emit(self._worker_lost(self._epoch, "the worker was replaced"))
        reset = ResetCache(num_pages=info.num_pages, page_size=info.page_size, bounded=info.bounded_groups)
        await self._cache.ask(reset, timeout=_CACHE_TIMEOUT_SECONDS)
        self._epoch = self._sent_epoch = epoch
        self._experts = info.experts
        self._sent.clear()
        self._compiling.clear()
        self._verdicts.clear()
        self._timeline_writer.steps_lost(self.context.clock.monotonic())
        self._board.forget_steps()  # one may have been sent in the previous epoch after its end
        await self._emit(self._planner.worker_ready(info, self.context.clock.monotonic()))

    def _worker_lost(self, epoch: int, reason: str) -> list[SequenceOutput]:
        """Handle the end of an epoch of the worker. Returns the ends of sequences that are not run again."""
        now = self.context.clock.monotonic()
        at = self._died_at(epoch)
        lost = self._sequences_in_flight_at(at)
        self._timeline_writer.worker_died(self._planner.running(), lost, at, now, reason)
        self._journal.worker_died(lost)
        self._attribute_death(epoch)
        return self._quarantine(now)

    def _quarantine(self, now: float) -> list[SequenceOutput]:
        """End quarantined sequences and all other choices of their requests: a request fails as a whole, and its other
        choices may kill the worker too."""
        journal = self._journal
        streams = {id(entry.stream) for each in journal.quarantined if (entry := journal.get(each)) is not None}
        quarantined = [entry.sequence for entry in journal.live() if id(entry.stream) in streams] if streams else []
        journal.quarantined.clear()
        self._timeline_writer.quarantined(quarantined, now)
        ended = Ended("error", message=_QUARANTINED)
        return [msgspec.structs.replace(output, ended=ended) for output in self._planner.abort(quarantined)]

    def _attribute_death(self, epoch: int) -> Verdict:
        """The verdict on the death of the worker in ``epoch``, computed at the first call."""
        verdict = self._verdicts.get(epoch)
        if verdict is None:
            # A worker that died before it was taken here got no steps: the steps are those of the previous epoch.
            lost = self._steps_in_flight_at(self._died_at(epoch)) if epoch == self._sent_epoch else []
            verdict = self._verdicts[epoch] = self._planner.worker_died(lost)
            self._journal.quarantined.update(verdict.quarantined)
            if not verdict.counts:
                _log.warning(
                    "The worker died again in a step with suspects; %d are left and run apart from other sequences",
                    len(self._journal.suspects),
                )
        return verdict

    def _batch_at(self, at: float) -> tuple[int, ...]:
        """The sequences in the steps of a worker that died at the time ``at``; none if it had not loaded."""
        died = None if self._epoch is None else self._board.died_at(self._epoch)
        if self._epoch is None or (died is not None and died < at):
            return ()
        return self._sequences_in_flight_at(at)

    def _died_at(self, epoch: int) -> float:
        """When the epoch ended, as far as is known; a worker that hangs ends now."""
        now = self.context.clock.monotonic()
        died_at = self._board.died_at(epoch)
        return now if died_at is None else min(died_at, now)

    def _steps_in_flight_at(self, at: float) -> list[int]:
        """Steps sent to the worker by the time ``at`` without a result. Steps sent between its death and the report of
        it wait for the next incarnation, which refuses them."""
        return [number for number, sent in self._sent.items() if sent <= at]

    def _sequences_in_flight_at(self, at: float) -> tuple[int, ...]:
        """The sequences in :meth:`_steps_in_flight_at`."""
        return tuple(self._planner.in_steps(self._steps_in_flight_at(at)))

    @handles
    async def step_done(self, message: StepDone) -> None:
        if message.epoch != self._epoch:
            return
        now = self.context.clock.monotonic()
        self._timeline_writer.answered(message.result, now)
        outputs = self._planner.finish_step(message.result, now)
        self._results += 1
        self._board.step_finished(now, message.result, sum([len(word.tokens) for word in outputs]))
        await self._schedule(outputs)

    @handles
    async def step_failed(self, message: StepFailed) -> None:
        if message.epoch != self._epoch:
            return
        _log.debug("Step %d got no answer: %s", message.number, message.reason)  # its worker's death is logged
        # No step is sent until WorkerReady announces the next epoch.
        self._epoch = None
        ready = self._board.worker
        if not message.worker_died and ready is not None and ready[1] == message.epoch:
            # It hangs or does not take messages: only a restart helps.
            reason = f"step {message.number} got no answer: {message.reason}"
            self.context.system.crash_actor(self._worker, ChildCrash(reason))
        await self._schedule(self._worker_lost(message.epoch, message.reason))

    @handles
    async def hand_over(self, message: HandOver) -> None:
        if self._worker_is_alive():
            return
        if self._epoch is not None:  # its steps have not failed yet; their reports will be ignored
            epoch, self._epoch = self._epoch, None
            await self._emit(self._worker_lost(epoch, "the worker died"))
        # Outputs under way must be in the journal before the others read it.
        await self._detokenizer.ask(FlushOutputs(), timeout=_CACHE_TIMEOUT_SECONDS)
        self._planner.forget_steps()  # so that a pause does not wait for them
        self._leave_to_others()
        await self._schedule()

    def _leave_to_others(self) -> None:
        moved = self._hand_over()
        if moved:
            _log.info("%d sequences of %s go on in other replicas", len(moved), self._worker.name)
        self._planner.text_stopped(moved)

    # -- grammars

    def _compile_held(self) -> None:
        """Let the ranks compile the grammars of held sequences, while others run."""
        grammars = self._planner.held_grammars()
        for grammar in [each for each in grammars if each not in self._compiling]:
            if len(self._compiling) >= _MAX_COMPILES:
                return
            self._compiling[grammar] = []
            for rank in (self._worker, *self._peers):
                self._compile(rank, grammar)

    def _compile(self, rank: ActorRef[WorkerProtocol], grammar: Grammar) -> None:
        epoch = self._epoch
        assert epoch is not None

        def answered(answer: str) -> GrammarCompiled:
            return GrammarCompiled(grammar=grammar, epoch=epoch, answer=answer)

        def failed(error: BaseException) -> GrammarCompiled:
            if isinstance(error, ActorDied):  # the next worker is asked again
                return GrammarCompiled(grammar=grammar, epoch=_NO_EPOCH, answer="")
            return answered(CompileGrammar.BUSY)

        message = CompileGrammar(grammar=grammar, timeout=_COMPILE_SECONDS)
        self.context.pipe(rank, message, timeout=2 * _COMPILE_SECONDS, on_reply=answered, on_error=failed)

    @handles
    async def grammar_compiled(self, message: GrammarCompiled) -> None:
        answers = self._compiling.get(message.grammar)
        if message.epoch != self._epoch or answers is None:
            return
        answers.append(message.answer)
        if len(answers) <= len(self._peers):
            return
        del self._compiling[message.grammar]
        answer, ended = next(filter(None, answers), ""), None
        if answer == CompileGrammar.BUSY:
            ended = Ended("error", message=_NOT_COMPILED)
        elif answer:
            ended = Ended("invalid", message=f"the grammar cannot go on: {answer}")
        await self._schedule(self._planner.grammar_compiled(message.grammar, ended))

    # -- control

    @handles
    async def pause(self, message: Pause) -> Deferred[None]:
        self._planner.paused = self._journal.paused = True
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pauses.append((message, answer))
        await self._schedule()
        return answer

    @handles
    async def continue_(self, message: Continue) -> None:
        self._planner.paused = self._journal.paused = False
        await self._schedule()

    async def _finish_pauses(self) -> None:
        """Answer the pauses, if no step is in flight."""
        if self._planner.in_flight:
            return
        pauses, self._pauses = self._pauses, []
        if self._planner.paused and any(pause.retract for pause, _ in pauses):
            self._planner.retract()
            self._timeline_writer.moved(self._planner.take_moves(), self.context.clock.monotonic())
        for _, answer in pauses:
            if not answer.done():  # the caller may be gone
                answer.set_result(None)

    @handles
    async def flush(self, message: Flush) -> bool:
        planner = self._planner
        if planner.running() or planner.in_flight or (planner.has_work and not planner.paused):
            return False
        await self._run_with_cache(planner.sync_cache())
        return await self._cache.ask(FlushCache(), timeout=_CACHE_TIMEOUT_SECONDS)

    # -- steps

    async def _schedule(self, outputs: Sequence[SequenceOutput] = ()) -> None:
        """Send as many steps as may be in flight, then emit ``outputs`` and the sequences that planning ended.

        Steps first: the next step is on its way before the tokens of the last one are processed.
        """
        planner = self._planner
        pending = list(outputs)
        while self._worker_is_alive() and planner.has_work and planner.can_send:
            now = self.context.clock.monotonic()
            pending += planner.expire(now)
            plan: StepPlan | None = await self._run_with_cache(planner.plan(now))
            self._timeline_writer.moved(planner.take_moves(), self.context.clock.monotonic())
            if plan is None:
                break
            if plan.batch is not None and self._worker_is_alive():
                self._submit(plan, plan.batch, now)
            pending += plan.outputs
        if self._lockstep is not None and self._results:
            results, self._results = self._results, 0
            self._lockstep.settled(self._board.replica, results)
        if moves := planner.take_moves():
            self._timeline_writer.moved(moves, self.context.clock.monotonic())
        if self._worker_is_alive():
            self._compile_held()
        await self._emit(pending)
        if self._pauses:
            await self._finish_pauses()
        now = self.context.clock.monotonic()
        self._board.load(planner.load(now), now)

    async def _run_with_cache(self, planning: Generator[CacheMessage, CacheReply, T]) -> T:
        """Run a generator of the planner: send its messages to the cache, and return its result."""
        try:
            call = next(planning)
            while True:
                sent = self.context.clock.monotonic()
                reply: CacheReply = await self._cache.ask(call, timeout=_CACHE_TIMEOUT_SECONDS)
                if isinstance(call, OpenSequence) and isinstance(reply, PrefixMatch):
                    self._timeline_writer.prefix_matched(call.sequence, sent, self.context.clock.monotonic(), reply)
                call = planning.send(reply)
        except StopIteration as finished:
            result: T = finished.value
            return result

    def _worker_is_alive(self) -> bool:
        """Whether the worker takes steps, as far as is known; otherwise WorkerReady will announce it."""
        return self._epoch is not None and self._board.died_at(self._epoch) is None

    def _submit(self, plan: StepPlan, batch: StepBatch, now: float) -> None:
        """Send a step, or let it wait for its round."""
        epoch, lockstep = self._epoch, self._lockstep
        assert epoch is not None
        if lockstep is None:
            self._send(plan, batch, now, epoch)
            return
        turn = Turn(
            sum(memoryview(batch.counts).cast("i")) + sum(memoryview(batch.draft_limits).cast("i")),
            lambda tokens: self._send(plan, msgspec.structs.replace(batch, pass_tokens=tokens), now, epoch),
            apart=len(self._journal.suspects) > 0,
        )
        lockstep.submit(self._board.replica, epoch, turn)

    def _launch_empty(self, epoch: int, tokens: tuple[int, ...]) -> None:
        """Let the workers take part in a round in which this replica has nothing to run."""
        empty = StepBatch(number=0, slots=b"", generations=b"", counts=b"", pass_tokens=tokens)
        step = Step(batch=empty, epoch=epoch, idle_work_first=False)
        for worker in (self._worker, *self._peers):
            self.context.pipe(
                worker,
                step,
                timeout=self._step_timeout,
                on_reply=self._round_ended(epoch) if worker is self._worker else lambda result: None,
                on_error=self._step_error(0, epoch),
            )

    def _round_ended(self, epoch: int) -> Callable[[StepResult], None]:
        def ended(result: StepResult) -> None:
            if self._lockstep is not None:
                self._lockstep.answered(self._board.replica, epoch)

        return ended

    def _step_error(self, number: int, epoch: int) -> Callable[[BaseException], StepFailed]:
        def failed(error: BaseException) -> StepFailed:
            if self._lockstep is not None:
                self._lockstep.broke(epoch)
            return StepFailed(number=number, epoch=epoch, reason=str(error), worker_died=isinstance(error, ActorDied))

        return failed

    def _send(self, plan: StepPlan, batch: StepBatch, now: float, epoch: int) -> None:
        tokens = sum([chunk.tokens for chunk in plan.chunks])
        sent = self._sent[batch.number] = self.context.clock.monotonic()
        traces = self._timeline_writer.sent(batch.number, plan, sent)
        if traces:
            batch = msgspec.structs.replace(batch, traces=traces)
        self._board.step_sent(StepShape(now, len(plan.decodes), len(plan.chunks), tokens))
        experts, record = self._experts, None if self._recorder is None else self._recorder.for_step(batch.number)
        requests: list[str] = []
        if record is not None:
            batch = msgspec.structs.replace(batch, record_experts=record.wanted)
            rows = [*(row.id for row in plan.decodes), *(chunk.sequence for chunk in plan.chunks)]
            requests = ["" if (entry := self._journal.get(row)) is None else entry.timeline.request_id for row in rows]
        # A step belongs to no request: it has a trace of its own.
        trace = current_traceparent.set(next((row.traceparent for row in traces if row.row == STEP_ROW), None))

        def answered(result: StepResult) -> StepDone:
            self._sent.pop(batch.number, None)  # now, however long the message waits in the mailbox
            self._board.stage_ran(self._worker.name, result.timing.stage)
            if self._lockstep is not None:
                self._lockstep.answered(self._board.replica, epoch)
            if record is not None:
                record.add(self._board.replica, requests, result, experts)
            return StepDone(result=result, epoch=epoch)

        step = Step(batch=batch, epoch=epoch, idle_work_first=len(self._journal.suspects) > 0)
        self.context.pipe(
            self._worker,
            step,
            timeout=self._step_timeout,
            on_reply=answered,
            on_error=self._step_error(batch.number, epoch),
        )
        for peer in self._peers:

            def answered_by_peer(result: StepResult, name: str = peer.name) -> None:
                # All ranks sample the same tokens; only the spans and times of the other ranks are used.
                self._timeline_writer.peer_answered(name, result.spans)
                self._board.stage_ran(name, result.timing.stage)

            self.context.pipe(
                peer,
                step,
                timeout=self._step_timeout,
                on_reply=answered_by_peer,
                on_error=self._step_error(batch.number, epoch),
            )
        current_traceparent.reset(trace)

    async def _emit(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            await self._detokenizer.tell(Emit(outputs=tuple(outputs)))
