"""The walk to accepted nodes and what follows it on a GPU, or by Triton's interpreter, against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.tree import Drafts, DraftTree, chain, tree_of
from kernels.devices.cuda.attention.moving import move_accepted
from kernels.devices.cuda.drafting.acceptance import accept, copy_accepted
from kernels.devices.draft_kernels import AcceptedBuffers
from kernels.sampling.sampler import SampledTokens
from kernels.speculation.verify import Samples, VerifyResult, walk
from kernels.state.step_rows import StepRows


class State:
    """What rows of a step need of slots."""

    def __init__(self, known):
        self.known = known


def random_tree(rows, nodes, generator):
    tokens = torch.randint(0, 3, (rows, nodes), generator=generator)
    parents = torch.stack(
        [torch.tensor([-1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(1, nodes))])] * rows
    )
    return tree_of(tokens, parents)


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "there"])
@pytest.mark.parametrize("forced", [0, 1, 3])
@pytest.mark.parametrize(
    ("linear", "nodes", "depth"),
    [(True, 4, 3), (False, 16, 3), (False, 11, 10), (False, 64, 5), (False, 2, 1), (False, 3, 9)],
)
def test_the_same_is_accepted(linear, nodes, depth, forced, shown, device):
    generator = torch.Generator().manual_seed(nodes)
    rows = 5
    tree = chain(torch.randint(0, 3, (rows, nodes), generator=generator)) if linear else None
    tree = tree or random_tree(rows, nodes, generator)
    counts = np.array([nodes, max(2, nodes - 3), nodes, 2, nodes])
    slots, starts = np.array([4, 1, 7, 2, 3]), np.array([10, 3, 0, 22, 7])
    state = State(np.zeros(9, dtype=np.int64))
    state.known[slots] = starts + 1
    step = StepRows(np.arange(rows), slots, np.ones(rows, dtype=np.int64), _table(starts, slots))
    step = step.with_drafts(np.arange(rows), Drafts(tree, counts))
    total = int(counts.sum())
    sampled = torch.randint(0, 3, (total,), generator=generator)
    nonfinite = torch.rand(total, generator=generator) < 0.1
    after = torch.zeros(rows, nodes, dtype=torch.int64)
    for row in range(rows):
        begin = int(step.offsets[row])
        after[row, : counts[row]] = sampled[begin : begin + int(counts[row])]
    expected = walk(tree, torch.from_numpy(counts), after, depth, None, forced)
    draws = SampledTokens(sampled, nonfinite)
    verified = VerifyResult.from_samples(step, Samples.from_step(step, state.known), draws, expected, torch.from_numpy)

    numbers = np.stack((step.slots, step.starts, step.counts, step.offsets), 1)
    own = torch.from_numpy(numbers).pin_memory() if shown and device.type == "cuda" else torch.from_numpy(numbers)
    own = own if shown else own.to(device)
    table = torch.full((9, 80), -1, dtype=torch.int32, device=device)
    there = DraftTree(*(getattr(tree, name).to(device) for name in ("tokens", "parents", "depths", "bits")))
    found = accept(there, own, sampled.to(device), nonfinite.to(device), depth, forced, table)
    assert torch.equal(found.outcome.cpu(), verified.outcome)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.nonfinite.reshape(-1).cpu(), verified.sampled.nonfinite)
    assert torch.equal(found.rows.cpu(), own.cpu())
    if shown:
        own.fill_(-1)
    part = found.first_rows(2)
    here = part.on_host(part.packed.cpu())
    assert torch.equal(here.outcome, verified.outcome[:2])
    assert torch.equal(here.tokens, expected.tokens[:2])
    assert torch.equal(here.nonfinite.reshape(-1), verified.sampled.nonfinite[: 2 * here.levels])
    wanted_table = torch.full((9, 80), -1, dtype=torch.int32)
    levels = expected.tokens.shape[1]
    for row in range(rows):
        begin = int(starts[row]) + 1
        wanted_table[slots[row], begin : begin + levels] = expected.tokens[row].to(torch.int32)
    assert torch.equal(table.cpu(), wanted_table)

    # Their keys and values follow.
    page_size = 16
    caches = [torch.randn(20, 2, 2, page_size, 8, generator=generator).to(device) for _ in range(2)]
    index = torch.randperm(20 * page_size, generator=generator)[:total]
    moved = [cache.clone() for cache in caches]
    pointers = torch.tensor([cache.data_ptr() for cache in moved])
    move_accepted(moved, index.to(device), found.rows, found.outcome, lambda _: pointers.to(device))
    for cache, now in zip(caches, moved, strict=True):
        flat, kept = (each.transpose(2, 3).transpose(1, 2).flatten(0, 1) for each in (cache.clone(), now))
        for row in range(rows):
            accepted, path = abs(int(found.outcome[row, 0])), found.outcome[row, 2:].cpu()
            places = index[int(step.offsets[row]) :]
            flat[places[:accepted]] = flat[places[path[:accepted]]]
        assert torch.equal(flat, kept)


def _table(starts, slots):
    class Slots:
        computed = np.zeros(9, dtype=np.int64)
        known = np.zeros(9, dtype=np.int64)

    Slots.computed[slots], Slots.known[slots] = starts, starts + 1
    return Slots()


@pytest.mark.parametrize(("known", "dtype"), [(300, torch.int64), (280, torch.int32), (310, torch.int32)])
def test_what_is_drafted_from_is_brought(known, dtype, device):
    generator = torch.Generator().manual_seed(3)
    rows, size, columns, levels, held, wide = 3, 4, 300, 5, 3, 2500
    given = torch.randint(0, 99, (size, 4), generator=generator)
    given[:, 3] = torch.tensor([0, 7, 14, 0])
    pages = torch.randint(0, 99, (size, known + 5), generator=generator, dtype=dtype)[:, 5:]
    outcome = torch.cat((torch.tensor([[3, 4], [-2, 4], [1, 4]]), torch.randint(0, 7, (rows, held))), 1)
    tokens = torch.randint(0, 99, (rows, held), generator=generator)
    features = torch.randn(21, 2 * wide, generator=generator)[:, wide:]
    host = torch.full((size, 2 + columns), 9, device=device)
    kept_outcome = torch.full((size, 2 + levels), 9, device=device)
    kept_tokens = torch.full((size, levels), 9, device=device)
    kept_features = torch.zeros((size * levels, wide), device=device)
    buffers = AcceptedBuffers(host, kept_outcome, kept_tokens, kept_features)
    copy_accepted(*(part.to(device) for part in (given, pages, outcome, tokens, features)), buffers)
    there = min(known, columns)
    assert torch.equal(host[:, :2].cpu(), given[:, [1, 0]])
    assert torch.equal(host[:, 2 : 2 + there].cpu(), pages[:, :there].long())
    assert not host[:, 2 + there :].any()
    wanted_table = torch.zeros((size, 2 + levels), dtype=torch.int64)
    wanted_table[:rows, : 2 + held] = outcome
    assert torch.equal(kept_outcome.cpu(), wanted_table)
    assert torch.equal(kept_tokens[:rows, :held].cpu(), tokens)
    at = wanted_table[:rows, 2:] + given[:rows, 3:]
    assert torch.equal(kept_features[: rows * levels].cpu(), features[at.reshape(-1)])
