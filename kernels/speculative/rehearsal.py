"""Steps with guesses of requests that nobody made, run when a model is loaded.

Which kernels a step launches depends on how many rows verify guesses in it, on how many guesses these have, and on what
runs beside them; and what the draft has to see first depends on the steps before. So the runner is driven as a
scheduler drives it, through some steps of each kind: what is made at first use is made then, and no request waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kernels.answers import RunningStep
from kernels.speculative.drafter import Drafter
from kernels.step import Admission, ModelInfo, SlotSampling, StepBatch

__all__ = ["rehearse"]

_ROWS = (1, 2, 4, 8, 16)
_SHORT = 16  # tokens of a prompt, where they do not matter
_PROMPTS = (7, 64)  # and where they do: the longest that there is room for comes last
_BESIDE = 4  # rows of a step with a prompt
_STEPS = 8  # of a request behind its prompt, at most
_NOBODY = -1  # a generation that no request has
_SALT = b"rehearsal"  # what is learnt of these tokens is of no use to a request
_GREEDY = SlotSampling(temperature=0.0)

Start = Callable[[StepBatch], RunningStep]


def rehearse(start: Start, info: ModelInfo, drafter: Drafter, max_slots: int, max_step_tokens: int) -> None:
    """Run them by ``start``, as ``ModelRunner.start`` does, on slots and pages that are free, and are so again behind
    them. ``info``: what the runner says of itself."""
    stage = _Stage(start, info, drafter)
    each = max(_SHORT, drafter.most_nodes)
    most = min(max_slots - 1, max_step_tokens // each, stage.room(_SHORT))
    for rows in (rows for rows in _ROWS if rows <= most):
        stage.alike(rows)
    if most > 1:
        for guesses in {1, drafter.most_nodes - 1}:
            stage.beside(min(most, _BESIDE), guesses)
    if most > 0:
        longest = min(max_step_tokens, stage.longest)
        for prompt in (*(prompt for prompt in _PROMPTS if prompt < longest), longest):
            stage.prompt(prompt)
    stage.close()


class _Stage:
    """Drives the runner. Every request begins with the same few tokens over and over, so that a draft that looks up
    what was seen finds something: but only behind these, as what the model says next may be anything. Where it does so
    (``_looks_up``) requests come to each step anew, all but their last token known, and computed by nobody.
    """

    def __init__(self, start: Start, info: ModelInfo, drafter: Drafter) -> None:
        self._start, self._info, self._looks_up = start, info, drafter.needs_host_tokens
        self._guesses, self._levels = drafter.most_nodes - 1, range(1, drafter.depth) if drafter.stepwise else ()
        # Positions that a request needs behind its prompt.
        self._behind = (_STEPS + len(self._levels)) * drafter.most_nodes + max(drafter.reach(), self._guesses)
        self._number, self._page = 0, 1
        self._running: deque[RunningStep] = deque()
        self._admitted: list[Admission] = []
        self._released: list[int] = []

    def room(self, prompt: int) -> int:
        """Requests with prompts of so many tokens that there are pages for."""
        fits = prompt + self._behind <= self._info.context_length
        return (self._info.num_pages - 1) // self._pages(prompt) if fits else 0

    @property
    def longest(self) -> int:
        """The longest prompt that there is room for."""
        info = self._info
        return min(info.context_length, (info.num_pages - 1) * info.page_size) - self._behind

    def alike(self, rows: int) -> None:
        """``rows`` requests that all do the same. Fewer guesses, and levels, are as of one row."""
        slots = self._begin(range(1, rows + 1))
        for guesses in (self._guesses, self._guesses, *((self._guesses, 1) if rows == 1 else ())):
            self._guess(slots, [guesses] * rows)
        for levels in self._levels if rows == 1 else ():
            self._guess(slots, [self._guesses] * rows, levels)
        self._wait()
        self._step(slots, [1] * rows)
        self._guess(slots, [self._guesses] * rows)
        self._release(slots)

    def beside(self, rows: int, guesses: int) -> None:
        """Requests with so many guesses beside a prompt, and then beside one that has none."""
        slots, last = self._begin(range(1, rows)), rows
        self._guess(slots, [guesses] * len(slots))
        self._wait()
        self._anew(slots)
        self._admit([last], _SHORT, 0)
        some, both = [guesses] * len(slots), [*slots, last]
        self._step(both, [1] * len(slots) + [_SHORT], [*some, 0])
        self._wait()
        self._guess(both, [*some, 0])
        self._release(both)

    def prompt(self, tokens: int) -> None:
        """One request with a prompt of so many tokens."""
        self._admit([1], tokens, 0)
        self._step([1], [tokens])
        self._step([1], [1], [self._guesses])
        self._release([1])

    def close(self) -> None:
        """Let the runner forget them."""
        self._step([], [])
        self._wait()

    def _begin(self, slots: Sequence[int]) -> list[int]:
        """Requests that may guess in the next step."""
        if not self._looks_up:
            self._admit(slots, _SHORT, 0)
            self._step(slots, [_SHORT] * len(slots))
        return list(slots)

    def _guess(self, slots: Sequence[int], guesses: Sequence[int], levels: int = 0) -> None:
        self._anew(slots)
        self._step(slots, [1] * len(slots), guesses, levels)

    def _anew(self, slots: Sequence[int]) -> None:
        if self._looks_up:
            self._release(slots)
            self._admit(slots, _SHORT, _SHORT - 1)

    def _pages(self, prompt: int) -> int:
        return -(-(prompt + self._behind) // self._info.page_size)

    def _admit(self, slots: Sequence[int], prompt: int, computed: int) -> None:
        tokens = np.arange(prompt, dtype=np.int32) % min(4, self._info.vocab_size)
        for slot in slots:
            pages = np.arange(self._page, self._page + self._pages(prompt), dtype=np.int32)
            self._page += len(pages)
            self._admitted.append(
                Admission(slot, _NOBODY, tokens.tobytes(), prompt, computed, pages.tobytes(), _GREEDY, _SALT)
            )

    def _release(self, slots: Sequence[int]) -> None:
        self._wait()
        self._released += slots
        self._page = 1

    def _step(self, slots: Sequence[int], counts: Sequence[int], guesses: Sequence[int] = (), levels: int = 0) -> None:
        self._number += 1
        batch = StepBatch(
            self._number,
            _packed(slots),
            _packed([_NOBODY] * len(slots)),
            _packed(counts),
            admitted=tuple(self._admitted),
            released=_packed(self._released),
            drafts=_packed(guesses),
            levels=levels,
        )
        self._admitted, self._released = [], []
        running = self._start(batch)
        self._running.append(running)
        while len(self._running) > (not running.done):  # as many are in flight as a scheduler has
            self._running.popleft().result()

    def _wait(self) -> None:
        while self._running:
            self._running.popleft().result()


def _packed(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()
