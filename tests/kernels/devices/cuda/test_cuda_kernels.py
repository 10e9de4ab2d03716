"""Each kernel against the same in plain float32 torch."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

import kernels.devices.cuda
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention.decode import DecodeScratch, split_count
from kernels.devices.cuda.attention.plan import AttentionPlan, DraftRows, attention, plan_attention
from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.angles import angles
from kernels.devices.cuda.elementwise.norm_rope_cache import norm_rope_cache
from kernels.devices.cuda.elementwise.norms import CudaNorm, norm_embeddings_and_states, norm_pair
from kernels.devices.cuda.elementwise.rows import look_up
from kernels.devices.cuda.elementwise.sampling import greedy_tokens, mask_logits
from kernels.devices.cuda.launch import copying
from kernels.devices.cuda.matmul import gemm_small, gemm_small_tma
from kernels.devices.cuda.matmul import linear as linear_layers
from kernels.devices.cuda.matmul.autotune import Choices
from kernels.devices.cuda.matmul.linear import CudaLinear
from kernels.devices.cuda.matmul.norm_then_linear import CudaNormThenLinear
from kernels.devices.linear import NormThenLinear
from kernels.devices.row_attention import CapAndSinks
from kernels.sampling.masks import RowMasks
from tests.kernels.devices.cuda.plain import bulk_in_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Chosen(Choices):
    """What is ``chosen`` by the test, the ways that were to be ``tried``, and which one is ``preferred``."""

    def __init__(self) -> None:
        self.chosen, self.tried, self.preferred = "", {}, ""

    def name(self, shape, trial, preferred=""):
        self.tried, self.preferred = trial(), preferred
        return self.chosen


def near(found: Tensor, expected: Tensor) -> None:
    """The relative error of the whole, as a kernel's rounding leaves it."""
    # The interpreter cuts numbers off where a GPU rounds them to bfloat16.
    limit = {torch.float32: 2e-5, torch.float16: 2e-3}.get(found.dtype, 1e-2 if found.is_cuda else 2e-2)
    found, expected = found.float().cpu(), expected.float().cpu()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1024, 5000])
