"""What a graph of drafts reads, in one kernel on a GPU, or by Triton's interpreter, against the same by hand; numbers
that kernels read from the host, and results that nothing waits for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.contract.config import RunnerConfig
from kernels.core.tree import DraftTree, chain, tree_of
from kernels.devices.cuda.attention.verify import HEADER
from kernels.devices.cuda.device import CudaDevice
from kernels.devices.cuda.graphs.staging import Staged, stage
from kernels.devices.staging import Staging, fetch

PAGE, COLUMNS = 16, 7
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Trees:
    """Two trees of six nodes each, and where a graph of up to nine rows finds what it reads."""

    tokens, rows, columns = 6, 2, 5

    def __init__(self, linear, size, device):
        generator = torch.Generator().manual_seed(size)
        self.size, self.ids = size, torch.randint(0, 99, (2, 6), generator=generator)
        parents = torch.tensor([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 0, 4]])
        self.tree = chain(self.ids) if linear else tree_of(self.ids, parents)
        self.pages = torch.randint(1, 50, (2, self.columns), generator=generator)
        token_ids = torch.full((9 * 6,), -1, dtype=torch.int32, device=device)
        positions, index = torch.full((2, 9 * 6), -1, device=device)
        state = torch.full((9, HEADER + COLUMNS), -1, dtype=torch.int32, device=device)
        seen, parents, depths = torch.full((3, 9, 6), -7, device=device)
        nodes = DraftTree(token_ids.view(9, 6), parents, depths, seen)
        self.to = Staged(token_ids, positions, index, state, torch.full((9, 4), -1, device=device), nodes)
        self.device = device

    def stage(self, starts, before=None):
        """``starts``: passed with the pages, if any."""
        whole = torch.zeros((self.size, 1 + HEADER + self.columns), dtype=torch.int32)
        whole[:2, 0] = torch.tensor([8, 5])
        given = whole[:, 1:]
        given[:, 0], given[:, 1], given[:, 3] = torch.arange(self.size) * 6, 6, 1
        given[:2, HEADER:] = self.pages
        if starts is not None:
            given[:2, 2], given[:2, 3] = starts, starts + 6
        names = ("tokens", "parents", "depths", "bits")
        there = DraftTree(*(getattr(self.tree, name).to(self.device) for name in names))
        stage(whole.to(self.device), there, self.to, PAGE, before)
        return given

    def check(self, starts, given):
        to, size, count = self.to, self.size, 12
        assert to.token_ids.tolist() == [*self.ids.flatten().tolist(), *[-1] * (9 * 6 - count)]
        assert torch.equal(to.positions[:count].cpu(), (starts[:, None] + self.tree.depths).flatten())
        at = starts[:, None] + torch.arange(6)
        expected = self.pages.gather(1, at // PAGE) * PAGE + at % PAGE
        assert torch.equal(to.index[:count].cpu(), expected.flatten())
        assert to.index[count : size * 6].tolist() == [place % PAGE for place in range(count, size * 6)]
        assert torch.equal(to.state[:size, : HEADER + self.columns].cpu(), given)
        assert (to.state[size:] == -1).all()
        assert torch.equal(to.tree.bits[:2].cpu(), self.tree.bits)
        assert (to.tree.bits[2:size] == 1).all()
        assert torch.equal(to.tree.parents[:2].cpu(), self.tree.parents)
        assert torch.equal(to.tree.depths[:2].cpu(), self.tree.depths)
        assert (to.tree.parents[2:size] == -1).all()
        assert not to.tree.depths[2:size].any()
        nobody = [[0, 0, 1, row * 6] for row in range(2, size)]
        there = [[8, int(starts[0]), 6, 0], [5, int(starts[1]), 6, 6]]
        assert to.rows[:size].tolist() == [*there, *nobody]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_trees_are_placed(linear, size, device):
    trees, starts = Trees(linear, size, device), torch.tensor([30, 7])
    trees.check(starts, trees.stage(starts))


@pytest.mark.parametrize("size", [2, 4])
def test_trees_are_placed_behind_what_was_accepted(size, device):
    trees, starts = Trees(False, size, device), torch.tensor([30, 7])
    trees.stage(starts)
    before = torch.full((size, 9), 77, device=device)
    for accepted in ([3, -1], [1, 4], [5, 2]):  # less than 0: the row is not finite
        before[:2, 0] = torch.tensor(accepted)
        given, starts = trees.stage(None, before), starts + torch.tensor(accepted).abs()
        given[:2, 2], given[:2, 3] = starts, starts + 6
        trees.check(starts, given)


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
        there, here = staging.put_pinned(array.reshape(5, 10)), torch.zeros(50, dtype=torch.int64, device="cuda")
        assert there.shape == (5, 10)
        assert there.is_pinned()
        _copy[(1,)](there, here, 50, 64)
        shown.append(array.tolist())
        taken.append(here)
        array[:] = -1  # the caller may
    assert [here.tolist() for here in taken] == shown
    assert staging.put_pinned(np.zeros(1 << 13, dtype=np.int64)).is_cuda  # what no buffer holds is put


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


@needs_gpu
def test_what_is_issued_after_copies_may_write_to_what_was_copied():
    platform, tensor = CudaDevice(RunnerConfig(model_path="", device="cuda")), torch.full((1000,), 7, device="cuda")
    assert (platform.memory.fetch([tensor], lasting=True)()[0] == 7).all()  # there is a stream for them now
    with torch.cuda.stream(platform.memory._beside):
        torch.cuda._sleep(1 << 30)
    wait = platform.memory.fetch([tensor], lasting=True)
    platform.memory.wait_for_copies()
    tensor.fill_(8)
    assert not torch.cuda.current_stream().query()
    assert (wait()[0] == 7).all()
