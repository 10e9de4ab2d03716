"""The planner: turns queued sequences into steps and the results of steps into outputs."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Generator, Iterable

import msgspec
import numpy as np

from actors.boards.suspects import Cohort, Rerun, Suspects, Verdict
from actors.protocol import Ended, SchedulerLoad, SequenceOutput, SequenceSpec, TokenScores
from actors.scheduling.bounded_reservations import BoundedReservations
from actors.scheduling.config import PlannerConfig
from actors.scheduling.fairness import FairShare
from actors.scheduling.planning import CacheMessage, CacheReply, StepPlanning, too_large
from actors.scheduling.policy import Policy
from actors.scheduling.scores import PromptScores, StepScores, join, pooled_vectors, token_values
from actors.scheduling.sequence import Sequence, Status
from actors.scheduling.sequence_table import Move, SequenceTable
from actors.scheduling.speculation.draft_limits import DraftLimits, draft_limit
from actors.scheduling.step_builder import Chunk, InFlightStep
from kernels.contract.caches import State
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.step import StepBatch, StepResult

__all__ = ["CacheMessage", "CacheReply", "Planner", "StepPlan"]


class StepPlan(msgspec.Struct, frozen=True):
    """``batch``: the step to send to the worker. ``outputs``: sequences ended by planning.

    None as ``batch`` means: call ``plan`` again, since ended sequences may have made room for others. ``chunks`` are
    the prefill rows; ``decodes`` are the sequences of the rows before them.
    """

    batch: StepBatch | None
    outputs: list[SequenceOutput]
    chunks: list[Chunk] = []
    decodes: list[Sequence] = []


class Planner:
    """Decides what runs next. Sans-IO: it yields messages to the cache, and callers pass the time.

    A sequence waits, runs (it has a slot, pages and a row in every step it can use) and ends exactly once. It returns
    from running to waiting when pages run out, when a much higher priority needs its place, or when its worker dies.
    Then its pages are released, and prompt and output are computed again, except for a prefix that is still cached.

    Two steps may be in flight: the next token of a sequence is planned before the last one is known. So an end is
    noticed one step late, and the superfluous row is ignored. With draft tokens, the number of tokens that a step in
    flight samples is unknown too: the next step is planned as if it were one, with pages for the maximum. Steps run
    strictly in order. So pages and slots can be reassigned while a row is in flight: their new owner writes later.

    While there are ``suspects`` of a worker's death, steps alternate between suspects and others, one step in flight.
    """

    def __init__(self, config: PlannerConfig, suspects: Suspects | None = None) -> None:
        self._config = config
        self._suspects = Suspects() if suspects is None else suspects
        self._suspects_next = True  # whether the next step runs suspects, if there are any
        shares = FairShare()
        self._policy = Policy(config, shares)
        self._table = SequenceTable(config, shares)
        self._planning = StepPlanning(config, self._policy, self._table)
        self._flights: deque[InFlightStep] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._start_limits: list[tuple[float, int]] = []
        self._info: ModelInfo | None = None
        self._draft_limits: DraftLimits | None = None
        self._number = 0
        self._last_finish = 0.0
        self.paused = False  # whether no further step is planned

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a worker has been announced."""
        return self._info is not None

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits, or the cache must still be notified."""
        return bool(self._table.sequences) or self._table.has_closes

    @property
    def in_flight(self) -> int:
        """Number of steps without a result."""
        return len(self._flights)

    @property
    def can_send(self) -> bool:
        """Whether another step may be sent to the worker."""
        return self.ready and not self.paused and len(self._flights) < self._most_flights

    @property
    def _most_flights(self) -> int:
        config = self._config
        if self._suspects or not config.overlap:
            return 1
        return 2 if config.stages == 1 else config.stages + config.stages_ahead

    def is_known(self, sequence: int) -> bool:
        """Whether the sequence waits or runs."""
        return sequence in self._table.sequences

    def in_steps(self, steps: Container[int]) -> dict[int, Rerun]:
        """Sequences with a row in one of these steps that has no result yet, and the rerun that would repeat it."""
        result: dict[int, Rerun] = {}
        for flight in self._flights:
            if flight.number not in steps:
                continue
            for row, sequence in enumerate(flight.sequences):
                if sequence.status is not Status.FINISHED:
                    earlier = result.get(sequence.id)
                    decode = row < flight.decodes or (earlier is not None and earlier.decode)
                    # An earlier step may accept draft tokens; then the lost step started later in the sequence.
                    tokens = sequence.scheduled + sequence.max_extra
                    result[sequence.id] = Rerun(tokens or sequence.length, decode)
        return result

    def worker_died(self, steps: Container[int]) -> Verdict:
        """Judge the death of a worker that left these steps unanswered. The caller aborts the condemned sequences."""
        self._suspects.retain(self._table.sequences)
        return self._suspects.died(self.in_steps(steps))

    def running(self) -> tuple[int, ...]:
        """Ids of the sequences on the device."""
        return tuple(self._table.running)

    def take_moves(self) -> list[Move]:
        """Moves of sequences onto or off the device since the last call, in order."""
        moves, self._table.moves = self._table.moves, []
        return moves

    def load(self, now: float) -> SchedulerLoad:
        """Counts for metrics and health."""
        table = self._table
        return SchedulerLoad(
            running=len(table.running),
            waiting=len(table.waiting) + len(table.held),
            waiting_tokens=table.waiting.tokens,
            steps=self._number,
            steps_in_flight=len(self._flights),
            preemptions=table.preemptions,
            last_step_age=max(now - self._last_finish, 0.0) if table.sequences else 0.0,
            paused=self.paused,
        )

    # -- requests and workers -----------------------------------------------------------------------------------------

    def worker_ready(self, info: ModelInfo, now: float) -> list[SequenceOutput]:
        """Take a worker with empty slots and an empty cache. Running sequences wait again; steps in flight are
        forgotten.

        The caller resets the cache before it plans. Returns the ends of sequences that this worker can never run.
        """
        self._info = info
        self._flights.clear()
        bounded, reservations = info.bounded_groups, None
        if bounded:
            reservations = BoundedReservations(
                bounded, info.page_size, self._config.step_tokens + self._config.tail_tokens
            )
        snapshots = [pages.page_tokens for pages in bounded if isinstance(pages.group.spec, State)]
        shared_pages = max((*snapshots, info.page_size)) // info.page_size
        self._table.new_worker(info.page_size, reservations, shared_pages)
        draft_limits = DraftLimits(info, self._config.adaptive)
        self._draft_limits = draft_limits if draft_limits.is_enabled else None
        self._planning.new_worker(info.num_pages - 1, self._draft_limits)
        self._last_finish = now
        waiting = [*self._table.waiting, *self._table.held.values()]
        return [output for sequence in waiting if (output := self._examine(sequence, info)) is not None]

    def submit(self, specs: Iterable[SequenceSpec], now: float, *, hold: bool = False) -> list[SequenceOutput]:
        """Queue sequences and ignore known ones. Returns the ends of those that are refused or already complete.

        ``hold``: those with a grammar wait until the worker has compiled it.
        """
        outputs: list[SequenceOutput] = []
        for spec in specs:
            if self.is_known(spec.sequence):
                continue
            if not self._table.sequences:
                self._last_finish = now
            sequence = Sequence(spec, self._policy.effective_priority(spec.priority))
            self._table.queue(sequence)
            if hold and spec.sampling.grammar is not None:
                self._table.hold(sequence)
            if spec.deadline is not None:
                self._deadlines = self._with_time(self._deadlines, spec.deadline, spec.sequence)
            if spec.start_by is not None:
                self._start_limits = self._with_time(self._start_limits, spec.start_by, spec.sequence)
            if self._info is not None and (output := self._examine(sequence, self._info)) is not None:
                outputs.append(output)
        return outputs

    def abort(self, sequences: Iterable[int]) -> list[SequenceOutput]:
        """End waiting and running sequences; unknown ones are ignored."""
        return [self._table.end(sequence, Ended("abort")) for sequence in self._find(sequences)]

    def text_stopped(self, sequences: Iterable[int]) -> None:
        """Drop sequences whose end the detokenizer has reported already: no output."""
        for sequence in self._find(sequences):
            self._table.drop(sequence)

    def expire(self, now: float) -> list[SequenceOutput]:
        """End sequences whose deadline has passed, and those that have waited too long for their start."""
        ended = Ended("timeout", message="the request's deadline passed")
        outputs = [self._table.end(sequence, ended) for sequence in self._find(_passed(self._deadlines, now))]
        late = [sequence for sequence in self._find(_passed(self._start_limits, now)) if sequence.cached_tokens < 0]
        return outputs + [self._table.end(sequence, Ended("late")) for sequence in late]

    def forget_steps(self) -> None:
        """Forget the steps in flight of workers that have died, once their death is judged."""
        self._flights.clear()

    def retract(self) -> None:
        """Move all running sequences back to the queue."""
        for sequence in list(self._table.running.values()):
            self._table.preempt(sequence)

    def held_grammars(self) -> list[Grammar]:
        """The grammars that the worker must compile before their sequences may run, each once."""
        result = dict.fromkeys(sequence.spec.sampling.grammar for sequence in self._table.held.values())
        return [grammar for grammar in result if grammar is not None]

    def grammar_compiled(self, grammar: Grammar, failed: Ended | None = None) -> list[SequenceOutput]:
        """Queue the held sequences with this grammar again, or end them as ``failed``."""
        held = [each for each in self._table.held.values() if each.spec.sampling.grammar == grammar]
        if failed is not None:
            return [self._table.end(sequence, failed) for sequence in held]
        for sequence in held:
            self._table.release(sequence)
        return []

    def sync_cache(self) -> Generator[CacheMessage, CacheReply, None]:
        """Send pending commits and closes to the cache, without a step. Exhaust the generator before any other call."""
        return self._planning.sync_cache()

    def _find(self, sequences: Iterable[int]) -> list[Sequence]:
        """The known sequences, each once."""
        by_id = self._table.sequences
        return [by_id[number] for number in dict.fromkeys(sequences) if number in by_id]

    def _with_time(self, times: list[tuple[float, int]], at: float, sequence: int) -> list[tuple[float, int]]:
        """The heap with one more time, and without ended sequences when they are most of it."""
        heapq.heappush(times, (at, sequence))
        if len(times) > 2 * len(self._table.sequences) + 64:
            times = [entry for entry in times if entry[1] in self._table.sequences]
            heapq.heapify(times)
        return times

    def _examine(self, sequence: Sequence, info: ModelInfo) -> SequenceOutput | None:
        """End a waiting sequence that is complete or that this worker can never run."""
        prompt, context = sequence.prompt_length, info.context_length
        sequence.target = min(prompt + sequence.spec.max_tokens, context)
        sequence.draft_limit = draft_limit(sequence, info)
        pages = -(-sequence.length // info.page_size)
        ended = sequence.end()
        if ended is None and prompt < 1:
            ended = Ended("error", message="the prompt is empty: send at least one token")
        if ended is None and prompt > info.max_prompt_tokens:
            message = f"the prompt has {prompt} tokens, the context holds {context}: shorten the prompt"
            ended = Ended("error", message=message)
        if ended is None and pages > info.num_pages - 1:
            ended = too_large(pages, info.num_pages - 1)
        return None if ended is None else self._table.end(sequence, ended)

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Generator[CacheMessage, CacheReply, StepPlan | None]:
        """Plan the next step; None when there is nothing to do now. Exhaust the generator before any other call."""
        if not self.can_send:
            return None
        for cohort in self._cohorts():
            step, allocated = yield from self._planning.fill(now, idle=not self._flights, cohort=cohort)
            if step.outputs or not step.empty:
                break
        if step.empty:
            return StepPlan(None, step.outputs) if step.outputs else None
        if cohort is not None:
            self._suspects_next = cohort.excluded
        self._number += 1
        released, unanswered = self._table.slots.take_released(), len(self._flights)
        batch = step.batch(self._number, allocated, self._table.running, released, unanswered)
        self._flights.append(step.flight(self._number))
        return StepPlan(batch, step.outputs, step.chunks(), step.decodes)

    def _cohorts(self) -> tuple[Cohort | None, ...]:
        """The cohorts that the next step may run, the preferred one first."""
        if self._suspects:
            self._suspects.retain(self._table.sequences)
        if not self._suspects:
            return (None,)
        self._table.may_admit = True  # another cohort may find room
        suspects, others = self._suspects.cohorts(self._table.running)
        return (suspects, others) if self._suspects_next else (others, suspects)

    def finish_step(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Apply the result of a step to its sequences. Results of forgotten steps are ignored.

        Raises RuntimeError when results come out of order: then it is unknown which tokens the worker has written.
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
        vectors = pooled_vectors(result) if result.pooled_rows else {}
        states, experts = token_values(result.states), token_values(result.experts)
        failed = {(error.slot, error.generation): error for error in result.failed}
        if self._draft_limits is not None and (flight.adapted or flight.decodes < len(flight.samples)):
            self._draft_limits.learn(flight, result)
        outputs: list[SequenceOutput] = []
        index = 0
        suspected = bool(self._suspects)
        ran: list[tuple[Sequence, bool]] = []  # (sequence, whether it decoded)
        speculating = len(flight.max_extra)
        drafted: list[int] = np.frombuffer(result.drafted, dtype=np.int32).tolist() or [0] * speculating
        for row, (sequence, serial, count, samples, got) in enumerate(
            zip(flight.sequences, flight.serials, flight.counts, flight.samples, accepted, strict=True)
        ):
            at, index = index, index + got
            if sequence.serial != serial:
                continue  # it has ended or left the device since the step was planned
            if failed and (sequence.slot, sequence.generation) in failed:
                error = failed[sequence.slot, sequence.generation]
                ended = Ended("invalid" if error.invalid else "error", message=error.message)
                outputs.append(self._table.end(sequence, ended))
                continue
            if suspected:
                ran.append((sequence, row < flight.decodes))
            if prompts is not None and (part := prompts.for_row(row)) is not None:
                sequence.prompt_parts.append(part)
            if row in states:
                sequence.states += states[row]
            if row in experts:
                sequence.experts += experts[row]
            if row < speculating:
                output = self._accept(sequence, tokens[at:index], flight.max_extra[row], drafted[row], scores, at)
                outputs.append(_with_vectors(output, sequence, vectors, row))
                continue
            if got != samples:
                raise RuntimeError(f"step {result.number} was to sample {samples} tokens in row {row} but has {got}")
            sequence.computed += count
            sequence.progressed = True
            if sequence.computed >= sequence.commit_at:
                self._table.filled_page(sequence)
            if samples:
                output = self._emit(sequence, tokens[at], None if scores is None else scores.at(at))
                outputs.append(_with_vectors(output, sequence, vectors, row))
        for sequence, decode in ran:
            self._suspects.ran(sequence.id, sequence.computed, decode=decode)
        return outputs

    def _accept(
        self, sequence: Sequence, tokens: list[int], max_extra: int, drafted: int, scores: StepScores | None, at: int
    ) -> SequenceOutput:
        """Apply 1 to ``max_extra + 1`` tokens of a decode; those after the end of the sequence are dropped.

        ``drafted``: draft tokens verified; ``at``: index of the first token in the step's result.
        """
        if not 1 <= len(tokens) <= max_extra + 1:
            raise RuntimeError(f"a row was to sample 1 to {max_extra + 1} tokens but has {len(tokens)}")
        output = sequence.output
        start, ended = len(output), None
        for token in tokens:
            output.append(token)
            if token in sequence.stop_ids or sequence.length >= sequence.target:
                ended = sequence.end()
                if ended is not None:
                    break
        kept = len(output) - start
        sequence.max_extra -= max_extra
        sequence.known += kept - 1
        sequence.scheduled += kept - 1
        sequence.computed += kept
        sequence.progressed = True
        if sequence.computed >= sequence.commit_at:
            self._table.filled_page(sequence)
        if ended is not None:
            self._table.drop(sequence)
        result = None if scores is None or sequence.spec.sampling.logprobs < 0 else scores.run(at, at + kept)
        produced, cached = tuple(tokens[:kept]), sequence.cached_tokens
        return SequenceOutput(sequence.id, start, produced, result, _prompt_scores(sequence), cached, ended, drafted)

    def _emit(self, sequence: Sequence, token: int, scores: TokenScores | None) -> SequenceOutput:
        """Append a sampled token; the output says whether the sequence ends."""
        output = sequence.output
        start = len(output)
        output.append(token)
        ended: Ended | None = None
        if token in sequence.stop_ids or sequence.prompt_length + start + 1 >= sequence.target:
            ended = sequence.end()
            if ended is not None:
                self._table.drop(sequence)
        prompt_scores = _prompt_scores(sequence) if sequence.prompt_parts else None
        if sequence.spec.sampling.logprobs < 0:
            scores = None
        return SequenceOutput(sequence.id, start, (token,), scores, prompt_scores, sequence.cached_tokens, ended)


def _with_vectors(output: SequenceOutput, sequence: Sequence, vectors: dict[int, bytes], row: int) -> SequenceOutput:
    """Add the pooled vector of the row, if there is one, and the states and experts of the sequence that were not
    emitted. ``vectors``: pooled vectors of the step, by row."""
    if sequence.states or sequence.experts:
        # Those before an output token were emitted with it, and are computed again after an interruption.
        first = -1 if output.start else 0
        states, experts = (b"".join(part[first:]) for part in (sequence.states, sequence.experts))
        sequence.states, sequence.experts = [], []
        return msgspec.structs.replace(output, states=states, experts=experts)
    if not vectors or row not in vectors:
        return output
    return msgspec.structs.replace(output, vector=vectors[row])


def _prompt_scores(sequence: Sequence) -> TokenScores | None:
    """Scores of the whole prompt, emitted with the first token."""
    if not sequence.prompt_parts:
        return None
    result, sequence.prompt_parts = join(sequence.prompt_parts), []
    return result


def _passed(times: list[tuple[float, int]], now: float) -> list[int]:
    """Take the sequences whose time has come from the heap."""
    result: list[int] = []
    while times and times[0][0] <= now:
        result.append(heapq.heappop(times)[1])
    return result
