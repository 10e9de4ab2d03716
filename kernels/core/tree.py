"""Draft trees: what a drafter proposes and the target verifies in one pass.

Node 0 of a row is its last known token, the root; every other node is a draft token at what follows its parent. A
parent stands before its children, so the first nodes of a tree are a tree. Everything here is plain torch on the
drafts' device with shapes that do not depend on values, so that it may be part of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "MAX_NODES",
    "DraftTree",
    "Drafts",
    "Growth",
    "Level",
    "chain",
    "chain_bits",
    "tree_of",
    "unpack_bits",
    "within_window",
]

MAX_NODES = 64
"""What a node sees of its tree is the bits of one int64."""


@dataclass(frozen=True)
class DraftTree:
    """``tokens``, ``parents``, ``depths`` int64 [rows, nodes]; the root's parent is -1, its depth 0.

    ``bits`` int64 [rows, nodes]: bit j of node i is set when node i sees node j: itself and its ancestors.
    ``linear``: every node follows the one before it, in every row.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    bits: Tensor
    linear: bool = False

    def mask(self) -> Tensor:
        """bool [rows, nodes, nodes]: ``mask[r, i, j]``: whether node i sees node j."""
        return unpack_bits(self.bits, self.bits.shape[1])


@dataclass(frozen=True)
class Drafts:
    """``tree``: [rows, nodes]. ``nodes`` int64 [rows], on the host: the target verifies the first ``nodes[r]`` nodes of
    row r, the root among them; 1 where the row has no draft token. At most ``DraftRows.limits + 1``."""

    tree: DraftTree
    nodes: npt.NDArray[np.int64]


def chain(tokens: Tensor) -> DraftTree:
    """The tree without branches of ``tokens`` int [rows, nodes], the root first."""
    rows, nodes = tokens.shape
    _check(nodes)
    depths = torch.arange(nodes, device=tokens.device).expand(rows, nodes)
    return DraftTree(
        tokens.to(torch.int64), depths - 1, depths, chain_bits(nodes, tokens.device).expand(rows, nodes), True
    )


def chain_bits(nodes: int, device: torch.device) -> Tensor:
    """``DraftTree.bits`` of one chain, int64 [nodes]."""
    _check(nodes)
    return (2 << torch.arange(nodes, device=device)) - 1


def tree_of(tokens: Tensor, parents: Tensor, depth: int = 0) -> DraftTree:
    """The tree of ``tokens`` and ``parents`` int [rows, nodes], each parent before its children, the root's -1.

    ``depth``: that no node's is above; 0: any. Ancestors are found by pointer doubling: after k rounds a node knows
    those up to 2^k - 1 steps above it.
    """
    rows, nodes = tokens.shape
    _check(nodes)
    tokens, parents = tokens.to(torch.int64), parents.to(torch.int64)
    jump = parents.clamp(min=0)
    bits = _own_bits(nodes, tokens.device).expand(rows, nodes)
    depths = (parents >= 0).to(torch.int64)
    for _ in range((depth or nodes - 1).bit_length()):
        bits = bits | bits.gather(1, jump)
        depths = depths + depths.gather(1, jump)
        jump = jump.gather(1, jump)
    return DraftTree(tokens, parents, depths, bits)


def unpack_bits(bits: Tensor, nodes: int) -> Tensor:
    """bool [..., nodes] of ``bits`` int64 [...]."""
    return (bits.unsqueeze(-1) >> torch.arange(nodes, device=bits.device)) & 1 != 0


def within_window(bits: Tensor, window: int) -> Tensor:
    """``bits`` int64 [rows, nodes] of which each node keeps its last ``window`` ones, its own among them; 0: all."""
    if not window or window >= MAX_NODES:
        return bits
    seen = unpack_bits(bits, MAX_NODES)
    nearest = seen.flip(-1).cumsum(-1).flip(-1) <= window  # a deeper ancestor has a higher number
    return (seen & nearest).to(torch.int64).mul(_own_bits(MAX_NODES, bits.device)).sum(-1)


def _own_bits(nodes: int, device: torch.device) -> Tensor:
    """int64 [nodes]: bit j alone."""
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(nodes, device=device)


