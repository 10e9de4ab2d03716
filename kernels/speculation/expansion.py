"""Chains and trees of draft tokens from an autoregressive draft model.

With one continuation a node, the draft tokens are a chain and each pass of the draft is a decode. With more, each pass
runs the best nodes of a level for all rows. Within the tree, attention sees only a node's ancestors, so the cache needs
no moves (EAGLE-2, Li et al., arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import BoundedRows, ForwardBatch
from kernels.core.tree import MAX_NODES, Drafts, Growth, chain
from kernels.devices.base import Device
from kernels.devices.capture import CaptureRequest
from kernels.devices.draft_kernels import TreeShape
from kernels.devices.latent_cache import make_latent_cache
from kernels.devices.prepared import CapturedPasses, VerifyOutputs
from kernels.models.config import ModelConfig
from kernels.speculation.draft_sampler import DraftPlaces, DraftSampler
from kernels.speculation.drafter import DrafterContext, DraftRows, Observation
from kernels.speculation.early_draft import EarlyDraftModel, EarlyDraftPasses
from kernels.speculation.native_drafts import ChainModel, NativeChains, NativeDrafts
from kernels.state.slots import SlotTable

__all__ = ["DraftModel", "Expansion", "forward_batch", "observed_rows"]

_SHORT = 16  # rows up to this length use the attention of verified rows, longer ones that of prompts


class DraftModel(Protocol):
    """An autoregressive draft model: a token's input is its id and the state of the token before.

    ``config``: this rank's part. ``width``: numbers of a state. ``ids`` int64: the target's id of each token of
    ``logits``; None: the vocabulary is the target's.
    """

    config: ModelConfig
    width: int
    ids: Tensor | None

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        """Input ``states`` [tokens, width], which may be overwritten -> output states [tokens, width]."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the next tokens from output ``states`` [rows, width]."""
        ...


