"""Products by the copy engine that begin and end a norm, and whose parts are left to the next kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

import kernels.devices.cuda
import kernels.devices.cuda.matmul.linear as linear_layers
from kernels.contract.config import RunnerConfig
from kernels.devices.cuda.device import CudaDevice
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.cuda.launch import copying
from kernels.devices.cuda.matmul import gemm_small, gemm_small_tma
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.qkv_projection import CudaQkvProjection
from kernels.devices.cuda.matmul.residual_linear import CudaResidualLinear
from kernels.devices.cuda.matmul.scaled_residual import Joining, Scaled, ScaledNormThenLinear
from kernels.devices.linear import NormThenLinear
from tests.kernels.devices.cuda.compiled import compiling, empty
from tests.kernels.devices.cuda.plain import bulk_in_triton
from tests.kits.speculation.captures import decoder
from tests.kits.speculation.paged import Paged
from tests.kits.tiny_model import make_tiny_model

HEADS, KV_HEADS, DIM, PAGE, PAGES = 2, 1, 128, 16, 5
HEADS_8B, KV_HEADS_8B = 32, 8
EPS = 1e-2  # large enough to be seen


@pytest.fixture(scope="module")
def bulks(tmp_path_factory):
    return gemm_small_tma if torch.cuda.is_available() else bulk_in_triton(tmp_path_factory.mktemp("plain"))


def kind(device):
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def made(device, tokens, outputs, inputs):
    if device.type == "cuda" and not copying(device):
        pytest.skip("the device has no such engine, or another one")
    torch.manual_seed(7)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(kind(device)).to(device)
    return torch.randn(tokens, inputs).to(kind(device)).to(device), weight, gemm_small.counters(weight)


def norm_of(device, width):
    return CudaNorm((0.5 + torch.rand(width)).to(kind(device)).to(device), EPS)


def near(found, expected):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (8e-3 if found.is_cuda else 1.5e-3), error  # bfloat16 has three bits less


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "inputs"), [(2, 4096), (16, 4096), (5, 256), (40, 1024)])
def test_a_product_is_added_and_begins_a_norm(device, tokens, inputs, biased, bulks):
    """The stream is to the bit what the norm's kernel makes of it, in parts and without."""
    outputs = 328  # of the last program's rows some are none
    x, weight, arrived = made(device, tokens, outputs, inputs)
    bias = torch.randn(outputs).to(x.dtype).to(device) if biased else None
    described, norm = bulks.described(weight), norm_of(device, outputs)
    stream = torch.randn(tokens, outputs).to(x.dtype).to(device)
    alone, expected = stream.clone(), stream.clone()
    normed, _ = norm.add(bulks.multiply(x, described, bias, arrived, False), expected)
    scaled = Scaled.room(norm, stream)
    for part in (scaled.rows, scaled.squares):
        part.fill_(float("nan"))
    assert bulks.multiply(x, described, bias, arrived, False, joining=Joining(stream, scaled)) is stream
    bulks.multiply(x, described, bias, arrived, False, joining=Joining(alone, None))
    assert torch.equal(stream, expected)
    assert torch.equal(alone, expected)
    assert torch.equal(scaled.rows, (expected.float() * norm.weight.float()).to(x.dtype))
    tiles = torch.nn.functional.pad(expected.float(), (0, -outputs % 64)).view(tokens, -1, 64)
    torch.testing.assert_close(scaled.squares, tiles.square().sum(2))
    factor = torch.rsqrt(scaled.squares.sum(1, keepdim=True) / outputs + EPS)
    near(scaled.rows.float() * factor, normed)
    assert not arrived.any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("tokens", "gated", "outputs"), [(2, True, 128), (16, False, 384), (24, True, 96), (3, False, 72)]
)
def test_a_product_ends_a_norm(device, tokens, gated, outputs, biased, bulks):
    x, weight, arrived = made(device, tokens, outputs * (2 if gated else 1), 2080)
    bias = torch.randn(len(weight)).to(x.dtype).to(device) if biased else None
    described, norm = bulks.described(weight), norm_of(device, 2080)
    x *= torch.linspace(0.01, 9, tokens, device=device)[:, None].to(x.dtype)  # each token has a factor of its own
    scaled = begun(norm, x)
    expected = bulks.multiply(norm(x), described, bias, arrived, gated)
    near(bulks.multiply(scaled, described, bias, arrived, gated), expected)
    assert not arrived.any()
    if not gated and not biased:
        parts = bulks.multiply(scaled, described, None, arrived, False, left=True)
        assert parts.shape == (gemm_small_tma.choose_split(tokens, outputs, 2080, False).splits, tokens, outputs)
        near(parts.sum(0), expected)


def begun(norm, stream):
    scaled = Scaled.room(norm, stream)
    tokens, width = stream.shape
    scaled.rows.copy_((stream.float() * norm.weight.float()).to(stream.dtype))
    scaled.squares.copy_(torch.nn.functional.pad(stream.float(), (0, -width % 64)).view(tokens, -1, 64).square().sum(2))
    return scaled