@dataclass(frozen=True)
class Level:
    """The nodes that the drafter expands next, best first.

    ``tokens`` int64 [rows, width]. ``scores`` float32 [rows, width]: the sum of log-probabilities along the path.
    ``origins`` int64 [rows, width]: which node of the level before each follows (0 in the first level: the root).
    """

    tokens: Tensor
    scores: Tensor
    origins: Tensor


class Growth:
    """A tree grown level by level and then cut down to its best nodes: the dynamic draft tree of EAGLE-2 (Li et al.,
    arXiv 2406.16858, section 4).

    A node's score is the sum of the draft's log-probabilities along its path, an estimate of how likely it is to be
    accepted. The ``width`` best of each level are expanded (section 4.1). The best of all nodes that were seen
    are kept in the end (section 4.2). A child's score is never above its parent's, and the earlier of two nodes with
    equal scores wins. So a parent is always kept before its children, and the first n nodes are the best tree of n.
    """

    def __init__(self, root: Tensor, width: int) -> None:
        """``root`` int [rows]: last known tokens."""
        self._root = root.to(torch.int64).view(-1, 1)
        self._width = width
        self._tokens: list[Tensor] = []  # of each level: every candidate [rows, candidates]
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # numbers of candidates, counted over all levels; -1: the root
        self._seen = 0
        self._level: tuple[Tensor, Tensor] | None = None  # scores and numbers of the nodes to expand [rows, width]

    @property
    def candidates(self) -> int:
        """Nodes seen so far, the root not counted."""
        return self._seen

    def grow(self, tokens: Tensor, log_probs: Tensor) -> Level:
        """Give each node of the last level its children, and choose the next level.

        ``tokens`` int, ``log_probs`` [rows, nodes of the last level (1 at first), children]: the draft's most likely
        continuations, best first, and their log-probabilities (what is above 0 counts as 0, NaN as impossible).
        """
        rows, nodes, children = tokens.shape
        scores = log_probs.to(torch.float32).nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)
        if self._level is None:
            parents = torch.full((rows, nodes * children), -1, dtype=torch.int64, device=tokens.device)
        else:
            above, numbers = self._level
            scores = scores + above.unsqueeze(-1)
            parents = numbers.unsqueeze(-1).expand(rows, nodes, children).reshape(rows, -1)
        scores = scores.reshape(rows, -1)
        flat = tokens.to(torch.int64).reshape(rows, -1)
        ordered, order = scores.sort(dim=1, descending=True, stable=True)
        best, chosen = ordered[:, : self._width], order[:, : self._width]
        self._tokens.append(flat)
        self._scores.append(scores)
        self._parents.append(parents)
        self._level = (best, chosen + self._seen)
        self._seen += nodes * children
        return Level(flat.gather(1, chosen), best, chosen // children)

    def tree(self, nodes: int) -> DraftTree:
        """The best ``nodes`` nodes, the root among them, best first. Raises ValueError when fewer were seen."""
        kept = nodes - 1
        if not 0 < kept <= self._seen:
            raise ValueError(f"a tree of {nodes} nodes needs 1 to {self._seen} drafts: grow more levels or wider ones")
        scores, tokens, parents = (torch.cat(parts, 1) for parts in (self._scores, self._tokens, self._parents))
        order = scores.sort(dim=1, descending=True, stable=True)[1]
        chosen = order[:, :kept]
        # What place among the nodes a candidate got; behind the last column stands the root, which -1 finds.
        rank = torch.zeros((len(scores), self._seen + 1), dtype=torch.int64, device=scores.device)
        places = torch.arange(1, self._seen + 1, device=scores.device).expand_as(order)
        rank.scatter_(1, order, places)
        above = parents.gather(1, chosen)
        above = torch.where(above < 0, self._seen, above)
        none = torch.full_like(self._root, -1)
        return tree_of(
            torch.cat((self._root, tokens.gather(1, chosen)), 1),
            torch.cat((none, rank.gather(1, above)), 1),
            len(self._tokens),
        )


def _check(nodes: int) -> None:
    if not 0 < nodes <= MAX_NODES:
        raise ValueError(f"a draft tree has 1 to {MAX_NODES} nodes, not {nodes}")
