"""Steps of nothing but greedy rows that all verify chains of guesses, where the device is the host.

As ``kernels.steady`` does for plain decodes: one call drafts or verifies, and what is around it is numpy's. What such a
step accepts is known at once; the drafter observes it before the next step, as always.
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
from kernels.platforms.base import DecodeTokens, HostPass, Platform
from kernels.rows import ragged
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.speculative.host_drafts import HostDrafts, SeenHere, places_of, raw
from kernels.speculative.speculator import Speculator
from kernels.step import StepBatch

__all__ = ["Chained", "SteadyChains"]

_ONE = np.ones(1, dtype=np.int32).tobytes()

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chained:
    """``tokens`` int32 [accepted]: all rows', one after the other. ``accepted``, ``drafted`` int32 [rows]."""

    tokens: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]
    drafted: npt.NDArray[np.int32]


class SteadyChains:
    """``verify``: the call, which leaves ``result`` (what the model returned), ``tokens`` and ``broken`` of each token.

    For up to ``max_rows`` rows.
    """

    def __init__(
        self,
        state: SlotTable,
        sampler: Sampler,
        speculator: Speculator,
        drafts: HostDrafts,
        verify: HostPass,
        features: Tensor,
        tokens: Tensor,
        broken: Tensor,
        max_rows: int,
        steps: int,
    ) -> None:
        self._state, self._sampler, self._speculator = state, sampler, speculator
        self._drafts, self._verify, self._max_rows, self._steps = drafts, verify, max_rows, steps
        self._features, self._raw_features = features, raw(features)
        self._tokens, self._broken = tokens.numpy(), broken.numpy()
        self._rows: tuple[bytes, bytes] | None = None  # slots and generations that were found fit
        self._slots: Longs = np.zeros(0, dtype=np.int64)
        self._seen: tuple[SeenHere, npt.NDArray[np.int32]] | None = None  # not observed yet, with its generations

    @classmethod
    def make(
        cls,
        platform: Platform,
        model: Decoder,
        caches: list[object],
        windows: Sequence[int],
        state: SlotTable,
        sampler: Sampler,
        speculator: Speculator,
        max_rows: int,
        steps: int,
    ) -> SteadyChains | None:
        """None where the platform, the drafter or its settings have no use for it."""
        greedy, drafter = platform.greedy, speculator.drafter
        if greedy is None or not speculator.exact or drafter.depth < drafter.most_nodes - 1:
            return None
        kept: list[Tensor] = []

        def whole(batch: ForwardBatch) -> Tensor:
            result = model.forward(batch, caches)
            hidden, features = model.split(result)
            kept.extend((features, *greedy(model.logits(hidden))))
            return result

        verify = platform.capture_pass(whole, windows, max_rows * drafter.most_nodes)
        if verify is None or kept[0].dtype != torch.bfloat16:
            return None
        drafts = drafter.host_drafts(state, max_rows)
        if drafts is None:
            return None
        return cls(state, sampler, speculator, drafts, verify, *kept, max_rows, steps)

    def settle(self) -> None:
        """Let the drafter see what the last step accepted."""
        if self._seen is None:
            return
        (seen, generations), self._seen = self._seen, None
        state = self._state
        alive = state.active[seen.slots] & (state.generation[seen.slots] == generations)
        if not alive.all() or not self._drafts.observe(seen):
            self._speculator.show(seen.slots, generations, seen.starts, seen.counts, self._features, seen.places)

    def fits(self, batch: StepBatch) -> bool:
        """Whether its rows, releases, admissions and grants done, are such."""
        rows = len(batch.slots) // 4
        if batch.counts != _ONE * rows or len(batch.drafts) != len(batch.slots) or not 0 < rows <= self._max_rows:
            return False
        state = self._state
        if self._rows != (batch.slots, batch.generations):
            slots = np.frombuffer(batch.slots, dtype=np.int32)
            generations, counts = (np.frombuffer(part, dtype=np.int32) for part in (batch.generations, batch.counts))
            if state.errors(slots, generations, counts) or not self._sampler.plain(tuple(slots.tolist())):
                return False
            self._slots, self._rows = slots.astype(np.int64), (batch.slots, batch.generations)
        slots = self._slots
        known, room = state.known[slots], state.page_count[slots] * state.page_size
        fits = (state.computed[slots] + 1 == known) & (known < room) & (known < state.longest)
        return bool(fits.all()) and self._speculator.wanted(slots)

    def draft(self, batch: StepBatch) -> tuple[Longs, Longs] | None:
        """-> the rows' chains, roots first, int64 [rows, nodes], and how many nodes of each are verified; None where
        a row has no guesses."""
        state, slots = self._state, self._slots
        assert state.here is not None
        known, capacity = state.known[slots], state.page_count[slots] * state.page_size
        limits = np.minimum(np.frombuffer(batch.drafts, dtype=np.int32), capacity - known)
        limits = np.minimum(limits, self._speculator.drafter.most_nodes - 1)
        if limits.min() < 1:
            return None
        steps = min(batch.levels or self._steps, self._steps, int(limits.max()))
        found = self._drafts.draft(slots, known - 1, capacity, steps)
        if found is None:
            return None
        width = min(found.shape[1], int(limits.max()))
        chains = np.empty((len(slots), 1 + width), dtype=np.int64)
        chains[:, 0] = state.here[slots, known - 1]
        chains[:, 1:] = found[:, :width]
        return chains, np.minimum(limits, width).astype(np.int64) + 1

    def run(self, batch: StepBatch, chains: Longs, counts: Longs) -> Chained | None:
        """Verify the chains. None when a row is not finite: then nothing was done that is not done again."""
        state, slots = self._state, self._slots
        assert state.here is not None
        rows, width = chains.shape
        roots = state.known[slots] - 1
        offsets = np.zeros(rows + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        total = int(offsets[-1])
        levels = np.arange(width)
        run = levels < counts[:, None]
        ids = chains[run].astype(np.int32)
        positions = (roots[:, None] + levels)[run]
        index = places_of(state.pages, np.repeat(slots, counts), positions, state.page_size)
        lengths = roots + counts
        pages = state.pages[slots, : int(lengths.max() - 1) // state.page_size + 1]
        self._verify(DecodeTokens(ids, positions, index, pages, lengths, offsets))
        if self._broken[:total].any():
            return None
        after = np.zeros((rows, width), dtype=np.int64)
        after[run] = self._tokens[:total]
        right = (chains[:, 1:] == after[:, :-1]) & run[:, 1:]
        accepted = np.logical_and.accumulate(right, axis=1).sum(1) + 1
        state.here[slots[:, None], roots[:, None] + 1 + levels] = after
        state.known[slots] += accepted
        state.computed[slots] += accepted
        seen = SeenHere(slots, roots, accepted, self._raw_features, ragged(offsets[:-1], accepted))
        self._seen = seen, np.frombuffer(batch.generations, dtype=np.int32)
        self._speculator.drafter.judged(slots.tolist(), (accepted - 1).tolist(), (counts - 1).tolist())
        tokens = after[levels < accepted[:, None]].astype(np.int32)
        return Chained(tokens, accepted.astype(np.int32), (counts - 1).astype(np.int32))