class Expansion:
    """Runs ``model`` over observed tokens, and grows trees with it.

    ``first``: the place of a tree's first draft token in the draft's cache, counted from the root's position: 0 where
    the draft's position i holds the token after the target's position i, 1 where it holds the token itself.
    """

    def __init__(self, context: DrafterContext, model: DraftModel, first: int = 0) -> None:
        settings, config = context.settings, context.config
        self.steps, self.topk, self.nodes = settings.num_steps, settings.topk, settings.num_draft_tokens
        self.caches: list[Any] = []
        self._context, self._model, self._first = context, model, first
        self._device = context.device
        drafting = context.device.drafting
        candidates = None if drafting is None else drafting.candidates
        self._sampler = DraftSampler(model.ids, context.device.sampling.greedy, candidates)
        self._windows = sorted(set(model.config.windows))
        places = self.topk * (self.steps - 1)
        if self.topk > 1 and places > MAX_NODES:
            raise ConfigError(
                f"--speculative-num-steps {self.steps} with --speculative-eagle-topk {self.topk} run {places} nodes "
                f"through the draft, and at most {MAX_NODES} fit: lower one of them"
            )
        self._places = DraftPlaces(context.device, config, places, first)
        self._observing: CapturedPasses | None = None  # prepared passes over accepted tokens ...
        self._levels: CapturedPasses | None = None  # ... and over the nodes of a level, with their logits

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token."""
        config, dtype = self._model.config, self._context.dtype
        if (latent := config.latent) is not None:
            return config.layers * latent.spec().token_bytes(dtype.itemsize)
        return config.layers * self._device.cache.token_bytes(config.kv_heads, config.head_dim, dtype)

    @property
    def spare_bytes(self) -> int:
        """As ``Drafter.spare_bytes``, of the caches."""
        return self._places.spare_tokens * self.cache_bytes

    def make_caches(self, pages: int) -> list[Any]:
        """As ``Drafter.make_caches``."""
        config, context = self._model.config, self._context
        pages, page_size = self._places.cache_pages(pages), context.config.page_size
        if (latent := config.latent) is not None:
            place = context.dtype, self._device.torch_device
            self.caches = [make_latent_cache(latent.spec(), pages, page_size, *place) for _ in range(config.layers)]
            return self.caches
        self.caches = self._device.cache.make(
            config.layers, pages, page_size, config.kv_heads, config.head_dim, context.dtype
        )
        return self.caches

    def capture(self, agree: Callable[[bool], bool]) -> None:
        """As ``Drafter.capture``."""
        model, context, device = self._model, self._context, self._device
        if self._reads_rows:
            return
        states = torch.zeros((1, model.width), dtype=context.dtype, device=device.torch_device)
        max_rows, page_size = context.config.max_slots - 1, context.config.page_size
        columns = -(-(context.context + self._first + self.topk * self.steps) // page_size) + 1

        def observe(batch: ForwardBatch) -> Tensor:
            assert batch.states is not None
            return model.forward(batch, batch.states, self.caches)

        def choose(batch: ForwardBatch) -> Tensor:
            result = observe(batch)
            if device.traits.overlaps:  # another launch costs less than a graph's memory for logits
                return result
            logits = model.logits(result)
            both = device.elementwise.empty_rows(len(result), model.width + logits.shape[1], result.dtype)
            device.elementwise.add_rows(result, None, both[:, : model.width])
            device.elementwise.add_rows(logits, None, both[:, model.width :])
            return both

        self._observing = device.capture.decodes(
            CaptureRequest(observe, self._windows, max_rows, columns, agree, self.steps + 1, False, states)
        )
        if self.steps > 1:
            self._levels = device.capture.decodes(
                CaptureRequest(choose, self._windows, max_rows, columns, agree, self.topk, self.topk > 1, states)
            )

    def prepare_early(
        self,
        model: EarlyDraftModel,
        states: Tensor,
        agree: Callable[[bool], bool],
        accept_outputs: Mapping[int, VerifyOutputs],
    ) -> EarlyDraftPasses | None:
        """Passes that observe and draft in one launch (``early_draft``); None if the device captures none.

        ``states``: of the slots' last tokens. ``accept_outputs``: see ``Drafter.capture``.
        """
        config, ids = self._context.config, self._model.ids
        if self._model.config.latent is not None or self._reads_rows:
            return None
        shape = TreeShape(self.steps, self.topk, self.nodes, self._first, config.page_size, tuple(self._windows), ids)
        passes = EarlyDraftPasses(self._context, model, self._sampler, self.caches, states, shape)
        passes.capture(config.max_slots - 1, agree, accept_outputs)
        return passes if passes.size(1) else None

    def native_chains(
        self,
        state: SlotTable,
        rows: int,
        states: Tensor,
        reached: npt.NDArray[np.int64],
        start: Callable[[Tensor], Tensor],
        features: int,
    ) -> NativeDrafts | None:
        """As ``Drafter.native_drafts``; the rest as ``ChainModel`` says."""
        if self.topk > 1 or self._model.config.latent is not None or self._reads_rows:
            return None
        model = self._model
        chain_model = ChainModel(
            forward=lambda batch, before: model.forward(batch, before, self.caches),
            start=start,
            logits=model.logits,
            windows=self._windows,
            ids=model.ids,
            features=features,
            states=states,
            reached=reached,
            first=self._first,
        )
        return NativeChains.make(self._device, state, self._places, chain_model, rows, self.nodes)

    def observe(self, observation: Observation, tokens: Tensor, states: Tensor) -> Tensor:
        """Run ``tokens`` [tokens] at the observed positions -> output states [tokens, width]."""
        attended = observed_rows(observation.starts, observation.counts, observation.pages)
        batch = self._batch(tokens, observation.positions, observation.cache_index, attended, states)
        result = None if self._observing is None else self._observing.run(batch)
        return self._model.forward(batch, states, self.caches) if result is None else result

    def draft(self, rows: DraftRows, states: Tensor) -> Drafts:
        """Draft a tree for each row. ``states`` [rows, width]: output states of the root tokens."""
        steps = max(1, min(rows.steps, self.steps, int(rows.limits.max())))
        return self._chain(rows, states, steps) if self.topk == 1 else self._tree(rows, states, steps)

    def _chain(self, rows: DraftRows, states: Tensor, steps: int) -> Drafts:
        choose = self._sampler.best
        tokens = [rows.root_tokens, choose(self._model.logits(states), rows.noise, rows.root_positions, 1)]
        if steps > 1:
            starts = rows.roots + self._first + np.arange(steps - 1)[:, None]
            table = self._places.table(rows.slots, rows.roots, rows.pages, rows.capacity, steps - 1)
            positions, index = self._places.put(starts, starts, table)
            ones = np.ones(len(rows.slots), dtype=np.int64)
        for step in range(1, steps):
            at = starts[step - 1]
            attended = AttentionRows(at, ones, table, len(at))
            batch = self._batch(tokens[-1], positions[step - 1], index[step - 1], attended, states)
            states, logits = self._run(batch, states)
            tokens.append(choose(logits, rows.noise, rows.root_positions, 1 + step))
        return Drafts(chain(torch.stack(tokens, 1)), np.minimum(rows.limits, steps) + 1)

    def _tree(self, rows: DraftRows, states: Tensor, steps: int) -> Drafts:
        count, width, device = len(rows.slots), self.topk, states.device
        choose = self._sampler.candidates
        if steps > 1:
            roots = rows.roots + self._first
            levels = np.arange(steps - 1)[:, None]
            starts = roots + width * levels
            table = self._places.table(rows.slots, rows.roots, rows.pages, rows.capacity, width * (steps - 1))
            places = (starts[:, :, None] + np.arange(width)).reshape(steps - 1, -1)
            positions, index = self._places.put(np.repeat(roots + levels, width, 1), places, table)
            counts = np.full(count, width, dtype=np.int64)
        own = torch.ones((), dtype=torch.int64, device=device) << torch.arange(width, device=device)
        row = torch.arange(count, device=device).unsqueeze(1)

        growth = Growth(rows.root_tokens, width)
        tokens, scores = choose(self._model.logits(states), rows.noise, rows.root_positions, 1, width)
        level = growth.grow(tokens.unsqueeze(1), scores.unsqueeze(1))
        seen = own.expand(count, width)
        for step in range(1, steps):
            above = 1 if step == 1 else width  # nodes of the previous level
            states = states.index_select(0, (row * above + level.origins).view(-1))
            attended = AttentionRows(starts[step - 1], counts, table, 0, count, seen, roots)
            batch = self._batch(level.tokens.reshape(-1), positions[step - 1], index[step - 1], attended, states)
            states, logits = self._run(batch, states)
            tokens, scores = choose(logits, rows.noise, rows.root_positions, 1 + step, width)
            level = growth.grow(tokens.view(count, width, -1), scores.view(count, width, -1))
            seen = seen.gather(1, level.origins) | (own << (step * width))
        nodes = min(self.nodes, growth.candidates + 1)
        return Drafts(growth.tree(nodes), np.minimum(rows.limits + 1, nodes))

    def _run(self, batch: ForwardBatch, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run a level's tokens -> output states, and the logits of the next tokens."""
        both = None if self._levels is None else self._levels.run(batch)
        width = self._model.width
        if both is not None and both.shape[1] > width:
            return both[:, :width], both[:, width:]
        states = self._model.forward(batch, states, self.caches) if both is None else both
        return states, self._model.logits(states)

    def _batch(
        self, tokens: Tensor, positions: Tensor, index: Tensor, rows: AttentionRows, states: Tensor
    ) -> ForwardBatch:
        batch = forward_batch(self._device, self._model.config, tokens, positions, index, rows, states=states)
        window, size = self._model.config.row_window, self._context.config.page_size
        if window is None:
            return batch
        # The draft keeps all tokens, in the pages that the target has for what it keeps of all.
        return replace(batch, bounded={window: BoundedRows(rows.starts, rows.counts, rows.pages, size, index)})

    @property
    def _reads_rows(self) -> bool:
        return _reads_rows(self._device, self._model.config)


