"""The Scheduler actor: keeps the worker fed with steps and tells the detokenizer what came back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from actors.chronicle import Chronicle
from actors.faults import FaultInjector
from actors.journal import Journal
from actors.protocol import (
    Abort,
    CacheProtocol,
    DetokenizerProtocol,
    Emission,
    Emit,
    Ended,
    Fence,
    Flush,
    FlushCache,
    Lease,
    OpenSequence,
    ResetCache,
    SchedulerProtocol,
    Step,
    StepDone,
    StepFailed,
    Submit,
    TextStopped,
    WorkerProtocol,
    WorkerReady,
)
from actors.runtime import Actor, ActorDied, ActorRef, ChildCrash, current_traceparent, handles
from actors.scheduling.config import PlannerConfig
from actors.scheduling.planner import CacheReply, Planner, StepPlan
from actors.scheduling.suspects import Verdict
from actors.vitals import Vitals
from kernels.step import ModelInfo, StepBatch, StepResult
from telemetry.step_metrics import StepShape
from telemetry.worker_spans import STEP_ROW

if TYPE_CHECKING:
    from telemetry.tracing import Tracing

__all__ = ["Scheduler"]

_log = logging.getLogger("troupe.scheduler")

_CACHE_TIMEOUT = 30.0

_SET_APART = (
    "The model's worker died while it ran this request, and died again when it ran this request apart from all others, "
    "so the request is not run a third time. Change the request, or send it again later; if it fails again, report it."
)


class Scheduler(Actor[SchedulerProtocol]):
    """A thin shell around :class:`Planner`.

    After every message it plans as many steps as may be in flight. The worker's answers come back into its own mailbox,
    so nothing here ever waits for the device.
    """

    def __init__(
        self,
        config: PlannerConfig,
        *,
        journal: Journal,
        cache: ActorRef[CacheProtocol],
        worker: ActorRef[WorkerProtocol],
        peers: Sequence[ActorRef[WorkerProtocol]] = (),
        detokenizer: ActorRef[DetokenizerProtocol],
        vitals: Vitals,
        step_timeout: float,
        tracing: Tracing | None = None,
        faults: FaultInjector | None = None,
    ) -> None:
        self._planner = Planner(config, journal.suspects)
        self._journal = journal
        self._chronicle = Chronicle(journal, worker.name, tracing)
        self._cache = cache
        self._worker = worker
        self._peers = peers
        self._detokenizer = detokenizer
        self._vitals = vitals
        self._step_timeout = step_timeout
        self._faults = faults
        self._epoch: int | None = None
        self._sent: dict[int, float] = {}  # when, of the steps that the worker has not answered ...
        self._sent_epoch: int | None = None  # ... of this epoch
        self._verdicts: dict[int, Verdict] = {}  # on the deaths since the last worker was taken, by epoch

    async def started(self) -> None:
        self._vitals.forget_steps()
        self._vitals.read_batch = self._batch_at
        self._vitals.judge = None
        if self.context.incarnation > 0:
            # What the last life sent must be in the journal before the journal is read.
            await self._detokenizer.ask(Fence(), timeout=_CACHE_TIMEOUT)
        now = self.context.clock.monotonic()
        entries = list(self._journal.live())
        if entries:
            self._chronicle.resumed(entries, now)
            await self._tell(self._planner.submit(tuple(entry.resume_spec() for entry in entries), now))
        await self._tell(self._set_apart(now))
        self._vitals.judge = self._judge  # not before the planner knows which suspects live
        ready = self._vitals.worker
        if ready is not None:
            await self._take_worker(*ready)
        await self._pump()

    # -- requests

    @handles
    async def submit(self, message: Submit) -> None:
        if self._faults is not None:
            await self._faults.strike_async("queue")
        # An abort takes the faster lane: what is no longer in the journal was aborted before it came here.
        specs = tuple(spec for spec in message.sequences if spec.sequence in self._journal)
        await self._pump(self._planner.submit(specs, self.context.clock.monotonic()))

    @handles
    async def abort(self, message: Abort) -> None:
        await self._pump(self._planner.abort(message.sequences))

    @handles
    async def text_stopped(self, message: TextStopped) -> None:
        self._planner.text_stopped(message.sequences)
        await self._pump()

    # -- the worker

    @handles
    async def worker_ready(self, message: WorkerReady) -> None:
        await self._take_worker(message.info, message.epoch)
        await self._pump()

    async def _take_worker(self, info: ModelInfo, epoch: int) -> None:
        if epoch == self._epoch or self._vitals.died_at(epoch) is not None:
            return
        # Where no step has told of the end of the life before (its failure is behind this message, or it had none),
        # this does. Who is not run again hears of it now: should the cache not answer, nobody would say it later.
        if self._epoch is not None:
            await self._tell(self._worker_lost(self._epoch, "the worker was replaced"))
        await self._cache.ask(ResetCache(num_pages=info.num_pages, page_size=info.page_size), timeout=_CACHE_TIMEOUT)
        self._epoch = self._sent_epoch = epoch
        self._sent.clear()
        self._verdicts.clear()
        self._chronicle.steps_lost(self.context.clock.monotonic())
        self._vitals.forget_steps()  # one may have been sent to the life before, when that was over already
        await self._tell(self._planner.worker_ready(info, self.context.clock.monotonic()))

    def _worker_lost(self, epoch: int, reason: str) -> list[Emission]:
        """A life of the worker is over. Returns the sequences that are not run again, ended."""
        now = self.context.clock.monotonic()
        at = self._fell_at(epoch)
        lost = self._in_hand(at)
        self._chronicle.worker_died(self._planner.running(), lost, at, now, reason)
        self._journal.worker_died(lost)
        self._judge(epoch)
        return self._set_apart(now)

    def _set_apart(self, now: float) -> list[Emission]:
        """End what was condemned, with all choices of the same requests: a request fails as a whole, and its other
        choices may do the same harm before its reader leaves."""
        journal = self._journal
        streams = {id(entry.stream) for each in journal.condemned if (entry := journal.get(each)) is not None}
        condemned = [entry.sequence for entry in journal.live() if id(entry.stream) in streams] if streams else []
        journal.condemned.clear()
        self._chronicle.set_apart(condemned, now)
        ended = Ended("error", message=_SET_APART)
        return [msgspec.structs.replace(word, ended=ended) for word in self._planner.abort(condemned)]

    def _judge(self, epoch: int) -> Verdict:
        """What the death of the worker's life ``epoch`` proves. Judged once, by the first that asks."""
        verdict = self._verdicts.get(epoch)
        if verdict is None:
            # One that died before it was taken here was sent nothing: the steps are those of the life before.
            lost = self._steps_in_hand(self._fell_at(epoch)) if epoch == self._sent_epoch else []
            verdict = self._verdicts[epoch] = self._planner.worker_died(lost)
            self._journal.condemned.update(verdict.condemned)
            if not verdict.counts:
                _log.warning(
                    "The worker died again of a step with suspects; %d are left, and run apart from other sequences",
                    len(self._journal.suspects),
                )
        return verdict

    def _batch_at(self, at: float) -> tuple[int, ...]:
        """The sequences in the steps of a worker that died ``at``; none if it had not loaded."""
        died = None if self._epoch is None else self._vitals.died_at(self._epoch)
        if self._epoch is None or (died is not None and died < at):
            return ()
        return self._in_hand(at)

    def _fell_at(self, epoch: int) -> float:
        """When the life ended, as far as is known: one that hangs ends now."""
        now = self.context.clock.monotonic()
        died_at = self._vitals.died_at(epoch)
        return now if died_at is None else min(died_at, now)

    def _steps_in_hand(self, at: float) -> list[int]:
        """Steps that the worker was sent by ``at`` and has not answered. What it is sent between its death and the news
        of it waits for its next life, which refuses it."""
        return [number for number, sent in self._sent.items() if sent <= at]

    def _in_hand(self, at: float) -> tuple[int, ...]:
        """The sequences in :meth:`_steps_in_hand`."""
        return tuple(self._planner.in_steps(self._steps_in_hand(at)))

    @handles
    async def step_done(self, message: StepDone) -> None:
        if message.epoch != self._epoch:
            return
        now = self.context.clock.monotonic()
        self._chronicle.answered(message.result, now)
        emissions = self._planner.finish_step(message.result, now)
        self._vitals.step_finished(now, message.result, sum([len(word.tokens) for word in emissions]))
        await self._pump(emissions)

    @handles
    async def step_failed(self, message: StepFailed) -> None:
        if message.epoch != self._epoch:
            return
        _log.debug("Step %d got no answer: %s", message.number, message.reason)  # its worker's death is logged
        # The worker's next life announces itself by WorkerReady; until then nothing is sent.
        self._epoch = None
        ready = self._vitals.worker
        if not message.worker_died and ready is not None and ready[1] == message.epoch:
            # It hangs, or does not take what it is sent: only a new life can mend that.
            reason = f"step {message.number} got no answer: {message.reason}"
            self.context.system.crash_actor(self._worker, ChildCrash(reason))
        await self._pump(self._worker_lost(message.epoch, message.reason))

    # -- questions

    @handles
    async def flush(self, message: Flush) -> bool:
        if self._planner.has_work:
            return False
        return await self._cache.ask(FlushCache(), timeout=_CACHE_TIMEOUT)

    # -- steps

    async def _pump(self, emissions: Sequence[Emission] = ()) -> None:
        """Send as many steps as may be in flight, then tell ``emissions`` and what planning ended.

        The device first: the next step is on its way before anybody reads the tokens of the last one.
        """
        planner = self._planner
        told = list(emissions)
        while self._worker_lives() and planner.has_work and planner.can_send:
            now = self.context.clock.monotonic()
            told += planner.expire(now)
            planning = planner.plan(now)
            plan: StepPlan | None = None
            try:
                call = next(planning)
                while True:
                    asked = self.context.clock.monotonic()
                    reply: CacheReply = await self._cache.ask(call, timeout=_CACHE_TIMEOUT)
                    if isinstance(call, OpenSequence) and isinstance(reply, Lease):
                        self._chronicle.leased(call.sequence, asked, self.context.clock.monotonic(), reply)
                    call = planning.send(reply)
            except StopIteration as finished:
                plan = finished.value
            self._chronicle.moved(planner.moves(), self.context.clock.monotonic())
            if plan is None:
                break
            if plan.batch is not None and self._worker_lives():
                self._send(plan, plan.batch, now)
            told += plan.emissions
        if moves := planner.moves():
            self._chronicle.moved(moves, self.context.clock.monotonic())
        await self._tell(told)
        now = self.context.clock.monotonic()
        self._vitals.load(planner.load(now), now)

    def _worker_lives(self) -> bool:
        """Whether the worker takes steps, for all that is known; else its next life announces itself."""
        return self._epoch is not None and self._vitals.died_at(self._epoch) is None

    def _send(self, plan: StepPlan, batch: StepBatch, now: float) -> None:
        epoch = self._epoch
        assert epoch is not None
        tokens = sum([chunk.tokens for chunk in plan.chunks])
        sent = self._sent[batch.number] = self.context.clock.monotonic()
        traces = self._chronicle.sent(batch.number, plan, sent)
        if traces:
            batch = msgspec.structs.replace(batch, traces=traces)
        self._vitals.step_sent(StepShape(now, len(plan.decodes), len(plan.chunks), tokens))
        # A step belongs to no request: what is traced of it is the step's own trace.
        trace = current_traceparent.set(next((row.traceparent for row in traces if row.row == STEP_ROW), None))

        def answered(result: StepResult) -> StepDone:
            self._sent.pop(batch.number, None)  # however long this one takes to hear of it
            return StepDone(result=result, epoch=epoch)

        self.context.pipe(
            self._worker,
            Step(batch=batch, epoch=epoch),
            timeout=self._step_timeout,
            on_reply=answered,
            on_error=lambda error: StepFailed(
                number=batch.number, epoch=epoch, reason=str(error), worker_died=isinstance(error, ActorDied)
            ),
        )
        for peer in self._peers:

            def heard(result: StepResult, name: str = peer.name) -> None:
                # Rank 0 speaks for all; of the others only their own time counts.
                self._chronicle.peer_answered(name, result.spans)

            self.context.pipe(
                peer,
                Step(batch=batch, epoch=epoch),
                timeout=self._step_timeout,
                on_reply=heard,
                on_error=lambda error: StepFailed(
                    number=batch.number, epoch=epoch, reason=str(error), worker_died=isinstance(error, ActorDied)
                ),
            )
        current_traceparent.reset(trace)

    async def _tell(self, emissions: list[Emission]) -> None:
        if emissions:
            await self._detokenizer.tell(Emit(emissions=tuple(emissions)))
