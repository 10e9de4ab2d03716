"""Whole steps with prompts on a GPU, or by Triton's interpreter, where a graph is run again and not replayed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import kernels.devices.cuda
from kernels.core.arrays import ragged
from kernels.core.attention_rows import AttentionRows, PromptTokens
from kernels.core.batch import ForwardBatch
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.cuda.attention import prefill_warp_specialized
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.graphs import prompt_graphs
from kernels.devices.cuda.graphs.prompt_graphs import PromptGraphs, prompt_sizes
from kernels.devices.cuda.launch import copying
from tests.kernels.devices.cuda.plain import specialized_in_triton
from tests.kits.cuda.graphs import again

PAGE, COLUMNS, HEADS, DIM, VOCAB = 16, 12, 2, 16, 97


class Small:
    """A model of one layer whose tokens see those before them."""

    def __init__(self, device, window, page=PAGE, dim=DIM, dtype=torch.float32):
        torch.manual_seed(2)
        self.device, self.window, self.page = device, window, page
        self.cache = torch.randn(1 + 5 * COLUMNS, 2, HEADS, page, dim).to(device, dtype)
        self.words, self.head = (torch.randn(VOCAB, HEADS * dim).to(device, dtype) for _ in range(2))
        self.table = torch.randint(VOCAB, (6, page * COLUMNS), dtype=torch.int32).to(device)
        self.scratch = DecodeScratch(device)

    def put(self, array):
        return torch.from_numpy(array.copy()).to(self.device)

    def forward(self, batch, last):
        queries = self.words[batch.token_ids.long()].view(-1, HEADS, self.cache.shape[-1])
        queries = queries + (batch.positions % 7 / 7).to(queries.dtype)[:, None, None]
        index = batch.cache_index
        self.cache[index // self.page, :, :, index % self.page] = torch.stack((queries, -queries), 1)
        hidden = attention(queries, self.cache, batch.plans[self.window], 0.2, self.scratch)
        if self.device.type == "cpu":  # on a GPU nothing can be asked while it is captured
            assert bool(hidden.isfinite().all())  # or every row would read it from the null page
        hidden = hidden.index_select(0, last)
        logits = hidden @ self.head.T
        logits[:, 3] += torch.where(batch.positions[last] == 77, torch.nan, 0.0)
        return hidden, logits

    def eager(self, given):
        at, slots = ragged(given.starts, given.counts), np.repeat(given.slots, given.counts)
        row = np.repeat(np.arange(len(given.slots)), given.counts)
        index = given.pages[row, at // self.page].astype(np.int64) * self.page + at % self.page
        rows = AttentionRows(given.starts, given.counts, given.pages, given.decodes)
        plans = {self.window: plan_attention(rows, self.window, HEADS, self.put)}
        tokens = self.table[self.put(slots), self.put(at)]
        last = self.put(np.cumsum(given.counts) - 1)
        return self.forward(ForwardBatch(tokens, self.put(at), self.put(index), plans), last)

    def graphs(self, monkeypatch, sizes, **options):
        if self.device.type == "cpu":
            monkeypatch.setattr(
                prompt_graphs, "capture_each", lambda sizes, run, device, agree, kind: again(sizes, run)
            )
        options = {"paying": False, "fits": lambda: True} | options
        return PromptGraphs(
            StepCaptureRequest(self.forward, self.table, [self.window], 8, COLUMNS),
            sizes,
            HEADS,
            self.page,
            put=self.put,
            **options,
        )


def step(starts, counts, grows, decodes, page=PAGE):
    """The first slots, with pages of their own."""
    starts, counts = np.array(starts), np.array(counts)
    columns = int((starts + counts - 1).max()) // page + 1
    pages = 1 + np.arange(len(starts) * COLUMNS, dtype=np.int32).reshape(-1, COLUMNS)[::-1, :columns]
    return PromptTokens(np.arange(1, 1 + len(starts)), starts, counts, np.array(grows), pages, decodes)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(
    "given",
    [
        step([0], [70], [True], 0),
        step([33, 0, 17, 40], [1, 1, 61, 50], [True, False, True, False], 2),  # behind cached tokens, too
        step([150, 8, 0], [1, 70, 57], [True, True, True], 1),  # one is not finite, and no token is left over
    ],
)
def test_a_step_is_what_it_is_without_a_graph(given, window, device, monkeypatch):
    small = Small(device, window)
    graphs = small.graphs(monkeypatch, [(128, 4), (96, 1)])
    assert graphs.sizes == [(96, 1), (128, 4)]
    before, table = small.cache.clone(), small.table.clone()
    hidden, logits = small.eager(given)
    written = small.cache.clone()
    for _ in range(2):  # nothing of a step is left to the next
        small.cache.copy_(before)
        small.table.copy_(table)
        graphs.run(step([5, 0, 0], [1, 90, 30], [True, True, True], 1))
        small.cache.copy_(before)
        small.table.copy_(table)
        found = graphs.run(given)
        torch.testing.assert_close(found.hidden, hidden)
        torch.testing.assert_close(found.logits, logits, equal_nan=True)
        torch.testing.assert_close(small.cache[1:], written[1:])
        nonfinite = ~logits.isfinite().all(-1)
        assert found.argmax.tolist() == torch.where(nonfinite, -1, logits.argmax(-1)).tolist()
        for slot, start, count, grows in zip(given.slots, given.starts, given.counts, given.grows, strict=True):
            if grows:
                table[slot, start + count] = max(0, int(found.argmax[slot - 1]))
        assert torch.equal(small.table[1:], table[1:])


@pytest.fixture(scope="module")
def specialized_or_plain(tmp_path_factory):
    return (
        prefill_warp_specialized
        if torch.cuda.is_available()
        else specialized_in_triton(tmp_path_factory.mktemp("plain"))
    )


@pytest.mark.parametrize(
    ("given", "times"),
    [
        (step([5, 0, 63, 64, 0], [1, 1, 1, 64, 65], [True, False, False, True, True], 1, 64), 1),  # to ends of pages
        (step([100, 0], [1, 191], [True, True], 1, 64), 1),  # no token is left over
        (step([127, 64, 3], [1, 1, 1], [True] * 3, 1, 64), 1),  # hardly a token is there
        (step([3, 130], [1, 100], [True, False], 1, 64), 0),  # the graph has a single block's tokens
    ],
)
def test_a_step_in_a_graph_by_warps_of_different_work(given, times, device, monkeypatch, specialized_or_plain):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    taken, attend = [], specialized_or_plain.attend_prompts
    monkeypatch.setattr(
        specialized_or_plain, "attend_prompts", lambda *arguments: taken.append(0) or attend(*arguments)
    )
    monkeypatch.setattr(kernels.devices.cuda.attention, "prefill_warp_specialized", specialized_or_plain)
    if device.type == "cpu":
        for fact in ("copying", "has_gluon"):
            monkeypatch.setattr(kernels.devices.cuda.attention.plan, fact, lambda *_: True)
    small = Small(device, 0, 64, 128, torch.float16)
    graphs = small.graphs(monkeypatch, [(192, 5), (128, 2)])
    assert graphs.run(step([0, 0], [90, 102], [True, True], 0, 64)) is not None
    small.cache[1:] = torch.randn_like(small.cache[1:])
    before, table = small.cache.clone(), small.table.clone()
    taken.clear()
    found = graphs.run(given)
    if device.type == "cpu":
        assert len(taken) == times
    graphs_found = found.hidden.clone(), found.logits.clone()
    small.cache.copy_(before)
    small.table.copy_(table)
    monkeypatch.setattr(kernels.devices.cuda.attention.plan, "_specializes", lambda *_: False)
    monkeypatch.setattr(kernels.devices.cuda.attention.plan, "_spreads", lambda *_: False)
    for mine, right in zip(graphs_found, small.eager(given), strict=True):
        assert bool(mine.isfinite().all())
        assert (mine - right).float().norm() <= 3e-3 * right.float().norm()


def test_what_no_graph_fits_and_what_does_not_pay(device, monkeypatch):
    small = Small(device, 0)
    monkeypatch.setattr(prompt_graphs, "launches_last", lambda run, device: run.args[0][0] < 128)
    sizes = prompt_sizes((64,), 192, 4) + prompt_sizes((), 192, 4)
    assert sizes == [(64, 4), (128, 4), (192, 4)]
    graphs = small.graphs(monkeypatch, sizes, paying=True)
    assert graphs.sizes == [(64, 4)]
    assert graphs.run(step([0], [65], [True], 0)) is None
    assert graphs.run(step([0] * 5, [2] * 5, [True] * 5, 0)) is None
    assert graphs.run(step([0], [60], [True], 0)) is not None


def test_prompt_sizes_that_do_not_pay_leave_smaller_mixed_graphs(device, monkeypatch):
    monkeypatch.setattr(prompt_graphs, "launches_last", lambda run, device: run.args[0][0] < 128)
    graphs = Small(device, 0).graphs(monkeypatch, [(64, 4), (80, 20), (128, 4)], paying=True)
    assert graphs.sizes == [(64, 4), (80, 20)]
    assert [len(kept) for kept in graphs._kept] == [20, 20]  # nothing is held for those that do not pay
    assert graphs.run(step([0], [70], [True], 0)) is None
    found = graphs.run(step([9] * 4 + [0], [1] * 4 + [64], [True] * 5, 4))
    assert found.hidden.shape[0] == 5
    monkeypatch.setattr(prompt_graphs, "launches_last", lambda run, device: False)
    assert Small(device, 0).graphs(monkeypatch, [(20, 20), (64, 4)], paying=True).sizes == []


def test_sizes_hold_the_decodes_beside_the_prompts():
    found = prompt_sizes((), 2048, 100)
    assert {rows for _, rows in found} == {8, 64, 100}
    assert (512, 8) in found
    assert (576, 64) in found
    assert (612, 100) in found
    assert {(2048, rows) for rows in (8, 64, 100)} < set(found)
    assert [size for size in prompt_sizes((), 5000, 100) if size[1] == 8][-3:] == [(2048, 8), (4096, 8), (5000, 8)]
    assert (2148, 100) in prompt_sizes((), 5000, 100)


def test_sizes_that_no_step_has_are_reported(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    assert prompt_sizes((32, 512), 512, 16) == [(32, 8), (32, 16), (512, 8), (512, 16)]
    assert not caplog.text
    assert prompt_sizes((4, 32, 640), 512, 16) == [(32, 8), (32, 16)]
    assert "no graph of [4, 640] tokens" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_graphs_that_would_take_the_memory_of_steps_are_abandoned(device, monkeypatch, caplog):
    room = iter([True, False])
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    graphs = Small(device, 0).graphs(monkeypatch, [(64, 4), (128, 4), (192, 4)], fits=lambda: next(room))
    assert graphs.sizes == [(192, 4)]
    assert graphs.run(step([0], [60], [True], 0)) is not None
    assert "the memory" in caplog.text
