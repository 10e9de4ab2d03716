"""Products with what adapters add, by whichever kernel takes so many tokens, against products of merged weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.layer_context import LayerContext
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.devices.cuda.elementwise.norms import Before, CudaNorm
from kernels.devices.cuda.matmul import low_rank_one
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta, make_up
from kernels.devices.cuda.matmul.low_rank_many import LowRankMany
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.cuda.matmul.qkv_projection import CudaQkvProjection
from kernels.devices.cuda.matmul.scaled_residual import Scaled
from tests.kits.cuda.heads import HEADS, KV_HEADS, Places, step

PLACES = 12
SIZES = {"one": (128,), "three": (192, 64, 64), "gated": (128, 128)}


class Products:
    """A layer of fused modules of ``sizes`` outputs with adapters, and their products in float32."""

    def __init__(self, device, dtype, rank, inputs, sizes, gated=False, bias=False):
        torch.manual_seed(rank)
        outputs = sum(sizes)
        self.dtype, self.device, self.gated, self.sizes, self.rank = dtype, device, gated, sizes, rank
        self.context = LayerContext(None, device)
        self.context.open(PLACES, 1)
        for place in range(PLACES):
            self.context.assign(np.array([place]), place)
        self.down = (torch.randn(PLACES, len(sizes) * rank, inputs) / inputs**0.5).to(device, dtype)
        self.up = make_up((1, PLACES, rank, outputs), dtype, device)[0]
        self.up.copy_(torch.randn(PLACES, rank, outputs) / rank**0.5)
        self.down[0] = self.up[0] = 0
        self.weight = (torch.randn(outputs, inputs) / inputs**0.5).to(device, dtype)
        self.bias = torch.randn(outputs).to(device, dtype) if bias else None
        delta = CudaLowRankDelta(self.context, self.down, self.up, sizes)
        self.linear = CudaLinear(self.weight, self.bias, None, gated, delta=delta)

    def tokens(self, count, *places):
        """Random tokens, of adapters at ``places`` in turn."""
        chosen = torch.tensor([places[index % len(places)] for index in range(count)])
        self.context.enter(chosen.to(self.device))
        return torch.randn(count, self.weight.shape[1]).to(self.device, self.dtype)

    def expected(self, x, activate=True):
        """The products of merged weights with ``x`` float32."""
        columns, end = [], 0
        for number, size in enumerate(self.sizes):
            begin, end = end, end + size
            a = self.down[:, number * self.rank : (number + 1) * self.rank].float()
            b = self.up[:, :, begin:end].float()
            merged = self.weight[begin:end].float() + torch.einsum("pro,pri->poi", b, a)
            columns.append(torch.einsum("toi,ti->to", merged[self.context.rows], x))
        result = torch.cat(columns, 1)
        if self.bias is not None:
            result += self.bias.float()
        if not (self.gated and activate):
            return result
        gate, other = result.chunk(2, 1)
        return torch.nn.functional.silu(gate) * other

    def assert_close(self, found, expected):
        error = 1e-4 if self.dtype is torch.float32 else 0.01
        assert (found.float() - expected).norm() < error * expected.norm()


def dtypes(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("places", [(0,), (11,), (3, 0, 1, 11)], ids=["none", "one", "mixed"])
@pytest.mark.parametrize("tokens", [1, 2, 17, 33, 64, 70])
@pytest.mark.parametrize(("kind", "rank", "inputs"), [("one", 16, 256), ("three", 8, 1040), ("gated", 24, 512)])
def test_a_product_has_what_its_rows_adapters_add(kind, rank, inputs, tokens, places, device):
    products = Products(device, dtypes(device), rank, inputs, SIZES[kind], kind == "gated")
    for _ in range(2):  # nothing is left behind
        x = products.tokens(tokens, *places)
        products.assert_close(products.linear(x), products.expected(x.float()))


@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_gate_and_up_of_one_module_have_what_adapters_add(tokens, device):
    products = Products(device, dtypes(device), 24, 256, (256,), gated=True, bias=True)
    x = products.tokens(tokens, 3, 0)
    products.assert_close(products.linear(x), products.expected(x.float()))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("sizes", "rank", "inputs", "tokens"),
    [
        ((200, 40, 40), 24, 328, 65),
        ((256, 64, 64), 16, 1040, 200),
        ((300,), 8, 4112, 200),
        ((128,), 64, 512, 70),
        ((320, 64), 80, 304, 200),
        ((104, 104), 16, 304, 200),
        ((64, 64), 40, 1040, 70),
    ],
)
def test_prompts_and_decodes_share_a_product(sizes, rank, inputs, tokens, biased, device):
    gated = sizes[0] == sizes[-1] and len(sizes) == 2
    products = Products(device, dtypes(device), rank, inputs, sizes, gated, biased)
    prompts = [9] * (tokens - 50) if tokens < 150 else [4] * 20 + [0] * 70 + [1] * (tokens - 140)
    for places in ([*range(PLACES)] * 4 + [0, 0] + prompts, [7] * tokens, [0] * 64 + [11] * (tokens - 64)):
        x = products.tokens(tokens, *places)
        expected = products.expected(x.float())
        for _ in range(2):  # nothing is left behind
            products.assert_close(products.linear(x), expected)


@pytest.mark.parametrize(("tokens", "expected"), [(64, 0), (65, 1), (200, 1)])
def test_prompts_have_kernels_of_their_own(tokens, expected, device, monkeypatch):
    products, found = Products(device, dtypes(device), 16, 256, (128,), bias=True), []
    add = LowRankMany.add
    monkeypatch.setattr(LowRankMany, "add", lambda *given, **named: found.append(None) or add(*given, **named))
    x = products.tokens(tokens, 3, 0)
    products.assert_close(products.linear(x), products.expected(x.float()))
    assert len(found) == expected


@pytest.fixture
def launches(monkeypatch):
    """Counts launches of the kernel for one token."""
    found, launch = [], low_rank_one.multiply
    monkeypatch.setattr(
        low_rank_one, "multiply", lambda *given, **named: found.append(named) or launch(*given, **named)
    )
    return found


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kind", "rank", "inputs"), [("one", 16, 256), ("three", 8, 4112), ("gated", 40, 2064)])
def test_one_token_takes_one_launch_with_the_norm(kind, rank, inputs, biased, device, launches):
    products = Products(device, dtypes(device), rank, inputs, SIZES[kind], kind == "gated", biased)
    norm = CudaNorm(1 + torch.rand(inputs).to(device, products.dtype), 1e-5)
    for place in (3, 11, 0):
        x = products.tokens(1, place)
        (fused,) = products.linear.fused_with_norm(x, Before(None, norm.weight, norm.eps)).values()
        products.assert_close(fused()[0], products.expected(norm(x).float()))
    assert len(launches) == 3


@pytest.mark.parametrize("dim", [32, 36])  # 36: heads end within a program of 16 rows
def test_heads_of_one_token_are_placed_in_the_same_launch(dim, device, launches, monkeypatch):
    monkeypatch.setattr(CudaLowRankDelta, "extends", True)  # as with heads of this size whose outputs are whole
    inputs = 256
    products = Products(device, dtypes(device), 16, inputs, (HEADS * dim, KV_HEADS * dim, KV_HEADS * dim), bias=True)
    norm = CudaNorm(1 + torch.rand(inputs).to(device, products.dtype), 1e-5)
    projection = CudaNormThenLinear(norm, products.linear, None)
    heads = CudaQkvProjection(Places(), projection, HEADS, KV_HEADS, dim, None)
    for first in (True, False):
        products.tokens(1, 5)
        x, residual, cos, sin, cache, index = step(device, products.dtype, dim, inputs)
        total = residual if first else residual + x
        qkv = products.expected(norm(total).float()).to(products.dtype).view(1, -1, dim)
        placed = cache.clone()
        norm_rope_cache(qkv, HEADS, KV_HEADS, None, 0.0, cos, sin, placed, index)
        queries, found = heads(None if first else x, residual, cos, sin, cache, index)
        assert heads.attention.placed == []
        assert torch.equal(found, total)
        products.assert_close(queries, qkv[:, :HEADS].float())
        products.assert_close(cache, placed.float())
    assert len(launches) == 2


def test_heads_of_odd_halves_are_placed_by_a_launch_of_their_own(device, monkeypatch):
    monkeypatch.setattr(CudaLowRankDelta, "extends", True)
    dim, inputs = 34, 256
    products = Products(device, dtypes(device), 16, inputs, (HEADS * dim, KV_HEADS * dim, KV_HEADS * dim))
    norm = CudaNorm(torch.ones(inputs).to(device, products.dtype), 1e-5)
    projection = CudaNormThenLinear(norm, products.linear, None)
    heads = CudaQkvProjection(Places(), projection, HEADS, KV_HEADS, dim, None)
    products.tokens(1, 5)
    heads(*step(device, products.dtype, dim, inputs))
    assert heads.attention.placed == [1]


def test_a_layer_runs_twice_in_one_pass(device, launches):
    products = Products(device, dtypes(device), 16, 256, (128,))
    x = products.tokens(1, 4)
    for token in (x, 2 * x):
        products.assert_close(products.linear(token), products.expected(token.float()))
    assert len(launches) == 1  # the second would take sums of the first


@pytest.mark.parametrize("tokens", [1, 5, 70, 2050])
def test_a_product_for_the_stream_has_what_adapters_add(tokens, device):
    products = Products(device, dtypes(device), 16, 256, (64,))
    x, residual = products.tokens(tokens, 2, 0), torch.randn(tokens, 64).to(device, products.dtype)
    norm = CudaNorm(torch.ones(64).to(device, products.dtype), 1e-5)
    expected = products.expected(x.float()) + residual.float()
    found = products.linear.into(x, residual.clone(), norm)
    if found is None:  # the kernel that adds takes brain floats alone
        assert 1 < tokens < 2048
        return
    products.assert_close(found[1], expected)
    if isinstance(found[0], Scaled):
        products.assert_close(found[0].rows, expected)


@pytest.mark.parametrize(("tokens", "rank", "inputs"), [(2, 16, 304), (17, 8, 4096), (40, 40, 1104), (64, 96, 640)])
def test_the_first_half_of_few_tokens_is_zero_elsewhere(tokens, rank, inputs, device):
    products = Products(device, dtypes(device), rank, inputs, (64, 64))
    if device.type != "cuda":
        pytest.skip("Gluon has no interpreter")
    from kernels.devices.cuda.matmul.low_rank_few import STEP, shrink

    x, counters = products.tokens(tokens, 9, 0, 2), torch.zeros(1000, dtype=torch.int32, device=device)
    for _ in range(2):
        low, begun = shrink(x, products.context.rows, products.down, rank, counters)
    reach = -(-9 * rank // STEP) * STEP
    found = (
        low.float()
        .view(2, tokens, PLACES - 1, rank)
        .masked_fill_(torch.arange(low.shape[1], device=device).view(PLACES - 1, rank) >= reach, 0)
    )
    every = torch.einsum("ti,pri->ptr", x.float(), products.down[1:].float()).view(PLACES - 1, tokens, 2, rank)
    own = products.context.rows[:, None] == torch.arange(1, PLACES, device=device)
    products.assert_close(found, every.permute(2, 1, 0, 3) * own[None, :, :, None])
    assert begun[0] == 1
    assert not counters[1:].any()


def test_a_pass_without_adapters_has_products_of_the_weight(device):
    products = Products(device, dtypes(device), 16, 256, (64,))
    x = products.tokens(1, 3)
    products.context.idle = True
    products.assert_close(products.linear(x), x.float() @ products.weight.float().T)
