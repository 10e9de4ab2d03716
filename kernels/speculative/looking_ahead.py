"""Passes of steps with guesses for ``Platform.compile_ahead``, beside those that are captured.

Nothing in them chooses by what another computes, so a draft makes no guesses here: it observes.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.rows import AttentionRows
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter, Observation
from kernels.speculative.tree import chain
from kernels.step import RunnerConfig

__all__ = ["look_ahead"]

_PROMPT = 16
_OBSERVED = (1, 7, _PROMPT, 64)
_SIZES = (2, 4, 8, 16, 32, 64)  # tokens of a row, or up to so many
_ROWS = (1, 2, 8, 16)
_LENGTHS = (64, 128, 256, 512, 1024, 2048)

Longs = npt.NDArray[np.int64]


def look_ahead(
    config: RunnerConfig,
    platform: Platform,
    model: Decoder,
    part: ModelConfig,
    dtype: torch.dtype,
    caches: list[Any],
    drafter: Drafter,
    slots: SlotTable,
) -> None:
    """``model``, of ``part`` in ``dtype``, over ``caches``, and ``drafter`` over its own, of each the first page.
    ``slots``: nobody's."""
    passes = _Passes(config.page_size, platform, model, part, dtype, caches, drafter, slots)
    most, longest = drafter.most_nodes, config.max_step_tokens
    for nodes in sorted({min(most, size) for size in _SIZES}):
        found = passes.verify(nodes)
    # How sequences are divided depends on how long and how many they are, and no more on how much each verifies.
    asked = [(1, size, _LENGTHS[0]) for size in _SIZES if size <= max(most, _PROMPT)]
    asked += [(_ROWS[-1], size, length) for _, size, length in asked]
    asked += [(rows, most, length) for rows in _ROWS for length in _LENGTHS]
    for rows, nodes, length in asked:
        if rows < config.max_slots and length <= longest:
            passes.attend(rows, nodes, length)
    if drafter.features:
        for tokens in (*_OBSERVED, longest):
            passes.observe(tokens, found)


class _Passes:
    def __init__(
        self,
        page_size: int,
        platform: Platform,
        model: Decoder,
        config: ModelConfig,
        dtype: torch.dtype,
        caches: list[Any],
        drafter: Drafter,
        slots: SlotTable,
    ) -> None:
        self._page_size, self._platform, self._model = page_size, platform, model
        self._config, self._dtype = config, dtype
        self._caches, self._drafter, self._slots = caches, drafter, slots

    def verify(self, nodes: int) -> Tensor:
        """A row with so many nodes beside a prompt, and what is accepted. -> the pass's result."""
        platform, model, drafter = self._platform, self._model, self._drafter
        counts = np.array([nodes, _PROMPT])
        ids, positions, index, pages = self._tokens(counts)
        tree = chain(torch.zeros((1, nodes), dtype=torch.int64, device=platform.device))
        rows = AttentionRows(np.zeros(2, np.int64), counts, pages, 0, 1, tree.bits if drafter.branches else None)
        plans = {window: platform.plan_attention(rows, window) for window in set(self._config.windows)}
        found = model.forward(ForwardBatch(ids, positions, index, plans), self._caches)
        logits = model.logits(model.split(found)[0])
        if platform.greedy is not None:
            asked = platform.show(np.array([[0, 0, 1, 0]], dtype=np.int64))  # a root alone, of nobody
            sampled = platform.greedy(logits)
            accepted = platform.accept(tree, asked, *sampled, drafter.depth, 0, self._slots.tokens)
            if accepted is not None and drafter.branches:
                platform.move_accepted(self._caches, index, accepted.rows, accepted.outcome)
        if drafter.branches:
            places = index[:1].expand(drafter.depth + 1).contiguous()
            platform.move_caches(self._caches, places, places, len(places))
        return found

    def attend(self, rows: int, nodes: int, length: int) -> None:
        """Only the attention, of sequences of that ``length`` that each verify so many nodes: how they are divided
        depends on it."""
        platform, config = self._platform, self._config
        counts = np.full(rows, nodes)
        pages = np.zeros((rows, -(-length // self._page_size)), dtype=np.int32)
        bits = torch.ones((rows, nodes), dtype=torch.int64, device=platform.device)
        heads = torch.zeros(
            (rows * nodes, config.heads + 2 * config.kv_heads, config.head_dim),
            dtype=self._dtype,
            device=platform.device,
        )
        for window, tree in product(set(config.windows), {self._drafter.branches, False}):
            asked = AttentionRows(np.maximum(length - counts, 0), counts, pages, 0, rows, bits if tree else None)
            plan = platform.plan_attention(asked, window)
            platform.attention(heads[:, : config.heads], self._caches[0], plan, 1.0)

    def observe(self, tokens: int, found: Tensor) -> None:
        """A prompt of so many tokens. ``found``: what a pass of any left."""
        counts, nobody, put = np.array([tokens]), np.zeros(1, np.int64), self._platform.put
        ids, positions, index, pages = self._tokens(counts)
        self._drafter.observe(
            Observation(
                slots=nobody,
                starts=nobody,
                counts=counts,
                pages=pages,
                capacity=counts,
                reached=np.ones(1, dtype=bool),
                token_ids=ids,
                next_tokens=ids,
                positions=positions,
                cache_index=index,
                features=self._model.split(found.new_zeros(tokens, found.shape[1]))[1],
                last=put(counts - 1),
                device_slots=put(nobody),
                table=self._slots.tokens,
            )
        )

    def _tokens(self, counts: Longs) -> tuple[Tensor, Tensor, Tensor, npt.NDArray[np.int32]]:
        """Ids int64, positions and places of rows of so many tokens from their beginning on, and the rows' pages."""
        put, total = self._platform.put, int(counts.sum())
        positions = np.concatenate([np.arange(count) for count in counts])
        pages = np.zeros((len(counts), -(-int(counts.max()) // self._page_size)), dtype=np.int32)
        return put(np.zeros(total, np.int64)), put(positions), put(positions % self._page_size), pages
