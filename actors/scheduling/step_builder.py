"""StepBuilder: a step under construction. InFlightStep: a step in flight, until its result."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from actors.protocol import AllocatedPages, AllocatePages, PrefixMatch, SequenceOutput
from actors.scheduling.sequence import Sequence
from kernels.contract.caches import PageGrants, PageRun
from kernels.contract.step import Admission, SlotSampling, StepBatch

__all__ = ["Chunk", "InFlightStep", "StepBuilder"]


class Chunk(msgspec.Struct, frozen=True):
    """A prefill row of a step: ``tokens`` of a sequence from ``position`` on. ``row``: its place in the step."""

    sequence: int
    row: int
    position: int
    tokens: int
    samples: bool  # whether the row samples a token


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A step without a result yet. Parallel lists by row; ``serials`` distinguish the admissions of a sequence.

    ``max_extra``: for each of the first ``decodes`` rows, how many tokens it may sample beyond one; empty when none
    may. ``adapted``: rows whose draft tokens the adaptive policy chose.
    """

    number: int
    sequences: list[Sequence]
    serials: list[int]
    counts: list[int]
    samples: list[int]  # tokens that each row will produce, at least
    max_extra: list[int]
    decodes: int
    adapted: int


class StepBuilder:
    """Rows in the order of the batch: decodes, then prefills, newly admitted ones last. ``budget``: tokens left;
    ``tail``: by how many tokens the last prefill may exceed it."""

    __slots__ = (
        "adapted",
        "admitted",
        "allocations",
        "budget",
        "counts",
        "decodes",
        "draft_levels",
        "draft_limits",
        "max_extra",
        "outputs",
        "pages",
        "prefill_rows",
        "samples",
        "short",
        "tail",
        "unobserved",
    )

    def __init__(self, budget: int, prefill_rows: int, tail: int = 0) -> None:
        self.budget = budget
        self.tail = tail
        self.prefill_rows = prefill_rows  # how many more may join
        self.decodes: list[Sequence] = []
        self.draft_limits: list[int] = []  # by decode: draft tokens that it may verify; empty when none may
        self.max_extra: list[int] = []  # by decode: how many of these may be accepted
        self.draft_levels = 0  # of the deepest draft that pays; 0: as many as the worker makes
        self.unobserved = False  # whether the draft does not observe it
        self.adapted = 0  # decodes whose draft limit the adaptive policy chose
        self.counts: list[tuple[Sequence, int]] = []  # of prefills
        self.samples: list[int] = []  # of prefills
        self.allocations: list[AllocatePages] = []
        self.pages = 0  # in `allocations`
        self.admitted: dict[int, PrefixMatch] = {}  # by sequence: its cached prefix of shared pages
        self.outputs: list[SequenceOutput] = []  # sequences that ended because they fit no cache
        self.short = False  # pages did not suffice for all running sequences

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.counts

    def request(self, sequence: Sequence, pages: int, page_size: int) -> None:
        """Request ``pages`` for a sequence."""
        self.allocations.append(AllocatePages(sequence.id, pages))
        self.pages += pages
        sequence.pages += pages
        sequence.capacity += pages * page_size

    def limit_prefills(self, tokens: int) -> None:
        """Limit prefills to ``tokens``."""
        self.budget = min(self.budget, tokens)
        self.tail = min(self.tail, tokens - self.budget)

    def chunk(self, rest: int) -> int:
        """How many of the ``rest`` tokens of a prompt to run. It exceeds the budget by up to ``tail`` tokens rather
        than leave a few for the next step: decodes take a few tokens of every step, so a prompt as long as a step would
        always need two."""
        return rest if rest <= self.budget + self.tail else self.budget

    def prefill(self, sequence: Sequence, count: int) -> None:
        """Add a row for the next ``count`` tokens of a prompt; the row of its last tokens samples."""
        sequence.scheduled += count
        sampled = 1 if sequence.scheduled == sequence.known else 0
        sequence.known += sampled
        self.counts.append((sequence, count))
        self.samples.append(sampled)
        self.budget -= count
        self.prefill_rows -= 1

    def batch(
        self,
        number: int,
        allocated: tuple[AllocatedPages, ...],
        running: dict[int, Sequence],
        released: bytes,
        unanswered: int = 0,
    ) -> StepBatch:
        """The batch for the worker. ``allocated``: replies to ``allocations``, in the same order. ``unanswered``:
        number of steps in flight."""
        page_slots: list[int] = []
        page_ids: list[bytes] = []
        first_pages: dict[int, AllocatedPages] = {}
        for request, reply in zip(self.allocations, allocated, strict=True):
            if request.sequence in self.admitted:
                first_pages[request.sequence] = reply
            else:
                page_slots += [running[request.sequence].slot] * request.pages
                page_ids.append(reply.pages)
        rows = self.sequences()
        return StepBatch(
            number=number,
            slots=_pack([sequence.slot for sequence in rows]),
            generations=_pack([sequence.generation for sequence in rows]),
            counts=_pack(self._row_counts()),
            page_slots=_pack(page_slots) if page_slots else b"",
            page_ids=b"".join(page_ids),
            admitted=tuple(
                [
                    _admission(running[sequence], prefix, first_pages.get(sequence))
                    for sequence, prefix in self.admitted.items()
                ]
            ),
            released=released,
            draft_limits=_pack(self.draft_limits + [0] * len(self.counts)) if self.draft_limits else b"",
            draft_levels=self.draft_levels,
            unobserved=self.unobserved,
            bounded=self._bounded(allocated, running) if allocated and allocated[0].bounded else (),
            unanswered=unanswered,
        )

    def _bounded(self, allocated: tuple[AllocatedPages, ...], running: dict[int, Sequence]) -> tuple[PageGrants, ...]:
        """Granted pages of the bounded groups, for sequences admitted by earlier steps."""
        later = [
            (running[request.sequence].slot, reply.bounded)
            for request, reply in zip(self.allocations, allocated, strict=True)
            if request.sequence not in self.admitted
        ]
        return tuple(
            [
                PageGrants(
                    _pack([slot for slot, pages in later for _ in range(len(pages[group]) // 4)]),
                    b"".join([pages[group] for _, pages in later]),
                )
                for group in range(len(allocated[0].bounded))
            ]
        )

    def sequences(self) -> list[Sequence]:
        """The sequence of each row."""
        return self.decodes + [sequence for sequence, _ in self.counts]

    def flight(self, number: int) -> InFlightStep:
        """The record of the step that is kept until its answer."""
        sequences = self.sequences()
        return InFlightStep(
            number,
            sequences=sequences,
            serials=[sequence.serial for sequence in sequences],
            counts=self._row_counts(),
            samples=[1] * len(self.decodes) + self.samples,
            max_extra=self.max_extra,
            decodes=len(self.decodes),
            adapted=self.adapted,
        )

    def chunks(self) -> list[Chunk]:
        """The prefill rows."""
        first = len(self.decodes)
        return [
            Chunk(sequence.id, first + place, sequence.scheduled - count, count, bool(samples))
            for place, ((sequence, count), samples) in enumerate(zip(self.counts, self.samples, strict=True))
        ]

    def _row_counts(self) -> list[int]:
        return [1] * len(self.decodes) + [count for _, count in self.counts]


def _admission(sequence: Sequence, prefix: PrefixMatch, first: AllocatedPages | None) -> Admission:
    """``first``: the pages granted to its first chunk."""
    pages, bounded = prefix.pages, prefix.bounded
    if first is not None:
        pages += first.pages
        bounded = tuple(
            [PageRun(run.first, run.pages + more) for run, more in zip(bounded, first.bounded, strict=True)]
        )
    return Admission(
        slot=sequence.slot,
        generation=sequence.generation,
        tokens=sequence.tokens(),
        prompt_length=sequence.prompt_length,
        computed=sequence.computed,
        pages=pages,
        sampling=_sampling(sequence),
        salt=sequence.spec.salt,
        adapter=sequence.spec.adapter,
        target=sequence.target,
        stop_ids=sequence.stop_ids,
        task=sequence.spec.task,
        bounded=bounded,
    )


def _sampling(sequence: Sequence) -> SlotSampling:
    """Sampling settings of the slot. A readmitted sequence does not score its prompt again: its prompt scores were
    emitted with the first token."""
    sampling = sequence.spec.sampling
    if sequence.scores_prompt or sampling.prompt_logprobs < 0:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=-1)


def _pack(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()
