"""What a graph of drafts reads, in one kernel on a GPU, or by Triton's interpreter, against the same by hand."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.staging import stage
from kernels.cuda.verify import HEADER
from kernels.speculative.tree import DraftTree, chain, tree_of

PAGE, COLUMNS = 16, 7


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_trees_are_placed(linear, size, device):
    generator = torch.Generator().manual_seed(size)
    rows, tokens, given_columns = 2, 6, 5
    ids = torch.randint(0, 99, (rows, tokens), generator=generator)
    tree = chain(ids) if linear else tree_of(ids, torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 4]]))
    starts = torch.tensor([30, 7])
    pages = torch.randint(1, 50, (rows, given_columns), generator=generator)
    given = torch.zeros((size, HEADER + given_columns), dtype=torch.int32)
    given[:, 0], given[:, 1], given[:, 3] = torch.arange(size) * tokens, tokens, 1
    given[:rows, 2], given[:rows, 3], given[:rows, HEADER:] = starts, starts + tokens, pages
    token_ids = torch.full((9 * tokens,), -1, dtype=torch.int32, device=device)
    positions, index = torch.full((2, 9 * tokens), -1, device=device)
    state = torch.full((9, HEADER + COLUMNS), -1, dtype=torch.int32, device=device)
    seen = torch.full((9, tokens), -1, device=device)
    there = DraftTree(*(getattr(tree, name).to(device) for name in ("tokens", "parents", "depths", "bits")))
    stage(given.to(device), there, token_ids, positions, index[: size * tokens], state, seen, PAGE)
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
