"""Products and attention that do not depend on what else is in a step: against plain torch, and bit by bit against
themselves in other steps."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

import kernels.devices.cuda.invariant_kernels
from actors.engine.engine import Engine
from actors.protocol.requests import Chat, SamplingParams
from app.cli.arguments import load_arguments
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.invariant import InvariantCudaLinearLayers
from kernels.devices.cuda.invariant_kernels import InvariantLinear
from kernels.devices.experts import ExpertWeights, Routing
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import InvariantElementwise, InvariantExpertLayers
from kernels.devices.linear import LinearLayers
from tests.kits.cuda.caches import SHAPES, Caches, near
from tests.kits.verifying import made


@pytest.fixture
def put(device):
    return lambda array: torch.from_numpy(array.copy()).to(device)


def same(found, expected):
    """Bit by bit; the interpreter multiplies by a library whose order of sums depends on shapes."""
    if found.is_cuda:
        assert torch.equal(found, expected)
    else:
        near(found, expected)


def dtypes(device):
    return (torch.float16,) if device.type == "cpu" else (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 80), (200, 4176)])
def test_a_tokens_product_is_the_same_among_any_others(device, gated, outputs, inputs):
    for dtype in dtypes(device):
        generator = torch.Generator().manual_seed(outputs)
        weight, x = (
            torch.randn(shape, generator=generator).to(device, dtype) for shape in ((outputs, inputs), (300, inputs))
        )
        bias = torch.randn(outputs, generator=generator).to(device, dtype)
        linear = InvariantLinear(weight, bias, gated)
        whole = linear(x)
        expected = x.float() @ weight.float().T + bias.float()
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        near(whole, expected)
        for first, count in ((0, 1), (299, 1), (5, 3), (17, 40), (30, 200)):
            same(linear(x[first : first + count]), whole[first : first + count])
        assert linear(x[:0]).shape == (0, whole.shape[1])
        wider = torch.cat((x, x), 1)
        same(linear(wider[:7, :inputs]), whole[:7])


def test_a_tokens_experts_give_the_same_among_any_others(device):
    (dtype, *_), generator = dtypes(device), torch.Generator().manual_seed(6)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    elementwise, fallbacks = InvariantElementwise(device), Fallbacks()
    linear = InvariantCudaLinearLayers(elementwise, fallbacks, LinearLayers(elementwise, fallbacks))
    experts = [ExpertWeights(random(64, 80), None, random(80, 32), None) for _ in range(6)]
    layer = InvariantExpertLayers(linear, fallbacks).make(random(6, 80), None, experts, Routing(2, True))
    x = random(60, 80)
    whole = layer(x)
    assert whole.float().norm() > 0
    for first, count in ((0, 1), (59, 1), (5, 3), (17, 40)):
        same(layer(x[first : first + count]), whole[first : first + count])


class Counted:
    """A kernel, and the grids that it was launched with."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


def test_products_of_few_tokens_are_cut_along_their_inputs(device, monkeypatch):
    """Else so few programs read a weight that a decode takes twice as long."""
    product, add_up = (
        Counted(getattr(kernels.devices.cuda.invariant_kernels, name))
        for name in ("invariant_gemm_kernel", "invariant_sum_kernel")
    )
    monkeypatch.setattr(kernels.devices.cuda.invariant_kernels, "invariant_gemm_kernel", product)
    monkeypatch.setattr(kernels.devices.cuda.invariant_kernels, "invariant_sum_kernel", add_up)
    linear = InvariantLinear(torch.ones(64, 4176, device=device, dtype=torch.float16), None)
    for tokens in (1, 16, 17):
        linear(torch.ones(tokens, 4176, device=device, dtype=torch.float16))
    assert [grid[2] for grid in product.grids] == [3, 3, 1]
    assert [grid[1] for grid in add_up.grids] == [1, 16]


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 24, 16), (8, 2, 128, 64), (20, 1, 64, 32)])
def test_queries_see_what_others_do(device, put, window, trees, shape, heads, kv_heads, dim, page_size):
    if device.type == "cpu" and (page_size, window) != (16, 40) and (page_size, shape) != (64, "mixed"):
        pytest.skip("the interpreter is slow")
    for dtype in dtypes(device):
        case = made(
            Caches(device), torch.Generator().manual_seed(3), put=lambda tensor: tensor.to(device), dtype=dtype,
            heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, window=window, trees=trees, **SHAPES[shape],
        )  # fmt: skip
        near(
            attention(case.queries, case.cache, plan_attention(case.rows, window, kv_heads, put), 0.2, None),
            case.expected,
        )


