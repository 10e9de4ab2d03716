"""The CPU's norms, rotation, activation, sums, rounding of tokens, layers of experts and sampling beside float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.contract.step import SlotSampling
from kernels.core.noise import exponential_noise, keys_at
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.experts import CpuExperts
from kernels.devices.cpu.native.library import Op, Step
from kernels.devices.experts import ExpertWeights, Routing
from kernels.sampling.sampler import Sampler
from kernels.weights.quantization.weights import quantize_int8
from tests.kits.float64 import BF16, ROWS, assert_near, bits, device, numbers, proof, same_alone

__all__ = ["device"]

SEEDS = st.integers(0, 999)
FUNCTION = 2.0**-18
"""Exponentials, roots and sums in float32, relative to the result."""


def plain(device: CpuDevice, fits: bool) -> float:
    """What torch's operators of bf16 round between their steps, relative to the result. ``fits``: whether there is a
    native operator of such a size, which rounds once."""
    return 0.0 if fits and device.native.current is not None else 2 * BF16


def alone(device: CpuDevice, call: Callable[[Tensor], Tensor], x: Tensor, found: Tensor) -> None:
    if device.native.current is not None and len(x):
        same_alone(call, x, found)


@proof(30)
@given(
    rows=ROWS,
    dim=st.one_of(st.integers(1, 40).map(lambda n: 16 * n), st.sampled_from([20, 33, 4096, 8192])),
    seed=SEEDS,
)
def test_a_norm_is_that_of_float64(device: CpuDevice, rows: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight, eps = numbers(generator, rows, dim, wild=True), torch.randn(dim, generator=generator), 1e-6
    norm = device.elementwise.make_norm(weight, eps)

    def exact(x: Tensor) -> Tensor:
        wide = x.double()
        return wide * weight.double() / (wide.square().mean(-1, keepdim=True) + eps).sqrt()

    found = norm(x)
    # Squares are added up in float32: a quarter of 2^-24 for each of up to 8,192 / 16.
    assert_near(found, exact(x), exact(x).abs() * 2.0**-15)
    alone(device, norm, x, found)
    residual = numbers(generator, rows, dim, wild=True)
    total = (x.float() + residual.float()).bfloat16()
    found, kept = norm.add(x.clone(), residual.clone())
    assert torch.equal(kept, total)
    assert_near(found, exact(total), exact(total).abs() * 2.0**-15)


@proof(30)
@given(
    rows=ROWS,
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 64, 96, 256]),
    seed=SEEDS,
)
def test_heads_are_normed_and_rotated_as_in_float64(
    device: CpuDevice, rows: int, heads: int, kv_heads: int, dim: int, seed: int
) -> None:
    """In one operator with the cache's writing where there is one."""
    generator = torch.Generator().manual_seed(seed)
    qkv = numbers(generator, rows, heads + 2 * kv_heads, dim, wild=seed % 2 == 0)
    angles = torch.rand(rows, 1, dim // 2, generator=generator) * 6.3
    cos, sin = angles.cos().repeat(1, 1, 2).bfloat16(), torch.cat((-angles.sin(), angles.sin()), 2).bfloat16()
    weight = torch.rand(heads + kv_heads, dim, generator=generator) + 0.5 if seed % 3 else None
    norm = None if weight is None else device.elementwise.make_norm(weight, 1e-6)
    device.cache.dtype = None
    (cache,) = device.cache.make(1, 12, 16, kv_heads, dim, torch.bfloat16)
    index = torch.randperm(12 * 16, generator=generator)[:rows]
    wide = qkv[:, : heads + kv_heads].double()
    if weight is not None:
        wide = wide * weight.double() / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    low, high = wide.chunk(2, -1)
    turned = torch.cat((high, low), -1)
    exact = wide * cos.double() + turned * sin.double()
    around = (wide * cos.double()).abs() + (turned * sin.double()).abs()
    # A norm's result is rounded to bf16 before it is rotated.
    noise = around * ((0 if weight is None else BF16 + 2**-15) + plain(device, dim >= 32) + FUNCTION)
    values = qkv[:, heads + kv_heads :].clone()

    def place(qkv: Tensor, at: slice = slice(None)) -> Tensor:
        return device.attention.norm_rope_cache(qkv.clone(), heads, norm, cos[at], sin[at], cache, index[at])

    found = place(qkv)
    assert_near(found, exact[:, :heads], noise[:, :heads])
    kept = device.cache.gather(cache, index)
    assert_near(kept[:, 0], exact[:, heads:], noise[:, heads:])
    assert torch.equal(bits(kept[:, 1]), bits(values))
    if device.native.current is not None and rows:
        last = slice(rows - 1, rows)
        assert torch.equal(bits(place(qkv[last], last)), bits(found[last]))
        assert torch.equal(bits(device.cache.gather(cache, index[last])), bits(kept[last]))


@proof(20)
@given(rows=ROWS, heads=st.integers(1, 5), rank=st.sampled_from([32, 48, 512]), seed=SEEDS)
def test_latent_vectors_are_normed_and_rotated_as_in_float64(
    device: CpuDevice, rows: int, heads: int, rank: int, seed: int
) -> None:
    """On their way to the cache, and the last numbers of queries in place."""
    rope, generator = 32, torch.Generator().manual_seed(seed)
    queries = numbers(generator, rows, heads, 64 + rope, wild=seed % 2 == 0)
    vectors = numbers(generator, rows, rank + rope, wild=seed % 2 == 0)
    angles = torch.rand(rows, 1, rope // 2, generator=generator) * 6.3
    cos, sin = angles.cos().repeat(1, 1, 2).bfloat16(), torch.cat((-angles.sin(), angles.sin()), 2).bfloat16()
    weight = torch.rand(rank, generator=generator) + 0.5
    norm = device.elementwise.make_norm(weight, 1e-6)
    cache = torch.full((12, 16, rank + rope), torch.nan, dtype=torch.bfloat16)
    index = torch.randperm(12 * 16, generator=generator)[:rows]

    def rotated(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.double()
        turned = torch.cat(wide.chunk(2, -1)[::-1], -1)
        exact = wide * cos.double() + turned * sin.double()
        return exact, (wide * cos.double()).abs() + (turned * sin.double()).abs()

    def place(at: slice = slice(None)) -> Tensor:
        given = queries[at].clone(), vectors[at], norm, cos[at], sin[at], cache, index[at]
        return device.attention.place_latent(*given)

    found = place()
    kept = cache.view(-1, rank + rope)
    exact, around = rotated(queries[..., 64:])
    assert torch.equal(found[..., :64], queries[..., :64])
    assert_near(found[..., 64:], exact, around * (plain(device, True) + FUNCTION))
    exact, around = rotated(vectors[:, None, rank:])
    assert_near(kept[index, None, rank:], exact, around * (plain(device, True) + FUNCTION))
    wide = vectors[:, :rank].double()
    exact = wide * weight.double() / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_near(kept[index, :rank], exact, exact.abs() * 2.0**-15)
    assert int(kept.isnan().any(1).sum()) == 12 * 16 - rows
    if device.native.current is not None and rows:
        before = kept[index[-1]].clone()
        assert torch.equal(bits(place(slice(rows - 1, rows))), bits(found[-1:]))
        assert torch.equal(bits(kept[index[-1]]), bits(before))


@proof(30)
@given(rows=ROWS, inner=st.one_of(st.integers(1, 20).map(lambda n: 16 * n), st.sampled_from([5, 33, 3072])), seed=SEEDS)
def test_an_activation_is_that_of_float64(device: CpuDevice, rows: int, inner: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = numbers(generator, rows, 2 * inner) * 10 ** (seed % 4)  # gates of up to some thousand, of either sign
    gate, up = x.double().chunk(2, 1)
    exact = gate * gate.sigmoid() * up
    # Below -87 float32 has no exponential: the result is zero.
    noise = exact.abs() * (plain(device, inner % 16 == 0) + 2.0**-14) + up.abs() * 1e-35
    found = device.elementwise.silu_and_mul(x.clone())
    assert_near(found, exact, noise)
    alone(device, lambda part: device.elementwise.silu_and_mul(part), x, found)


@proof(20)
@given(rows=ROWS, width=st.one_of(st.integers(1, 20).map(lambda n: 16 * n), st.sampled_from([5, 33])), seed=SEEDS)
def test_sums_are_those_of_float64(device: CpuDevice, rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = numbers(generator, rows, width, wild=True), numbers(generator, rows, width, wild=True)
    logits = numbers(generator, rows, 1) * 20
    out = device.elementwise.empty_rows(rows, 2 * width, torch.bfloat16)
    device.elementwise.add_rows(x, y, out[:, :width])
    device.elementwise.add_rows(x, None, out[:, width:])
    assert torch.equal(bits(out), bits(torch.cat(((x.float() + y.float()).bfloat16(), x), 1)))
    shared = y.double() * logits.double().sigmoid()
    found = device.elementwise.add_weighted(x.clone(), y, logits)
    assert_near(
        found,
        x.double() + shared,
        shared.abs() * (plain(device, width % 16 == 0) + 2.0**-14) + y.double().abs() * 1e-35,
    )


@proof(20)
@given(rows=ROWS, width=st.one_of(st.integers(1, 20).map(lambda n: 16 * n), st.sampled_from([5, 33, 4096])), seed=SEEDS)
def test_tokens_are_rounded_to_the_nearest_of_255(device: CpuDevice, rows: int, width: int, seed: int) -> None:
    x = numbers(torch.Generator().manual_seed(seed), rows, width, wild=True)
    wide = x.double()
    step = wide.abs().amax(1, keepdim=True) / 127
    found = device.linear.fake_quantize(x.clone())
    units = torch.where(step > 0, wide / step, 0.0)
    # Half a step, and the result's own rounding.
    assert_near(found, units.round() * step, ((units - units.floor() - 0.5).abs() < 127 * 2**-20) * step)
    alone(device, device.linear.fake_quantize, x, found)


@proof(12)
@given(
    positions=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 20)), min_size=1, max_size=40),
    dim=st.sampled_from([32, 64, 96, 256]),
    scale=st.sampled_from([1.0, 1.19]),
)
def test_angles_in_a_program_are_those_of_float64(
    device: CpuDevice, positions: list[int], dim: int, scale: float
) -> None:
    native = device.native.current
    if native is None:
        pytest.skip("only programs of native operators have angles of their own")
    frequencies = (1e4 ** -(torch.arange(dim // 2) / (dim // 2))).repeat(2)
    signed = torch.cat((-frequencies[: dim // 2], frequencies[dim // 2 :]))
    with native.record(len(positions)) as recording:
        cos, sin = device.attention.angles(torch.zeros(len(positions)), signed, scale, torch.bfloat16)
    at = torch.tensor(positions)
    step = Step(len(positions))
    step.positions = at.data_ptr()
    native.run((Op * len(recording.ops))(*recording.ops), len(recording.ops), step)
    # The angle itself is rounded to float32, as the reference rounds it.
    angles = (at.float()[:, None] * signed).double()
    assert_near(cos[:, 0], angles.cos() * scale, FUNCTION)
    assert_near(sin[:, 0], angles.sin() * scale, FUNCTION)


@pytest.mark.parametrize("kind", ["floats", "int8"])
@proof(12)
@given(
    rows=ROWS,
    hidden=st.sampled_from([64, 128, 192]),
    inner=st.sampled_from([64, 128]),
    count=st.integers(1, 20),
    normalized=st.booleans(),
    seed=SEEDS,
)
def test_experts_are_those_of_float64(
    kind: str, device: CpuDevice, rows: int, hidden: int, inner: int, count: int, normalized: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = 1 + seed % min(count, 4)
    weights = [
        (numbers(generator, 2 * inner, hidden) / hidden**0.5, numbers(generator, hidden, inner) / inner**0.5)
        for _ in range(count)
    ]
    given = [tuple(quantize_int8(one) for one in each) if kind == "int8" else each for each in weights]
    router = numbers(generator, count, hidden)
    layer = device.experts.make(
        router, None, [ExpertWeights(up, None, down, None) for up, down in given], Routing(chosen, normalized)
    )
    assert isinstance(layer, CpuExperts)
    x = numbers(generator, rows, hidden)
    logits = layer.in_turn.router(x)
    best = logits.sort(1, descending=True).values
    if chosen < count:  # tokens whose experts are not open
        x, logits = (one[best[:, chosen - 1] != best[:, chosen]] for one in (x, logits))
    found = layer(x)
    shares = logits.double().softmax(1)
    taken, experts = shares.topk(chosen, 1)
    taken = taken / taken.sum(1, keepdim=True) if normalized else taken
    exact = torch.zeros(len(x), hidden, dtype=torch.float64)
    for number, (up, down) in enumerate(weights):
        share = (taken * (experts == number)).sum(1, keepdim=True)
        gate, other = (x.double() @ up.double().T).chunk(2, 1)
        exact += gate * gate.sigmoid() * other @ down.double().T * share
    assert found.dtype == torch.bfloat16
    # Inner numbers, and with torch results, are rounded to bf16. In int8 each number of both products is rounded to a
    # 127th of its row's largest, some 3 times its usual size: a hundredth of a product for each of four factors.
    limit = 4 * BF16 if kind == "floats" else 0.06
    assert bool(((found.double() - exact).norm(dim=1) <= limit * exact.norm(dim=1)).all())
    alone(device, layer, x, found)


SAMPLINGS: list[dict[str, float]] = [
    {},
    {"temperature": 5.0},
    {"temperature": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.01, "temperature": 1.5},
    {"top_k": 7},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
]


def nucleus(logits: Tensor, how: SlotSampling, slack: float) -> Tensor:
    """The tokens float64 [vocab] that may be drawn, for a top-p and a min-p that are larger by a share."""
    shares = (logits / how.temperature).softmax(0)
    order = shares.sort(descending=True, stable=True)
    rank = torch.empty_like(order.indices)
    rank[order.indices] = torch.arange(len(logits))
    kept = rank < (how.top_k if how.top_k > 0 else len(logits))
    held = torch.where(kept[order.indices], order.values, 0.0)
    held /= held.sum()
    before = (held.cumsum(0) - held)[rank]
    if how.top_p < 1:
        kept &= before < how.top_p * (1 + slack)
    return kept & (shares >= shares.max() * how.min_p * (1 - slack))


@proof(20)
@given(data=st.data())
def test_a_draw_is_that_of_float64(device: CpuDevice, data: st.DataObject) -> None:
    """With the same noise, the token whose clock rings first wins."""
    rows, vocab = data.draw(st.integers(1, 20), "rows"), data.draw(st.sampled_from([33, 64, 211, 4096]), "vocab")
    generator = torch.Generator().manual_seed(data.draw(SEEDS, "seed"))
    logits = numbers(generator, rows, vocab) * data.draw(st.sampled_from([0.0, 1.0, 4.0]), "spread")
    sampler = Sampler(vocab, rows, own_draw=device.sampling.draw, own_greedy=device.sampling.greedy)
    hows = [
        SlotSampling(**{"temperature": 1.0, "seed": 977 * row} | SAMPLINGS[row % len(SAMPLINGS)]) for row in range(rows)
    ]
    for slot, how in enumerate(hows):
        sampler.admit(slot, how, 1)
    slots, positions = torch.arange(rows), torch.arange(rows) * 37
    found = sampler.sample(logits, slots, positions, torch.zeros(rows, 4, dtype=torch.int32)).tokens.tolist()
    keys = keys_at(sampler.noise(tuple(range(rows))).keys, positions)
    late = exponential_noise(keys[:, None], torch.arange(vocab, dtype=torch.int32)).double().log()
    for row, (how, token) in enumerate(zip(hows, found, strict=True)):
        scores = logits[row].double() / how.temperature - late[row]
        # A token at the edge of a nucleus may be on either side of it.
        winners = [
            scores.masked_fill(~nucleus(logits[row].double(), how, slack), -torch.inf) for slack in (-1e-5, 1e-5)
        ]
        assert any(scores[token] >= one.max() - 1e-5 - scores.abs().max() * 2**-20 for one in winners), (row, how)
        assert bool(nucleus(logits[row].double(), how, 1e-5)[token])


@proof(20)
@given(rows=ROWS, vocab=st.sampled_from([1, 5, 33, 64, 211, 4099]), seed=SEEDS)
def test_the_most_likely_token_is_that_of_float64(device: CpuDevice, rows: int, vocab: int, seed: int) -> None:
    """The first of equal ones wins, and none of a row that has a NaN, +inf or only -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = numbers(generator, rows, vocab).round(decimals=seed % 3)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.bfloat16)
    where = torch.rand(logits.shape, generator=generator) < 0.2 / vocab
    logits[where] = odd[torch.randint(3, (int(where.sum()),), generator=generator)]
    greedy = device.sampling.greedy
    assert greedy is not None
    tokens, nonfinite = greedy(logits)
    wide = logits.numpy(force=True) if logits.dtype == torch.float64 else logits.double().numpy()
    bad = np.isnan(wide).any(1) | np.isposinf(wide).any(1) | np.isneginf(wide).all(1)
    assert nonfinite.tolist() == bad.tolist()
    assert tokens.tolist() == [0 if failed else int(row.argmax()) for row, failed in zip(wide, bad, strict=True)]


def test_a_program_runs_operators_in_their_order(device: CpuDevice) -> None:
    """The bits of operators one by one, of fewer rows than were recorded, too."""
    native = device.native.current
    if native is None:
        pytest.skip("there are no programs without native operators")
    generator = torch.Generator().manual_seed(1)
    table, inner = numbers(generator, 50, 64), numbers(generator, 256, 64) / 8
    gated, down = device.linear.make_gated(inner, None), device.linear.make_dense(numbers(generator, 64, 128) / 8, None)
    norm = device.elementwise.make_norm(torch.rand(64, generator=generator), 1e-6)

    def forward(ids: Tensor) -> Tensor:
        x = device.elementwise.embed(ids, table)
        return norm.add(down(gated(norm(x))), x)[0]

    with native.record(40) as recording:
        out = forward(torch.zeros(40, dtype=torch.int64))
    ops = (Op * len(recording.ops))(*recording.ops)
    for rows in (40, 33, 32, 1, 7):
        ids = torch.randint(50, (rows,), generator=generator, dtype=torch.int32)
        native.run(ops, len(ops), Step(rows, ids.data_ptr()))
        assert torch.equal(bits(out[:rows]), bits(forward(ids)))
