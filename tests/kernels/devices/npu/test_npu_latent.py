"""Latent and sparse attention by torch_npu's operators, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.contract.caches import Latent
from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.attention import Attention
from kernels.devices.latent_attention import LatentHeads, LatentSpaceHeads, LatentWeights
from kernels.devices.latent_cache import IndexedLatent, SplitLatent, read_latent
from kernels.devices.npu import latent_attention
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.select import select_device
from kernels.weights.quantization.weights import quantize_int8

PAGE, HEADS = 128, 4
STEPS = {
    "decodes": ([130, 5, 300], [1, 1, 1]),
    "verifies": ([130, 5], [4, 16]),
    "prompts": ([0, 140], [40, 60]),
    "all": ([200, 9, 0, 130], [1, 3, 150, 17]),
}


def opened():
    device = select_device(RunnerConfig("", device="npu", page_size=PAGE, dtype="bfloat16"))
    device.select_dtype("bfloat16", None)
    return device


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().npu()


def filled(device, starts, counts):
    cache = device.cache.make_latent(Latent(512, 64, 128), 20, PAGE, torch.bfloat16, device.torch_device)
    assert isinstance(cache, IndexedLatent)
    assert isinstance(cache.vectors, SplitLatent)
    for seed, part in enumerate((cache.vectors.latent, cache.vectors.rotated, cache.keys)):
        part.copy_(numbers(*part.shape, seed=seed) * 0.3)
    pages = np.random.default_rng(1).permutation(np.arange(1, 20))[: 4 * len(starts)].reshape(len(starts), 4)
    rows = AttentionRows(np.array(starts), np.array(counts), pages.astype(np.int32), sum(n == 1 for n in counts))
    empty = torch.zeros(0)
    return cache, ForwardBatch(empty, empty, empty, {}, None, rows)


def heads(count=HEADS, plain=128, value=128):
    return LatentHeads(numbers(count, plain, 512, seed=7) * 0.05, numbers(count, 512, value, seed=8) * 0.05)


def close(found, expected):
    off = (found.float() - expected.float()).abs().max()
    assert off < 0.02 * expected.float().abs().max()


@pytest.mark.parametrize("sizes", [(HEADS, 128, 128), (5, 192, 256)], ids=["deepseek", "glm"])
@pytest.mark.parametrize("name", STEPS)
def test_rows_attend_as_in_plain_torch(name, sizes, simulator, monkeypatch):
    monkeypatch.setattr(latent_attention, "_NUMBERS", 150000)  # some heads at a time
    device = opened()
    starts, counts = STEPS[name]
    cache, batch = filled(device, starts, counts)
    queries, made = numbers(sum(counts), sizes[0], sizes[1] + 64, seed=3), heads(*sizes)
    before = dict(simulator.engine.calls)
    found = device.attention.attend_latent(queries, cache.vectors, batch, made, 0.1)
    called = {key for key, count in simulator.engine.calls.items() if count != before.get(key)}
    fused = sizes[1] == 128 or min(counts) <= 16
    assert ("npu.npu_fused_infer_attention_score.default" in called) == fused
    assert ("npu.npu_transpose_batchmatmul.default" in called) == (min(counts) <= 16)
    close(found, Attention.attend_latent(device.attention, queries, cache.vectors, batch, made, 0.1))


@pytest.mark.parametrize("name", STEPS)
def test_queries_in_the_latent_space_attend_without_products(name, simulator):
    device = opened()
    starts, counts = STEPS[name]
    cache, batch = filled(device, starts, counts)
    queries, same = numbers(sum(counts), HEADS, 512 + 64, seed=3) * 0.1, LatentSpaceHeads.of(heads())
    before = dict(simulator.engine.calls)
    found = device.attention.attend_latent(queries, cache.vectors, batch, same, 0.1)
    called = {key for key, count in simulator.engine.calls.items() if count != before.get(key)}
    assert "npu.npu_transpose_batchmatmul.default" not in called
    assert ("npu.npu_fused_infer_attention_score.default" in called) == (min(counts) <= 16)
    # The product with identity matrices gives the same.
    made = LatentHeads(same.keys.contiguous(), same.values.contiguous())
    close(found, Attention.attend_latent(device.attention, queries, cache.vectors, batch, made, 0.1))
    chosen = device.attention.choose_tokens(
        numbers(sum(counts), 8, 128, seed=4), numbers(sum(counts), 8, seed=5).float(), cache.keys, batch, 64
    )
    found, expected = (
        device.attention.attend_chosen(queries, cache.vectors, batch, each, 0.1, chosen) for each in (same, made)
    )
    close(found, expected)


@pytest.mark.parametrize("name", STEPS)
def test_chosen_tokens_are_those_of_plain_torch(name):
    device = opened()
    starts, counts = STEPS[name]
    cache, batch = filled(device, starts, counts)
    tokens = sum(counts)
    queries, weights = numbers(tokens, 8, 128, seed=4), numbers(tokens, 8, seed=5).float()
    chosen = device.attention.choose_tokens(queries, weights, cache.keys, batch, 64)
    plain = Attention.choose_tokens(device.attention, queries, weights, cache.keys, batch, 64)
    assert chosen.shape == (tokens, 1, 64)
    if plain is not None:
        for row, own in zip(plain, chosen.squeeze(1).split(counts), strict=True):
            if row is not None:
                assert torch.equal(row.sort(1).values.cpu(), own.long().sort(1).values.cpu())
    attended, made = numbers(tokens, HEADS, 192, seed=3), heads()
    found = device.attention.attend_chosen(attended, cache.vectors, batch, made, 0.1, chosen)
    if plain is None:
        expected = Attention.attend_latent(device.attention, attended, cache.vectors, batch, made, 0.1)
    else:
        expected = Attention.attend_chosen(device.attention, attended, cache.vectors, batch, made, 0.1, plain)
    close(found, expected)


def test_vectors_are_placed_as_in_plain_torch(simulator):
    device = opened()
    cache = device.cache.make_latent(Latent(512, 64), 3, PAGE, torch.bfloat16, device.torch_device)
    norm = device.elementwise.make_norm(numbers(512) + 1, 1e-6)
    angles = numbers(9, 1, 32).float()
    cos, sin = (torch.cat((part, part), -1).bfloat16() for part in (angles.cos(), angles.sin()))
    vectors, queries = numbers(9, 576, seed=2), numbers(9, HEADS, 192, seed=3)
    index = torch.tensor([300, 128, 129, 200, 140, 150, 260, 261, 262]).npu()
    plain = torch.zeros(3, PAGE, 576, dtype=torch.bfloat16).npu()
    before = simulator.engine.calls.get("npu.npu_kv_rmsnorm_rope_cache.default", 0)
    expected = device.attention.place_latent(queries.clone(), vectors, norm, cos, sin, plain, index)
    assert simulator.engine.calls.get("npu.npu_kv_rmsnorm_rope_cache.default", 0) == before
    found = device.attention.place_latent(queries.clone(), vectors, norm, cos, sin, cache, index)
    assert simulator.engine.calls["npu.npu_kv_rmsnorm_rope_cache.default"] == before + 1
    close(found, expected)
    close(read_latent(cache, index), read_latent(plain, index))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_one_operator_projects_as_those_it_replaces(kind, simulator):
    device, count, hidden = opened(), 2, 6144
    assert device.attention.fits_prologue(hidden, 1536, count, (128, 64, 128, 512))
    assert not device.attention.fits_prologue(hidden, 1024, count, (128, 64, 128, 512))
    cache, batch = filled(device, [130, 5, 300], [1, 2, 1])
    shapes = (1536, hidden), (count * 192, 1536), (576, hidden)
    floats = [numbers(*shape, seed=seed) * 0.02 for seed, shape in enumerate(shapes)]
    parts = floats if kind == "bfloat16" else [quantize_int8(each.cpu()).to(each.device) for each in floats]
    norms = [device.elementwise.make_norm(numbers(size, seed=size) * 0.1 + 1, 1e-6) for size in (1536, 512)]
    prologue = device.attention.make_latent_prologue(LatentWeights(*parts, *norms, heads(count)))
    x, angles = numbers(4, hidden, seed=11), numbers(4, 1, 32, seed=12).float()
    cos, sin = (torch.cat((part, part), -1).bfloat16() for part in (angles.cos(), angles.sin()))
    index = torch.tensor([300, 128, 129, 200]).npu()
    batch = replace(batch, cache_index=index)
    compressed, vectors = prologue.project(x)
    queries = prologue.queries(norms[0](compressed)).view(4, count, -1)
    queries = device.attention.place_latent(queries, vectors, norms[1], cos, sin, cache.vectors, index)
    placed = read_latent(cache.vectors, index)
    expected = device.attention.attend_latent(queries, cache.vectors, batch, heads(count), 0.1)
    cache.vectors.latent.view(-1, 512)[index] = 0
    cache.vectors.rotated.view(-1, 64)[index] = 0
    before = simulator.engine.calls.get("npu.npu_mla_prolog_v3.default", 0)
    result = prologue.attend(x, cos, sin, cache.vectors, batch, 0.1)
    assert simulator.engine.calls["npu.npu_mla_prolog_v3.default"] == before + 1
    close(read_latent(cache.vectors, index), placed)
    close(result, expected)
    _, longer = filled(device, [0], [40])
    assert prologue.attend(x, cos, sin, cache.vectors, longer, 0.1) is None


def test_sizes_without_a_document_are_refused():
    import torch_npu

    device = opened()
    cache, _ = filled(device, [130], [1])
    weights = numbers(512, 1536), numbers(1536, 192), numbers(1, 128, 512), numbers(512, 576)
    turned = numbers(1, 64), numbers(1, 64), cache.vectors.latent.unsqueeze(2), cache.vectors.rotated.unsqueeze(2)
    with pytest.raises(ConstraintError, match="hidden size of 512"):
        torch_npu.npu_mla_prolog_v3(
            numbers(1, 512), *weights, numbers(1536), numbers(512), *turned, cache_index=torch.tensor([3]).npu()
        )


@pytest.mark.parametrize("name", ["wide-deepseek-v3", "wide-kimi"])
def test_decodes_in_graphs_are_those_without(name, reference, drive, prompts, simulator):
    options = {"device": "npu", "page_size": PAGE, "dtype": "bfloat16", "max_total_tokens": 16 * PAGE}
    texts, answers = prompts(130, 40, 7), []
    for graphs in (False, True):
        driver = drive(reference(name).path, disable_graphs=not graphs, graph_rows=(2, 4), **options)
        assert list(driver.info.graph_rows) == ([2, 4] if graphs else [])
        for slot, text in enumerate(texts, 1):
            driver.admit(slot, text)
            driver.step([(slot, len(text))])
        before = sum(simulator.engine.calls.values())
        for _ in range(8):
            driver.step([(1, 1), (2, 1), (3, 1)])
        answers.append(([driver.tokens[slot] for slot in (1, 2, 3)], sum(simulator.engine.calls.values()) - before))
    assert answers[0][0] == answers[1][0]
    assert answers[1][1] < answers[0][1]


@pytest.mark.parametrize("name", ["wide-deepseek-v3", "wide-deepseek-v3.2"])
def test_drafted_tokens_are_those_without_drafts(name, reference, drive, prompts):
    """Trees of draft tokens are verified in plain torch, over the same cache."""
    options = {"device": "npu", "page_size": PAGE, "dtype": "bfloat16", "max_total_tokens": 16 * PAGE}
    (text,) = prompts(150)
    plain = drive(reference(name).path, **options)
    plain.admit(1, text)
    answer = plain.generate(1, 162)
    driver = drive(reference(name).path, speculation=SpeculativeSettings("NGRAM", num_draft_tokens=8), **options)
    driver.admit(2, answer)
    driver.step([(2, 162)])
    driver.admit(1, text)
    driver.step([(1, 150)])
    accepted = 0
    while len(driver.tokens[1]) < 156:
        before = len(driver.tokens[1])
        assert not driver.step([(1, 1)], drafts={1: 4}).failed
        accepted += len(driver.tokens[1]) - before - 1
    assert accepted > 0
    agreed = sum(one == other for one, other in zip(driver.tokens[1][150:156], answer[150:156], strict=True))
    assert agreed >= 4  # sums in another order may change a near tie


def latent_call(device, **changes):
    import torch_npu

    cache, _ = filled(device, [130], [1])
    given = {
        "query_rope": numbers(1, HEADS, 64),
        "key_rope": cache.vectors.rotated,
        "actual_seq_lengths": [1],
        "actual_seq_lengths_kv": [131],
        "block_table": torch.tensor([[1, 2]], dtype=torch.int32).npu(),
        "num_heads": HEADS,
        "num_key_value_heads": 1,
        "scale": 0.1,
        "input_layout": "TND_NTD",
        "block_size": PAGE,
        "sparse_mode": 0,
    }
    latent = cache.vectors.latent
    queries = numbers(1, changes.pop("heads", HEADS), 512)
    return torch_npu.npu_fused_infer_attention_score(queries, latent, latent, **(given | changes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key_rope": None}, "come together"),
        ({"heads": 3, "num_heads": 3, "query_rope": "three"}, "power of 2"),
        ({"input_layout": "BSND"}, "dimensions"),
        ({"block_table": None}, "in pages"),
        ({"sparse_mode": 2}, "takes 0 without a mask"),
    ],
)
def test_what_the_operator_does_not_take_is_refused(change, says):
    device = opened()
    if change.get("query_rope"):
        change = change | {"query_rope": numbers(1, 3, 64)}
    with pytest.raises((ConstraintError, RuntimeError), match=says):
        latent_call(device, **change)
