"""Whole steps of decodes on a GPU, or by Triton's interpreter, where a graph is run again and not replayed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.attention_rows import StepTokens
from kernels.devices.capture import StepCaptureRequest
from kernels.devices.cuda.attention.decode import DecodeScratch, split_count
from kernels.devices.cuda.attention.plan import attention
from kernels.devices.cuda.graphs import step_graphs
from kernels.devices.cuda.graphs.step_graphs import StepGraphs
from tests.kits.cuda.graphs import again

PAGE, COLUMNS, HEADS, DIM, VOCAB = 16, 6, 2, 16, 97


@pytest.fixture
def made(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(step_graphs, "capture_each", again)
    torch.manual_seed(2)
    cache = torch.randn(40, 2, HEADS, PAGE, DIM).to(device)
    words, head = torch.randn(VOCAB, HEADS * DIM).to(device), torch.randn(VOCAB, HEADS * DIM).to(device)
    scratch = DecodeScratch(device)

    def forward(batch, _):
        queries = (words[batch.token_ids.long()] + batch.positions[:, None]).view(-1, HEADS, DIM)
        index = batch.cache_index
        cache[index // PAGE, :, :, index % PAGE] = torch.stack((queries, -queries), 1)
        hidden = attention(queries, cache, batch.plans[0], 0.2, scratch)
        logits = hidden @ head.T
        logits[:, 3] += torch.where(batch.positions == 41, torch.nan, 0.0)
        return hidden, logits

    table = torch.randint(VOCAB, (6, PAGE * COLUMNS), dtype=torch.int32).to(device)
    graphs = StepGraphs(
        StepCaptureRequest(forward, table, [0], 4, COLUMNS),
        [2, 4],
        HEADS,
        PAGE,
        True,
        lambda array: torch.from_numpy(array.copy()).to(device),
    )
    return graphs, table, cache, words


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_step_reads_the_table_and_writes_to_it(made, count):
    graphs, table, cache, words = made
    assert graphs.sizes == [2, 4]
    slots, lengths = np.array([5, 2, 1, 3])[:count], np.array([17, 42, 33, 90])[:count]
    grows = np.array([True, True, False, True])[:count]
    pages = 1 + np.arange(4 * COLUMNS, dtype=np.int32).reshape(4, COLUMNS)[:count, : (max(lengths) - 1) // PAGE + 1]
    before, kept = table.clone(), cache.clone()
    found = graphs.run(StepTokens(slots, lengths, grows, pages))
    assert found is not None
    after, written = table.clone(), cache.clone()
    logits, argmax = found.logits.clone(), found.argmax.tolist()

    cache.copy_(kept)
    for row in range(count):
        alone = StepTokens(slots[row : row + 1], lengths[row : row + 1], grows[row : row + 1], pages[row : row + 1])
        own = graphs.run(alone)
        assert own is not None
        torch.testing.assert_close(own.logits[0], logits[row], rtol=1e-4, atol=1e-4, equal_nan=True)
        page, offset = int(pages[row, (lengths[row] - 1) // PAGE]), (lengths[row] - 1) % PAGE
        token = before[slots[row], lengths[row] - 1].long()
        expected = (words[token] + (lengths[row] - 1)).view(HEADS, DIM)
        torch.testing.assert_close(written[page, :, :, offset], torch.stack((expected, -expected)))
        table.copy_(before)
    nonfinite = [length == 42 for length in lengths]
    assert argmax == [-1 if fails else int(row.argmax()) for row, fails in zip(logits.cpu(), nonfinite, strict=True)]
    for row in range(count):
        if grows[row]:
            before[slots[row], lengths[row]] = max(0, argmax[row])
    assert torch.equal(after[1:], before[1:])


def test_a_step_of_the_same_rows_brings_nothing(made):
    graphs, table, cache, _ = made
    brought, put = [], graphs._put
    graphs._put = lambda array: brought.append(len(array)) or put(array)
    slots, lengths, grows = np.array([5, 2, 3]), np.array([17, 30, 8]), np.array([True, True, False])
    pages = 1 + np.arange(4 * COLUMNS, dtype=np.int32).reshape(4, COLUMNS)
    some = pages[:3, :2]

    def run(slots, lengths, grows, pages):
        """What a step gives, and what it gives where all is brought."""
        kept = table.clone(), cache.clone()
        found = graphs.run(StepTokens(slots, lengths, grows, pages))
        again = found.argmax.tolist(), found.logits.clone(), table.clone(), cache.clone()
        table.copy_(kept[0])
        cache.copy_(kept[1])
        count = len(brought)
        held, state = graphs._held.copy(), graphs._state.clone()
        graphs._held[:] = -1
        right = graphs.run(StepTokens(slots, lengths, grows, pages))
        assert len(brought) == count + 1
        del brought[count:]
        assert np.array_equal(graphs._held[: len(slots), :5], held[: len(slots), :5])
        assert torch.equal(graphs._state[: len(slots), :5], state[: len(slots), :5])
        assert again[0] == right.argmax.tolist()
        for mine, other in zip(again[1:], (right.logits, table, cache), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)

    run(slots, lengths, grows, some)
    assert brought == [4]
    run(slots, lengths + grows, grows, some)  # the last is read again, as rows that do not grow are
    assert brought == [4]
    run(slots, lengths + 2 * grows, np.array([True, True, True]), some)
    assert brought == [4, 4]
    run(slots, lengths + 2 * grows + 1, np.array([True, True, True]), some)
    assert brought == [4, 4]
    run(slots, lengths + 2 * grows + 2, np.array([True, True, True]), pages[:3, :3])  # a page more
    assert brought == [4, 4, 4]
    run(slots[:2], lengths[:2] + 5, grows[:2], pages[:2, :3])  # fewer rows
    assert brought == [4, 4, 4]
    run(slots[::-1], lengths[::-1] + 5, np.array([True, True, True]), pages[2::-1, :3])
    assert brought == [4, 4, 4, 4]


def test_tokens_arrive_whenever_they_are_read(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(step_graphs, "capture_each", again)

    def forward(batch, _):
        logits = torch.zeros(len(batch.positions), VOCAB, device=device)
        logits.scatter_(1, ((5 * batch.token_ids + batch.positions) % VOCAB)[:, None], 1.0)
        logits[:, 3] += torch.where(batch.positions == 41, torch.nan, 0.0)
        return logits, logits

    table = torch.arange(6 * PAGE * COLUMNS, dtype=torch.int32).to(device).view(6, -1) % VOCAB
    graphs = StepGraphs(
        StepCaptureRequest(forward, table, [0], 4, COLUMNS),
        [2, 4],
        HEADS,
        PAGE,
        True,
        lambda array: torch.from_numpy(array.copy()).to(device),
    )
    pages = np.ones((4, COLUMNS), dtype=np.int32)
    slots, grows = np.array([5, 2, 1, 3]), np.array([True, True, False, True])
    late, expected = [], []
    for step in range(30):
        count = 1 + step % 4
        found = graphs.run(StepTokens(slots[:count], 20 + step + slots[:count], grows[:count], pages[:count]))
        expected.append(found.argmax.tolist())
        if step % 5:
            late.append((step, found.arrives))
        if step % 3 == 0:
            assert [tokens.tolist() for tokens in found.arrives()] == expected[-1:]
    for step, arrives in late:
        assert [tokens.tolist() for tokens in arrives()] == [expected[step]]
    assert any(-1 in tokens for tokens in expected)
    assert len(set(map(tuple, expected))) > 20


def test_steps_of_short_contexts_are_launched_as_those_of_longer_ones(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(step_graphs, "capture_each", again)
    parts = []

    def forward(batch, _):
        parts.append(batch.plans[0].decodes.splits)
        logits = torch.zeros(len(batch.positions), VOCAB, device=device)
        return logits, logits

    table = torch.zeros((6, PAGE * COLUMNS), dtype=torch.int32, device=device)
    request = StepCaptureRequest(forward, table, [0], 1, COLUMNS)
    StepGraphs(request, [1], HEADS, PAGE, True, lambda array: torch.from_numpy(array).to(device))
    assert set(parts) == {split_count(1, HEADS, 4096)}
    assert parts[0] > split_count(1, HEADS, PAGE * COLUMNS)


def test_a_step_that_no_graph_fits(made):
    graphs = made[0]
    slots = np.array([1, 2, 3, 4, 5])
    assert graphs.run(StepTokens(slots, slots, slots > 0, np.ones((5, 1), dtype=np.int32))) is None
