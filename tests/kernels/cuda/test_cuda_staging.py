"""What a graph of drafts reads, in one kernel on a GPU, or by Triton's interpreter, against the same by hand; numbers
that kernels read from the host, and results that nothing waits for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.cuda.staging import Staged, stage
from kernels.cuda.verify import HEADER
from kernels.speculative.tree import DraftTree, chain, tree_of
from kernels.staging import Staging, fetch

PAGE, COLUMNS = 16, 7
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_trees_are_placed(linear, size, device):
    generator = torch.Generator().manual_seed(size)
    rows, tokens, given_columns = 2, 6, 5
    ids = torch.randint(0, 99, (rows, tokens), generator=generator)
    tree = chain(ids) if linear else tree_of(ids, torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 4]]))
    starts = torch.tensor([30, 7])
    pages = torch.randint(1, 50, (rows, given_columns), generator=generator)
    whole = torch.zeros((size, 1 + HEADER + given_columns), dtype=torch.int32)
    whole[:rows, 0] = torch.tensor([8, 5])
    given = whole[:, 1:]
    given[:, 0], given[:, 1], given[:, 3] = torch.arange(size) * tokens, tokens, 1
    given[:rows, 2], given[:rows, 3], given[:rows, HEADER:] = starts, starts + tokens, pages
    token_ids = torch.full((9 * tokens,), -1, dtype=torch.int32, device=device)
    positions, index = torch.full((2, 9 * tokens), -1, device=device)
    state = torch.full((9, HEADER + COLUMNS), -1, dtype=torch.int32, device=device)
    seen, parents, depths = torch.full((3, 9, tokens), -7, device=device)
    asked = torch.full((9, 4), -1, device=device)
    there = DraftTree(*(getattr(tree, name).to(device) for name in ("tokens", "parents", "depths", "bits")))
    to = Staged(token_ids, positions, index, state, asked, DraftTree(token_ids.view(9, tokens), parents, depths, seen))
    stage(whole.to(device), there, to, PAGE)
    count = rows * tokens
    assert token_ids.tolist() == [*ids.flatten().tolist(), *[-1] * (9 * tokens - count)]
    assert torch.equal(positions[:count].cpu(), (starts[:, None] + tree.depths).flatten())
    at = starts[:, None] + torch.arange(tokens)
    expected = pages.gather(1, at // PAGE) * PAGE + at % PAGE
    assert torch.equal(index[:count].cpu(), expected.flatten())
    assert index[count : size * tokens].tolist() == [place % PAGE for place in range(count, size * tokens)]
    assert torch.equal(state[:size, : HEADER + given_columns].cpu(), given)
    assert (state[size:] == -1).all()
    assert torch.equal(seen[:rows].cpu(), tree.bits)
    assert (seen[rows:size] == 1).all()
    assert torch.equal(parents[:rows].cpu(), tree.parents)
    assert torch.equal(depths[:rows].cpu(), tree.depths)
    assert (parents[rows:size] == -1).all()
    assert not depths[rows:size].any()
    nobody = [[0, 0, 1, row * tokens] for row in range(rows, size)]
    assert asked[:size].tolist() == [[8, 30, tokens, 0], [5, 7, tokens, tokens], *nobody]


@triton.jit
def _copy(given, taken, count, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(taken + at, tl.load(given + at, mask=at < count), mask=at < count)


@needs_gpu
def test_kernels_read_what_is_shown_where_it_lies():
    staging = Staging(torch.device("cuda"), buffers=2, size=1 << 12)
    shown, taken = [], []
    for number in range(200):  # the buffers go round some twenty times
        array = np.arange(number, number + 50, dtype=np.int64)
        there, here = staging.show(array.reshape(5, 10)), torch.zeros(50, dtype=torch.int64, device="cuda")
        assert there.shape == (5, 10)
        assert there.is_pinned()
        _copy[(1,)](there, here, 50, 64)
        shown.append(array.tolist())
        taken.append(here)
        array[:] = -1  # the caller may
    assert [here.tolist() for here in taken] == shown
    assert staging.show(np.zeros(1 << 13, dtype=np.int64)).is_cuda  # what no buffer holds is put


@needs_gpu
def test_nothing_waits_for_results_that_are_copied_beside():
    beside, tensor = torch.cuda.Stream(), torch.full((1000,), 7, device="cuda")
    with torch.cuda.stream(beside):
        torch.cuda._sleep(1 << 30)
    wait = fetch([tensor], beside)
    del tensor
    other = torch.full((1000,), 8, device="cuda")  # not where the first one is read yet
    torch.cuda.current_stream().synchronize()
    assert not beside.query()
    assert (wait()[0] == 7).all()
    assert (other == 8).all()
