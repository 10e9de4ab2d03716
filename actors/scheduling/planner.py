"""The planner: turns queued sequences into steps and the results of steps into emissions."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

import msgspec
import numpy as np

from actors.protocol import (
    CacheTurn,
    CacheTurnDone,
    Commit,
    Emission,
    Ended,
    Grant,
    Grow,
    Lease,
    OpenSequence,
    PeekPrefixes,
    SchedulerLoad,
    SequenceSpec,
    TokenScores,
)
from actors.scheduling.config import PlannerConfig
from actors.scheduling.draft import Draft, Flight
from actors.scheduling.growth import GrowthReserve
from actors.scheduling.policy import Policy
from actors.scheduling.scores import PromptScores, StepScores, join
from actors.scheduling.sequence import Sequence, Status
from actors.scheduling.siblings import PrefillsUnderWay
from actors.scheduling.slots import Slots
from actors.scheduling.waiting import WaitingQueue
from kernels.step import ModelInfo, StepBatch, StepResult

__all__ = ["CacheMessage", "CacheReply", "Planner", "StepPlan"]

CacheMessage: TypeAlias = OpenSequence | CacheTurn | PeekPrefixes
CacheReply: TypeAlias = Lease | CacheTurnDone | list[int]
Planning: TypeAlias = Generator[CacheMessage, CacheReply, None]

_MOST_HELD = 64  # sequences of the queue passed over in one step because their prefix is being computed
_RETRY_STEPS = 32  # a queue whose head did not fit is looked at again after so many steps, whatever happened


class StepPlan(msgspec.Struct, frozen=True):
    """``batch``: to be sent to the worker, if there is one. ``emissions``: sequences ended by planning.

    Without a batch the planner wants to be asked again: what ended may have made room for others.
    """

    batch: StepBatch | None
    emissions: list[Emission]


class Planner:
    """Decides what runs next. Sans-IO: it asks the cache by yielding messages, and is told the time.

    A sequence waits, runs (it has a slot, pages and a place in every step it can use) and ends exactly once. It may go
    back from running to waiting: when pages run out, when a much higher priority needs its place, or with its worker.
    Then its pages are given up and prompt and output are computed again, from whatever prefix is cached still.

    Two steps may be in flight: a sequence's next token is planned before the last one is known, so an end is noticed
    one step late and the row that ran in vain is ignored. Steps run strictly in order, which is why pages and slots can
    be given to others while such a row is still in flight: whoever gets them runs, and writes, later.
    """

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._policy = Policy(config)
        self._growth = GrowthReserve(config.conservativeness)
        self._slots = Slots(config.max_slots)
        self._siblings = PrefillsUnderWay(1)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._prefilling: dict[int, Sequence] = {}  # of them, those with more than one known token to run
        self._flights: deque[Flight] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._dirty: list[Sequence] = []  # with pages to commit
        self._final_commits: list[Commit] = []  # of sequences in ...
        self._closes: list[int] = []  # ... those to be closed
        self._available = 0  # pages the cache can give
        self._may_admit = True  # False: the head of the queue did not fit and nothing has changed
        self._blocked: tuple[int, int] = (-1, 0)  # the sequence that did not fit, and the pages it needs
        self._page_size = 0
        self._total_pages = 0
        self._context_length = 0
        self._number = 0
        self._serial = 0
        self._preemptions = 0
        self._last_finish = 0.0

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker has been announced."""
        return self._page_size > 0

    @property
    def has_work(self) -> bool:
        """Whether something runs, waits, or is to be told to the cache."""
        return bool(self._sequences or self._closes)

    @property
    def in_flight(self) -> int:
        """Steps without an answer."""
        return len(self._flights)

    @property
    def can_send(self) -> bool:
        """Whether the worker may be given another step."""
        return self.ready and len(self._flights) < (2 if self._config.overlap else 1)

    def is_known(self, sequence: int) -> bool:
        """Whether the sequence waits or runs."""
        return sequence in self._sequences

    def sequences_in_flight(self) -> tuple[int, ...]:
        """Sequences with a row in a step that has no answer yet: the suspects when a worker dies."""
        return tuple({s.id for flight in self._flights for s in flight.sequences if s.status is Status.RUNNING})

    def load(self, now: float) -> SchedulerLoad:
        """Counts for metrics and health."""
        return SchedulerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            steps=self._number,
            steps_in_flight=len(self._flights),
            preemptions=self._preemptions,
            last_step_age=max(now - self._last_finish, 0.0) if self._sequences else 0.0,
        )

    # -- coming and going ---------------------------------------------------------------------------------------------

    def worker_ready(self, info: ModelInfo, now: float) -> list[Emission]:
        """A worker with empty slots and an empty cache: what ran waits again, steps in flight are forgotten.

        The caller resets the cache before it plans. Returns the sequences that this worker can never run, ended.
        """
        self._page_size = info.page_size
        self._total_pages = info.num_pages - 1
        self._context_length = info.context_length
        self._available = self._total_pages
        self._flights.clear()
        self._slots.reset()
        self._siblings = PrefillsUnderWay(info.page_size)
        self._prefilling.clear()
        self._dirty.clear()
        self._final_commits.clear()
        self._closes.clear()
        self._may_admit = True
        self._last_finish = now
        for sequence in self._running.values():
            self._wait(sequence)
        self._running.clear()
        return [emission for sequence in list(self._waiting) if (emission := self._examine(sequence)) is not None]

    def submit(self, specs: Iterable[SequenceSpec], now: float) -> list[Emission]:
        """Queue sequences; known ones are left alone. Returns those refused, pushed out or complete already, ended."""
        emissions: list[Emission] = []
        for spec in specs:
            if spec.sequence in self._sequences:
                continue
            if not self._sequences:
                self._last_finish = now
            sequence = Sequence(spec, self._policy.strength(spec.priority))
            self._sequences[spec.sequence] = sequence
            self._waiting.add(sequence)
            if spec.deadline is not None:
                self._watch(spec.deadline, spec.sequence)
            emission = self._examine(sequence) if self.ready else None
            if emission is None:
                emission = self._bound_queue(sequence)
            if emission is not None:
                emissions.append(emission)
        self._may_admit = True
        return emissions

    def abort(self, sequences: Iterable[int]) -> list[Emission]:
        """End sequences wherever they are; unknown ones are ignored."""
        return [self._end(s, Ended("abort")) for i in sequences if (s := self._sequences.get(i)) is not None]

    def text_stopped(self, sequences: Iterable[int]) -> None:
        """Drop sequences whose end the detokenizer has told already: no emission."""
        for number in sequences:
            sequence = self._sequences.get(number)
            if sequence is not None:
                self._drop(sequence)

    def expire(self, now: float) -> list[Emission]:
        """End sequences whose deadline has passed."""
        emissions = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(number)
            if sequence is not None and sequence.spec.deadline is not None and sequence.spec.deadline <= now:
                emissions.append(self._end(sequence, Ended("timeout", message="the request's deadline passed")))
        return emissions

    def _watch(self, deadline: float, sequence: int) -> None:
        heapq.heappush(self._deadlines, (deadline, sequence))
        if len(self._deadlines) > 2 * len(self._sequences) + 64:  # most have ended long before
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
            heapq.heapify(self._deadlines)

    def _examine(self, sequence: Sequence) -> Emission | None:
        """End a waiting sequence that is complete, or that this worker can never run."""
        prompt, context = sequence.prompt_length, self._context_length
        sequence.target = min(prompt + sequence.spec.max_tokens, context)
        needed = -(-sequence.length // self._page_size)
        ended = sequence.end()
        if ended is None and prompt < 1:
            ended = Ended("error", message="the prompt is empty: give it at least one token")
        if ended is None and prompt >= context:
            ended = Ended(
                "error", message=f"the prompt has {prompt} tokens, the context holds {context}: shorten the prompt"
            )
        if ended is None and needed > self._total_pages:
            ended = self._too_large(needed)
        return None if ended is None else self._end(sequence, ended)

    def _too_large(self, pages: int) -> Ended:
        return Ended(
            "error",
            message=f"the sequence needs {pages} pages, the cache has {self._total_pages}: "
            "raise --max-total-tokens or shorten the request",
        )

    def _bound_queue(self, newcomer: Sequence) -> Emission | None:
        """With the queue over its bound, the newcomer goes, or a waiting sequence of lower priority in its place.

        A sequence that has output already is never refused: its request was accepted in an earlier life.
        """
        bound = self._config.max_queued
        if bound is None or len(self._waiting) <= bound or newcomer.output:
            return None
        fresh = [sequence for sequence in self._waiting if not sequence.output and not sequence.preemptions]
        victim = self._policy.weakest(fresh)
        return self._end(
            victim,
            Ended(
                "error", message=f"the queue is full ({bound} waiting): try again later or raise --max-queued-requests"
            ),
        )

    def _end(self, sequence: Sequence, ended: Ended) -> Emission:
        self._drop(sequence)
        return Emission(
            sequence=sequence.id,
            start=len(sequence.output),
            cached_tokens=max(sequence.cached_tokens, 0),
            ended=ended,
        )

    def _drop(self, sequence: Sequence) -> None:
        """A sequence ends: nothing of it stays but the closing of its pages."""
        if sequence.status is Status.RUNNING:
            del self._running[sequence.id]
            self._leave_device(sequence)
        else:
            self._waiting.remove(sequence)
            self._may_admit = True
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]

    def _wait(self, sequence: Sequence) -> None:
        sequence.rest()
        sequence.status = Status.WAITING
        self._waiting.add(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        """Slot and pages are given up: told to cache and worker with the next plan."""
        self._prefilling.pop(sequence.id, None)
        self._siblings.discard(sequence)
        self._slots.give_back(sequence.slot)
        if sequence.computed >= sequence.commit_at:
            self._final_commits.append(self._commit(sequence))
        self._closes.append(sequence.id)
        sequence.serial = 0
        self._may_admit = True

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Back to the queue, to its old place; what it computed stays as long as the cache can keep it."""
        del self._running[sequence.id]
        self._leave_device(sequence)
        self._wait(sequence)
        sequence.progressed = False
        sequence.preemptions += 1
        self._preemptions += 1
        draft.preempted.add(sequence.id)

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Generator[CacheMessage, CacheReply, StepPlan | None]:
        """The next step, or None when there is nothing to do now. Drive it to its end before any other call."""
        if not self.can_send:
            return None
        config = self._config
        draft = Draft(config.step_tokens, config.prefill_max_requests or config.max_running)
        emissions: list[Emission] = []
        first = yield from self._make_room(draft)
        yield from self._plan_decodes(draft)
        draft.budget = min(draft.budget, config.max_prefill_tokens)
        yield from self._plan_prefills(draft)
        while draft.empty and self._running and not self._flights:
            yield from self._unblock(draft, emissions)
        if self._waiting and self._may_join(draft) and not (self._running and (draft.short or not self._may_admit)):
            yield from self._admit(draft, first, now, emissions)
        grants: tuple[Grant, ...] = ()
        if draft.grows or self._has_news():
            grants = (yield from self._turn(tuple(draft.grows))).grants
        batch: StepBatch | None = None
        if not draft.empty:
            self._number += 1
            batch = draft.batch(self._number, grants, self._running, self._slots.released())
            self._flights.append(draft.flight(self._number))
            if not draft.short:
                self._growth.step()
            if self._number % _RETRY_STEPS == 0:
                self._may_admit = True
        if batch is None and not emissions:
            return None
        return StepPlan(batch, emissions)

    def _has_news(self) -> bool:
        return bool(self._dirty or self._closes)

    def _turn(self, grows: tuple[Grow, ...] = ()) -> Generator[CacheMessage, CacheReply, CacheTurnDone]:
        """Tell the cache what was computed and who left, and ask for pages."""
        commits = self._final_commits
        for sequence in self._dirty:
            if sequence.serial and sequence.computed >= sequence.commit_at:
                commits.append(self._commit(sequence))
        closes = tuple(self._closes)
        self._final_commits, self._dirty, self._closes = [], [], []
        done = yield CacheTurn(commits=tuple(commits), closes=closes, grows=grows)
        if not isinstance(done, CacheTurnDone):
            raise TypeError(f"a CacheTurn was answered with {type(done).__name__}")
        self._available = done.available
        return done

    def _settle(self, draft: Draft) -> Planning:
        """Learn how many pages there are, with everything told; those the draft will ask for are not counted."""
        if self._has_news():
            yield from self._turn()
            self._available -= draft.pages

    def _commit(self, sequence: Sequence) -> Commit:
        """The full pages that are certainly computed, told once."""
        start, sequence.told = sequence.told, sequence.length
        sequence.shared = sequence.computed // self._page_size
        sequence.commit_at = (sequence.shared + 1) * self._page_size
        if sequence.shared >= sequence.prompt_length // self._page_size:
            self._siblings.discard(sequence)
        return Commit(sequence=sequence.id, tokens=sequence.tokens_from(start), computed=sequence.computed)

    def _plan_decodes(self, draft: Draft) -> Planning:
        """A token for every sequence whose next input is known, to the device at least."""
        rows: list[Sequence] = []
        growers: list[Sequence] = []
        for sequence in self._running.values():
            scheduled = sequence.scheduled
            if sequence.known - scheduled == 1 and sequence.known < sequence.target:
                rows.append(sequence)
                if scheduled >= sequence.capacity:
                    growers.append(sequence)
        if len(growers) > self._available:
            yield from self._settle(draft)
        if len(growers) > self._available:
            growers = yield from self._yield_pages(draft, growers)
            rows = [s for s in rows if s.serial and (s.scheduled < s.capacity or s in growers)]
        for sequence in growers:
            draft.grow(sequence, 1, self._page_size)
        self._available -= len(growers)
        for sequence in rows:
            sequence.scheduled += 1
            sequence.known += 1
        draft.decodes = rows
        draft.budget -= len(rows)

    def _yield_pages(
        self, draft: Draft, growers: list[Sequence]
    ) -> Generator[CacheMessage, CacheReply, list[Sequence]]:
        """Too few pages: the weakest are preempted. Returns those of ``growers`` that get a page.

        Who has been preempted and has not got on since is spared, and so is who will end with the steps in flight; so
        it may be that some growers have to sit out this step.
        """
        draft.short = True
        self._growth.preempted()
        while len(growers) > self._available:
            victim = self._victim(lambda s: s.progressed and s.known < s.target)
            if victim is None:
                growers = sorted(growers, key=lambda s: (-s.strength, s.rank))[: self._available]
                break
            self._preempt(victim, draft)
            growers = [sequence for sequence in growers if sequence is not victim]
            yield from self._settle(draft)
        return growers

    def _victim(self, eligible: Callable[[Sequence], bool]) -> Sequence | None:
        """The weakest eligible running sequence; the strongest of all is none."""
        running = self._running.values()
        strongest = self._policy.strongest(running)
        candidates = [sequence for sequence in running if sequence is not strongest and eligible(sequence)]
        return self._policy.weakest(candidates) if candidates else None

    def _plan_prefills(self, draft: Draft) -> Planning:
        """The next chunks of running prefills, in the order of their admission."""
        for sequence in list(self._prefilling.values()):
            if draft.budget <= 0 or draft.prefill_rows <= 0:
                break
            rest = sequence.known - sequence.scheduled
            count = min(rest, draft.budget)
            pages = -(-(sequence.scheduled + count) // self._page_size) - sequence.pages
            if pages > self._available:
                yield from self._settle(draft)
            if pages > self._available:
                pages = self._available
                count = min(count, sequence.capacity + pages * self._page_size - sequence.scheduled)
                draft.short = True
            if count <= 0:
                continue
            self._run_prefill(draft, sequence, count, max(pages, 0))

    def _run_prefill(self, draft: Draft, sequence: Sequence, count: int, pages: int) -> None:
        if pages > 0:
            draft.grow(sequence, pages, self._page_size)
            self._available -= pages
        draft.prefill(sequence, count)
        if sequence.known - sequence.scheduled > 1:
            self._prefilling[sequence.id] = sequence
        else:
            self._prefilling.pop(sequence.id, None)

    def _unblock(self, draft: Draft, emissions: list[Emission]) -> Planning:
        """Sequences run, nothing is in flight, and no one can go on: one has to go for the others."""
        draft.short = True
        self._growth.preempted()
        victim = self._victim(lambda s: True)
        if victim is not None:
            self._preempt(victim, draft)
        else:
            (last,) = self._running.values()
            emissions.append(self._end(last, self._too_large(-(-(last.scheduled + 1) // self._page_size))))
        yield from self._settle(draft)
        yield from self._plan_decodes(draft)
        yield from self._plan_prefills(draft)

    def _make_room(self, draft: Draft) -> Generator[CacheMessage, CacheReply, Sequence | None]:
        """A waiting sequence of much higher priority takes the place of weak ones. Returns it, to be admitted first."""
        pressing = self._policy.pressing(self._waiting, self._running.values())
        if pressing is None:
            return None
        if len(self._running) >= self._config.max_running or not self._slots.free:
            victim = self._victim_of(pressing)
            if victim is None:
                return None
            self._preempt(victim, draft)
            return pressing
        if self._may_admit:
            return None  # there is room, and the queue's own order says for whom
        if self._blocked[0] == pressing.id:
            yield from self._settle(draft)
            while self._blocked[1] + self._growth.pages(self._running.values(), self._page_size) > self._available:
                victim = self._victim_of(pressing)
                if victim is None:
                    break
                self._preempt(victim, draft)
                yield from self._settle(draft)
            return pressing if draft.preempted else None
        self._may_admit = True  # another one is known not to fit: this one has yet to be tried
        return pressing

    def _victim_of(self, pressing: Sequence) -> Sequence | None:
        candidates = [
            s
            for s in self._running.values()
            if s.progressed and s.known < s.target and self._policy.may_preempt(pressing, s)
        ]
        return self._policy.weakest(candidates) if candidates else None

    def _may_join(self, draft: Draft) -> bool:
        """Whether the step has a place for one more admission."""
        return (
            draft.budget > 0
            and draft.prefill_rows > 0
            and len(self._running) < self._config.max_running
            and self._slots.free > 0
        )

    def _admit(self, draft: Draft, first: Sequence | None, now: float, emissions: list[Emission]) -> Planning:
        """Sequences from the queue, in the policy's order. One that does not fit is not overtaken."""
        config, size = self._config, self._page_size
        yield from self._settle(draft)
        order = yield from self._order(first, now)
        whole = min(config.step_tokens - config.max_running, config.max_prefill_tokens)  # surely fits one step
        reserve = self._growth.pages(self._running.values(), size)
        held = 0
        for sequence in order:
            if not self._may_join(draft) or held >= _MOST_HELD:
                break
            if sequence.id in draft.preempted and self._running:
                continue
            if self._siblings.computes_for(sequence):
                held += 1
                continue
            needed = -(-sequence.length // size)
            if needed > self._total_pages:
                emissions.append(self._end(sequence, self._too_large(needed)))
                continue
            if not config.chunked and draft.counts and draft.budget < sequence.length <= whole:
                break
            lease = yield from self._open(sequence)
            self._available = lease.available - draft.pages
            sequence.pages = len(lease.pages) // 4
            own = self._growth.pages((sequence,), size)
            if self._running and own + reserve > self._available:
                sequence.rest()
                self._closes.append(sequence.id)
                self._blocked = (sequence.id, own)
                self._may_admit = False
                break
            self._start(draft, sequence, lease)
            reserve += self._growth.pages((sequence,), size)

    def _order(self, first: Sequence | None, now: float) -> Generator[CacheMessage, CacheReply, list[Sequence]]:
        cached: list[int] | None = None
        if self._policy.wants_prefixes(self._waiting):
            reply = yield PeekPrefixes(
                tokens=tuple([sequence.tokens() for sequence in self._waiting]),
                salts=tuple([sequence.spec.salt for sequence in self._waiting]),
            )
            if not isinstance(reply, list):
                raise TypeError(f"a PeekPrefixes was answered with {type(reply).__name__}")
            cached = reply
        order = self._policy.order(self._waiting, now, cached)
        if first is not None:
            order.remove(first)
            order.insert(0, first)
        return order

    def _open(self, sequence: Sequence) -> Generator[CacheMessage, CacheReply, Lease]:
        lease = yield OpenSequence(
            sequence=sequence.id,
            tokens=sequence.tokens(),
            salt=sequence.spec.salt,
            use_cache=not sequence.scores_prompt,
        )
        if not isinstance(lease, Lease):
            raise TypeError(f"an OpenSequence was answered with {type(lease).__name__}")
        return lease

    def _start(self, draft: Draft, sequence: Sequence, lease: Lease) -> None:
        """An admission: a slot, the shared pages, and the first chunk."""
        size = self._page_size
        self._waiting.remove(sequence)
        self._running[sequence.id] = sequence
        sequence.status = Status.RUNNING
        self._serial += 1
        sequence.serial = self._serial
        sequence.slot, sequence.generation = self._slots.take()
        sequence.computed = sequence.scheduled = sequence.capacity = lease.cached
        sequence.shared = lease.cached // size
        sequence.told = sequence.length
        sequence.commit_at = (sequence.shared + 1) * size if self._config.use_cache else sys.maxsize
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = lease.cached
        draft.admitted[sequence.id] = lease.pages
        count = min(sequence.known - sequence.scheduled, draft.budget)
        self._run_prefill(draft, sequence, count, -(-(sequence.scheduled + count) // size) - sequence.pages)
        if self._config.use_cache and sequence.shared < sequence.prompt_length // size:
            self._siblings.add(sequence)

    # -- results ------------------------------------------------------------------------------------------------------

    def finish_step(self, result: StepResult, now: float) -> list[Emission]:
        """What a step's answer means for its sequences. Answers to forgotten steps are ignored.

        Raises RuntimeError when steps are answered out of order: what the worker has written is unknown then.
        """
        if not self._flights or result.number < self._flights[0].number:
            return []
        if result.number != self._flights[0].number:
            raise RuntimeError(f"step {result.number} was answered before step {self._flights[0].number}")
        flight = self._flights.popleft()
        self._last_finish = now
        accepted: list[int] = np.frombuffer(result.accepted, dtype=np.int32).tolist()
        tokens: list[int] = np.frombuffer(result.tokens, dtype=np.int32).tolist()
        scores = StepScores(result) if result.logprobs else None
        prompts = PromptScores(result) if result.prompt_rows else None
        failed = {(error.slot, error.generation): error.message for error in result.failed}
        emissions: list[Emission] = []
        index = 0
        for row, (sequence, serial, count, samples, got) in enumerate(
            zip(flight.sequences, flight.serials, flight.counts, flight.samples, accepted, strict=True)
        ):
            at, index = index, index + got
            if sequence.serial != serial:
                continue  # it has ended, or lost its place, since the step was planned
            if failed and (sequence.slot, sequence.generation) in failed:
                message = failed[sequence.slot, sequence.generation]
                emissions.append(self._end(sequence, Ended("error", message=message)))
                continue
            if got != samples:
                raise RuntimeError(f"step {result.number} was to sample {samples} tokens in row {row}, it has {got}")
            sequence.computed += count
            sequence.progressed = True
            if sequence.computed >= sequence.commit_at:
                self._dirty.append(sequence)
                if sequence.commit_at <= sequence.prompt_length:
                    self._may_admit = True  # a page of a prompt to share: somebody may fit now
            if prompts is not None and (part := prompts.of(row)) is not None:
                sequence.prompt_parts.append(part)
            if samples:
                emissions.append(self._emit(sequence, tokens[at], None if scores is None else scores.at(at)))
        return emissions

    def _emit(self, sequence: Sequence, token: int, scores: TokenScores | None) -> Emission:
        """A sequence has a token; it may be its last."""
        output = sequence.output
        start = len(output)
        output.append(token)
        ended: Ended | None = None
        if token in sequence.stop_ids or sequence.prompt_length + start + 1 >= sequence.target:
            ended = sequence.end()
            if ended is not None:
                self._drop(sequence)
        prompt_scores: TokenScores | None = None
        if sequence.prompt_parts:
            prompt_scores, sequence.prompt_parts = join(sequence.prompt_parts), []
        if sequence.spec.sampling.logprobs < 0:
            scores = None
        return Emission(sequence.id, start, (token,), scores, prompt_scores, sequence.cached_tokens, ended)
