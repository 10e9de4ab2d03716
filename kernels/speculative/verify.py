"""Which guesses are right.

The noise of sampling is a function of the seed, the position and the token id, so what the target samples after given
tokens is one token. It is sampled after every node of a draft tree, as if all guesses before were right; then the walk
goes from the root to the child that holds what was sampled, and on from there. What is emitted is what would have been
sampled without any guess, for greedy and for sampled requests alike: there is no rejection sampling (Leviathan et al.,
arXiv 2211.17192), whose output has the same distribution but is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.speculative.tree import DraftTree, unpack_bits

__all__ = ["Leniency", "Walk", "path_history", "walk", "walk_here"]


@dataclass(frozen=True)
class Walk:
    """``path`` int64 [rows, depth + 1]: the nodes that were passed, the root first; behind ``counts`` the last one
    stands again. ``counts`` int64 [rows]: how many, which is how many tokens are emitted: ``tokens`` int64 [rows,
    depth + 1], the token after each node of the path.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Leniency:
    """What is accepted beside what was sampled. Not lossless: for who asked for it.

    ``weights`` float32 [rows, nodes]: the target's probability of each node's token after its parent. ``chances``
    float32 [rows, nodes]: uniform in 0 .. 1, of each node as a parent. ``single``: a child of at least this probability
    is accepted. ``total``: where the children together have the probability q, one is accepted with q / ``total``
    instead of q. Rows whose ``lenient`` bool [rows] is not set are exact.
    """

    weights: Tensor
    chances: Tensor
    single: float
    total: float
    lenient: Tensor


def walk(
    tree: DraftTree, nodes: Tensor, sampled: Tensor, depth: int, leniency: Leniency | None = None, forced: int = 0
) -> Walk:
    """Walk trees of which the first ``nodes`` int64 [rows] nodes of each row were run.

    ``sampled`` int64 [rows, nodes]: the token sampled after each node; anything in nodes that were not run. ``depth``:
    levels to go at most. Of children with the same token the first counts. ``forced``: so many tokens are emitted,
    right or wrong, as long as the tree goes on; for benchmarks. Nothing is read by the host.
    """
    rows, width = tree.tokens.shape
    places = torch.arange(width, device=sampled.device)
    run = places < nodes.unsqueeze(1)
    if forced:  # the path to the first of the nodes that are deep enough
        depth = min(depth, forced - 1)
        deepest = tree.depths.masked_fill(~run | (tree.depths > depth), -1).argmax(1)
        run = run & unpack_bits(tree.bits.gather(1, deepest.unsqueeze(1)).squeeze(1), width)
    exact = leniency is None and not forced
    if tree.linear and exact:
        right = (tree.tokens[:, 1:] == sampled[:, :-1]) & run[:, 1:]
        counts = ((~right).cumsum(1) == 0).sum(1) + 1  # an A5 has no cumulative product
        path = torch.minimum(places[: depth + 1], (counts - 1).unsqueeze(1))
        return Walk(path, counts, sampled.gather(1, path))
    at = torch.zeros((rows, 1), dtype=torch.int64, device=sampled.device)
    going = torch.ones((rows, 1), dtype=torch.bool, device=sampled.device)
    counts = torch.ones(rows, dtype=torch.int64, device=sampled.device)
    path = [at]
    for _ in range(depth):
        children = (tree.parents == at) & run
        right = children if forced else children & (tree.tokens == sampled.gather(1, at))
        if leniency is not None:
            right = _lenient(leniency, children, right, at)
        # The first of them: argmax of a bool takes it.
        going = going & right.any(1, keepdim=True)
        at = torch.where(going, right.to(torch.int8).argmax(1, keepdim=True), at)
        counts = counts + going.squeeze(1)
        path.append(at)
    passed = torch.cat(path, 1)
    tokens = sampled.gather(1, passed)
    if not exact:  # what was passed is what was accepted, sampled or not
        inner = torch.arange(depth, device=sampled.device) < (counts - 1).unsqueeze(1)
        tokens[:, :-1] = torch.where(inner, tree.tokens.gather(1, passed[:, 1:]), tokens[:, :-1])
    return Walk(passed, counts, tokens)


def walk_here(tree: DraftTree, nodes: npt.NDArray[np.int64], sampled: Tensor, depth: int) -> Walk:
    """``walk`` of chains where the device is the host: numpy finds so few numbers several times as fast as torch."""
    after = sampled.numpy()
    right = tree.tokens.numpy()[:, 1:] == after[:, :-1]
    right &= np.arange(1, after.shape[1]) < nodes[:, None]
    counts = np.logical_and.accumulate(right, axis=1).sum(1) + 1
    path = np.minimum(np.arange(depth + 1), counts[:, None] - 1)
    tokens = np.take_along_axis(after, path, 1)
    return Walk(torch.from_numpy(path), torch.from_numpy(counts), torch.from_numpy(tokens))


def _lenient(leniency: Leniency, children: Tensor, right: Tensor, at: Tensor) -> Tensor:
    """``right``, or, in rows without such a child, the likeliest child where it is good enough."""
    weights = leniency.weights.masked_fill(~children, -1.0)
    best, place = weights.max(1, keepdim=True)
    q = weights.clamp(min=0).sum(1, keepdim=True).clamp(max=1.0)
    # Exact acceptance has taken q already: of the rest, so much makes it min(1, q / total).
    extra = ((q / leniency.total).clamp(max=1.0) - q) / (1.0 - q).clamp(min=1e-9)
    accepted = (best >= leniency.single) | (leniency.chances.gather(1, at) < extra)
    accepted = accepted & (best >= 0) & leniency.lenient.unsqueeze(1) & ~right.any(1, keepdim=True)
    chosen = torch.zeros_like(right).scatter_(1, place, True)
    return right | (chosen & accepted)


def path_history(tree: DraftTree, roots: Tensor, known: Tensor) -> Tensor:
    """The tokens before each node's next, as if it were accepted: int32 [rows, nodes, positions].

    ``roots`` int64 [rows]: positions of the roots. ``known`` int32 [rows, positions]: all tokens up to the root, and
    room for a path behind it.
    """
    rows, width = tree.tokens.shape
    positions = known.shape[1]
    history = known.unsqueeze(1).repeat(1, width, 1)
    history = torch.cat((history, torch.zeros_like(history[..., :1])), -1)  # a last column for what is not seen
    where = (roots.unsqueeze(1) + tree.depths).unsqueeze(1).expand(rows, width, width)
    where = torch.where(tree.mask(), where, positions).clamp(max=positions)
    tokens = tree.tokens.to(known.dtype).unsqueeze(1).expand(rows, width, width)
    return history.scatter_(2, where, tokens)[..., :positions]
