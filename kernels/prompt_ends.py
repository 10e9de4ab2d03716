"""Steps that bring every sequence to its last known token, where a platform runs all of it in one call: short prompts,
the ends of longer ones, and decodes beside them.

As ``kernels.steady`` is for decodes: of the time to the first token of a short prompt and a small model, half was what
is done around the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.prepared import Guessed, ReachEnds
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.step import StepBatch

__all__ = ["PromptEnds", "Reached"]

LONGEST = 48
"""Tokens of a row, at most: more are attended to in blocks."""
TOKENS = 256
"""Of a step, at most: with more the model takes so long that what is around it does not count."""

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Reached:
    """``tokens``: int32 [rows], one of each. Of ``slots`` int64 [rows] ``counts`` tokens were run from ``starts`` on,
    whose ``features`` [tokens, n], as their bits, follow one another."""

    tokens: bytes
    slots: Longs
    starts: Longs
    counts: Longs
    features: npt.NDArray[np.int16]


class PromptEnds:
    """For up to ``rows`` rows."""

    def __init__(
        self,
        state: SlotTable,
        sampler: Sampler,
        reach: ReachEnds,
        features: npt.NDArray[np.int16],
        rows: int,
        draws: bool,
    ) -> None:
        self._state, self._sampler, self._reach, self._features = state, sampler, reach, features
        self._most, self._draws = rows, draws

    @classmethod
    def make(
        cls,
        platform: Platform,
        model: Decoder,
        caches: list[object],
        windows: Sequence[int],
        state: SlotTable,
        sampler: Sampler,
        rows: int,
        capture: bool = True,
    ) -> PromptEnds | None:
        """None where the platform makes no such calls. ``capture``: as ``HostTarget.make`` says."""
        greedy = platform.greedy
        if greedy is None or state.here is None:
            return None
        kept: list[Tensor] = []

        def forward(batch: ForwardBatch) -> Tensor:
            result = model.forward(batch, caches, capture)
            kept.extend(model.split(result) if capture else (result, result))
            return result

        body = platform.capture_pass(forward, windows, TOKENS)
        if body is None or kept[0].dtype != torch.bfloat16:
            return None
        hidden, features = kept
        last = hidden.new_zeros(rows, hidden.shape[1])

        def head(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            logits = model.logits(batch.states)
            kept.extend((logits, *greedy(logits)))
            return logits

        heading = platform.capture_pass(head, windows, rows, last)
        if heading is None:
            return None
        logits, likeliest, broken = kept[2:]
        reach = body.reach(heading, state.table, hidden, last, Guessed(logits, likeliest), broken.numpy())
        bits: npt.NDArray[np.int16] = features.view(torch.int16).numpy()
        return cls(state, sampler, reach, bits, rows, platform.draw is not None)

    def run(self, batch: StepBatch) -> Reached | None:
        """The rows of a step, releases, admissions and grants done. None when it is not for this, or a row is not
        finite: then nothing was done that is not done again."""
        slots, generations, counts = (
            np.frombuffer(part, dtype=np.int32) for part in (batch.slots, batch.generations, batch.counts)
        )
        state = self._state
        if not 0 < len(slots) <= self._most or not 1 < counts.max() <= LONGEST or counts.sum() > TOKENS:
            return None
        if state.errors(slots, generations, counts):
            return None
        at = slots.astype(np.int64)
        starts, run = state.computed[at], counts.astype(np.int64)
        if (starts + run != state.known[at]).any() or (state.prompt_logprobs[at] >= 0).any():
            return None
        named = tuple(slots.tolist())
        if not self._sampler.raced(named):
            return None
        draws = self._sampler.draws(named)
        if draws is not None and not self._draws:
            return None
        tokens = self._reach(at, starts, run, draws)
        return None if tokens is None else Reached(tokens, at, starts, run, self._features)