def test_norm_and_norm_behind_an_addition(device, dtype, width):
    x, residual = torch.randn(2, 3, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    norm = CudaNorm(weight, 1e-5)

    def expected(value: Tensor) -> Tensor:
        return value.float() * torch.rsqrt(value.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()

    near(norm(x), expected(x))
    other = CudaNorm(weight.flip(0), 1e-5)
    near(norm_pair(x, norm, residual, other), torch.cat((norm(x).float(), other(residual).float()), 1))
    total = (x.float() + residual.float()).to(dtype)
    normed, kept = norm.add(x, residual)
    near(normed, expected(total))
    near(kept, total)  # the interpreter cuts where the device rounds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1024])
def test_what_a_pass_over_tokens_and_states_begins_with(device, dtype, width):
    """To the bit what kernels of their own make of it; a token that the table has not is nothing."""
    ids, positions = torch.tensor([7, 0, 99, 31], device=device), torch.tensor([3, 0, 700, 9], device=device)
    table, states = (torch.randn(rows, 2 * width, device=device).to(dtype)[:, :width] for rows in (32, 4))
    token_norm, state_norm = (CudaNorm(torch.randn(width, device=device).to(dtype), eps) for eps in (1e-5, 1e-2))
    frequencies = torch.rand(24, device=device)
    found = norm_embeddings_and_states(ids, table, token_norm, states, state_norm, positions, frequencies, 0.5)
    assert torch.equal(found[0], norm_pair(look_up(ids, table), token_norm, states, state_norm))
    assert found[0].any(1).all()
    for part, expected in zip(found[1:], angles(positions, frequencies, 0.5, dtype), strict=True):
        assert part.shape == (4, 1, 24)
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [80, 1536])
def test_swiglu(device, dtype, inner):
    x = torch.randn(5, 2 * inner, device=device).to(dtype)
    near(swiglu(x), torch.nn.functional.silu(x[:, :inner].float()) * x[:, inner:].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 48), (33, 1024), (64, 5120)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_linear_layers(device, dtype, biased, outputs, inputs, tokens):
    weight = torch.randn(2 * outputs, inputs, device=device).to(dtype)
    bias = torch.randn(2 * outputs, device=device).to(dtype) if biased else None
    x = (torch.randn(tokens, inputs, device=device) / math.sqrt(inputs)).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    near(CudaLinear(weight, bias)(x), expected)
    near(
        CudaLinear(weight, bias, gated=True)(x), torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    )


class Fusing(CudaLinear):
    """Makes the norm before it in two ways, by torch's operators."""

    def fused_with_norm(self, x, before):
        if len(x) > 1:
            return {}

        def within():
            total = x + before.residual
            return self(torch.nn.functional.rms_norm(total, total.shape[1:], before.gain, before.eps)), total

        return {"within": within, "otherwise": within}

    def copies(self):
        return [Fusing(self.weight.clone(), self.bias)]


def test_linear_layers_behind_a_norm(device):
    """The choice between the ways, beside the norm and the layer as they are."""
    x, residual = torch.randn(2, 1, 48, device=device) / 7
    norm = CudaNorm(torch.randn(48, device=device) / 7, 1e-5)
    linear = Fusing(torch.randn(96, 48, device=device), torch.randn(96, device=device))
    expected, total = NormThenLinear(norm, linear).add(x.clone(), residual.clone())
    choices = Chosen()
    for name in ("apart", "within"):
        choices.chosen = name
        found, summed = CudaNormThenLinear(norm, linear, choices).add(x.clone(), residual.clone())
        near(found, expected)
        near(summed, total)
    assert list(choices.tried) == ["apart", "within", "otherwise"]
    for way in [*choices.tried.values()] * 2:  # a trial leaves no traces
        near(way(), expected)
    both = torch.cat((x, x))
    near(CudaNormThenLinear(norm, linear, choices).add(both.clone(), both.clone())[0], linear(norm(both + both)))


@pytest.fixture(scope="module")
def bulks(tmp_path_factory):
    return gemm_small_tma if torch.cuda.is_available() else bulk_in_triton(tmp_path_factory.mktemp("plain"))


OWN = ("narrow", "narrow, short")


@pytest.mark.parametrize(
    ("tokens", "gated", "names"),
    [(2, False, OWN), (40, True, OWN), (2, True, ("bulk",)), (40, False, ("bulk",))],
)
def test_products_of_a_few_tokens_are_tried_in_a_row(device, monkeypatch, tokens, gated, names, bulks):
    """Every way is tried, and gives the layer's product."""
    weight = torch.randn(192, 1024, device=device).half()
    x = (torch.randn(tokens, 1024, device=device) / 32).half()
    if device.type == "cpu":
        monkeypatch.setattr(gemm_small, "able", lambda x, weight: True)
        monkeypatch.setattr(kernels.devices.cuda.matmul, "gemm_small_tma", bulks, raising=False)
    elif "bulk" in names and not copying(device):
        pytest.skip("the device has no such engine, or another one")
    monkeypatch.setattr(linear_layers, "_carried", lambda x, weight: "bulk" in names)
    expected = CudaLinear(weight, None, None, gated)(x)
    choices = Chosen()
    linear = CudaLinear(weight, None, choices, gated)
    for choices.chosen in ("cuBLAS", *names):
        near(linear(x), expected)
        near(linear(torch.cat((x, x), 1)[:, :1024]), expected)  # as hidden states beside captured ones are
    assert list(choices.tried) == ["cuBLAS", *names]
    assert choices.preferred == "bulk"
    for way in choices.tried.values():
        near(way(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (200, 4096), (64, 9088), (8200, 256)])
@pytest.mark.parametrize("tokens", [2, 17, 64])
def test_products_of_a_few_tokens(device, dtype, biased, outputs, inputs, tokens):
    weight = torch.randn(2 * outputs, inputs, device=device).to(dtype)
    bias = torch.randn(2 * outputs, device=device).to(dtype) if biased else None
    x = (torch.randn(tokens, inputs, device=device) / math.sqrt(inputs)).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()
    arrived = gemm_small.counters(weight)
    both = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    for split in gemm_small.split_options(tokens, weight, gated=False).values():
        for _ in range(2):  # the counters of parts must be back at zero
            near(gemm_small.multiply(x, weight, bias, arrived, gated=False, split=split), expected)
    for split in gemm_small.split_options(tokens, weight, gated=True).values():
        near(gemm_small.multiply(x, weight, bias, arrived, gated=True, split=split), both)
    near(gemm_small.multiply(x, weight, bias, arrived, gated=True), both)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(2, 96, 520), (17, 200, 4096), (64, 64, 9088)])