LENGTH, PAGE, HEADS, KV_HEADS = 150, 16, 4, 2
PATH = (0, 2, 3, 6)
"""Nodes of a tree of 8."""


@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("dim", [24, 64])
def test_a_query_finds_the_same_in_any_step(device, put, window, dim):
    """As a decode, in chunks of a prompt wherever they begin, as a draft of a chain, and on a path of a tree."""
    for dtype in dtypes(device):
        _same_in_any_step(device, put, window, dim, dtype)


def _same_in_any_step(device, put, window, dim, dtype):
    generator = torch.Generator().manual_seed(dim)
    keys_values = torch.randn(LENGTH, 2 * KV_HEADS, dim, generator=generator).to(device, dtype)
    queries = torch.randn(LENGTH, HEADS, dim, generator=generator).to(device, dtype)
    caches, columns = Caches(device), -(-(LENGTH + 8) // PAGE)
    (cache,) = caches.make(1, columns + 1, PAGE, KV_HEADS, dim, dtype)
    pages = np.arange(columns, 0, -1, dtype=np.int32)[None]

    def keep(positions, source):
        at = np.asarray(positions)
        index = pages[0, at // PAGE].astype(np.int64) * PAGE + at % PAGE
        caches.write(cache, torch.from_numpy(index).to(device), source)

    def found(start, count, given, **kind):
        rows = AttentionRows(np.array([start]), np.array([count]), pages, **kind)
        return attention(given, cache, plan_attention(rows, window, KV_HEADS, put), 0.3, None)

    keep(range(LENGTH), keys_values)
    whole = found(0, LENGTH, queries, decodes=0)
    chunk = found(37, LENGTH - 37, queries[37:], decodes=0)
    same(chunk, whole[37:])
    for at in (0, 1, 15, 16, 63, 64, 100, LENGTH - 1):
        same(found(at, 1, queries[at : at + 1], decodes=1), whole[at : at + 1])
    for start in (0, 60, 127):
        some = found(start, 7, queries[start : start + 7], decodes=0, verifies=1)
        same(some, whole[start : start + 7])
    for start in (0, 61, 125):
        keep(range(start, start + 8), torch.randn(8, 2 * KV_HEADS, dim, generator=generator).to(device, dtype))
        keep([start + node for node in PATH], keys_values[start : start + len(PATH)])
        tree = torch.tensor([[sum(1 << seen for seen in PATH if seen <= node) for node in range(8)]])
        mixed = torch.randn(8, HEADS, dim, generator=generator).to(device, dtype)
        mixed[list(PATH)] = queries[start : start + len(PATH)]
        some = found(start, 8, mixed, decodes=0, verifies=1, tree=tree.to(device))
        same(some[list(PATH)], whole[start : start + len(PATH)])
        keep(range(start, start + 8), keys_values[start : start + 8])


QUESTIONS = ("What is the capital of Norway?", "Tell me a short story about a fox.", "What is 12 plus 30?")
WORDS = ("--device", "cuda", "--enable-deterministic-inference", "--max-total-tokens", "16384")


async def _answers(*more):
    """To each question, greedy and sampled: all asked at once, and then one by one with their prefixes there."""
    async with Engine(arguments=load_arguments([*WORDS, *more], {})) as engine:

        async def answer(question, temperature):
            params = SamplingParams(
                max_tokens=48, temperature=temperature, top_p=0.95 if temperature else 1.0, seed=7, ignore_eos=True
            )
            chat = Chat(messages=[{"role": "user", "content": question}])
            return [token async for delta in engine.generate(chat, params) for token in delta.token_ids]

        cases = [(question, temperature) for temperature in (0.0, 0.9) for question in QUESTIONS]
        together = await asyncio.gather(*(answer(*one) for one in cases))
        return together, [await answer(*one) for one in cases]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
async def test_answers_do_not_depend_on_the_batch_on_chunks_or_on_drafts():
    """The same by the included model alone, all at once, in chunks of a few tokens, and by trees and chains of
    draft tokens. Few engines: each takes seconds to start."""
    together, alone = await _answers()
    assert together == alone
    for more in (
        ("--chunked-prefill-size", "16"),
        ("--speculative-algorithm", "EAGLE3"),
        ("--speculative-algorithm", "NGRAM"),
    ):
        assert await _answers(*more) == (alone, alone)
