"""What is emitted has the target's distribution, and is what the target samples; leniency and benchmarks aside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from kernels.core.tree import chain, tree_of
from kernels.sampling.sampler import Sampler
from kernels.speculation.verify import Leniency, path_history, walk, walk_here

VOCAB, ROWS = 6, 6000
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5  # of the token before


def distribution(logits, temperature, top_k, top_p):
    p = torch.softmax(logits.double() / temperature, -1).numpy()
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or len(p)]
    before = np.cumsum(p[kept]) / p[kept].sum() - p[kept] / p[kept].sum()
    kept = kept[before < top_p]
    found = np.zeros_like(p)
    found[kept] = p[kept] / p[kept].sum()
    return found


def trees(shape, roots, generator):
    """Draft tokens that know nothing of the noise: likely tokens and unlikely ones, in no order."""
    rows = len(roots)
    first = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)])
    if shape == "chain":
        return chain(torch.stack((roots, first[:, 0], first[:, 1], first[:, 2]), 1))
    tokens = torch.cat((roots[:, None], first[:, :3], first[:, 2:3], first[:, 4:5]), 1)
    return tree_of(tokens, torch.tensor([[-1, 0, 0, 0, 1, 2]]).expand(rows, -1))


def emit(shape, sampling, forced=0):
    """The first two tokens of each row, verified in one pass where the draft tokens were right, sampled one by one
    else."""
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(VOCAB, ROWS + 1)
    slots = torch.arange(1, ROWS + 1)
    for slot in slots.tolist():
        sampler.admit(slot, SlotSampling(seed=slot * 7919, **sampling), 1)
    roots = torch.zeros(ROWS, dtype=torch.int64)
    tree = trees(shape, roots, generator)
    nodes = tree.tokens.shape[1]
    history = torch.zeros((ROWS + 1, 8), dtype=torch.int32)
    repeated = slots.repeat_interleave(nodes)
    sampled = sampler.sample(LOGITS[tree.tokens.reshape(-1)], repeated, tree.depths.reshape(-1) + 5, history).tokens
    found = walk(tree, torch.full((ROWS,), nodes), sampled.view(ROWS, nodes), 3, forced=forced)
    one = found.tokens[:, 0]
    alone = sampler.sample(LOGITS[one], slots, torch.full((ROWS,), 6), history).tokens
    two = torch.where(found.counts > 1, found.tokens[:, min(1, found.tokens.shape[1] - 1)], alone)
    plain = sampler.sample(LOGITS[roots], slots, torch.full((ROWS,), 5), history).tokens
    after = sampler.sample(LOGITS[plain], slots, torch.full((ROWS,), 6), history).tokens
    return one, two, plain, after, found.counts


def unlikeliness(one, two, sampling):
    """Standard deviations that the pairs' chi-squared is above what the target's distribution lets expect (Wilson and
    Hilferty, 1931)."""
    temperature = sampling["temperature"]
    cuts = (temperature, sampling.get("top_k", 0), sampling.get("top_p", 1.0))
    first = distribution(LOGITS[0], *cuts)
    expected = np.stack([first[token] * distribution(LOGITS[token], *cuts) for token in range(VOCAB)]) * ROWS
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (one.numpy(), two.numpy()), 1)
    if counts[expected == 0].any():
        return np.inf
    common = expected >= 5
    rest = expected[~common].sum()
    chi = (((counts - expected) ** 2)[common] / expected[common]).sum()
    if rest > 0:
        chi += (counts[~common].sum() - rest) ** 2 / max(rest, 5)
    freedom = common.sum() - 1
    spread = 2 / (9 * freedom)
    return ((chi / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


SAMPLINGS = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.7},
]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_is_emitted_has_the_targets_distribution(sampling, shape):
    one, two, plain, after, counts = emit(shape, sampling)
    assert (counts > 1).any()
    assert unlikeliness(one, two, sampling) < 3.1  # one time in a thousand it is more
    assert torch.equal(one, plain)
    assert torch.equal(two, after)
    # And it is seen when draft tokens are taken for right that are not.
    one, two, *_ = emit(shape, sampling, forced=3)
    assert unlikeliness(one, two, sampling) > 10


def test_the_walk_follows_what_was_sampled():
    tree = tree_of(torch.tensor([[5, 6, 7, 8, 9]] * 4), torch.tensor([[-1, 0, 0, 1, 3]] * 4))
    sampled = torch.tensor([[6, 8, 0, 9, 4], [6, 8, 0, 9, 4], [7, 8, 3, 9, 4], [1, 8, 3, 9, 4]])
    found = walk(tree, torch.tensor([5, 4, 5, 5]), sampled, 3)
    assert found.counts.tolist() == [4, 3, 2, 1]
    assert found.path.tolist() == [[0, 1, 3, 4], [0, 1, 3, 3], [0, 2, 2, 2], [0, 0, 0, 0]]
    accepted = [tokens[:count] for tokens, count in zip(found.tokens.tolist(), found.counts, strict=True)]
    assert accepted == [[6, 8, 9, 4], [6, 8, 9], [7, 3], [1]]


@pytest.mark.parametrize("as_tree", [False, True])
def test_a_chain_is_accepted_up_to_the_first_wrong_draft(as_tree):
    tokens = torch.tensor([[5, 6, 7, 8]] * 3)
    tree = chain(tokens)
    if as_tree:
        tree = tree_of(tokens, tree.parents)
    found = walk(tree, torch.tensor([4, 4, 2]), torch.tensor([[6, 7, 1, 1], [0, 7, 8, 1], [6, 7, 8, 1]]), 3)
    assert found.counts.tolist() == [3, 1, 2]
    assert found.path.tolist() == [[0, 1, 2, 2], [0, 0, 0, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("depth", [3, 5])
def test_chains_on_the_host_are_walked_alike(depth):
    generator = torch.Generator().manual_seed(2)
    tokens, sampled = (torch.randint(2, (64, depth + 1), generator=generator) for _ in range(2))
    nodes = torch.arange(64) % (depth + 1) + 1  # of some rows fewer are run than there are
    found = walk_here(chain(tokens), nodes.numpy(), sampled, depth)
    expected = walk(chain(tokens), nodes, sampled, depth)
    assert set(expected.counts.tolist()) == set(range(1, depth + 2))
    for name in ("path", "counts", "tokens"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)


def test_a_nodes_history_is_its_path():
    tree = tree_of(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    known = torch.tensor([[1, 2, 5, 0, 0, 0]], dtype=torch.int32)
    found = path_history(tree, torch.tensor([2]), known)[0].tolist()
    assert [history[: 3 + depth] for history, depth in zip(found, [0, 1, 1, 2, 3], strict=True)] == [
        [1, 2, 5],
        [1, 2, 5, 6],
        [1, 2, 5, 7],
        [1, 2, 5, 6, 8],
        [1, 2, 5, 6, 8, 9],
    ]


@pytest.mark.parametrize("emitted", [1, 2, 3])
def test_benchmarks_choose_how_many_are_accepted(emitted):
    tree = tree_of(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    found = walk(tree, torch.tensor([5]), torch.tensor([[0, 0, 0, 0, 0]]), 3, forced=emitted)
    assert found.counts.tolist() == [emitted]
    assert found.tokens[0, :emitted].tolist() == [*[6, 8][: emitted - 1], 0]


def lenient(single=1.0, total=1.0, chance=0.5, warm=True):
    weights = torch.tensor([[0.0, 0.3, 0.2, 0.6]])
    return Leniency(weights, torch.full((1, 4), chance), single, total, torch.tensor([warm]))


@pytest.mark.parametrize(
    ("leniency", "count"),
    [
        (lenient(), 1),
        (lenient(single=0.3), 3),  # both the best child of the root and its only child are likely enough
        (lenient(single=0.31), 1),
        (lenient(single=0.3, warm=False), 1),  # greedy
        (lenient(total=0.5), 3),  # of a half that is tried, all is accepted; then 0.6 of 0.5
        (lenient(total=0.8, chance=0.3), 1),  # (0.5 / 0.8 - 0.5) / 0.5 = 0.25
        (lenient(total=0.8, chance=0.2), 3),
    ],
)
def test_leniency_accepts_what_is_likely_enough(leniency, count):
    tree = tree_of(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1]]))
    found = walk(tree, torch.tensor([4]), torch.tensor([[0, 1, 2, 3]]), 2, leniency)
    assert found.counts.tolist() == [count]
    assert found.tokens[0, :count].tolist() == ([6, 8, 3][:count] if count > 1 else [0])
