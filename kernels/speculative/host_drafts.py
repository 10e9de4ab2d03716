"""Drafting where the device is the host: every pass is one call, and all around it is numpy's.

On a small model what Python does for a pass takes as long as the pass. What is computed is what the drafters compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.host_target import HostTarget
from kernels.platforms.base import Platform
from kernels.platforms.operators import Draw, Draws
from kernels.platforms.prepared import ChainPasses, DraftSlots, GuessCycle, Guessed, HostPass, ObserveTokens
from kernels.platforms.rows import DecodeTokens
from kernels.slots import SlotTable
from kernels.speculative.places import DraftPlaces

__all__ = ["GuessesHere", "HostBlocks", "HostChains", "HostDrafts", "Raw", "SeenHere", "places_of", "raw"]

LONGEST = 128
"""Tokens of a row up to which a prompt is seen as decodes are, a query after the other."""

Longs = npt.NDArray[np.int64]
Raw = npt.NDArray[np.int16]


class SeenHere(NamedTuple):
    """What was computed: of each row ``counts`` tokens from position ``starts`` on.

    ``features`` [tokens, n], as their bits, of which ``places`` int64 are those of the rows' tokens; None for a drafter
    that has no use for them.
    """

    slots: Longs
    starts: Longs
    counts: Longs
    features: Raw | None
    places: Longs


@dataclass(frozen=True)
class GuessesHere:
    """A tree for each row, as ``Drafts`` and ``DraftTree`` say; ``depths`` and what follows it None for chains."""

    tokens: Longs
    counts: Longs
    parents: Longs | None = None
    depths: Longs | None = None
    bits: Longs | None = None


class Choice:
    """What a pass leaves behind: ``logits`` [rows, vocabulary] and the likeliest of each, in ``tokens``. ``ids``: as in
    ``Guesses``, which says why guesses of sampled rows are sampled, too."""

    def __init__(self, platform: Platform, logits: Tensor, tokens: Tensor, ids: Tensor | None) -> None:
        self._draw: Draw | None = platform.draw
        self._logits, self._ids = logits, ids
        self._stands_for: Longs | None = None if ids is None else ids.numpy()
        self._vocab = logits.shape[1] if ids is None else int(ids.max()) + 1
        self._likeliest: Longs = tokens.numpy()

    def best(self, count: int, draws: Draws | None, positions: Longs) -> Longs:
        """Of the first ``count`` rows; ``draws`` of each, ``positions`` of the tokens that are guessed."""
        chosen = self._likeliest[:count]
        if draws is not None:
            assert self._draw is not None
            found = self._draw(self._logits[:count], draws, torch.from_numpy(positions), self._ids, self._vocab)
            assert found is not None, "the platform recorded the pass"
            chosen = found[0].numpy()
        return chosen if self._stands_for is None else self._stands_for[chosen]


class HostDrafts(ABC):
    """What it returns may be that it is not for them: the drafter then does the same."""

    @abstractmethod
    def observe(self, seen: SeenHere) -> bool:
        """As ``Drafter.observe``."""

    def cycle(self, target: HostTarget) -> GuessCycle | None:
        """What guesses and has the ``target`` verify it in one call; then nothing is to be asked of ``draft``."""
        return None

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> GuessesHere | None:
        """What is guessed behind the ``roots``, up to ``limits`` nodes and ``steps`` levels of each row.
        ``draws`` [rows]: how the target samples, see ``guesses``; None: all rows are greedy."""
        return None

    @staticmethod
    def chains(root_tokens: Longs, guesses: Longs, limits: Longs) -> GuessesHere:
        """``guesses`` int64 [rows, n], each row's one after the other."""
        width = min(guesses.shape[1], int(limits.max()))
        tokens = np.empty((len(guesses), 1 + width), dtype=np.int64)
        tokens[:, 0], tokens[:, 1:] = root_tokens, guesses[:, :width]
        return GuessesHere(tokens, np.minimum(limits, width) + 1)


def raw(tensor: Tensor) -> Raw:
    """The bits of a bf16 tensor of the host, in the same memory."""
    found: Raw = tensor.view(torch.int16).numpy()
    return found


