"""Kernels for the work between the passes of a draft model, so that nothing is read back to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree

__all__ = ["AcceptedTokens", "DraftKernels", "TreeBuilder", "TreeShape"]


@dataclass(frozen=True)
class TreeShape:
    """``steps`` levels of ``topk`` nodes each, of which ``nodes``, with the root, are verified. ``first``: as
    ``Expansion`` says. ``windows``: of the draft's attention. ``ids`` int64: the target's of the draft's tokens."""

    steps: int
    topk: int
    nodes: int
    first: int
    page_size: int
    windows: tuple[int, ...]
    ids: Tensor | None

    @property
    def candidates(self) -> int:
        """Candidate nodes, without the root."""
        return self.topk + (self.steps - 1) * self.topk * self.topk

    @property
    def kept(self) -> int:
        """Nodes of a tree, with the root."""
        return self.steps + 1 if self.topk == 1 else min(self.nodes, self.candidates + 1)


@dataclass(frozen=True)
class AcceptedTokens:
    """The results of rows that verified, in device tensors that stay where they are.

    ``roots``, ``slots`` int64 [rows] and ``pages`` int64 [rows, columns]: of the verified roots. ``outcome`` int64
    [rows, 2 + levels]: ``VerifyResult.outcome``. ``tokens`` int64 [rows, levels]: what follows each node passed.
    ``features`` [rows * levels, n]: of these nodes; those of rows that are not sound may be overwritten. ``states``
    [slots, width]: those of the slots' last tokens are written there.
    """

    roots: Tensor
    slots: Tensor
    pages: Tensor
    outcome: Tensor
    tokens: Tensor
    features: Tensor
    states: Tensor


@dataclass(frozen=True)
class AcceptedBuffers:
    """Where an early draft reads accepted tokens: ``rows`` int64 [size, 2 + columns]: roots, slots and pages, 0 where
    there is no page; ``outcome`` int64 [.., 2 + levels], 0 in rows without a request; ``tokens`` int64 [.., levels];
    ``features`` [.. * levels, n]."""

    rows: Tensor
    outcome: Tensor
    tokens: Tensor
    features: Tensor


class TreeBuilder(Protocol):
    """One pass: ``observe`` and ``start``, then ``level`` for each level but the last, then ``tree``."""

    def observe(self) -> ForwardBatch:
        """The batch of accepted tokens, with features in place of states; other tokens go to the null page."""
        ...

    def start(self, seen: Tensor) -> Tensor:
        """``seen`` [rows * levels, width], what the observed tokens left -> of the last ones [rows, width]."""
        ...

    def level(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        """The nodes that follow those that left ``states`` and have the ``logits``, with the states they go on from."""
        ...

    def tree(self, logits: Tensor) -> DraftTree:
        """The best nodes of all, with those that follow the last level."""
        ...


class DraftKernels(ABC):
    """A device without these kernels has no ``DraftKernels`` at all: plain torch, or the host, does the same."""

    @abstractmethod
    def candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``logits`` [rows, vocab] -> the ``count`` most likely ids int64 and their log-probabilities float32, both
        [rows, count], the best first; of equals the lowest id first."""

    @abstractmethod
    def make_tree_builder(self, shape: TreeShape, accepted: AcceptedTokens) -> TreeBuilder | None:
        """Kernels for the steps between the passes that grow a tree; None if there are none for this ``shape``."""

    @abstractmethod
    def accept(
        self, tree: DraftTree, rows: Tensor, sampled: Tensor, nonfinite: Tensor, depth: int, forced: int, table: Tensor
    ) -> Acceptance | None:
        """``kernels.speculation.verify.walk`` in one kernel, with its consequences; None if there is no such kernel.

        ``rows`` int64 [rows, 4]: the slot, the root's position, the number of nodes that were run, and the index of the
        first of these in ``sampled`` int64 and ``nonfinite`` bool. The token that follows each node passed is written
        behind the root to the slot's row of ``table`` int32.
        """

    @abstractmethod
    def move_accepted(self, caches: Sequence[Any], index: Tensor, rows: Tensor, outcome: Tensor) -> bool:
        """``KvCaches.move_all`` of what ``accept`` found for ``rows``, in one kernel; False if there is no such kernel.
        ``index`` int64 [tokens]: where the keys and values of the nodes were written."""

    @abstractmethod
    def copy_accepted(
        self,
        rows: Tensor,
        pages: Tensor,
        outcome: Tensor,
        tokens: Tensor,
        features: Tensor,
        to: AcceptedBuffers,
    ) -> bool:
        """Copy, in one kernel, what rows accepted to where an early draft reads it: ``outcome`` [rows, 2 + n],
        ``tokens`` [rows, n] and, of ``features``, those of the nodes passed.

        ``rows`` int64 [size, 4], of which there may be more than of ``outcome``: as ``accept`` takes them, their third
        number unused; ``pages`` int [size, n]. False if there is no such kernel.
        """
