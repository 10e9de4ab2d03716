"""Warm-up steps without a request, run while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from kernels.contract.caches import has_states
from kernels.contract.config import RunnerConfig
from kernels.core.arrays import Ints, Longs
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.base import Device
from kernels.devices.state_cache import run_accepted_null
from kernels.execution.layer_groups import LayerGroups
from kernels.models.decoder import Decoder
from kernels.sampling.sampler import Sampler
from kernels.state.slots import SlotTable

__all__ = ["WarmUp"]

WARM_DECODES = (1, 2, 4, 8)
WARM_PREFILLS = (16, 64)
WARM_STATES = (32,)
"""Prompts of models with states in addition: kernels of recurrent layers are compiled for each size of a chunk."""


class WarmUp:
    """Runs warm-up steps of one model. ``windows``: window lengths of its layers. ``groups``: its cache groups, unless
    all are plain pages."""

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        model: Decoder,
        sampler: Sampler,
        windows: frozenset[int],
        groups: LayerGroups | None = None,
    ) -> None:
        self._groups = groups
        self._config = config
        self._device = device
        self._model = model
        self._sampler = sampler
        self._windows = windows

    def warm_up(self, caches: list[Any], slots: SlotTable) -> None:
        """Run a few shapes in the null page, so that no request waits for kernels that are compiled at first use."""
        for counts, pages in self._shapes():
            self.run(caches, slots, counts, len(counts), pages)

    def for_model(self, model: Decoder) -> WarmUp:
        """The warm-up of another model with the same settings."""
        return WarmUp(self._config, self._device, model, self._sampler, self._windows, self._groups)

    def precompile_passes(self, caches: list[Any]) -> None:
        """Run the passes of ``warm_up`` for ``Capture.precompile``."""
        for counts, pages in self._shapes():
            logits = self.logits(caches, counts, len(counts), pages)
            if self._device.sampling.greedy is not None:
                self._device.sampling.greedy(logits)

    def _shapes(self) -> Iterator[tuple[Longs, Ints]]:
        shapes = [np.ones(rows, dtype=np.int64) for rows in WARM_DECODES if rows < self._config.max_slots]
        states = self._groups is not None and has_states([each.group for each in self._groups.bounded])
        prefills = (*WARM_PREFILLS, *(WARM_STATES if states else ()))
        shapes += [np.array([count]) for count in prefills if count <= self._config.max_step_tokens]
        for counts in shapes:
            yield counts, np.zeros((len(counts), -(-int(counts.max()) // self._config.page_size)), dtype=np.int32)

    def run(self, caches: list[Any], slots: SlotTable, counts: Longs, sampled: int, pages: Ints) -> None:
        """Run rows of ``counts`` first tokens, written from page 0 on, and sample ``sampled`` of them.

        ``pages`` [rows, pages]: the pages that attention reads.
        """
        logits = self.logits(caches, counts, sampled, pages)
        nothing = self._device.memory.put(np.zeros(sampled, dtype=np.int64))
        self._sampler.sample(logits, nothing, nothing, slots.tokens, host_slots=[0] * sampled, longest=0)

    def logits(self, caches: list[Any], counts: Longs, sampled: int, pages: Ints) -> Tensor:
        """``run`` without sampling -> logits [sampled, vocab]."""
        device, model = self._device, self._model
        tokens = int(counts.sum())
        ids, positions = (device.memory.put(np.zeros(tokens, dtype=kind)) for kind in (np.int32, np.int64))
        places = np.arange(tokens) % ((int(pages.max()) + 1) * self._config.page_size)
        decodes = len(counts) if tokens == len(counts) else 0
        rows = AttentionRows(np.zeros_like(counts), counts, pages, decodes)
        plans = {window: device.attention.plan_layers(rows, window) for window in self._windows}
        batch = ForwardBatch(ids, positions, device.memory.put(places), plans, rows=rows)
        if self._groups is not None:
            verifies = self._config.speculation is not None and sampled > len(counts)
            batch = self._groups.place_null(batch, rows, sampled if verifies else 0)
        hidden = model.forward(batch, caches)
        if model.rows is not None:
            model.rows.select(device.memory.put(np.arange(sampled)))
        logits = model.logits(model.split(hidden)[0][:sampled])
        for each in batch.verifying:
            run_accepted_null(each, device.memory.put)
        return logits