def places_of(table: npt.NDArray[np.int32], rows: Longs, positions: Longs, page_size: int) -> Longs:
    """Where ``positions`` of ``rows`` of a table of pages lie in a cache."""
    return table[rows, positions // page_size] * np.int64(page_size) + positions % page_size


class HostChains(HostDrafts):
    """Of a model that guesses one token after the other. ``forward``: of the draft's tokens and the states before them
    to those that they leave; ``start``: the target's features as such states, None for a draft that has no use for
    them. ``states`` [max_slots, width]: what the last token of each slot left, and ``reached`` int64 [max_slots]: the
    places of the draft's cache that are filled. ``first``: as Expansion's.
    """

    def __init__(
        self,
        state: SlotTable,
        places: DraftPlaces,
        reached: Longs,
        first: int,
        observe: ObserveTokens,
        passes: ChainPasses,
        tokens: int,
        most: int,
    ) -> None:
        self._state, self._places, self._reached, self._first = state, places, reached, first
        self._observe, self._passes, self._tokens, self._most = observe, passes, tokens, most

    @classmethod
    def make(
        cls,
        platform: Platform,
        state: SlotTable,
        places: DraftPlaces,
        forward: Callable[[ForwardBatch, Tensor], Tensor],
        start: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        windows: Sequence[int],
        states: Tensor,
        reached: Longs,
        first: int,
        ids: Tensor | None,
        features: int,
        rows: int,
        nodes: int,
    ) -> HostChains | None:
        """None where the platform makes no such calls. ``features``: their width."""
        choose = platform.greedy
        if choose is None or states.dtype != torch.bfloat16:
            return None
        width = states.shape[1]
        seen, headed, before = (
            states.new_zeros(count, size) for count, size in ((rows * nodes, features), (rows, width), (rows, width))
        )
        kept: list[Tensor] = []

        def observe(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            kept.append(forward(batch, start(batch.states)))
            return kept[-1]

        def head(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            found = logits(batch.states)
            kept.extend((found, choose(found)[0]))
            return found

        def guess(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            found = forward(batch, batch.states)
            scores = logits(found)
            kept.extend((scores, choose(scores)[0]))
            platform.add_rows(found, None, before)
            return found

        observing = platform.capture_pass(observe, windows, rows * nodes, seen)
        heading = None if observing is None else platform.capture_pass(head, windows, rows, headed)
        guessing = None if heading is None else platform.capture_pass(guess, windows, rows, before)
        if observing is None or heading is None or guessing is None:
            return None
        left, *found = kept
        at_first, then = Guessed(*found[:2]), Guessed(*found[2:])
        ahead = 1 - first
        seeing = observing.observe(state.table, ahead, seen, left, states)
        passes = ChainPasses(
            *(observing, ahead, seen, left, heading, guessing, at_first, then, ids, states, headed, before)
        )
        return cls(state, places, reached, first, seeing, passes, len(left), nodes - 1)

    def observe(self, seen: SeenHere) -> bool:
        state, slots, starts, counts = self._state, seen.slots, seen.starts, seen.counts
        ends = starts + counts
        if self._first:  # it has no need of what the target found: it goes on from where it is
            starts = self._reached[slots]
            ends = np.minimum(ends + 1, state.page_count[slots] * state.page_size)
            counts = ends - starts
            if counts.min() < 1:
                return False
        if counts.sum() > self._tokens or counts.max() > LONGEST:
            return False
        self._observe(slots, starts, counts, seen.features, seen.places)
        self._reached[slots] = ends
        return True

    def cycle(self, target: HostTarget) -> GuessCycle | None:
        state, places = self._state, DraftSlots(self._reached, self._first, *self._places.own)
        features = target.features if self._passes.seen.shape[1] else None
        return target.run.cycle(
            *(self._passes, places, state.table, target.logits, target.tokens, target.broken, features),
            *(self._most, state.longest),
        )


class HostBlocks(HostDrafts):
    """Of a model that guesses a block in one pass, DFlash's. ``nodes``: of the block so many count."""

    def __init__(
        self,
        state: SlotTable,
        places: DraftPlaces,
        block: int,
        nodes: int,
        mask: int,
        observe: ObserveTokens,
        tokens: int,
        guess: HostPass,
        choice: Choice,
    ) -> None:
        self._state, self._places, self._block, self._nodes, self._mask = state, places, block, nodes, mask
        self._observe, self._tokens, self._guess, self._choice = observe, tokens, guess, choice
        self._everything = np.full((1, block), -1 if block == 64 else (1 << block) - 1, dtype=np.int64)

    @classmethod
    def make(
        cls,
        platform: Platform,
        state: SlotTable,
        places: DraftPlaces,
        model: Any,
        caches: list[Any],
        dtype: torch.dtype,
        features: int,
        rows: int,
        block: int,
        nodes: int,
        mask: int,
    ) -> HostBlocks | None:
        """None where the platform makes no such calls. ``features``: their width."""
        choose = platform.greedy
        if choose is None or dtype != torch.bfloat16:
            return None
        seen = torch.zeros((rows * nodes, features), dtype=dtype)
        kept: list[Tensor] = []

        def observe(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            model.observe(batch.states, batch.positions, batch.cache_index, caches)
            return batch.states

        def guess(batch: ForwardBatch) -> Tensor:
            found: Tensor = model.head(model.forward(batch, caches))
            kept.extend((found, choose(found)[0]))
            return found

        windows = [model.config.windows[0]]
        observing = platform.capture_pass(observe, windows, rows * nodes, seen)
        guessing = None if observing is None else platform.capture_pass(guess, windows, rows * block)
        if observing is None or guessing is None:
            return None
        choice = Choice(platform, *kept, None)
        seeing = observing.observe(state.table, 0, seen, None, None)
        return cls(state, places, block, nodes, mask, seeing, len(seen), guessing, choice)

    def observe(self, seen: SeenHere) -> bool:
        assert seen.features is not None
        if seen.counts.sum() > self._tokens:
            return False
        self._observe(seen.slots, seen.starts, seen.counts, seen.features, seen.places)
        return True

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> GuessesHere | None:
        state, count, block = self._state, len(slots), self._block
        given = state.pages[slots, : int(roots.max() + steps) // state.page_size + 1]
        table = self._places.table(slots, roots, given, capacity, block)
        ids = np.full((count, block), self._mask, dtype=np.int32)
        assert state.here is not None
        ids[:, 0] = state.here[slots, roots]
        positions = (roots[:, None] + np.arange(block)).reshape(-1)
        index = places_of(table, np.repeat(np.arange(count), block), positions, state.page_size)
        bits = np.repeat(self._everything, count, 0)
        offsets = np.arange(count + 1) * block
        self._guess(DecodeTokens(ids.reshape(-1), positions, index, table, roots + block, offsets, bits))
        if draws is not None:
            draws = np.repeat(draws, block)
            level = np.tile(np.arange(block), count)
            draws["temperature"][(level == 0) | (level >= self._nodes)] = 0  # of no use
        tokens = self._choice.best(count * block, draws, positions).reshape(count, block)[:, 1 : self._nodes]
        return self.chains(state.here[slots, roots], tokens, limits)
