"""Kernels between the passes of a draft model on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree
from kernels.devices.cuda.attention.moving import move_accepted
from kernels.devices.cuda.cache import CudaCache
from kernels.devices.cuda.drafting.acceptance import accept, copy_accepted
from kernels.devices.cuda.drafting.candidates import candidates
from kernels.devices.cuda.drafting.tree_builder import CudaTreeBuilder
from kernels.devices.draft_kernels import AcceptedBuffers, AcceptedTokens, DraftKernels, TreeBuilder, TreeShape
from kernels.devices.memory import DeviceMemory

__all__ = ["CudaDraftKernels"]


class CudaDraftKernels(DraftKernels):
    def __init__(self, memory: DeviceMemory) -> None:
        self._put = memory.put
        self._pointers: dict[tuple[int, ...], Tensor] = {}

    def candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return candidates(logits, count)

    def make_tree_builder(self, shape: TreeShape, accepted: AcceptedTokens) -> TreeBuilder | None:
        return CudaTreeBuilder(shape, accepted) if CudaTreeBuilder.fits(shape) else None

    def accept(
        self, tree: DraftTree, rows: Tensor, sampled: Tensor, nonfinite: Tensor, depth: int, forced: int, table: Tensor
    ) -> Acceptance | None:
        return accept(tree, rows, sampled, nonfinite, depth, forced, table)

    def move_accepted(self, caches: Sequence[CudaCache], index: Tensor, rows: Tensor, outcome: Tensor) -> bool:
        move_accepted(caches, index, rows, outcome, self._pointers_of)
        return True

    def copy_accepted(
        self,
        rows: Tensor,
        pages: Tensor,
        outcome: Tensor,
        tokens: Tensor,
        features: Tensor,
        to: AcceptedBuffers,
    ) -> bool:
        copy_accepted(rows, pages, outcome, tokens, features, to)
        return True

    def _pointers_of(self, caches: Sequence[Tensor]) -> Tensor:
        """int64 [caches]: their addresses, copied to the device once."""
        at = tuple(cache.data_ptr() for cache in caches)
        if at not in self._pointers:
            self._pointers[at] = self._put(np.array(at, dtype=np.int64))
        return self._pointers[at]
