"""The planner: turns queued sequences into steps and the results of steps into emissions."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Generator, Iterable

import msgspec
import numpy as np

from actors.protocol import Emission, Ended, SchedulerLoad, SequenceSpec, TokenScores
from actors.scheduling.config import PlannerConfig
from actors.scheduling.draft import Chunk, Flight
from actors.scheduling.fairness import FairShare
from actors.scheduling.guessing import Guessing, wants
from actors.scheduling.planning import CacheMessage, CacheReply, StepPlanning, too_large
from actors.scheduling.policy import Policy
from actors.scheduling.roster import Move, Roster
from actors.scheduling.scores import PromptScores, StepScores, join
from actors.scheduling.sequence import Sequence, Status
from actors.scheduling.suspects import Cohort, Rerun, Suspects, Verdict
from kernels.step import ModelInfo, StepBatch, StepResult

__all__ = ["CacheMessage", "CacheReply", "Planner", "StepPlan"]


class StepPlan(msgspec.Struct, frozen=True):
    """``batch``: to be sent to the worker, if there is one. ``emissions``: sequences ended by planning.

    Without a batch the planner wants to be asked again: what ended may have made room for others. ``chunks`` are the
    prefill rows, ``decodes`` the sequences of the rows before them.
    """

    batch: StepBatch | None
    emissions: list[Emission]
    chunks: list[Chunk] = []
    decodes: list[Sequence] = []


class Planner:
    """Decides what runs next. Sans-IO: it asks the cache by yielding messages, and is told the time.

    A sequence waits, runs (it has a slot, pages and a place in every step it can use) and ends exactly once. It may go
    back from running to waiting: when pages run out, when a much higher priority needs its place, or with its worker.
    Then its pages are given up and prompt and output are computed again, from whatever prefix is cached still.

    Two steps may be in flight: a sequence's next token is planned before the last one is known, so an end is noticed
    one step late and the row that ran in vain is ignored. Where the worker verifies guesses, not even the number of
    tokens that a step in flight samples is known: the next one is planned as if it were one, with pages for the most.
    Steps run strictly in order, which is why pages and slots can be given to others while a row is still in flight:
    whoever gets them runs, and writes, later.

    While there are ``suspects`` of a worker's death, steps are of suspects and of others in turns, one in flight.
    """

    def __init__(self, config: PlannerConfig, suspects: Suspects | None = None) -> None:
        self._config = config
        self._suspects = Suspects() if suspects is None else suspects
        self._suspects_next = True  # whether the next step is of suspects, if there are any
        shares = FairShare()
        self._policy = Policy(config, shares)
        self._roster = Roster(config, shares)
        self._planning = StepPlanning(config, self._policy, self._roster)
        self._flights: deque[Flight] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._info: ModelInfo | None = None
        self._guessing: Guessing | None = None
        self._number = 0
        self._last_finish = 0.0

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker has been announced."""
        return self._info is not None

    @property
    def has_work(self) -> bool:
        """Whether something runs, waits, or is to be told to the cache."""
        return bool(self._roster.sequences) or self._roster.has_closes

    @property
    def in_flight(self) -> int:
        """Steps without an answer."""
        return len(self._flights)

    @property
    def can_send(self) -> bool:
        """Whether the worker may be given another step."""
        return self.ready and len(self._flights) < (2 if self._config.overlap and not self._suspects else 1)

    def is_known(self, sequence: int) -> bool:
        """Whether the sequence waits or runs."""
        return sequence in self._roster.sequences

    def in_steps(self, steps: Container[int]) -> dict[int, Rerun]:
        """Sequences with a row in one of these steps that has no answer yet, and what would repeat it."""
        found: dict[int, Rerun] = {}
        for flight in self._flights:
            if flight.number not in steps:
                continue
            for row, sequence in enumerate(flight.sequences):
                if sequence.status is not Status.FINISHED:
                    earlier = found.get(sequence.id)
                    decode = row < flight.decodes or (earlier is not None and earlier.decode)
                    # Draft tokens that an earlier step has yet to accept move the lost step on.
                    tokens = sequence.scheduled + sequence.ahead
                    found[sequence.id] = Rerun(tokens or sequence.length, decode)
        return found

    def worker_died(self, steps: Container[int]) -> Verdict:
        """The worker died and has not answered these steps. The caller aborts the condemned sequences."""
        self._suspects.retain(self._roster.sequences)
        return self._suspects.died(self.in_steps(steps))

    def running(self) -> tuple[int, ...]:
        """Sequences with a place on the device."""
        return tuple(self._roster.running)

    def moves(self) -> list[Move]:
        """Who has come onto the device and who has left it since the last call, in order."""
        moves, self._roster.moves = self._roster.moves, []
        return moves

    def load(self, now: float) -> SchedulerLoad:
        """Counts for metrics and health."""
        roster = self._roster
        return SchedulerLoad(
            running=len(roster.running),
            waiting=len(roster.waiting),
            waiting_tokens=roster.waiting.tokens,
            steps=self._number,
            steps_in_flight=len(self._flights),
            preemptions=roster.preemptions,
            last_step_age=max(now - self._last_finish, 0.0) if roster.sequences else 0.0,
        )

    # -- coming and going ---------------------------------------------------------------------------------------------

    def worker_ready(self, info: ModelInfo, now: float) -> list[Emission]:
        """A worker with empty slots and an empty cache: what ran waits again, steps in flight are forgotten.

        The caller resets the cache before it plans. Returns the sequences that this worker can never run, ended.
        """
        self._info = info
        self._flights.clear()
        self._roster.new_worker(info.page_size)
        guessing = Guessing(info, self._config.adaptive)
        self._guessing = guessing if guessing.enabled else None
        self._planning.new_worker(info.num_pages - 1, self._guessing)
        self._last_finish = now
        waiting = list(self._roster.waiting)
        return [emission for sequence in waiting if (emission := self._examine(sequence, info)) is not None]

    def submit(self, specs: Iterable[SequenceSpec], now: float) -> list[Emission]:
        """Queue sequences; known ones are left alone. Returns those refused or complete already, ended."""
        emissions: list[Emission] = []
        for spec in specs:
            if self.is_known(spec.sequence):
                continue
            if not self._roster.sequences:
                self._last_finish = now
            sequence = Sequence(spec, self._policy.strength(spec.priority))
            self._roster.queue(sequence)
            if spec.deadline is not None:
                self._watch(spec.deadline, spec.sequence)
            if self._info is not None and (emission := self._examine(sequence, self._info)) is not None:
                emissions.append(emission)
        return emissions

    def abort(self, sequences: Iterable[int]) -> list[Emission]:
        """End sequences wherever they are; unknown ones are ignored."""
        return [self._roster.end(sequence, Ended("abort")) for sequence in self._find(sequences)]

    def text_stopped(self, sequences: Iterable[int]) -> None:
        """Drop sequences whose end the detokenizer has told already: no emission."""
        for sequence in self._find(sequences):
            self._roster.drop(sequence)

    def expire(self, now: float) -> list[Emission]:
        """End sequences whose deadline has passed."""
        expired: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            expired.append(heapq.heappop(self._deadlines)[1])
        ended = Ended("timeout", message="the request's deadline passed")
        return [self._roster.end(sequence, ended) for sequence in self._find(expired)]

    def _find(self, sequences: Iterable[int]) -> list[Sequence]:
        """Those that are known, each once."""
        known = self._roster.sequences
        return [known[number] for number in dict.fromkeys(sequences) if number in known]

    def _watch(self, deadline: float, sequence: int) -> None:
        heapq.heappush(self._deadlines, (deadline, sequence))
        if len(self._deadlines) > 2 * len(self._roster.sequences) + 64:  # most have ended long before
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._roster.sequences]
            heapq.heapify(self._deadlines)

    def _examine(self, sequence: Sequence, info: ModelInfo) -> Emission | None:
        """End a waiting sequence that is complete, or that this worker can never run."""
        prompt, context = sequence.prompt_length, info.context_length
        sequence.target = min(prompt + sequence.spec.max_tokens, context)
        sequence.drafts = wants(sequence, info)
        pages = -(-sequence.length // info.page_size)
        ended = sequence.end()
        if ended is None and prompt < 1:
            ended = Ended("error", message="the prompt is empty: give it at least one token")
        if ended is None and prompt >= context:
            message = f"the prompt has {prompt} tokens, the context holds {context}: shorten the prompt"
            ended = Ended("error", message=message)
        if ended is None and pages > info.num_pages - 1:
            ended = too_large(pages, info.num_pages - 1)
        return None if ended is None else self._roster.end(sequence, ended)

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Generator[CacheMessage, CacheReply, StepPlan | None]:
        """The next step, or None when there is nothing to do now. Drive it to its end before any other call."""
        if not self.can_send:
            return None
        for cohort in self._cohorts():
            draft, grants = yield from self._planning.fill(now, idle=not self._flights, cohort=cohort)
            if draft.emissions or not draft.empty:
                break
        if draft.empty:
            return StepPlan(None, draft.emissions) if draft.emissions else None
        if cohort is not None:
            self._suspects_next = cohort.excluded
        self._number += 1
        batch = draft.batch(self._number, grants, self._roster.running, self._roster.slots.released())
        self._flights.append(draft.flight(self._number))
        return StepPlan(batch, draft.emissions, draft.chunks(), draft.decodes)

    def _cohorts(self) -> tuple[Cohort | None, ...]:
        """What the next step may run, the first choice first."""
        if self._suspects:
            self._suspects.retain(self._roster.sequences)
        if not self._suspects:
            return (None,)
        self._roster.may_admit = True  # another cohort than before may find room
        suspects, others = self._suspects.cohorts(self._roster.running)
        return (suspects, others) if self._suspects_next else (others, suspects)

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
        if self._guessing is not None and (flight.adapted or flight.decodes < len(flight.samples)):
            self._guessing.learn(flight, result)
        emissions: list[Emission] = []
        index = 0
        suspected = bool(self._suspects)
        ran: list[tuple[Sequence, bool]] = []  # and whether it decoded
        speculating = len(flight.ahead)
        drafted: list[int] = np.frombuffer(result.drafted, dtype=np.int32).tolist() or [0] * speculating
        for row, (sequence, serial, count, samples, got) in enumerate(
            zip(flight.sequences, flight.serials, flight.counts, flight.samples, accepted, strict=True)
        ):
            at, index = index, index + got
            if sequence.serial != serial:
                continue  # it has ended, or lost its place, since the step was planned
            if failed and (sequence.slot, sequence.generation) in failed:
                message = failed[sequence.slot, sequence.generation]
                emissions.append(self._roster.end(sequence, Ended("error", message=message)))
                continue
            if suspected:
                ran.append((sequence, row < flight.decodes))
            if prompts is not None and (part := prompts.of(row)) is not None:
                sequence.prompt_parts.append(part)
            if row < speculating:
                emission = self._accept(sequence, tokens[at:index], flight.ahead[row], drafted[row], scores, at)
                emissions.append(emission)
                continue
            if got != samples:
                raise RuntimeError(f"step {result.number} was to sample {samples} tokens in row {row}, it has {got}")
            sequence.computed += count
            sequence.progressed = True
            if sequence.computed >= sequence.commit_at:
                self._roster.filled_page(sequence)
            if samples:
                emissions.append(self._emit(sequence, tokens[at], None if scores is None else scores.at(at)))
        for sequence, decode in ran:
            self._suspects.ran(sequence.id, sequence.computed, decode=decode)
        return emissions

    def _accept(
        self, sequence: Sequence, tokens: list[int], ahead: int, drafted: int, scores: StepScores | None, at: int
    ) -> Emission:
        """A decode that may have verified guesses: one token and ``ahead`` more at most, of which those after the last
        one of the sequence count for nothing. ``drafted``: guesses verified; ``at``: where the tokens stand in the
        step's result."""
        if not 1 <= len(tokens) <= ahead + 1:
            raise RuntimeError(f"a row was to sample 1 to {ahead + 1} tokens, it has {len(tokens)}")
        output = sequence.output
        start, ended = len(output), None
        for token in tokens:
            output.append(token)
            if token in sequence.stop_ids or sequence.length >= sequence.target:
                ended = sequence.end()
                if ended is not None:
                    break
        kept = len(output) - start
        sequence.ahead -= ahead
        sequence.known += kept - 1
        sequence.scheduled += kept - 1
        sequence.computed += kept
        sequence.progressed = True
        if sequence.computed >= sequence.commit_at:
            self._roster.filled_page(sequence)
        if ended is not None:
            self._roster.drop(sequence)
        found = None if scores is None or sequence.spec.sampling.logprobs < 0 else scores.run(at, at + kept)
        said, cached = tuple(tokens[:kept]), sequence.cached_tokens
        return Emission(sequence.id, start, said, found, _prompt_scores(sequence), cached, ended, drafted)

    def _emit(self, sequence: Sequence, token: int, scores: TokenScores | None) -> Emission:
        """A sequence has a token; it may be its last."""
        output = sequence.output
        start = len(output)
        output.append(token)
        ended: Ended | None = None
        if token in sequence.stop_ids or sequence.prompt_length + start + 1 >= sequence.target:
            ended = sequence.end()
            if ended is not None:
                self._roster.drop(sequence)
        prompt_scores = _prompt_scores(sequence) if sequence.prompt_parts else None
        if sequence.spec.sampling.logprobs < 0:
            scores = None
        return Emission(sequence.id, start, (token,), scores, prompt_scores, sequence.cached_tokens, ended)


def _prompt_scores(sequence: Sequence) -> TokenScores | None:
    """Those of the prompt, which go out with the first token."""
    if not sequence.prompt_parts:
        return None
    found, sequence.prompt_parts = join(sequence.prompt_parts), []
    return found
