"""A step while it is being planned, and what is remembered of it while it is in flight."""

from __future__ import annotations

import msgspec
import numpy as np

from actors.protocol import Emission, Grant, Grow
from actors.scheduling.sequence import Sequence
from kernels.step import Admission, SlotSampling, StepBatch

__all__ = ["Chunk", "Draft", "Flight"]


class Chunk(msgspec.Struct, frozen=True):
    """A prefill row of a step: ``tokens`` of a sequence from ``position`` on. ``row``: its place in the step."""

    sequence: int
    row: int
    position: int
    tokens: int
    samples: bool  # whether a token comes of it


class Flight:
    """A step without an answer yet. Parallel lists, a row each; ``serials`` tell a sequence's lives apart.

    ``ahead``: of the first rows, the ``decodes``, how many tokens more than one each may sample; empty when none may.
    ``adapted``: rows whose number of guesses was chosen for what it promised.
    """

    __slots__ = ("adapted", "ahead", "counts", "decodes", "number", "samples", "sequences", "serials")

    def __init__(
        self,
        number: int,
        sequences: list[Sequence],
        counts: list[int],
        samples: list[int],
        ahead: list[int],
        decodes: int,
        adapted: int,
    ) -> None:
        self.number = number
        self.sequences = sequences
        self.serials = [sequence.serial for sequence in sequences]
        self.counts = counts
        self.samples = samples  # tokens each row will produce
        self.ahead = ahead
        self.decodes = decodes
        self.adapted = adapted


class Draft:
    """Rows in the order they will run: decodes, then prefills, the newly admitted last. ``budget``: tokens left;
    ``tail``: by how many the last prefill may exceed it."""

    __slots__ = (
        "adapted",
        "admitted",
        "ahead",
        "budget",
        "counts",
        "decodes",
        "drafts",
        "emissions",
        "grows",
        "levels",
        "pages",
        "prefill_rows",
        "samples",
        "short",
        "tail",
        "unseen",
    )

    def __init__(self, budget: int, prefill_rows: int, tail: int = 0) -> None:
        self.budget = budget
        self.tail = tail
        self.prefill_rows = prefill_rows  # how many more of them may join
        self.decodes: list[Sequence] = []
        self.drafts: list[int] = []  # of decodes: guesses that each may verify; empty when none may
        self.ahead: list[int] = []  # of decodes: of these, how many may be accepted
        self.levels = 0  # of the deepest draft that is worth it; 0: as many as the worker makes
        self.unseen = False  # whether the worker keeps nothing of it for its draft
        self.adapted = 0  # decodes for which that was decided
        self.counts: list[tuple[Sequence, int]] = []  # of prefills
        self.samples: list[int] = []  # of prefills
        self.grows: list[Grow] = []
        self.pages = 0  # in `grows`
        self.admitted: dict[int, bytes] = {}  # sequence -> its shared pages, int32
        self.emissions: list[Emission] = []  # sequences that ended because they fit no cache
        self.short = False  # pages did not suffice for all that run

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.counts

    def grow(self, sequence: Sequence, pages: int, page_size: int) -> None:
        """Ask for pages."""
        self.grows.append(Grow(sequence.id, pages))
        self.pages += pages
        sequence.pages += pages
        sequence.capacity += pages * page_size

    def limit_prefills(self, tokens: int) -> None:
        """Let prefills have no more than ``tokens``."""
        self.budget = min(self.budget, tokens)
        self.tail = min(self.tail, tokens - self.budget)

    def chunk(self, rest: int) -> int:
        """How many of the ``rest`` tokens of a prompt to run. A few tokens that would be left for the next step are not
        left: decodes beside it take a few from every step, and a prompt as long as a step would always need two."""
        return rest if rest <= self.budget + self.tail else self.budget

    def prefill(self, sequence: Sequence, count: int) -> None:
        """Run the next ``count`` tokens of a prompt; the last ones sample."""
        sequence.scheduled += count
        sampled = 1 if sequence.scheduled == sequence.known else 0
        sequence.known += sampled
        self.counts.append((sequence, count))
        self.samples.append(sampled)
        self.budget -= count
        self.prefill_rows -= 1

    def batch(self, number: int, grants: tuple[Grant, ...], running: dict[int, Sequence], released: bytes) -> StepBatch:
        """The message for the worker. ``grants`` answer ``grows``, in their order."""
        page_slots: list[int] = []
        page_ids: list[bytes] = []
        first_pages: dict[int, bytes] = {}
        for grow, grant in zip(self.grows, grants, strict=True):
            if grow.sequence in self.admitted:
                first_pages[grow.sequence] = grant.pages
            else:
                page_slots += [running[grow.sequence].slot] * grow.pages
                page_ids.append(grant.pages)
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
                    _admission(running[sequence], shared + first_pages.get(sequence, b""))
                    for sequence, shared in self.admitted.items()
                ]
            ),
            released=released,
            drafts=_pack(self.drafts + [0] * len(self.counts)) if self.drafts else b"",
            levels=self.levels,
            unseen=self.unseen,
        )

    def sequences(self) -> list[Sequence]:
        """The sequence of each row."""
        return self.decodes + [sequence for sequence, _ in self.counts]

    def flight(self, number: int) -> Flight:
        """What is to be remembered until the answer comes."""
        samples = [1] * len(self.decodes) + self.samples
        decodes = len(self.decodes)
        return Flight(number, self.sequences(), self._row_counts(), samples, self.ahead, decodes, self.adapted)

    def chunks(self) -> list[Chunk]:
        """The prefill rows."""
        first = len(self.decodes)
        return [
            Chunk(sequence.id, first + place, sequence.scheduled - count, count, bool(samples))
            for place, ((sequence, count), samples) in enumerate(zip(self.counts, self.samples, strict=True))
        ]

    def _row_counts(self) -> list[int]:
        return [1] * len(self.decodes) + [count for _, count in self.counts]


def _admission(sequence: Sequence, pages: bytes) -> Admission:
    return Admission(
        slot=sequence.slot,
        generation=sequence.generation,
        tokens=sequence.tokens(),
        prompt_length=sequence.prompt_length,
        computed=sequence.computed,
        pages=pages,
        sampling=_sampling(sequence),
        salt=sequence.spec.salt,
        target=sequence.target,
        stop_ids=sequence.stop_ids,
    )


def _sampling(sequence: Sequence) -> SlotSampling:
    """Prompt scores went out with the first token: a sequence that comes back does not score its prompt again."""
    sampling = sequence.spec.sampling
    if sequence.scores_prompt or sampling.prompt_logprobs < 0:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=-1)


def _pack(values: list[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()
