"""The CPU's native operators against PyTorch's."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import pytest
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.devices.attention import Attention
from kernels.devices.cpu.dense_linear import NativeLinear, TiedLinear
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library
from kernels.devices.cpu.operators import Native
from kernels.weights.quantization.weights import quantize_int8
from tests.kits.native import needs_native

pytestmark = needs_native

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def library_path():
    """Compiled once on this machine."""
    return library.build()


@pytest.fixture(params=[1, 3], ids=["alone", "team"])
def platform(request):
    platform = CpuDevice(threads=request.param)
    assert platform.select_dtype("bfloat16", None) == BF16
    platform.cache.make(1, 1, 16, 1, 64, BF16)
    return platform


@pytest.fixture
def plain(monkeypatch):
    """PyTorch's operators, in float32 where that is asked of them."""
    platform = CpuDevice(threads=1)
    assert platform.select_dtype("float32", None) == torch.float32
    return platform


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


def close(found, expected):
    assert found.dtype == BF16
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(rows, biased, platform, plain, generator):
    x = torch.randn(rows, 64, generator=generator).to(BF16)
    weight = torch.randn(83, 64, generator=generator).to(BF16)  # not a whole number of tiles
    bias = torch.randn(83, generator=generator).to(BF16) if biased else None
    linear = platform.linear.make_dense(weight, bias)
    assert isinstance(linear.call, NativeLinear)
    whole = linear(x)
    close(whole, plain.linear.make_dense(weight.float(), None if bias is None else bias.float())(x.float()))
    last = x[-1:]
    assert torch.equal(linear(last), whole[-1:])  # the same bits alone


def test_no_rows_are_no_work(platform, generator):
    linear = platform.linear.make_dense(torch.randn(83, 64, generator=generator).to(BF16), None)
    assert linear(torch.empty(0, 64, dtype=BF16)).shape == (0, 83)


def test_what_there_is_no_memory_for_is_an_error(platform, generator):
    """In whatever thread it happens; what comes after it runs."""
    weight, x = torch.randn(2, 300, 64, generator=generator).to(BF16)
    linear = platform.linear.make_dense(weight, None)
    expected = linear(x)
    op = library.Op(kind=3, a=x.data_ptr(), b=x.data_ptr(), out=x.data_ptr(), stride_a=64, i0=1 << 46, i1=64)
    with pytest.raises(MemoryError, match="lower --"):
        linear.call.native.run(ctypes.byref(op), 1, library.Step(len(x)))
    assert torch.equal(linear(x), expected)


def test_threads_that_do_not_start_are_an_error(monkeypatch):
    found = library.open_library()
    monkeypatch.setattr(found, "open", lambda threads: None)
    with pytest.raises(RuntimeError, match="--cpu-threads"):
        Native(found, 1 << 20)


def test_a_large_linear_layer(platform, plain, generator):
    """A product of several panels of tokens, whose result is written past the caches."""
    x = torch.randn(1100, 2048, generator=generator).to(BF16) / 8
    weight = torch.randn(992, 2048, generator=generator).to(BF16) / 8
    linear = platform.linear.make_dense(weight, None)
    whole = linear(x)
    close(whole, plain.linear.make_dense(weight.float(), None)(x.float()))
    for row in (0, 255, 256, 1099):
        assert torch.equal(linear(x[row : row + 1]), whole[row : row + 1])  # the same bits alone


@pytest.mark.parametrize("rows", [1, 17, 63, 129, 161, 700])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_gated_layers_are_their_operators_one_by_one(rows, kind, platform, generator):
    x = torch.randn(rows, 1088, generator=generator).to(BF16)  # several slices, the last a short one
    weight = torch.randn(192, 1088, generator=generator).to(BF16) / 8
    bias = torch.randn(192, generator=generator).to(BF16)
    given = weight if kind == "bf16" else quantize_int8(weight)
    found = platform.linear.make_gated(given, bias)(x)
    expected = platform.elementwise.silu_and_mul(platform.linear.make_projection(given, bias)(x))
    assert found.shape == (rows, 96)
    assert torch.equal(found, expected)


def test_a_gated_layer_that_does_not_fit_runs_one_by_one(platform, generator):
    x, weight = torch.randn(5, 64, generator=generator).to(BF16), torch.randn(96, 64, generator=generator).to(BF16)
    wide = x.float() @ weight.float().T
    found = platform.linear.make_gated(weight, None)(x)
    close(found, torch.nn.functional.silu(wide[:, :48]) * wide[:, 48:])


