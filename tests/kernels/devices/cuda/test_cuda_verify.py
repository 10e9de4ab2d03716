"""The attention of drafts on a GPU against plain torch, and graphs of drafts against the kernels that they hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import kernels.devices.cuda.attention.plan
import kernels.devices.cuda.graphs.decode_graphs
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Acceptance
from kernels.core.tree import DraftTree, chain, tree_of
from kernels.devices.capture import CaptureRequest
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import AttentionPlan, attention, plan_attention
from kernels.devices.cuda.attention.verify import draft_splits
from kernels.devices.cuda.drafting.acceptance import accept
from kernels.devices.cuda.graphs.decode_graphs import DecodeGraphs
from kernels.devices.prepared import VerifyHead
from tests.kits.cuda.caches import SHAPES, Caches, near
from tests.kits.verifying import made


@pytest.fixture
def make(device):
    def make(**options):
        generator = torch.Generator().manual_seed(3)
        return made(Caches(device), generator, put=lambda tensor: tensor.to(device), **options)

    return make


@pytest.fixture
def put(device):
    return lambda array: torch.from_numpy(array.copy()).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 4, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 24, 16), (8, 2, 128, 64), (20, 1, 64, 32)])
def test_drafts_see_their_paths(make, put, device, dtype, window, trees, shape, heads, kv_heads, dim, page_size):
    if device.type == "cpu" and (dtype == torch.bfloat16 or (page_size, shape) not in ((16, shape), (64, "mixed"))):
        pytest.skip("the interpreter is slow, and knows no bfloat16 products")
    case = make(
        dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, window=window, trees=trees,
        **SHAPES[shape],
    )  # fmt: skip
    plan = plan_attention(case.rows, window, kv_heads, put)
    scratch = DecodeScratch(device)
    near(attention(case.queries, case.cache, plan, 0.2, scratch), case.expected)


def test_blocks_of_queries_count_as_rows_when_sequences_are_split():
    assert draft_splits(1, 4, 4, 8, 131072) == 64
    assert draft_splits(1, 16, 4, 8, 8192) == 32
    assert draft_splits(1, 16, 4, 8, 512) == 8
    assert draft_splits(4, 16, 4, 8, 8192) == 8
    assert draft_splits(16, 64, 4, 8, 8192) == 1
    assert draft_splits(16, 64, 4, 8, 131072) == 4  # one long sequence among many is not left to one program


@pytest.mark.parametrize(("verified", "tokens"), [(5, 8), (8, 8), (9, 16)])
def test_beside_a_prompt_drafts_take_room_for_themselves_and_few_kernels(verified, tokens, monkeypatch):
    calls = []
    for name in ("attend_decodes", "attend_prefills"):
        monkeypatch.setattr(kernels.devices.cuda.attention.plan, name, lambda *_: None)
    monkeypatch.setattr(
        kernels.devices.cuda.attention.plan, "attend_drafts", lambda *given: calls.append((len(given[0]), given[4]))
    )
    rows = AttentionRows(np.array([9, 30, 0]), np.array([1, verified, 40]), np.zeros((3, 3), dtype=np.int32), 1, 1)
    queries, cache = torch.zeros(1 + verified + 40, 4, 16), torch.zeros(4, 2, 2, 16, 16)
    plan = plan_attention(rows, 0, 2, torch.from_numpy)
    attention(queries, cache, plan, 1.0, DecodeScratch(queries.device))
    assert calls == [(1 + verified, tokens)]


TOKENS = 5


def test_a_graph_says_that_its_rows_are_known_before_it_begins(monkeypatch):
    plans = []
    monkeypatch.setattr(
        kernels.devices.cuda.graphs.decode_graphs,
        "capture_each",
        lambda sizes, run, *_: {size: (None, run(size)) for size in sizes},
    )

    def forward(batch: ForwardBatch) -> torch.Tensor:
        plans.append(batch.plans[0].drafts)
        return batch.positions

    DecodeGraphs(
        CaptureRequest(forward, [0], 2, 30, lambda could: could, TOKENS, True),
        [2],
        2,
        16,
        torch.device("cpu"),
        True,
        torch.from_numpy,
    )
    assert [plan.early for plan in plans] == [True]


def rerun(sizes, run, *_):
    """As ``capture_each`` where there are no graphs."""
    found = {}
    for size in sizes:
        held = run(size)

        def replay(size=size, held=held):
            for here, there in zip(_leaves(held), _leaves(run(size)), strict=True):
                here.copy_(there)

        found[size] = replay, held
    return found


def _leaves(held):
    if isinstance(held, Acceptance):
        return [held.packed, held.rows]
    if held is None or isinstance(held, int):
        return []
    return [held] if isinstance(held, torch.Tensor) else [leaf for part in held for leaf in _leaves(part)]


@pytest.mark.parametrize(("least", "size"), [(0, 2), (4, 4)])
def test_a_graph_reads_a_stream_in_place_in_the_size_that_all_have(least, size, monkeypatch):
    monkeypatch.setattr(kernels.devices.cuda.graphs.decode_graphs, "capture_each", rerun)
    ran: list[torch.Tensor] = []

    def forward(batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None
        ran.append(batch.states.clone())
        return batch.states * 2

    device = torch.device("cpu")
    request = CaptureRequest(forward, [0], 4, 30, lambda could: could, states=torch.zeros(0, 3))
    graphs = DecodeGraphs(request, [2, 4], 2, 16, device, True, torch.from_numpy)
    assert graphs.states is not None
    graphs.states.fill_(9.0)
    given = torch.arange(3.0).view(1, 3)
    one = np.ones(1, dtype=np.int64)
    plan = plan_attention(AttentionRows(one, one, np.ones((1, 2), dtype=np.int32), 1), 0, 2, torch.from_numpy)
    at = torch.ones(1, dtype=torch.int64)
    batch = ForwardBatch(at, at, at, {0: plan}, graphs.states[:1].copy_(given))
    found = graphs.run(batch, plan, least)
    assert found is not None
    assert torch.equal(found, given * 2)
    assert torch.equal(ran[-1], torch.cat([given, torch.zeros(size - 1, 3)]))


def test_a_pass_of_few_rows_has_what_its_head_makes(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(kernels.devices.cuda.graphs.decode_graphs, "capture_each", rerun)
    weight = torch.randn(2, 33).to(device)

    def forward(batch):
        return torch.stack((batch.token_ids.float(), batch.positions.float()), 1)

    def head(result):
        logits = result @ weight
        return logits, logits.argmax(1), logits[:, 0] > 0

    graphs = DecodeGraphs(
        CaptureRequest(forward, [0], 6, 30, lambda could: could, TOKENS, True, head=VerifyHead(head)),
        [2, 4, 6], 2, 16, device, True, lambda array: torch.from_numpy(array).to(device),
    )  # fmt: skip
    for count in (1, 3, 4, 5, 2):
        tokens, starts = torch.randint(99, (count, TOKENS)), np.arange(count) + 20
        found = graphs.verify(starts, np.ones((count, 3), dtype=np.int32), chain(tokens.to(device)))
        at = torch.from_numpy(starts)[:, None] + torch.arange(TOKENS)
        expected = torch.stack((tokens.flatten().float(), at.flatten().float()), 1)
        assert torch.equal(found.result.cpu(), expected)
        assert found.index.tolist() == (16 + at % 16).flatten().tolist()
        assert (found.head is None) == (count > 4)
        if found.head is not None:
            for made, right in zip(found.head, head(found.result), strict=True):
                torch.testing.assert_close(made, right)


def test_a_pass_of_few_greedy_rows_accepts_by_itself(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(kernels.devices.cuda.graphs.decode_graphs, "capture_each", rerun)
    table = torch.zeros((9, 60), dtype=torch.int32, device=device)
    moved = []

    def forward(batch):
        return torch.stack((batch.token_ids.float(), batch.positions.float()), 1)

    def find(result):  # the next token is the one after, but for one that is of no use
        tokens = result[:, 0].long()
        return result, tokens + 1, tokens == 40

    def take(tree, rows, index, sampled, nonfinite):
        moved.append(index)
        return accept(tree, rows, sampled, nonfinite, 2, 0, table)

    graphs = DecodeGraphs(
        CaptureRequest(
            forward, [0], 6, 30, lambda could: could, 4, True, head=VerifyHead(find, take, lambda result: result[:, 1:])
        ),
        [2, 4, 6], 2, 16, device, True, lambda array: torch.from_numpy(array).to(device),
    )  # fmt: skip
    assert sorted(graphs.accept_outputs) == [2, 4]
    assert not any(
        end.accepted.packed.any() for end in graphs.accept_outputs.values()
    )  # what is behind may read that first
    tokens = torch.tensor([[11, 12, 12, 13], [21, 30, 22, 23], [31, 9, 9, 9], [39, 40, 5, 41], [1, 2, 3, 4]])
    tree = tree_of(
        tokens.to(device),
        torch.tensor([[-1, 0, 0, 2], [-1, 0, 0, 2], [-1, 0, 1, 2], [-1, 0, 0, 1], [-1, 0, 1, 2]]).to(device),
    )
    starts, slots = np.array([20, 7, 0, 33, 2]), np.array([3, 8, 1, 5, 2])
    outcome = [[2, 2, 0, 1, 1], [3, 2, 0, 2, 3], [1, 3, 0, 0, 0], [-3, 2, 0, 1, 3]]
    expected = [[12, 13, 13], [22, 23, 24], [32, 32, 32], [40, 41, 42]]
    for count in (4, 1, 3, 2):
        table.zero_()
        some = DraftTree(tree.tokens[:count], tree.parents[:count], tree.depths[:count], tree.bits[:count])
        pages = np.arange(1, 3 * count + 1, dtype=np.int32).reshape(count, 3)
        found = graphs.verify(starts[:count], pages, some, slots[:count])
        size = found.accept_size
        assert size == (2 if count < 3 else 4)
        assert found.head is None
        assert found.accepted.outcome.tolist() == outcome[:count]
        assert found.accepted.tokens.tolist() == expected[:count]
        assert found.accepted.nonfinite.tolist() == [[False, row == 3, False] for row in range(count)]
        for row in range(count):
            start = int(starts[row]) + 1
            assert table[slots[row], start : start + 3].tolist() == expected[row]
        assert int((table[1:] != 0).sum()) == 3 * count  # and of rows that there are not, in nobody's
        end = graphs.accept_outputs[size]
        assert end.rows[:count, :2].tolist() == np.stack((slots[:count], starts[:count]), 1).tolist()
        assert end.pages[:count, :3].tolist() == pages.tolist()
        assert end.accepted.outcome[:count].tolist() == outcome[:count]
        assert torch.equal(end.features[: 4 * count], found.result[:, 1:])
        assert (end.accepted.outcome[count:, 0] == 1).all()
    assert len(moved) > 0
    other = graphs.verify(
        starts[:3],
        pages[[0, 0, 0]],
        DraftTree(*(part[:3] for part in (tree.tokens, tree.parents, tree.depths, tree.bits))),
    )
    assert (other.accepted, other.head, other.accept_size) == (None, None, 0)  # without greedy slots
    whole = graphs.verify(starts, pages[[0] * 5], tree, slots)
    assert (whole.accepted, whole.head) == (None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("dtype", "dim", "page_size"), [(torch.float32, 32, 16), (torch.bfloat16, 64, 64)])
def test_a_graph_serves_any_drafts_that_fit_it(make, put, device, trees, window, dtype, dim, page_size):
    """Full rows, rows that are short, decodes among them, and fewer rows than it was captured for."""
    heads, kv_heads, columns = 4, 2, 30
    cache = torch.zeros(400, 2, kv_heads, page_size, dim, device=device, dtype=dtype)
    scratch, table = DecodeScratch(device), torch.randn(97, heads * dim, device=device).to(dtype)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None
        queries = (table[batch.token_ids.long()] + batch.states).view(-1, heads, dim)
        cache[batch.cache_index // page_size, :, :, batch.cache_index % page_size] = queries.repeat(
            1, kv_heads, 1
        ).view(-1, 2, kv_heads, 2, dim)[:, :, :, 0] + batch.positions.view(-1, 1, 1, 1)
        return attention(queries, cache, batch.plans[window], 0.2, scratch)

    graphs = DecodeGraphs(
        CaptureRequest(
            forward, [window], 4, columns, lambda could: could, TOKENS, trees,
            torch.zeros(1, heads * dim, device=device, dtype=dtype),
        ),
        [2, 4], kv_heads, page_size, device, True, put,
    )  # fmt: skip
    assert graphs.sizes == [2, 4]
    for counts in ([5, 5, 5, 5], [5, 5], [1, 1, 4, 2], [5], [3], [1, 5, 5]):
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        case = make(
            dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, window=window,
            trees=trees, decodes=tuple(7 + 30 * row for row in range(decodes)),
            drafts=tuple((90 * row, count) for row, count in enumerate(counts[decodes:])),
        )  # fmt: skip
        cache.zero_()
        cache[: len(case.cache)] = case.cache
        rows, tokens = case.rows, sum(counts)
        at = np.concatenate([start + np.arange(count) for start, count in zip(rows.starts, counts, strict=True)])
        places = rows.pages[np.repeat(np.arange(len(counts)), counts), at // page_size].astype(np.int64)
        batch = ForwardBatch(
            torch.randint(97, (tokens,), device=device),
            put(at),
            put(places * page_size + at % page_size),
            {window: plan_attention(rows, window, kv_heads, put)},
            torch.randn(tokens, heads * dim, device=device).to(dtype),
        )
        plan = batch.plans[window]
        before = cache.clone()
        found = graphs.run(batch, plan)
        assert found is not None
        found = found.clone()
        cache.copy_(before)
        near(found, forward(batch))
    longer = dataclasses.replace(rows, counts=rows.counts + TOKENS)
    assert graphs.run(batch, AttentionPlan(None, None, window, plan.drafts, longer)) is None