def forward_batch(
    device: Device,
    config: ModelConfig,
    tokens: Tensor,
    positions: Tensor,
    index: Tensor,
    rows: AttentionRows,
    *,
    states: Tensor | None = None,
) -> ForwardBatch:
    """A pass of a draft over ``tokens`` [tokens] of ``rows``, which stand at ``index`` of its cache."""
    if _reads_rows(device, config):
        return ForwardBatch(tokens, positions, index, {}, states, rows)
    plans = {window: device.attention.plan(rows, window) for window in sorted(set(config.windows))}
    return ForwardBatch(tokens, positions, index, plans, states)


def _reads_rows(device: Device, config: ModelConfig) -> bool:
    """Whether attention reads rows on the host."""
    planned = device.attention.plans_latent and device.cache.dtype is None
    latent = config.latent is not None and not planned
    return config.indexed or latent or bool(config.eager_with(device.attention.plans))


def observed_rows(
    starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]
) -> AttentionRows:
    """Rows of known tokens: decodes, then short ones as rows that verify a chain, then prompts."""
    decodes = _leading(counts == 1)
    return AttentionRows(starts, counts, pages, decodes, _leading(counts[decodes:] <= _SHORT))


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """Number of leading flags that are set."""
    return len(flags) if flags.all() else int(flags.argmin())
