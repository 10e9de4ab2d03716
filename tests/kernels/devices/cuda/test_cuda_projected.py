"""A projection of one token that rotates and caches its heads itself, against one behind which a kernel does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.devices.cuda import launch
from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue, norm_rope_cache
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.matmul import gemv_quantized, grouped, qkv_projection
from kernels.devices.cuda.matmul.grouped import GroupedLinear, WideWeight
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.cuda.matmul.qkv_projection import CudaQkvProjection
from kernels.weights.quantization.weights import GroupedWeight
from tests.kernels.devices.cuda.plain import single_in_triton
from tests.kits.cuda.heads import HEADS, KV_HEADS, Places, step


def made(device, dtype, dim, inputs, biased=False, normed=False):
    torch.manual_seed(5)
    weight = (torch.randn((HEADS + 2 * KV_HEADS) * dim, inputs) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(len(weight)).to(dtype).to(device) if biased else None
    linear = CudaLinear(weight, bias)
    behind = CudaNormThenLinear(CudaNorm(1 + torch.rand(inputs).to(dtype).to(device), 1e-5), linear, None)
    own = CudaNorm(torch.randn(HEADS + KV_HEADS, dim).to(dtype).to(device), 1e-6) if normed else None
    return CudaQkvProjection(Places(), behind, HEADS, KV_HEADS, dim, own)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("dim", "inputs"), [(16, 128), (64, 4096), (24, 2064), (6, 128)])
def test_one_launch_does_what_two_do(device, dtype, biased, first, dim, inputs, monkeypatch):
    heads = made(device, dtype, dim, inputs, biased)
    x, residual, cos, sin, cache, index = step(device, dtype, dim, inputs)
    given = None if first else x.clone()
    linear, norm = heads.projection.linear, heads.projection.norm
    total = residual.clone() if first else residual + x
    qkv, placed = linear(norm(total)).view(1, -1, dim), cache.clone()
    norm_rope_cache(qkv, HEADS, KV_HEADS, None, 0.0, cos, sin, placed, index)

    if first:
        monkeypatch.setattr(CudaNorm, "_launch", lambda *_: pytest.fail("the product norms the stream"))
    queries, found = heads(given, residual, cos, sin, cache, index)
    assert heads.attention.placed == []
    assert queries.shape == (1, HEADS, dim)
    assert torch.equal(found, total)
    torch.testing.assert_close(queries, qkv[:, :HEADS], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(cache, placed, rtol=2e-3, atol=2e-3)
    assert int((cache != 0).any(-1).sum()) == 2 * KV_HEADS


def test_other_heads_are_placed_by_a_kernel_of_their_own(device):
    dtype, dim, inputs = torch.float16, 16, 128
    heads = made(device, dtype, dim, inputs)
    two = step(device, dtype, dim, inputs, tokens=2)
    heads(*two)
    assert heads.attention.placed == [2]
    normed = made(device, dtype, dim, inputs, normed=True)
    one = step(device, dtype, dim, inputs)
    normed(*one)
    assert normed.attention.placed == [1]
    uneven = made(device, dtype, dim, 120)  # inputs that are left to cuBLAS
    uneven(*step(device, dtype, dim, 120))
    assert uneven.attention.placed == [1]
    other = made(device, dtype, dim, inputs)
    x, residual, cos, sin, cache, index = one
    other(x, residual, cos, sin, cache.float(), index)
    assert other.attention.placed == [1]
    other.projection.linear = linear = other.projection.linear.__call__  # of another kind
    other(x, residual, cos, sin, cache, index)
    assert linear is other.projection.linear
    assert other.attention.placed == [1, 1]


@pytest.mark.parametrize("normed", [False, True])
def test_a_token_is_read_when_the_kernel_in_front_has_ended(normed, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("only the interpreter can tell")
    heads = made(device, torch.float16, 16, 128)
    x, _, cos, sin, cache, index = step(device, torch.float16, 16, 128)
    weight, other = heads.projection.linear.weight, torch.zeros_like(cache)
    before = Before(None, 1 + torch.rand(128).half(), 1e-5) if normed else None
    right = qkv_projection.project(x, weight, None, RopeCacheEpilogue(HEADS, cos, sin, cache, index), before)
    early, waits = (x, cos, sin, index), []
    values = [part.clone() for part in early]

    def begin() -> None:
        for part in early:
            part.fill_(0)

    def wait() -> None:
        waits.append(None)
        for part, value in zip(early, values, strict=True):
            part.copy_(value)

    monkeypatch.setattr(qkv_projection, "overlapping", lambda _: True)
    monkeypatch.setattr(qkv_projection, "gdc_launch_dependents", begin)
    monkeypatch.setattr(qkv_projection, "gdc_wait", wait)
    own = RopeCacheEpilogue(HEADS, cos, sin, other, index)
    assert torch.equal(qkv_projection.project(x, weight, None, own, before), right)
    assert len(waits) == len(weight) // (4 if normed else 2)  # each program
    assert torch.equal(other, cache)


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    return gemv_quantized if torch.cuda.is_available() else single_in_triton(tmp_path_factory.mktemp("plain"))


def of_4_bits(device, dtype, dim, inputs, biased):
    outputs = (HEADS + 2 * KV_HEADS) * dim
    values = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = ((torch.rand(outputs, inputs // 128) + 0.1) / inputs**0.5 / 8).half()
    bias = torch.randn(outputs).to(dtype).to(device) if biased else None
    weight = GroupedWeight(values, scales, None, 128, 4, dtype=dtype).to(device)
    return GroupedLinear(weight, bias, WideWeight(device)), bias


@pytest.mark.parametrize("way", ["rows of a warp", "apart"])
def test_heads_of_4_bits_are_placed_where_the_norm_is_within(way, device, products, monkeypatch):
    dtype, dim, inputs = torch.bfloat16 if device.type == "cuda" else torch.float16, 64, 768
    given = step(device, dtype, dim, inputs)
    linear, _ = of_4_bits(device, dtype, dim, inputs, False)
    norm = CudaNorm((1 + torch.rand(inputs)).to(dtype).to(device), 1e-5)
    choices = SimpleNamespace(name=lambda *_: way)
    heads = CudaQkvProjection(Places(), CudaNormThenLinear(norm, linear, choices), HEADS, KV_HEADS, dim, None)
    monkeypatch.setattr(gemv_quantized, "multiply", products.multiply)
    monkeypatch.setattr(grouped, "single_suits", lambda *_: True)
    monkeypatch.setattr(linear, "_few", lambda x, _: torch.zeros(1, (HEADS + 2 * KV_HEADS) * dim).to(x))
    x, residual, *rest = given
    sum_ = x + residual
    queries, total = heads(x, residual, *rest)
    assert heads.attention.placed == ([1] if way == "apart" else [])
    assert queries.shape == (1, HEADS, dim)
    torch.testing.assert_close(total, sum_, rtol=1e-3, atol=0)
    heads(None, sum_, *rest)
    assert heads.attention.placed[-1:] == [1]


def test_heads_are_placed_by_another_kernel_where_that_cannot_be_made(device, products, monkeypatch, caplog):
    """As with a Gluon in which something else is called otherwise."""
    dtype, dim, inputs = torch.bfloat16 if device.type == "cuda" else torch.float16, 64, 768
    x, residual, *rest = step(device, dtype, dim, inputs)
    linear, _ = of_4_bits(device, dtype, dim, inputs, False)
    norm = CudaNorm((1 + torch.rand(inputs)).to(dtype).to(device), 1e-5)
    choices = SimpleNamespace(name=lambda *_: "rows of a warp")
    heads = CudaQkvProjection(Places(), CudaNormThenLinear(norm, linear, choices), HEADS, KV_HEADS, dim, None)
    tried, of_products = [], products.multiply

    def multiply(*given):
        if len(given) > 7 and given[7] is not None:
            tried.append(given)
            raise AttributeError("no such layout")
        return of_products(*given)

    monkeypatch.setattr(launch, "_missing", set())
    monkeypatch.setattr(gemv_quantized, "multiply", multiply)
    monkeypatch.setattr(grouped, "single_suits", lambda *_: True)
    for count in (1, 2):
        queries, total = heads(x.clone(), residual.clone(), *rest)
        assert heads.attention.placed == [1] * count
    assert len(tried) == 1
    assert ["no such layout" in record.getMessage() for record in caplog.records] == [True]
    torch.testing.assert_close(total, x + residual, rtol=1e-3, atol=0)
    assert queries.shape == (1, HEADS, dim)


@pytest.mark.parametrize("biased", [False, True])
def test_heads_of_a_weight_of_4_bits(device, biased, products, monkeypatch):
    dtype, dim, inputs = torch.bfloat16 if device.type == "cuda" else torch.float16, 64, 768
    x, residual, cos, sin, cache, index = step(device, dtype, dim, inputs)
    linear, bias = of_4_bits(device, dtype, dim, inputs, biased)
    epilogue, placed = RopeCacheEpilogue(HEADS, cos, sin, cache, index), cache.clone()
    before = Before(residual, (1 + torch.rand(inputs)).to(dtype).to(device), 1e-5)
    for name, cut in gemv_quantized.tilings(linear._form, False).items():
        qkv, total = products.multiply(x, linear._form, bias, False, 64, cut, before)
        qkv = qkv.view(1, -1, dim)
        norm_rope_cache(qkv, HEADS, KV_HEADS, None, 0.0, cos, sin, placed, index)
        monkeypatch.setattr(gemv_quantized, "multiply", products.multiply)
        queries, found = linear.project_heads(x, before, name, epilogue)
        assert torch.equal(found, total)
        torch.testing.assert_close(queries, qkv[:, :HEADS], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(cache, placed, rtol=2e-2, atol=2e-2)
        assert int((cache != 0).any(-1).sum()) == 2 * KV_HEADS
        cache.zero_()
    assert linear.project_heads(x, before, "tiles of 64", epilogue) is None
    odd = RopeCacheEpilogue(HEADS, cos, sin, cache[..., :40], index)
    assert linear.project_heads(x, before, name, odd) is None