def test_products_of_a_few_tokens_by_the_copy_engine(device, tokens, outputs, inputs, gated, bulks):
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    weight = torch.randn(2 * outputs, inputs, device=device).to(dtype)
    bias = torch.randn(2 * outputs, device=device).to(dtype)
    x = (torch.randn(tokens, inputs, device=device) / math.sqrt(inputs)).to(dtype)
    if device.type == "cuda" and not copying(device):
        pytest.skip("the device has no such engine, or another one")
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    if gated:
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    arrived = gemm_small.counters(weight)
    for _ in range(2):  # the counters of parts must be back at zero
        near(bulks.multiply(x, bulks.described(weight), bias, arrived, gated), expected)
    wide = torch.cat((torch.full_like(x, 7.0), x), 1)[:, inputs:]  # as hidden states beside captured ones are
    near(bulks.multiply(wide, bulks.described(weight), bias, arrived, gated), expected)
    assert not arrived.any()
    if device.type == "cpu":
        waited, ended = bulks.Barrier.asked()
        assert waited == ended  # nothing is on its way when a program has ended


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(2, 96, 528), (17, 200, 4096), (64, 64, 9088)])
def test_products_of_a_few_tokens_in_eight_bits(device, tokens, outputs, inputs, gated, bulks):
    if device.type == "cuda" and not copying(device):
        pytest.skip("the device has no such engine, or another one")
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    weight = torch.randn(2 * outputs, inputs, device=device).to(torch.float8_e4m3fn)
    x = torch.randn(tokens, inputs, device=device).to(torch.float8_e4m3fn)
    bias = torch.randn(2 * outputs, device=device).to(dtype)
    scales = torch.rand(tokens, device=device) + 0.5, torch.rand(2 * outputs, device=device) / math.sqrt(inputs)
    expected = (x.double() @ weight.double().t()) * scales[0][:, None] * scales[1] + bias.double()
    if gated:
        expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
    arrived = gemm_small.counters(weight)
    for _ in range(2):  # the counters of parts must be back at zero
        both = bulks.EightBitScales(*scales, dtype)
        found = bulks.multiply(x, bulks.described(weight), bias, arrived, gated, scales=both)
        near(found, expected.float())
    assert found.dtype == dtype
    assert not arrived.any()


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "gated", "parts"),
    [
        (64, 6144, 4096, False, 1),
        (64, 4096, 4096, False, 1),
        (64, 4096, 14336, False, 1),
        (64, 5632, 2048, True, 1),
        (64, 3072, 1024, True, 2),
        (64, 1024, 2048, False, 4),
        (33, 1024, 3072, False, 4),
        (32, 1024, 3072, False, 2),
    ],
)
def test_programs_of_many_tokens_lie_evenly(tokens, outputs, inputs, gated, parts):
    """As many as an H200 has multiprocessors take all of one, unless tokens are cut until there are more."""
    cut = gemm_small_tma.choose_split(tokens, outputs, inputs, gated)
    assert triton.next_power_of_2(tokens) // cut.tokens == parts
    programs = parts * -(-outputs // 64) * cut.splits
    stage = (64 * (2 if gated else 1) + cut.tokens) * 128 * 2
    assert programs > 48
    assert cut.stages * stage <= 227 << 10
    if cut.tokens > 16 and programs <= 132:
        assert 2 * cut.stages * stage > 227 << 10
    assert cut.splits == 1 or inputs // 128 // cut.splits >= 4
    weight = torch.empty((2 if gated else 1) * outputs, 1)
    assert len(gemm_small.counters(weight)) >= parts * -(-outputs // 64)  # each tile of each part has one


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "splits", "stages"),
    [
        (4096, 14336, False, 2, 11),
        (4096, 4096, False, 2, 11),
        (8192, 28672, False, 1, 11),
        (6144, 4096, False, 4, 3),
        (6144, 8192, False, 4, 3),
        (6144, 12288, False, 2, 5),
        (1024, 3072, False, 4, 5),
        (14336, 4096, True, 1, 3),
        (8192, 8192, True, 2, 3),
        (128256, 4096, False, 1, 5),
    ],
)
def test_programs_of_few_tokens_lie_evenly(outputs, inputs, gated, splits, stages):
    """Where one or three of each multiprocessor are most of what fits on an H200."""
    assert (
        gemm_small_tma.choose_split(16, outputs, inputs, gated)
        == gemm_small_tma.choose_split(2, outputs, inputs, gated)
        == gemm_small_tma.TmaSplit(16, splits, stages)
    )
    if not gated:
        fit = (228 << 10) // (stages * (64 + 16) * 128 * 2 + 1024)
        assert fit == {11: 1, 5: 2, 3: 3}[stages]
        assert stages == 5 or 0.9 <= splits * -(-outputs // 64) / (132 * fit) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(device, dtype):
    positions = torch.tensor([0, 1, 77, 131071], device=device)
    frequencies = torch.tensor([-1.0, -0.01, -1e-5, 1.0, 0.01, 1e-5], device=device)
    angle = (positions.float()[:, None, None] * frequencies).double()
    for found, expected in zip(angles(positions, frequencies, 1.5, dtype), (angle.cos(), angle.sin()), strict=True):
        assert found.shape == (4, 1, 6)
        near(found, 1.5 * expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [16, 24, 128])
@pytest.mark.parametrize("tokens", [3, 70])
def test_heads_are_normed_rotated_and_put_into_the_cache(device, dtype, normed, dim, tokens):
    heads, kv_heads, page_size, pages = 4, 2, 16, 7
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    given = qkv.float().clone()
    weight = torch.randn(heads + kv_heads, dim, device=device).to(dtype) if normed else None
    angle = torch.rand(tokens, 1, dim // 2, device=device) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    cache = torch.zeros(pages, 2, kv_heads, page_size, dim, device=device, dtype=dtype)
    index = torch.randperm(pages * page_size)[:tokens].to(device)
    norm_rope_cache(qkv, heads, kv_heads, weight, 1e-6, cos, sin, cache, index)

    qk = given[:, : heads + kv_heads]
    if weight is not None:
        qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    half = dim // 2
    qk = qk * cos.float() + torch.cat((qk[..., half:], qk[..., :half]), -1) * sin.float()
    near(qkv[:, :heads], qk[:, :heads])
    placed = cache[index // page_size, :, :, index % page_size]
    near(placed[:, 0], qk[:, heads:])
    assert torch.equal(placed[:, 1].float(), given[:, heads + kv_heads :])
    assert int((cache != 0).any(-1).sum()) == tokens * 2 * kv_heads


def filled(device: torch.device, dtype: torch.dtype, lengths: list[int], kv_heads: int, dim: int, page_size: int):
    """A cache of random numbers, and each row's pages in it, shuffled."""
    columns = -(-max(lengths) // page_size)
    count = len(lengths) * columns + 1
    cache = torch.randn(count, 2, kv_heads, page_size, dim, device=device).to(dtype)
    pages = np.random.default_rng(3).permutation(np.arange(1, count)).reshape(len(lengths), columns).astype(np.int32)
    return cache, pages


def reference(
    queries: Tensor,
    cache: Tensor,
    rows: AttentionRows,
    window: int,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    growth: int = 0,
) -> Tensor:
    _, heads, dim = queries.shape
    kv_heads = cache.shape[2]
    found, offset = [], 0
    for start, count, pages in zip(rows.starts.tolist(), rows.counts.tolist(), rows.pages, strict=True):
        held = cache[torch.from_numpy(pages.astype(np.int64)).to(cache.device)].double()
        keys, values = held.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, : start + count]
        q = queries[offset : offset + count].double().view(count, kv_heads, heads // kv_heads, dim)
        score = torch.einsum("qhgd,hkd->hgqk", q, keys) * scale
        at, key = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        hidden = key > at
        if window > 0:
            hidden |= key <= at - window
        elif window:
            hidden |= key < at // -window * -window
        score = cap * torch.tanh(score / cap) if cap else score
        if growth:
            score = score * (torch.log2(at.clamp(min=growth).double()) / math.log2(growth)).to(score.device)
        score = score.masked_fill(hidden.to(score.device), -torch.inf)
        if sinks is not None:
            beside = sinks.double().view(*score.shape[:2], 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat((score, beside), -1)
        score = score.softmax(-1)[..., : start + count]
        found.append(torch.einsum("hgqk,hkd->qhgd", score, values).reshape(count, heads * dim))
        offset += count
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size"), [(4, 2, 16, 16), (6, 2, 24, 64), (8, 1, 128, 64), (2, 1, 256, 64)]
)
@pytest.mark.parametrize("shape", ["decodes", "alone", "prefills", "mixed", "long"])
def test_attention_over_pages(device, dtype, window, heads, kv_heads, dim, page_size, shape):
    counts, starts = {
        "decodes": ([1, 1, 1, 1], [0, 5, 200, 63]),
        "alone": ([1], [300]),
        "prefills": ([150, 3, 40], [0, 70, 33]),
        "mixed": ([1, 1, 130, 5], [17, 990, 0, 64]),
        "long": ([1, 1100], [40, 7]),
    }[shape]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    cache, pages = filled(device, dtype, lengths, kv_heads, dim, page_size)
    decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
    rows = AttentionRows(np.array(starts), np.array(counts), pages, decodes)
    whole = torch.randn(sum(counts), heads + 2 * kv_heads, dim, device=device).to(dtype)
    queries, scale = whole[:, :heads], dim**-0.5
    plan = plan_attention(rows, window, kv_heads, lambda array: torch.from_numpy(array.copy()).to(device))
    scratch = DecodeScratch(device)
    for _ in range(2):  # the counters of split sequences must be back at zero
        near(attention(queries, cache, plan, scale, scratch), reference(queries, cache, rows, window, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("cap", "sunk"), [(0.0, True), (3.0, False), (3.0, True)])
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 24, 64), (8, 1, 64, 16)])
@pytest.mark.parametrize("shape", ["decodes", "alone", "prefills", "drafts"])
def test_attention_with_caps_and_sinks(device, dtype, cap, sunk, window, heads, kv_heads, dim, page_size, shape):
    counts, starts = {
        "decodes": ([1, 1, 1, 1], [0, 5, 200, 63]),
        "alone": ([1], [300]),
        "prefills": ([1, 150, 3], [70, 0, 70]),
        "drafts": ([4, 2, 1], [300, 9, 64]),
    }[shape]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    cache, pages = filled(device, dtype, lengths, kv_heads, dim, page_size)
    drafts, decodes = len(counts) if shape == "drafts" else 0, sum(count == 1 for count in counts)
    rows = AttentionRows(np.array(starts), np.array(counts), pages, 0 if drafts else decodes, drafts)
    queries = 3 * torch.randn(sum(counts), heads, dim, device=device).to(dtype)
    sinks = torch.linspace(-9, 9, heads, device=device) if sunk else None  # some take nothing, some all
    plan = plan_attention(rows, window, kv_heads, lambda array: torch.from_numpy(array.copy()).to(device))
    found = attention(queries, cache, plan, dim**-0.5, DecodeScratch(device), CapAndSinks(cap, sinks))
    near(found, reference(queries, cache, rows, window, dim**-0.5, cap, sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "growth"), [(-32, 0), (0, 16), (-48, 16)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size"), [(6, 2, 24, 64), (8, 1, 512, 16)])
@pytest.mark.parametrize("shape", ["decodes", "alone", "prefills", "chains", "trees"])
def test_attention_in_chunks_and_that_grows(device, dtype, window, growth, heads, kv_heads, dim, page_size, shape):
    if device.type == "cpu" and (dtype == torch.bfloat16 or (dim == 512 and shape in ("alone", "prefills"))):
        pytest.skip("the interpreter is slow, and knows no products of bfloat16")
    counts, starts = {
        "decodes": ([1, 1, 1, 1], [0, 5, 200, 63]),
        "alone": ([1], [300]),
        "prefills": ([1, 150, 3], [70, 0, 70]),
        "chains": ([4, 2, 1], [300, 31, 64]),
        "trees": ([4, 4], [300, 29]),
    }[shape]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    cache, pages = filled(device, dtype, lengths, kv_heads, dim, page_size)
    drafts, decodes = len(counts) if shape in ("chains", "trees") else 0, sum(count == 1 for count in counts)
    chain = torch.tensor([[1, 3, 7, 15]] * 2, device=device) if shape == "trees" else None  # bits of a path
    rows = AttentionRows(np.array(starts), np.array(counts), pages, 0 if drafts else decodes, drafts, chain)
    queries = torch.randn(sum(counts), heads, dim, device=device).to(dtype)
    plan = plan_attention(rows, window, kv_heads, lambda array: torch.from_numpy(array.copy()).to(device))
    extra = CapAndSinks(3.0 if growth else 0.0, None, growth)
    result = attention(queries, cache, plan, dim**-0.5, DecodeScratch(device), extra)
    near(result, reference(queries, cache, rows, window, dim**-0.5, extra.cap, None, growth))


@pytest.mark.parametrize("start", [30, 300])
def test_queries_behind_a_rows_tokens_that_see_none_are_finite(device, start):
    """As a graph pads rows: their numbers go to the null page, of which masked blocks are read."""
    cache, pages = filled(device, torch.float16, [start + 1], 2, 24, 16)
    state = torch.tensor([[0, 8, start, start + 1, *pages[0].tolist()]], dtype=torch.int32, device=device)
    queries = torch.randn(8, 4, 24, device=device).half()
    plan = AttentionPlan(None, None, -32, DraftRows(state, None, 8, start + 1))
    assert attention(queries, cache, plan, 0.2, DecodeScratch(device)).isfinite().all()


def test_sequences_are_split_until_the_device_is_full():
    assert split_count(1, 8, 131072) == 64
    assert split_count(1, 8, 128) == 2
    assert split_count(64, 8, 8192) == 2
    assert split_count(512, 8, 8192) == 1
    assert split_count(512, 8, 131072) == 4  # one long sequence among many is not left to one program


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_argmax_and_rows_that_fail(device, dtype):
    logits = torch.randn(6, 9001, device=device).to(dtype)
    logits[0, [17, 8000]] = 50.0  # the first of equals
    logits[1, 9000] = 60.0
    logits[2, 4321] = torch.nan
    logits[3, 7] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    tokens, nonfinite = greedy_tokens(logits)
    assert tokens.tolist() == [17, 9000, 0, 0, 0, 0]
    assert nonfinite.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_masks_of_some_rows_forbid_what_torch_forbids(device, dtype):
    vocab, words = 9001, 282
    logits = torch.randn(5, vocab, device=device).to(dtype)
    bits = np.random.default_rng(1).integers(-(2**31), 2**31, (3, words)).astype(np.int32)
    bits[1], bits[2] = -1, 0
    masks = RowMasks(np.array([4, 0, 2]), bits, lambda array: torch.from_numpy(array).to(device))
    expected = logits.clone()
    masks.apply(expected)
    masks.apply(logits, mask_logits)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[[0, 1, 3]].isfinite(), torch.ones(3, vocab, dtype=torch.bool, device=device))


def test_scratch_that_was_outgrown_stays_where_it_was():
    """Graphs write to it for as long as they are replayed."""
    scratch = DecodeScratch(torch.device("cpu"))
    before = [weakref.ref(tensor.untyped_storage()) for tensor in scratch.room(24, 16, 8, 128, 8)]
    places = [storage().data_ptr() for storage in before]
    after = scratch.room(26, 16, 8, 128, 16)
    assert all(storage() is not None for storage in before)
    assert not {tensor.data_ptr() for tensor in after} & set(places)


def test_long_rows_with_few_tokens_are_left_to_cublas(monkeypatch):
    for name in ("overlapping", "has_large_shared_memory"):
        monkeypatch.setattr(gemm_small, name, lambda device: True)
    long, short = (torch.empty(6144, inputs, dtype=torch.bfloat16) for inputs in (4096, 1024))
    chosen = [
        gemm_small.suits(torch.empty(tokens, weight.shape[1]), weight, gated)
        for weight in (long, short)
        for gated in (False, True)
        for tokens in (1, 16, 17)
    ]
    assert chosen == [False, False, True] * 2 + [False, True, True] * 2