def step(device, dtype, tokens):
    angle = torch.rand(tokens, 1, DIM // 2) * 6
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    cache = torch.zeros(PAGES, 2, KV_HEADS, PAGE, DIM)
    index = torch.randperm(PAGES * PAGE)[:tokens]
    return *(part.to(dtype).to(device) for part in (cos, sin, cache)), index.to(device)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [3, 16])
def test_heads_of_parts(device, tokens, normed, bulks):
    """What adds up the parts of heads does it as the product would have done, bit for bit."""
    every = HEADS + 2 * KV_HEADS
    x, weight, arrived = made(device, tokens, every * DIM, 2048)
    cos, sin, cache, index = step(device, x.dtype, tokens)
    described = bulks.described(weight)
    gamma = torch.rand(HEADS + KV_HEADS, DIM, device=device).to(x.dtype) if normed else None
    qkv = bulks.multiply(x, described, None, arrived, False).view(tokens, every, DIM)
    parts = bulks.multiply(x, described, None, arrived, False, left=True)
    assert len(parts) > 1
    assert parts.dtype == torch.float32
    placed, other = cache, cache.clone()
    made_of_parts = torch.full_like(qkv, 9.0)
    norm_rope_cache(qkv, HEADS, KV_HEADS, gamma, EPS, cos, sin, placed, index)
    norm_rope_cache(made_of_parts, HEADS, KV_HEADS, gamma, EPS, cos, sin, other, index, parts)
    assert torch.equal(qkv[:, :HEADS], made_of_parts[:, :HEADS])
    assert torch.equal(placed, other)
    assert placed.any()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_kernels_compile_and_fit(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    tokens, every, norm = 16, HEADS_8B + 2 * KV_HEADS_8B, CudaNorm(empty(4096), 1e-5)
    stream = empty(tokens, 4096)
    with compiling(monkeypatch, 90) as found:
        for outputs, gated in ((every * DIM, False), (4096, False), (28672, True)):
            weight = empty(outputs, 4096)
            reported, arrived = gemm_small_tma.described(weight), gemm_small.counters(weight)
            if outputs == 4096:
                joining = Joining(stream, Scaled.room(norm, stream))
                gemm_small_tma.multiply(stream, reported, None, arrived, gated, joining=joining)
            else:
                gemm_small_tma.multiply(Scaled.room(norm, stream), reported, None, arrived, gated, left=not gated)
        parts, cache = empty(2, tokens, every * DIM, dtype=torch.float32), empty(99, 2, KV_HEADS_8B, 64, DIM)
        turn, index = empty(tokens, 1, DIM), empty(tokens, dtype=torch.int64)
        norm_rope_cache(empty(tokens, every, DIM), HEADS_8B, KV_HEADS_8B, None, 0.0, turn, turn, cache, index, parts)
    assert [kernel.kernel for kernel in found] == [
        "gemm_small_tma_kernel",
        "gemm_small_tma_kernel",
        "gemm_small_tma_kernel",
        "norm_rope_cache_kernel",
    ]
    for kernel, programs in zip(found, (3, 1, 2, 8), strict=True):  # of a multiprocessor
        assert programs * (kernel.shared + 1024) <= 228 << 10, kernel
        assert kernel.spilled == 0, kernel


class Places:
    """A platform that tells how many tokens it places."""

    def __init__(self) -> None:
        self.placed: list[int] = []

    def norm_rope_cache(self, qkv, heads, norm, cos, sin, cache, index):
        self.placed.append(len(qkv))
        norm_rope_cache(qkv, heads, KV_HEADS, None, 0.0, cos, sin, cache, index)
        return qkv[:, :heads]


@pytest.fixture
def engine(bulks, monkeypatch):
    """Layers take the copy engine, also where there is none."""
    monkeypatch.setattr(kernels.devices.cuda.matmul, "gemm_small_tma", bulks, raising=False)
    monkeypatch.setattr(linear_layers, "_carried", lambda x, weight: True)
    monkeypatch.setattr(linear_layers, "_JOINED", torch.bfloat16 if torch.cuda.is_available() else torch.float16)


@pytest.mark.parametrize("given", ["nothing", "rows", "begun", "another's"])
def test_heads_of_a_layer_are_made_of_parts(device, given, engine, monkeypatch):
    tokens, inputs = 5, 2048
    x, weight, _ = made(device, tokens, (HEADS + 2 * KV_HEADS) * DIM, inputs)
    cos, sin, cache, index = step(device, x.dtype, tokens)
    platform, norm = Places(), norm_of(device, inputs)
    found = []
    for left in (True, False):
        linear = CudaLinear(weight, None)
        heads = CudaQkvProjection(platform, NormThenLinear(norm, linear), HEADS, KV_HEADS, DIM, None)
        if not left:
            monkeypatch.setattr(linear, "leaves", lambda x: False)
        own, residual = cache.clone(), torch.ones_like(x)
        unadded = {"nothing": None, "rows": x.clone(), "begun": begun(norm, residual)}.get(
            given, begun(norm_of(device, inputs), residual)
        )
        queries, total = heads(unadded, residual, cos, sin, own, index)
        found.append((queries.clone(), total, own))
        assert platform.placed == ([] if left else [tokens])
    for one, other in zip(*found, strict=True):
        if given == "begun":
            near(one, other)
        else:
            assert torch.equal(one, other)
    assert found[0][2].any()


@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_between_two_products_has_no_kernel(device, gated, engine, monkeypatch):
    tokens, width = 6, 1024
    x, first, _ = made(device, tokens, width, 512)
    second = (torch.randn(256, width) / width**0.5).to(x.dtype).to(device)
    norm = norm_of(device, width)
    into, behind = (
        CudaResidualLinear(CudaLinear(first, None)),
        ScaledNormThenLinear(norm, CudaLinear(second, None, gated=gated)),
    )
    into.next_norm = norm
    stream = torch.randn(tokens, width).to(x.dtype).to(device)
    plain = CudaLinear(second, None, gated=gated)
    expected_stream = stream.clone()
    expected = plain(norm.add(CudaLinear(first, None)(x), expected_stream)[0])
    launched = []
    monkeypatch.setattr(CudaNorm, "_launch", lambda *given, **_: launched.append(given))
    unadded, residual = into(x, stream)
    found, total = behind.add(unadded, residual)
    assert not launched
    assert total is residual is stream
    assert torch.equal(total, expected_stream)
    near(found, expected)


def test_what_is_no_copy_engines_is_added_by_the_norm(device, engine, monkeypatch):
    x, weight, _ = made(device, 5, 256, 4096)
    stream, norm = torch.ones(5, 256, device=device).to(x.dtype), norm_of(device, 256)

    def joins(linear, x=x, stream=stream, following=norm):
        return linear.into(x, stream.clone(), following)

    linear = CudaLinear(weight, None)
    unadded, _ = joins(linear)
    assert isinstance(unadded, Scaled)
    assert unadded.norm is norm
    assert joins(linear, following=None)[0] is None
    assert joins(linear, following=SimpleNamespace())[0] is None
    assert joins(linear, stream=stream.float()) is None
    assert joins(CudaLinear(weight, None, gated=True)) is None
    # That of one token, by another kernel, begins no norm; and of one or of many there are no parts.
    assert joins(linear, x[:1], stream[:1])[0] is None
    assert not linear.leaves(x[:1])
    assert not linear.leaves(x.repeat(13, 1))
    assert not CudaLinear(weight, torch.zeros_like(weight[:, 0])).leaves(x)
    assert not CudaLinear(weight, None, gated=True).leaves(x)
    assert linear.leaves(x)
    monkeypatch.setattr(linear, "_choices", SimpleNamespace(name=lambda *_: "cuBLAS"))
    assert joins(linear) is None
    assert not linear.leaves(x)
    assert linear.divided(begun(norm_of(device, 4096), x)) is None
    # What another norm began is normed anew.
    other, plain = norm_of(device, 256), CudaLinear(torch.randn(64, 256, device=device).to(x.dtype), None)
    behind = ScaledNormThenLinear(other, plain)
    assert torch.equal(behind.add(begun(norm, stream), stream)[0], plain(other(stream)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("captures", [(), (0, 2)])
def test_a_model_of_few_tokens_norms_its_stream_once_at_each_end(captures, device, tmp_path, monkeypatch):
    """And says what it says with a kernel for each norm and for each sum of parts, but for rounding."""
    made(device, 2, 8, 8)
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    path = make_tiny_model(tmp_path / "model", torch_dtype="bfloat16", **wide)
    platform = CudaDevice(RunnerConfig(model_path=str(path), device="cuda", dtype="bfloat16"))
    platform.linear._choices = SimpleNamespace(
        run=lambda shape, ways, trial, preferred: ways[preferred](), name=lambda shape, trial, preferred: preferred
    )
    paged = Paged(platform=platform, dtype=torch.bfloat16)
    config, target = decoder(path, paged, captures)
    batch = paged.batch([(1, 0, 6)], np.arange(40, 46))
    on_device = {name: getattr(batch, name).to(device) for name in ("token_ids", "positions", "cache_index")}
    batch = replace(batch, **on_device)
    normed, own = [], CudaNorm._launch

    def launch(self, *given, **how):
        normed.append(self)
        return own(self, *given, **how)

    monkeypatch.setattr(CudaNorm, "_launch", launch)
    with torch.inference_mode():
        caches = paged.caches(config)
        found = target.forward(batch, caches)
        assert normed == [target.layers[0].heads.projection.norm, target.norm]
        monkeypatch.setattr(CudaLinear, "into", lambda *_: None)
        monkeypatch.setattr(CudaLinear, "leaves", lambda *_: False)
        others = paged.caches(config)
        expected = target.forward(batch, others)
    assert found.shape == (6, 256 * (1 + len(captures)))
    for one, other in zip((found, *caches), (expected, *others), strict=True):
        assert one.isfinite().all()
        assert (one.float() - other.float()).norm() <= 0.02 * other.float().norm()
    assert not torch.equal(found, expected)
