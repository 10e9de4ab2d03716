"""Drafting on the CPU: every pass is one native call, and the rest is numpy.

On a small model the Python work around a pass takes as long as the pass itself. Results equal those of the drafters.
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

from kernels.core.arrays import Longs
from kernels.core.attention_rows import DecodeTokens
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Draw, Draws
from kernels.devices.base import Device
from kernels.devices.prepared import (
    ChainDraftPasses,
    DraftCacheSlots,
    DraftCycle,
    NativePass,
    ObserveTokens,
    PassLogits,
)
from kernels.models.native_model import NativeModel
from kernels.speculation.draft_sampler import DraftPlaces
from kernels.state.slots import SlotTable

__all__ = [
    "NativeBlockDrafts",
    "NativeChains",
    "NativeDrafts",
    "NativeObservation",
    "NativeTrees",
    "Raw",
    "places_of",
    "raw",
]

LONGEST = 128
"""Most tokens of prompts that use the attention of decodes, one query after another."""

Raw = npt.NDArray[np.int16]


class NativeObservation(NamedTuple):
    """Computed tokens to observe: in each row ``counts`` tokens from position ``starts`` on.

    ``features`` [tokens, n] are raw bits; ``places`` int64 says which of them are the rows' tokens. None for a drafter
    that uses none.
    """

    slots: Longs
    starts: Longs
    counts: Longs
    features: Raw | None
    places: Longs


@dataclass(frozen=True)
class NativeTrees:
    """A tree for each row, as ``Drafts`` and ``DraftTree`` say; ``depths`` and what follows it None for chains."""

    tokens: Longs
    counts: Longs
    parents: Longs | None = None
    depths: Longs | None = None
    bits: Longs | None = None

    def linear(self) -> list[list[int]]:
        """The nodes of each row, the root first; only the root where its tree branches."""
        nodes = [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]
        if self.parents is None:
            return nodes
        above = self.parents.tolist()
        return [
            row if parents[: len(row)] == list(range(-1, len(row) - 1)) else row[:1]
            for row, parents in zip(nodes, above, strict=True)
        ]


class Choice:
    """Chooses tokens from a pass's results: ``logits`` [rows, vocabulary] and their argmax, ``tokens``. ``ids``: as in
    ``DraftSampler``, which explains why draft tokens of sampled rows are sampled, too.
    """

    def __init__(self, device: Device, logits: Tensor, tokens: Tensor, ids: Tensor | None) -> None:
        self._draw: Draw | None = device.sampling.draw
        self._logits, self._ids = logits, ids
        self._stands_for: Longs | None = None if ids is None else ids.numpy()
        self._vocab = logits.shape[1] if ids is None else int(ids.max()) + 1
        self._argmax: Longs = tokens.numpy()

    def best(self, count: int, draws: Draws | None, positions: Longs) -> Longs:
        """Tokens of the first ``count`` rows, drawn by ``draws`` or the argmax. ``positions``: their positions."""
        chosen = self._argmax[:count]
        if draws is not None:
            assert self._draw is not None
            result = self._draw(self._logits[:count], draws, torch.from_numpy(positions), self._ids, self._vocab)
            assert result is not None, "the device recorded the pass"
            chosen = result[0].numpy()
        return chosen if self._stands_for is None else self._stands_for[chosen]


class NativeDrafts(ABC):
    """Drafting in one native call. A call returns False or None where it is not possible; then use the drafter."""

    @abstractmethod
    def observe(self, observation: NativeObservation) -> bool:
        """As ``Drafter.observe``."""

    def cycle(self, target: NativeModel) -> DraftCycle | None:
        """A native call that drafts and lets the ``target`` verify. It replaces ``draft``; None: there is none."""
        return None

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> NativeTrees | None:
        """Draft up to ``limits`` nodes and ``steps`` levels after each row's root. ``draws`` [rows]: how the target
        samples, see ``Choice``; None: all rows are greedy."""
        return None

    @staticmethod
    def chains(root_tokens: Longs, drafts: Longs, limits: Longs) -> NativeTrees:
        """Chains of the draft tokens ``drafts`` int64 [rows, n]."""
        width = min(drafts.shape[1], int(limits.max()))
        tokens = np.empty((len(drafts), 1 + width), dtype=np.int64)
        tokens[:, 0], tokens[:, 1:] = root_tokens, drafts[:, :width]
        return NativeTrees(tokens, np.minimum(limits, width) + 1)


def raw(tensor: Tensor) -> Raw:
    """The bits of a bf16 tensor of the host, in the same memory."""
    result: Raw = tensor.view(torch.int16).numpy()
    return result


def places_of(table: npt.NDArray[np.int32], rows: Longs, positions: Longs, page_size: int) -> Longs:
    """Places in a cache of ``positions`` of ``rows`` of a table of pages."""
    return table[rows, positions // page_size] * np.int64(page_size) + positions % page_size


@dataclass(frozen=True)
class ChainModel:
    """An autoregressive draft model.

    ``forward``: draft tokens and input states -> output states. ``start``: the target's features, ``features`` wide ->
    input states. ``ids``: see ``DraftSampler``. ``states`` [max_slots, width]: the output state of each slot's last
    token. ``reached`` int64 [max_slots]: filled places of the draft's cache. ``first``: see ``Expansion``.
    """

    forward: Callable[[ForwardBatch, Tensor], Tensor]
    start: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    windows: Sequence[int]
    ids: Tensor | None
    features: int
    states: Tensor
    reached: Longs
    first: int


class NativeChains(NativeDrafts):
    """Chains from a ``ChainModel``. ``max_drafts``: draft tokens that a row verifies."""

    def __init__(
        self,
        state: SlotTable,
        places: DraftPlaces,
        model: ChainModel,
        observe: ObserveTokens,
        passes: ChainDraftPasses,
        max_drafts: int,
    ) -> None:
        self._state, self._places, self._reached, self._first = state, places, model.reached, model.first
        self._observe, self._passes, self._tokens, self._max_drafts = (
            observe,
            passes,
            len(passes.observe_output),
            max_drafts,
        )

    @classmethod
    def make(
        cls, device: Device, state: SlotTable, places: DraftPlaces, model: ChainModel, rows: int, nodes: int
    ) -> NativeChains | None:
        """Record the model's passes over up to ``rows`` rows. None where the device makes no such calls."""
        forward, start, logits, windows, ids = model.forward, model.start, model.logits, model.windows, model.ids
        states, first, features = model.states, model.first, model.features
        choose = device.sampling.greedy
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
            result = logits(batch.states)
            kept.extend((result, choose(result)[0]))
            return result

        def draft_pass(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            result = forward(batch, batch.states)
            scores = logits(result)
            kept.extend((scores, choose(scores)[0]))
            device.elementwise.add_rows(result, None, before)
            return result

        observing = device.capture.native_pass(observe, windows, rows * nodes, seen)
        heading = None if observing is None else device.capture.native_pass(head, windows, rows, headed)
        drafting = None if heading is None else device.capture.native_pass(draft_pass, windows, rows, before)
        if observing is None or heading is None or drafting is None:
            return None
        left, *result = kept
        at_first, then = PassLogits(*result[:2]), PassLogits(*result[2:])
        ahead = 1 - first
        seeing = observing.observe(state.table, ahead, seen, left, states)
        passes = ChainDraftPasses(
            *(observing, ahead, seen, left, heading, drafting, at_first, then, ids, states, headed, before)
        )
        return cls(state, places, model, seeing, passes, nodes - 1)

    def observe(self, observation: NativeObservation) -> bool:
        state, slots, starts, counts = self._state, observation.slots, observation.starts, observation.counts
        ends = starts + counts
        if self._first:  # it does not read the target's features
            starts = self._reached[slots]
            ends = np.minimum(ends + 1, state.page_count[slots] * state.page_size)
            counts = ends - starts
            if counts.min() < 1:
                return False
        if counts.sum() > self._tokens or counts.max() > LONGEST:
            return False
        self._observe(slots, starts, counts, observation.features, observation.places)
        self._reached[slots] = ends
        return True

    def cycle(self, target: NativeModel) -> DraftCycle | None:
        state, places = self._state, DraftCacheSlots(self._reached, self._first, *self._places.own)
        features = target.features if self._passes.observe_input.shape[1] else None
        return target.run.cycle(
            self._passes,
            places,
            state.table,
            target.output,
            features,
            max_drafts=self._max_drafts,
            max_length=state.max_length,
        )


@dataclass(frozen=True)
class BlockModel:
    """A draft model that drafts a block in one pass (DFlash), for up to ``rows`` rows.

    ``model`` runs over ``caches`` in ``dtype``, from features ``features`` wide. A block is the root and
    ``mask`` tokens, ``block`` in all; the first ``nodes`` count.
    """

    model: Any
    caches: list[Any]
    dtype: torch.dtype
    features: int
    block: int
    nodes: int
    mask: int
    rows: int


class NativeBlockDrafts(NativeDrafts):
    """Chains from a ``BlockModel``."""

    def __init__(
        self,
        state: SlotTable,
        places: DraftPlaces,
        model: BlockModel,
        observe: ObserveTokens,
        draft_pass: NativePass,
        choice: Choice,
    ) -> None:
        block = model.block
        self._state, self._places, self._block, self._nodes, self._mask = state, places, block, model.nodes, model.mask
        self._observe, self._tokens, self._draft, self._choice = observe, model.rows * model.nodes, draft_pass, choice
        self._everything = np.full((1, block), -1 if block == 64 else (1 << block) - 1, dtype=np.int64)

    @classmethod
    def make(
        cls, device: Device, state: SlotTable, places: DraftPlaces, blocks: BlockModel
    ) -> NativeBlockDrafts | None:
        """Record the model's passes. None where the device makes no such calls."""
        model, caches, dtype, rows, block, nodes = (
            *(blocks.model, blocks.caches, blocks.dtype),
            *(blocks.rows, blocks.block, blocks.nodes),
        )
        features = blocks.features
        choose = device.sampling.greedy
        if choose is None or dtype != torch.bfloat16:
            return None
        seen = torch.zeros((rows * nodes, features), dtype=dtype)
        kept: list[Tensor] = []

        def observe(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            model.observe(batch.states, batch.positions, batch.cache_index, caches)
            return batch.states

        def draft_pass(batch: ForwardBatch) -> Tensor:
            result: Tensor = model.head(model.forward(batch, caches))
            kept.extend((result, choose(result)[0]))
            return result

        windows = [model.config.windows[0]]
        observing = device.capture.native_pass(observe, windows, rows * nodes, seen)
        drafting = None if observing is None else device.capture.native_pass(draft_pass, windows, rows * block)
        if observing is None or drafting is None:
            return None
        logits, tokens = kept
        choice = Choice(device, logits, tokens, None)
        seeing = observing.observe(state.table, 0, seen, None, None)
        return cls(state, places, blocks, seeing, drafting, choice)

    def observe(self, observation: NativeObservation) -> bool:
        assert observation.features is not None
        if observation.counts.sum() > self._tokens:
            return False
        self._observe(
            observation.slots, observation.starts, observation.counts, observation.features, observation.places
        )
        return True

    def draft(
        self, slots: Longs, roots: Longs, capacity: Longs, limits: Longs, steps: int, draws: Draws | None
    ) -> NativeTrees | None:
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
        self._draft(DecodeTokens(ids.reshape(-1), positions, index, table, roots + block, offsets, bits))
        if draws is not None:
            draws = np.repeat(draws, block)
            level = np.tile(np.arange(block), count)
            draws["temperature"][(level == 0) | (level >= self._nodes)] = 0  # not used
        tokens = self._choice.best(count * block, draws, positions).reshape(count, block)[:, 1 : self._nodes]
        return self.chains(state.here[slots, roots], tokens, limits)
