"""Draft tokens of a pipeline: the last stage drafts, and all stages verify the same trees.

A stage needs the draft tokens of a step before its pass, and cannot wait for the last one then: that stage is busy with
the step before. So the last stage drafts as soon as it has sampled, and the trees travel to the other stages with the
sampled tokens. Each stage keeps them by slot until a step verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission
from kernels.core.arrays import Ints, Longs
from kernels.core.tree import Drafts, chain, tree_of
from kernels.devices.base import Device
from kernels.devices.prepared import VerifyOutputs
from kernels.distributed.group import Group
from kernels.speculation.drafter import Drafter, DraftRows, Observation

__all__ = ["StageDrafter"]

_MANY = 1 << 30


class StageDrafter(Drafter):
    """Gives each step the trees that the last stage has drafted after the step before.

    ``own``: the drafter of the last stage; None in the others. ``group``: all ranks of all stages; each must make one.
    """

    def __init__(self, own: Drafter | None, group: Group, device: Device, max_slots: int) -> None:
        self._own, self._device = own, device
        self.max_nodes = group.minimum(_MANY if own is None else own.max_nodes)
        self.depth = group.minimum(_MANY if own is None else own.depth)
        self._branches = bool(group.minimum(1 if own is None else int(own.branches)))
        if own is not None:
            self.features, self.needs_host_tokens, self.stepwise = own.features, own.needs_host_tokens, own.stepwise
            self.parameters, self.weight_bytes = own.parameters, own.weight_bytes
            self.cache_bytes, self.latent, self.spare_bytes = own.cache_bytes, own.latent, own.spare_bytes
        # By slot: the position of the root, and the tree as ``draft_next`` returns it.
        self._roots: Longs = np.full(max_slots, -1, dtype=np.int64)
        self._trees: Longs = np.zeros((max_slots, self.width), dtype=np.int64)

    @property
    def width(self) -> int:
        """Numbers of a tree: its nodes that may run, then the token and the parent of each."""
        return 1 + 2 * self.max_nodes

    @property
    def branches(self) -> bool:
        return self._branches

    def levels(self, settings: SpeculativeSettings) -> tuple[int, ...]:
        return super().levels(settings) if self._own is None else self._own.levels(settings)

    def make_caches(self, pages: int) -> list[Any]:
        return [] if self._own is None else self._own.make_caches(pages)

    def capture(self, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs] | None) -> None:
        if self._own is not None:
            self._own.capture(agree, accept_outputs)

    def admit(self, admission: Admission, tokens: Ints) -> None:
        self._roots[admission.slot] = -1
        if self._own is not None:
            self._own.admit(admission, tokens)

    def release(self, slot: int) -> None:
        self._roots[slot] = -1
        if self._own is not None:
            self._own.release(slot)

    def observe(self, observation: Observation) -> None:
        if self._own is not None:
            self._own.observe(observation)

    def record_acceptance(self, slots: Sequence[int], accepted: Sequence[int], drafted: Sequence[int]) -> None:
        if self._own is not None:
            self._own.record_acceptance(slots, accepted, drafted)

    def draft_next(self, rows: DraftRows) -> Longs:
        """Draft in the last stage. -> int64 [rows, width], on the host."""
        assert self._own is not None
        drafts = self._own.draft(rows)
        tokens, parents = self._device.memory.fetch([drafts.tree.tokens, drafts.tree.parents])()
        nodes, result = tokens.shape[1], np.zeros((len(rows.slots), self.width), dtype=np.int64)
        trees = result[:, 1:].reshape(-1, 2, self.max_nodes)
        trees[:, 0, :nodes], trees[:, 1] = tokens.numpy(), np.arange(self.max_nodes) - 1
        trees[:, 1, :nodes] = parents.numpy()
        result[:, 0], result[:, 1:] = drafts.nodes, trees.reshape(len(result), -1)
        return result

    def store(self, slots: Longs, roots: Longs, trees: Longs) -> None:
        """Keep the ``trees`` of these slots, whose last known tokens are at the positions ``roots`` int64 [rows]."""
        self._roots[slots], self._trees[slots] = roots, trees

    def draft(self, rows: DraftRows) -> Drafts:
        """The stored trees. All have ``max_nodes`` nodes, so that the stages agree in the sizes of what they send."""
        kept = self._trees[rows.slots]
        tokens, parents = (kept[:, 1 + part * self.max_nodes :][:, : self.max_nodes] for part in (0, 1))
        nodes: npt.NDArray[np.int64] = np.minimum(kept[:, 0], rows.limits + 1)
        nodes = np.where((self._roots[rows.slots] == rows.roots) & (nodes > 1), nodes, 1)
        put = self._device.memory.put
        run = np.arange(self.max_nodes) < nodes[:, None]
        if (parents == np.arange(self.max_nodes) - 1)[run].all():
            return Drafts(chain(put(np.ascontiguousarray(tokens))), nodes)
        parents = np.where(run, parents, np.arange(self.max_nodes) - 1)  # nodes that do not run: as in a chain
        return Drafts(tree_of(put(np.ascontiguousarray(tokens)), put(parents), 0), nodes)
