"""Draft trees against what the words say, node by node."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.core.tree import MAX_NODES, DraftTree, Growth, chain, chain_bits, tree_of, within_window


def ancestors(parents: list[int], node: int) -> list[int]:
    """From the root down to ``node``."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def check_shape(tree: DraftTree) -> None:
    mask = tree.mask()
    for row, parents in enumerate(tree.parents.tolist()):
        for node, parent in enumerate(parents):
            path = ancestors(parents, node)
            assert parent < node
            assert (parent >= 0) == (node > 0)
            assert tree.depths[row, node] == len(path) - 1
            assert mask[row, node].nonzero().flatten().tolist() == path


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    nodes = draw(st.integers(1, MAX_NODES))
    rows = draw(st.integers(1, 3))
    return [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)]


@settings(max_examples=60, deadline=None)
@given(forests())
def test_nodes_see_themselves_and_their_ancestors(parents: list[list[int]]) -> None:
    check_shape(tree_of(torch.zeros(len(parents), len(parents[0]), dtype=torch.int32), torch.tensor(parents)))


@pytest.mark.parametrize("nodes", [1, 2, 16, MAX_NODES])
def test_a_chain_is_a_tree_without_branches(nodes: int) -> None:
    tokens = torch.arange(2 * nodes, dtype=torch.int32).view(2, nodes)
    found = chain(tokens)
    again = tree_of(tokens, torch.arange(-1, nodes - 1).expand(2, nodes))
    assert found.linear
    assert not again.linear
    for name in ("tokens", "parents", "depths", "bits"):
        assert torch.equal(getattr(found, name), getattr(again, name)), name
    assert torch.equal(chain_bits(nodes, torch.device("cpu")), again.bits[0])
    assert torch.equal(found.mask()[1], torch.ones(nodes, nodes, dtype=torch.bool).tril())


@pytest.mark.parametrize("nodes", [0, MAX_NODES + 1])
def test_a_tree_has_up_to_64_nodes(nodes: int) -> None:
    with pytest.raises(ValueError, match="1 to 64 nodes"):
        chain(torch.zeros(1, nodes, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 to 64 nodes"):
        chain_bits(nodes, torch.device("cpu"))


@settings(max_examples=30, deadline=None)
@given(forests(), st.integers(0, MAX_NODES + 1))
def test_a_window_keeps_the_nearest_ancestors(parents: list[list[int]], window: int) -> None:
    tree = tree_of(torch.zeros(len(parents), len(parents[0])), torch.tensor(parents))
    found = within_window(tree.bits, window)
    for row, node in itertools.product(range(len(parents)), range(len(parents[0]))):
        path = ancestors(parents[row], node)
        kept = path[-window:] if window else path
        value = int(found[row, node]) & (1 << 64) - 1
        assert value == sum(1 << ancestor for ancestor in kept)


# A draft that is a table: what follows a path and how likely, of a vocabulary of eight.


def continuations(path: tuple[int, ...], children: int, coarse: bool) -> list[tuple[int, float]]:
    generator = torch.Generator().manual_seed(hash(path) % (1 << 31))
    logits = torch.rand(8, generator=generator) * 4
    if coarse:  # many are equally likely, some certain
        logits = logits.round() * 30
    values, tokens = logits.log_softmax(-1).topk(children)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


def brute_force(root: int, width: int, steps: int, nodes: int, coarse: bool) -> dict[tuple[int, ...], float]:
    """The kept paths and their scores, by sorting: of equals, the one seen first."""
    level: list[tuple[tuple[int, ...], float]] = [((root,), 0.0)]
    seen: list[tuple[tuple[int, ...], float]] = []
    for _ in range(steps):
        found = [
            ((*path, token), torch.tensor(score).add(value).item())
            for path, score in level
            for token, value in continuations(path, width, coarse)
        ]
        seen += found
        level = sorted(found, key=lambda one: -one[1])[:width]
    return dict(sorted(seen, key=lambda one: -one[1])[: nodes - 1])


@settings(max_examples=40, deadline=None)
@given(
    roots=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    width=st.integers(1, 4),
    steps=st.integers(1, 4),
    data=st.data(),
    coarse=st.booleans(),
)
def test_the_best_nodes_are_kept_with_their_parents(
    roots: list[int], width: int, steps: int, data: st.DataObject, coarse: bool
) -> None:
    most = width + (steps - 1) * width * width
    nodes = 1 + data.draw(st.integers(1, min(most, MAX_NODES - 1)))
    growth = Growth(torch.tensor(roots, dtype=torch.int32), width)
    paths: list[list[tuple[int, ...]]] = [[(root,)] for root in roots]
    for _ in range(steps):
        given_ = [[continuations(path, width, coarse) for path in row] for row in paths]
        tokens = torch.tensor([[[token for token, _ in node] for node in row] for row in given_])
        scores = torch.tensor([[[value for _, value in node] for node in row] for row in given_])
        level = growth.grow(tokens, scores)
        assert level.scores.shape == (len(roots), width)
        paths = [
            [(*row[origin], token) for origin, token in zip(origins, chosen, strict=True)]
            for row, origins, chosen in zip(paths, level.origins.tolist(), level.tokens.tolist(), strict=True)
        ]
    assert growth.candidates == most
    tree = growth.tree(nodes)
    check_shape(tree)
    for row, root in enumerate(roots):
        expected = brute_force(root, width, steps, nodes, coarse)
        of_row = tree.tokens[row].tolist()
        found = [tuple(of_row[i] for i in ancestors(tree.parents[row].tolist(), node)) for node in range(1, nodes)]
        assert found == list(expected), "best first"
    smaller = growth.tree(max(2, nodes // 2))
    assert torch.equal(smaller.parents, tree.parents[:, : smaller.parents.shape[1]]), "the first nodes are a tree"


def test_numbers_that_are_no_log_probabilities_still_make_a_tree() -> None:
    growth = Growth(torch.tensor([0, 0]), 2)
    growth.grow(torch.tensor([[[1, 2]], [[1, 2]]]), torch.tensor([[[-1.0, math.nan]], [[3.0, -math.inf]]]))
    growth.grow(torch.ones(2, 2, 2, dtype=torch.int64), torch.tensor([[[math.nan, 5.0]] * 2, [[7.0, math.nan]] * 2]))
    check_shape(growth.tree(7))


def test_a_tree_needs_as_many_candidates_as_nodes() -> None:
    growth = Growth(torch.tensor([0]), 2)
    growth.grow(torch.tensor([[[1, 2]]]), torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match="1 to 2 drafts"):
        growth.tree(4)