def test_a_linear_layer_that_does_not_fit_stays_as_it_was(platform, generator):
    weight = torch.randn(8, 40, generator=generator).to(BF16)
    linear = platform.linear.make_dense(weight, None)
    assert not isinstance(linear.call, NativeLinear)
    x = torch.randn(2, 40, generator=generator).to(BF16)
    close(linear(x), x.float() @ weight.float().T)


def test_a_large_tied_layer_is_kept_once(platform, generator, monkeypatch):
    """Its rows are looked up where the products have put them, and are the bits that they were."""
    table = torch.randn(83, 64, generator=generator).to(BF16)
    table[7, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    ids = torch.tensor([0, 82, 15, 16, 7, 31, 32, 7] * 5)
    x, expected, held = torch.randn(3, 64, generator=generator).to(BF16), table[ids], weakref.ref(table)
    logits = platform.linear.make_dense(table, None)(x)
    monkeypatch.setattr("kernels.devices.cpu.dense_linear.SHARED_PACK_BYTES", 0)
    lookup, head = platform.linear.make_tied(table)
    del table
    assert held() is None
    assert torch.equal(lookup(ids).view(torch.int16), expected.view(torch.int16))
    assert torch.equal(head(x).view(torch.int16), logits.view(torch.int16))
    with pytest.raises(IndexError):
        lookup(torch.tensor([83]))


def test_a_tied_layer_gives_up_its_table_when_it_goes_over(platform, generator, monkeypatch):
    monkeypatch.setattr("kernels.devices.cpu.dense_linear.SHARED_PACK_BYTES", 0)
    table, ids = torch.randn(83, 64, generator=generator).to(BF16), torch.tensor([3, 70])
    tied, expected, held = TiedLinear(table, None), table[ids], weakref.ref(table)
    del table
    assert torch.equal(tied.lookup(ids), expected)
    assert held() is not None
    tied.adopt(platform.native.current)
    assert torch.equal(tied.lookup(ids), expected)
    assert held() is None


def test_norms(platform, plain, generator):
    x, residual = torch.randn(2, 20, 48, generator=generator).to(BF16)
    weight = torch.randn(48, generator=generator)
    close(platform.elementwise.make_norm(weight, 0.1)(x), plain.elementwise.make_norm(weight, 0.1)(x.float()))
    found, total = platform.elementwise.make_norm(weight, 0.1).add(x, residual.clone())
    expected = (x + residual).float()
    assert torch.equal(total.float(), expected)
    close(found, plain.elementwise.make_norm(weight, 0.1)(expected))
    weights, heads = torch.randn(3, 32, generator=generator), torch.randn(20, 5, 32, generator=generator).to(BF16)
    close(
        platform.elementwise.make_norm(weights, 0.1)(heads[:, :3]),
        plain.elementwise.make_norm(weights, 0.1)(heads[:, :3].float()),
    )


def test_rotary_and_silu(platform, plain, generator):
    heads = torch.randn(20, 5, 64, generator=generator).to(BF16)
    cos, sin = torch.randn(2, 20, 1, 64, generator=generator).to(BF16)
    found, expected = torch.zeros(20, 9, 64, dtype=BF16), torch.zeros(20, 5, 64)
    platform.attention.rotate(heads, cos, sin, out=found[:, 2:7])
    plain.attention.rotate(heads.float(), cos.float(), sin.float(), out=expected)
    close(found[:, 2:7], expected)
    x = (torch.randn(20, 128, generator=generator) * 20).to(BF16)
    close(platform.elementwise.silu_and_mul(x.clone()), plain.elementwise.silu_and_mul(x.float()))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dim", [32, 96, 256])
def test_heads_are_placed_as_by_one_operator_after_another(dim, normed, platform, generator, monkeypatch):
    """To the bit, in queries and cache."""
    qkv = torch.randn(20, 5 + 2 * 2, dim, generator=generator).to(BF16)
    cos, sin = torch.randn(2, 20, 1, dim, generator=generator).to(BF16)
    index = torch.randperm(8 * 16, generator=generator)[:20]
    norm = platform.elementwise.make_norm(torch.randn(7, dim, generator=generator), 0.1) if normed else None
    expected, found = platform.cache.make(2, 8, 16, 2, dim, BF16)
    apart = Attention.norm_rope_cache(platform.attention, qkv.clone(), 5, norm, cos, sin, expected, index)
    monkeypatch.delattr(Native, "rotary")
    queries = platform.attention.norm_rope_cache(qkv, 5, norm, cos, sin, found, index)
    assert torch.equal(queries, apart)
    assert torch.equal(found, expected)
    assert found.count_nonzero() > 0


@pytest.mark.parametrize("window", [0, 40, 170])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (8, 8, 32), (20, 1, 128), (7, 1, 96), (4, 2, 256)])
def test_attention(window, heads, kv_heads, dim, platform, plain, generator):
    shape = (1, 200, 16, kv_heads, dim)
    (cache,), (expected_cache,) = platform.cache.make(*shape, BF16), plain.cache.make(*shape, torch.float32)
    cache.fill_(torch.nan)  # of what is not the row's nothing is used
    starts, counts = np.array([0, 15, 16, 17, 130, 500, 3, 20]), np.array([1, 1, 1, 1, 1, 1, 9, 300])
    tables = np.zeros((8, 33), dtype=np.int32)
    free = (torch.randperm(199, generator=generator) + 1).tolist()
    for row, length in enumerate(starts + counts):
        tables[row, : -(-length // 16)] = [free.pop() for _ in range(-(-length // 16))]
        index = torch.from_numpy(tables[row, np.arange(length) // 16] * np.int64(16) + np.arange(length) % 16)
        keys_values = torch.randn(length, 2 * kv_heads, dim, generator=generator).to(BF16)
        platform.cache.write(cache, index, keys_values)
        plain.cache.write(expected_cache, index, keys_values.float())
    rows = AttentionRows(starts, counts, tables, decodes=6)
    queries = torch.randn(counts.sum(), heads, dim, generator=generator).to(BF16)
    found = platform.attention.attend(queries, cache, platform.attention.plan(rows, window), 0.2)
    expected = plain.attention.attend(queries.float(), expected_cache, plain.attention.plan(rows, window), 0.2)
    close(found, expected)


@pytest.mark.parametrize("direction", [1, -1])
def test_attention_to_scores_that_are_far_apart(direction, platform, plain, generator):
    """They grow, or fall, by far more than what a float's exponent holds relative to the first."""
    shape = (1, 41, 16, 2, 64)
    (cache,), (expected_cache,) = platform.cache.make(*shape, BF16), plain.cache.make(*shape, torch.float32)
    keys_values = torch.randn(600, 4, 64, generator=generator).to(BF16)
    keys_values[:, :2, 0] = direction * torch.linspace(-40, 40, 600).to(BF16).unsqueeze(1)
    index = torch.arange(16, 616)
    platform.cache.write(cache, index, keys_values)
    plain.cache.write(expected_cache, index, keys_values.float())
    pages = np.tile(np.arange(1, 40, dtype=np.int32), (3, 1))
    rows = AttentionRows(np.array([599, 590, 200]), np.array([1, 7, 400]), pages, decodes=1, verifies=1)
    queries = torch.randn(408, 4, 64, generator=generator).to(BF16)
    queries[:, :, 0] = 8
    found = platform.attention.attend(queries, cache, platform.attention.plan(rows, 0), 1.0)
    expected = plain.attention.attend(queries.float(), expected_cache, plain.attention.plan(rows, 0), 1.0)
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("vocab", [211, 4096])
def test_greedy(vocab, platform, plain, generator):
    logits = torch.randn(40, vocab, generator=generator).to(BF16)
    logits[3] = logits[3].round()  # of equal ones the first
    logits[4, 7], logits[5, 200], logits[6] = torch.nan, torch.inf, -torch.inf
    logits[7, :-1] = -torch.inf
    tokens, nonfinite = platform.sampling.greedy(logits)
    expected, expected_broken = plain.sampling.greedy(logits.float())
    assert torch.equal(tokens, expected)
    assert nonfinite.tolist() == expected_broken.tolist() == [row in (4, 5, 6) for row in range(40)]
    assert tokens[3] == int((logits[3] == logits[3].max()).nonzero()[0])
    assert tokens[7] == vocab - 1
