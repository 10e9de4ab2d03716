"""Steps of no request, run while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.rows import AttentionRows
from kernels.sampling import Sampler
from kernels.slots import SlotTable
from kernels.step import RunnerConfig

__all__ = ["Rehearsal"]

WARM_DECODES = (1, 2, 4, 8)
WARM_PREFILLS = (16, 64)

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Rehearsal:
    """Of one model. ``windows``: lengths that its layers have."""

    def __init__(
        self, config: RunnerConfig, platform: Platform, model: Decoder, sampler: Sampler, windows: frozenset[int]
    ) -> None:
        self._config = config
        self._platform = platform
        self._model = model
        self._sampler = sampler
        self._windows = windows

    def warm_up(self, caches: list[Any], slots: SlotTable) -> None:
        """Run a few shapes in the dump page, so that a first request does not pay for what is made on first use."""
        for counts, pages in self._shapes():
            self.run(caches, slots, counts, len(counts), pages)

    def of(self, model: Decoder) -> Rehearsal:
        """The same of another model."""
        return Rehearsal(self._config, self._platform, model, self._sampler, self._windows)

    def look_ahead(self, caches: list[Any]) -> None:
        """The same passes for ``Platform.compile_ahead``."""
        for counts, pages in self._shapes():
            logits = self.logits(caches, counts, len(counts), pages)
            if self._platform.greedy is not None:
                self._platform.greedy(logits)

    def _shapes(self) -> Iterator[tuple[Longs, Ints]]:
        shapes = [np.ones(rows, dtype=np.int64) for rows in WARM_DECODES if rows < self._config.max_slots]
        shapes += [np.array([count]) for count in WARM_PREFILLS if count <= self._config.max_step_tokens]
        for counts in shapes:
            yield counts, np.zeros((len(counts), -(-int(counts.max()) // self._config.page_size)), dtype=np.int32)

    def run(self, caches: list[Any], slots: SlotTable, counts: Longs, sampled: int, pages: Ints) -> None:
        """Run rows of ``counts`` first tokens, written from page 0 on, and sample from ``sampled`` of them.

        ``pages`` [rows, pages]: what attention reads.
        """
        logits = self.logits(caches, counts, sampled, pages)
        nothing = self._platform.put(np.zeros(sampled, dtype=np.int64))
        self._sampler.sample(logits, nothing, nothing, slots.tokens, host_slots=[0] * sampled, longest=0)

    def logits(self, caches: list[Any], counts: Longs, sampled: int, pages: Ints) -> Tensor:
        """The same up to what is sampled from [sampled, vocab]."""
        platform, model = self._platform, self._model
        tokens = int(counts.sum())
        ids, positions = (platform.put(np.zeros(tokens, dtype=kind)) for kind in (np.int32, np.int64))
        places = np.arange(tokens) % ((int(pages.max()) + 1) * self._config.page_size)
        decodes = len(counts) if tokens == len(counts) else 0
        rows = AttentionRows(np.zeros_like(counts), counts, pages, decodes)
        plans = {window: platform.plan_attention(rows, window) for window in self._windows}
        hidden = model.forward(ForwardBatch(ids, positions, platform.put(places), plans), caches)
        return model.logits(model.split(hidden)[0][:sampled])
