"""Attention of drafts on simulated NPUs, and moves within their caches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.batch import ForwardBatch
from kernels.devices.capture import CaptureRequest
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.soc import Soc
from kernels.devices.npu.tree_attention import TreePart, tree_attention
from tests.kits.verifying import made

NPU = torch.device("npu:0")


def make(soc=None, **options):
    platform = NpuDevice(RunnerConfig(model_path="", device="npu", page_size=128, **options))
    platform.select_dtype("bfloat16", None)
    platform.bind_thread()
    if soc is not None:
        platform.attention.soc = soc
    return platform


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


SHAPES = {
    "drafts": {"drafts": ((140, 6), (125, 6), (0, 6), (300, 6))},
    "counts": {"drafts": ((133, 7), (15, 1), (16, 2), (126, 7))},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (40, 30))},
    "drafting": {"drafts": ((125, 9), (16, 9), (0, 9)), "drafted": 5},
}


@pytest.mark.parametrize("backend", ["ascend", "torch_native", "split"])
@pytest.mark.parametrize("window", [0, 4, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_drafts_see_their_paths(shape, trees, window, backend, dim, generator):
    platform = make(
        Soc("A5", "Ascend950") if backend == "split" else None,
        attention_backend=backend if backend == "torch_native" else "",
    )
    case = made(
        platform, generator, dtype=torch.bfloat16, heads=6, kv_heads=2, dim=dim, page_size=128, window=window,
        trees=trees, put=lambda tensor: tensor.to(NPU), fill=1e3, **SHAPES[shape],
    )  # fmt: skip
    plan = platform.attention.plan(case.rows, window)
    found = platform.attention.attend(case.queries, case.cache, plan, 0.2)
    torch.testing.assert_close(found.float().cpu(), case.expected, atol=0.02, rtol=0.02)
    assert any(isinstance(part, TreePart) for part in plan.parts) == (trees and backend != "torch_native")
    if not trees:  # chains go with what is beside them
        mixed = "decodes" in SHAPES[shape]
        assert len(plan.parts) == (2 if mixed and backend == "split" else 1)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_drafts_are_attended_as_prefills_or_as_decodes(mode, generator):
    settings = SpeculativeSettings(algorithm="NGRAM", attention_mode=mode)
    platform = make(decode_attention_backend="torch_native", speculation=settings)
    case = made(
        platform, generator, dtype=torch.bfloat16, heads=2, kv_heads=1, dim=128, page_size=128, window=0, trees=False,
        put=lambda tensor: tensor.to(NPU), decodes=(3, 200), drafts=((31, 2), (120, 2)), prefills=((0, 4), (40, 3)),
    )  # fmt: skip
    plan = platform.attention.plan(case.rows, 0)
    counts = [case.rows.counts[:2].sum(), case.rows.counts[2:4].sum(), case.rows.counts[4:].sum()]
    border = counts[0] if mode == "prefill" else counts[0] + counts[1]
    assert [(part.begin, part.end) for part in plan.parts] == [(0, border), (border, sum(counts))]
    found = platform.attention.attend(case.queries, case.cache, plan, 0.2)
    torch.testing.assert_close(found.float().cpu(), case.expected, atol=0.02, rtol=0.02)


def test_what_moves_within_the_cache_is_read_first(generator):
    platform = make()
    (cache,) = platform.cache.make(1, 3, 128, 2, 128, torch.bfloat16)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    before = [part.cpu().clone().view(-1, 2, 128) for part in (cache.keys, cache.values)]
    source, target = [270, 221, 222, 220, 0, 0], [220, 222, 221, 133, 0, 0]
    platform.cache.move(cache, torch.tensor(source).to(NPU), torch.tensor(target).to(NPU))
    for part, old in zip((cache.keys, cache.values), before, strict=True):
        expected = old.clone()
        for one, other in zip(source, target, strict=True):
            expected[other] = old[one]
        assert torch.equal(part.cpu().view(-1, 2, 128), expected)


TOKENS, COLUMNS, PAGE = 5, 4, 128


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("window", [0, 40])
def test_a_graph_serves_any_drafts_that_fit_it(trees, window, generator):
    """Full rows, rows that are short, decodes among them, and fewer rows than it was captured for."""
    heads, kv_heads, dim = 4, 2, 128
    platform = make(graph_rows=(2, 4))
    (cache,) = platform.cache.make(1, 30, PAGE, kv_heads, dim, torch.bfloat16)
    table = torch.randn(97, heads * dim, generator=generator).bfloat16().to(NPU)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None
        x = table.index_select(0, batch.token_ids.long()) + batch.states + batch.positions.view(-1, 1).bfloat16() / 99
        platform.cache.write(cache, batch.cache_index, x.view(-1, 2 * kv_heads, dim))
        return platform.attention.attend(x.view(-1, heads, dim), cache, batch.plans[window], 0.2)

    states = torch.zeros(1, heads * dim, dtype=torch.bfloat16, device=NPU)
    graphs = platform.capture.decodes(
        CaptureRequest(forward, [window], 4, COLUMNS, lambda could: could, tokens=TOKENS, tree=trees, states=states)
    )
    assert graphs is not None
    assert graphs.rows == (2, 4)
    for counts in ([5, 5, 5, 5], [5, 5], [1, 1, 4, 2], [5], [3], [1, 5, 5]):
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        case = made(
            platform, generator, dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim, page_size=PAGE,
            window=window, trees=trees, decodes=tuple(7 + 30 * row for row in range(decodes)),
            drafts=tuple((110 * row, count) for row, count in enumerate(counts[decodes:])),
            put=lambda tensor: tensor.to(NPU), fill=1.0,
        )  # fmt: skip
        rows, tokens = case.rows, sum(counts)
        for part, given in ((cache.keys, case.cache.keys), (cache.values, case.cache.values)):
            part.zero_()
            part[: len(given)].copy_(given)
        at = np.concatenate([start + np.arange(count) for start, count in zip(rows.starts, counts, strict=True)])
        places = rows.pages[np.repeat(np.arange(len(counts)), counts), at // PAGE].astype(np.int64)
        batch = ForwardBatch(
            torch.randint(97, (tokens,), generator=generator).to(NPU),
            platform.memory.put(at),
            platform.memory.put(places * PAGE + at % PAGE),
            {window: platform.attention.plan(rows, window)},
            torch.randn(tokens, heads * dim, generator=generator).bfloat16().to(NPU),
        )
        expected = forward(batch).cpu()  # writes the same keys and values
        found = graphs.run(batch)
        assert found is not None
        torch.testing.assert_close(found.cpu(), expected, atol=0.02, rtol=0.02)
        assert batch.states is not None
        assert graphs.states is not None
        in_place = dataclasses.replace(batch, states=graphs.states[:tokens].copy_(batch.states))
        again = graphs.run(in_place)
        assert again is not None
        torch.testing.assert_close(again.cpu(), expected, atol=0.02, rtol=0.02)
    longer = platform.attention.plan(dataclasses.replace(rows, counts=rows.counts + TOKENS), window)
    assert graphs.run(dataclasses.replace(batch, plans={window: longer})) is None


@pytest.mark.parametrize("shape", [(1, 1, 6, 256), (3, 1, 6, 256), (2, 1, 5, 256), (2, 6, 256), (2, 1, 6, 255)])
def test_the_simulator_knows_which_masks_the_operator_takes(shape, generator):
    """A mask of the whole needs as many keys as the page table holds, and one leading size of two."""
    platform = make()
    case = made(
        platform, generator, dtype=torch.bfloat16, heads=2, kv_heads=1, dim=128, page_size=128, window=0, trees=True,
        drafts=((200, 6), (3, 6)), put=lambda tensor: tensor.to(NPU),
    )  # fmt: skip
    (part,) = platform.attention.plan(case.rows, 0).parts
    given = dataclasses.replace(part, mask=torch.zeros(shape, dtype=torch.int8, device=NPU))
    if shape == (1, 1, 6, 256):
        tree_attention(case.queries, case.cache, given, 0.2)
    else:
        with pytest.raises(RuntimeError, match="atten_mask"):
            tree_attention(case.queries, case.cache, given, 0.2)
