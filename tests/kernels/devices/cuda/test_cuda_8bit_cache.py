"""Attention over an 8-bit cache and writes to it, against the same over the dequantized cache."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cuda.attention.cache_8bit import Cache8bit, bits
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.moving import move_caches
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.devices.row_attention import CapAndSinks
from kernels.weights.quantization.cache import (
    CACHE_DTYPES,
    SCALE,
    LayerScales,
    narrow,
    round_fixed,
    round_tokens,
    widen,
)
from tests.kits.verifying import made

SHAPES = {
    "decodes": {"decodes": (3, 200, 63, 0)},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (40, 30))},
}
KINDS = [(name, fixed) for name in CACHE_DTYPES for fixed in (False, True) if name != "bfloat16" or not fixed]


def empty(device, name, fixed, pages, kv_heads, page_size, dim):
    dtype, shape = CACHE_DTYPES[name], (pages, 2, kv_heads, page_size, dim)
    scales = None
    if narrow(dtype) and not fixed:
        scales = torch.zeros(shape[:-1], dtype=SCALE, device=device)
    layer = None
    if fixed:
        sizes = 0.04 + 0.01 * torch.rand(2, kv_heads, dim)
        offsets = torch.randint(-9, 9, (2, kv_heads, dim)).float() if name == "int8" else None
        layer = LayerScales(sizes, offsets).to(device)
    return Cache8bit(torch.zeros(shape, dtype=dtype, device=device), scales, layer)


def widened(cache):
    """[pages, page_size, 2, kv_heads, dim] in float32."""
    values = bits(cache.values).permute(0, 3, 1, 2, 4).contiguous().cpu().view(cache.values.dtype)
    scales = None if cache.scales is None else cache.scales.permute(0, 3, 1, 2).cpu()
    fixed = None if cache.fixed is None else cache.fixed.to(torch.device("cpu"))
    return widen(values, scales, fixed, torch.float32)


class Caches:
    """What ``made`` needs of a platform, also where there is no GPU: it keeps what the narrow cache stands for."""

    def __init__(self, device, name, fixed):
        self.device, self.name, self.fixed = device, name, fixed
        self.cache = self  # the capability, too

    def make(self, layers, pages, page_size, kv_heads, dim, dtype):
        return [empty(self.device, self.name, self.fixed, pages, kv_heads, page_size, dim)]

    def write(self, cache, index, keys_values):
        cache.write(index, keys_values)


def near(found, expected, limit):
    found, expected = found.float().cpu(), expected.float().cpu()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "fixed"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 24, 16), (8, 2, 64, 64)])
def test_attention_dequantizes_the_cache(device, dtype, window, shape, name, fixed, heads, kv_heads, dim, page_size):
    if device.type == "cpu" and (dtype == torch.bfloat16 or (page_size, window) == (64, 40)):
        pytest.skip("the interpreter is slow, and knows no bfloat16 products")
    torch.manual_seed(2)
    case = made(
        Caches(device, name, fixed), torch.Generator().manual_seed(3), dtype=dtype, heads=heads, kv_heads=kv_heads,
        dim=dim, page_size=page_size, window=window, trees=shape == "mixed", fill=1e2,
        put=lambda tensor: tensor.to(device), **SHAPES[shape],
    )  # fmt: skip
    plan = plan_attention(case.rows, window, kv_heads, lambda array: torch.from_numpy(array.copy()).to(device))
    found = attention(case.queries, case.cache, plan, 0.2, DecodeScratch(device))
    limits = {"bfloat16": 5e-3, "int8": 0.02, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}
    near(found, case.expected, limits[name] + (0.01 if dtype == torch.bfloat16 else 0))
    # And nearer to what the rounded numbers stand for.
    wide = widened(case.cache).permute(0, 2, 3, 1, 4).contiguous().to(device)
    exact = attention(case.queries.float(), wide, plan, 0.2, DecodeScratch(device))
    near(found, exact, 2e-5 if dtype == torch.float32 else 0.01)
    if not fixed:
        extra = CapAndSinks(2.0, torch.linspace(-3, 3, heads, device=device))
        found = attention(case.queries, case.cache, plan, 0.2, DecodeScratch(device), extra)
        exact = attention(case.queries.float(), wide, plan, 0.2, DecodeScratch(device), extra)
        near(found, exact, 2e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize(("name", "fixed"), KINDS)
def test_heads_are_rounded_as_they_are_placed(device, dtype, tokens, name, fixed):
    torch.manual_seed(4)
    heads, kv_heads, dim, page_size, pages = 4, 2, 24, 16, 7
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim) * torch.logspace(-3, 1, tokens).view(-1, 1, 1)).to(dtype)
    qkv[0] = 0
    ones, zeros = torch.ones(tokens, 1, dim, dtype=dtype), torch.zeros(tokens, 1, dim, dtype=dtype)
    index = torch.randperm(pages * page_size)[:tokens]
    cache = empty(device, name, fixed, pages, kv_heads, page_size, dim)
    moved = qkv.to(device)
    norm_rope_cache(moved, heads, kv_heads, None, 0.0, ones.to(device), zeros.to(device), cache, index.to(device))
    both, kept = qkv[:, heads:].unflatten(1, (2, -1)), CACHE_DTYPES[name]
    on_host = None if cache.fixed is None else cache.fixed.to(torch.device("cpu"))
    if on_host is not None:
        values, scales = round_fixed(both, on_host, kept), None
    elif narrow(kept):
        values, scales = round_tokens(both, kept)
    else:
        values, scales = both.to(kept), None
    expected = widen(values, scales, on_host, torch.float32)
    found = widened(cache).flatten(0, 1)[index]
    # The device divides and rounds a scale in its own way, and the interpreter its ties: one step at most.
    one = both.float().abs().amax(-1, keepdim=True) / 126 if on_host is None else on_host.scales
    step = {"bfloat16": 2**-7, "int8": 0.0, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}[name] * expected.abs()
    step = step + {"bfloat16": 0.0, "int8": 1.0, "fp8_e4m3": 2**-9 * 4, "fp8_e5m2": 2**-16 * 999}[name] * one
    near_enough = ((found - expected).abs() <= 1.01 * step + 1e-30).float().mean()
    loses_carries = device.type == "cpu" and name.startswith("fp8")  # the interpreter, of fp8 that it rounds up
    assert near_enough > 0.9 if loses_carries else near_enough == 1
    assert torch.equal(moved[:, :heads].cpu(), qkv[:, :heads])
    if scales is not None:
        for nonfinite in (torch.nan, torch.inf):
            qkv[1, heads, 5] = nonfinite
            norm_rope_cache(
                qkv.to(device), heads, kv_heads, None, 0.0, ones.to(device), zeros.to(device), cache, index.to(device)
            )
            read = widened(cache).flatten(0, 1)[index]
            assert not read[1, 0, 0, 5].isfinite()
            assert read[2:].isfinite().all()


@pytest.mark.parametrize(("name", "fixed"), KINDS)
def test_scales_move_with_what_they_are_of(device, name, fixed):
    torch.manual_seed(5)
    caches = [empty(device, name, fixed, 5, 2, 16, 8) for _ in range(3)]
    sizes = torch.logspace(-2, 0, 80).view(-1, 1, 1)
    for cache in caches:
        cache.write(torch.arange(80).to(device), (torch.randn(80, 4, 8) * sizes).to(device))
    before = [widened(cache).flatten(0, 1) for cache in caches]
    source, target = torch.tensor([70, 21, 22, 40, 7, 7]), torch.tensor([20, 22, 21, 33, 7, 7])
    move_caches(caches, source.to(device), target.to(device), 3, lambda array: torch.from_numpy(array).to(device))
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(widened(cache).flatten(0, 1), expected)
        cache.move(target.to(device)[:2], source.to(device)[:2])
        cache.clear([4])
        assert not bits(cache.values)[4].any()
