"""Steps of no request, run while a model is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
        shapes = [np.ones(rows, dtype=np.int64) for rows in WARM_DECODES if rows < self._config.max_slots]
        shapes += [np.array([count]) for count in WARM_PREFILLS if count <= self._config.max_step_tokens]
        for counts in shapes:
            pages = np.zeros((len(counts), -(-int(counts.max()) // self._config.page_size)), dtype=np.int32)
            self.run(caches, slots, counts, len(counts), pages)

    def run(self, caches: list[Any], slots: SlotTable, counts: Longs, sampled: int, pages: Ints) -> None:
        """Run rows of ``counts`` first tokens, written from page 0 on, and sample from ``sampled`` of them.

        ``pages`` [rows, pages]: what attention reads.
        """
        platform, model = self._platform, self._model
        tokens = int(counts.sum())
        zeros = platform.put(np.zeros(tokens, dtype=np.int64))
        places = np.arange(tokens) % ((int(pages.max()) + 1) * self._config.page_size)
        decodes = len(counts) if tokens == len(counts) else 0
        rows = AttentionRows(np.zeros_like(counts), counts, pages, decodes)
        plans = {window: platform.plan_attention(rows, window) for window in self._windows}
        hidden = model.forward(ForwardBatch(zeros, zeros, platform.put(places), plans), caches)
        logits = model.logits(model.split(hidden)[0][:sampled])
        nothing = zeros[:sampled]
        self._sampler.sample(logits, nothing, nothing, slots.tokens, host_slots=[0] * sampled, longest=0)
