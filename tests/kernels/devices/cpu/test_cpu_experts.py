"""Layers of experts by the CPU's native operator, beside experts one by one by torch's."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.contract.expert_placement import dispatch_table
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.experts import ClampedGate, Dispatch, ExpertWeights, Routing
from kernels.weights.quantization.gguf_weight import BlockRows, GgufWeight
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, quantize_fp8, quantize_int8
from tests.kits.gguf_writer import write_gguf
from tests.kits.native import compiled, needs_native, platform

__all__ = ["compiled", "platform"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]

HIDDEN, INNER, COUNT, CHOSEN = 256, 64, 9, 3
BF16 = torch.bfloat16


def grouped(weight, bits=4, **more):
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8, generator=generator)
    scales = torch.rand(outputs, inputs // 32, generator=generator) / (1 << bits) / inputs**0.5
    return GroupedWeight(values, 4 * scales, None, 32, bits, **more)


def shuffled(weight):
    return grouped(weight, order=torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)))


def blocks(weight):
    from gguf import constants, quants

    from kernels.weights.gguf.blocks import KINDS

    kinds = ("Q4_K", "Q5_1") if weight.shape[1] % 256 == 0 else ("Q4_1",)  # of which pieces may differ
    pieces = []
    for kind, part in zip(kinds, weight.float().chunk(len(kinds)), strict=True):
        number = constants.GGMLQuantizationType[kind]
        if kind == "Q4_K":
            data = torch.randint(0, 48, (len(part), part.shape[1] // 256 * 144), dtype=torch.uint8)
        else:
            data = torch.from_numpy(quants.quantize(part.numpy(), number))
        pieces.append(BlockRows(KINDS[number], data.view(len(part), -1, KINDS[number].size)))
    return GgufWeight(tuple(pieces))


def in_blocks(weight):
    scales = (
        torch.rand(-(-weight.shape[0] // 64), weight.shape[1] // 64, generator=torch.Generator().manual_seed(4)) + 0.5
    )
    return Fp8Weight(weight.to(torch.float8_e4m3fn), scales, (64, 64))


def mxfp4(weight):
    generator = torch.Generator().manual_seed(weight.shape[1])
    outputs, inputs = weight.shape
    codes = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    powers = torch.randint(119, 123, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight.from_blocks(codes, powers, weight.dtype)


def int8_and_rest(weight):
    return (quantize_int8(weight[:64]), grouped(weight[64:])) if len(weight) > 64 else ()


KINDS = {
    "floats": lambda weight: weight,
    "int8": quantize_int8,
    "4 bits": grouped,
    "8 bits": lambda weight: grouped(weight, 8),
    "act-order": shuffled,
    "4 by 8": lambda weight: grouped(weight, activation="dynamic"),
    "4 by 8, clipped": lambda weight: grouped(weight, activation="dynamic", clip=torch.tensor([0.7])),
    "int8, clipped": lambda weight: dataclasses.replace(quantize_int8(weight), clip=torch.tensor([0.9])),
    "e4m3": quantize_fp8,
    "e4m3 in blocks": in_blocks,
    "mxfp4": mxfp4,
    "blocks": blocks,
    "side by side": lambda weight: (shuffled(weight[:64]), blocks(weight[64:128]), *int8_and_rest(weight[128:])),
    "mixed": None,
}


def layer_of(platform, kind, normalized=True, biased=False, gate=None, only=slice(COUNT), **routing):
    """``only``: the experts that are here."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(BF16)

    experts = []
    for number in range(COUNT):
        form = KINDS[kind] or list(KINDS.values())[number % (len(KINDS) - 1)]
        biases = (random(2 * INNER), random(HIDDEN)) if biased else (None, None)
        experts.append(
            ExpertWeights(form(random(2 * INNER, HIDDEN)), biases[0], form(random(HIDDEN, INNER)), biases[1])
        )
    router, chosen = random(COUNT, HIDDEN), Routing(CHOSEN, normalized, **routing)
    some = experts[only] if isinstance(only, slice) else [experts[number] for number in only]
    return platform.experts.make(router, None, some, chosen, gate)


def tokens_of(layer, count):
    """Tokens whose experts no rounding of their logits leaves open."""
    x = torch.randn(2 * count + 4, HIDDEN, generator=torch.Generator().manual_seed(count)).to(BF16)
    logits = layer.in_turn.router(x).sort(-1, descending=True).values
    return x[logits[:, CHOSEN - 1] != logits[:, CHOSEN]][:count]


@pytest.mark.parametrize("kind", KINDS)
def test_one_operator_gives_what_experts_one_by_one_give(kind, platform, monkeypatch):
    layer = layer_of(platform, kind, normalized=kind != "int8", biased=kind in ("floats", "4 bits"))
    for count in (1, 5, 40, 500):
        x = tokens_of(layer, count)
        found, expected = layer(x), layer.in_turn(x)
        assert (found - expected).float().norm() < 2e-3 * expected.float().norm()
        part = slice(0, min(3, count))
        alone = layer(x[part])
        if kind in ("floats", "int8", "int8, clipped"):
            assert torch.equal(alone, found[part])  # whatever the tokens beside it
        else:  # of which a few are not multiplied as many are
            assert (alone - found[part]).float().norm() < 2e-2 * found[part].float().norm()
    monkeypatch.setattr(layer, "in_turn", None)
    with pytest.raises(AttributeError):  # of the router: nothing else is taken from it
        layer(x)


@pytest.mark.parametrize("kind", ["floats", "int8", "4 bits", "e4m3", "mxfp4"])
def test_all_tokens_may_take_the_same_experts(kind, platform):
    """Most experts have none then."""
    layer = layer_of(platform, kind)
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0, -1.0, 7.0, 0.5, 4.0, 3.0]], dtype=BF16)
    layer.in_turn.router = lambda x: logits.expand(len(x), -1).contiguous()
    for count in (1, 2, 40, 300):
        x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(BF16)
        expected = layer.in_turn(x)
        assert (layer(x) - expected).float().norm() < 2e-3 * expected.float().norm()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_corrected_and_scaled_experts_run_in_one_operator(scores, platform, monkeypatch):
    correction = torch.linspace(-0.2, 0.2, COUNT)
    layer = layer_of(platform, "floats", False, scores=scores, scale=2.5, correction=correction)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(BF16)
    expected = layer.in_turn(x)
    monkeypatch.setattr(layer.in_turn, "experts", ())
    for count in (1, 40):
        assert (layer(x[:count]) - expected[:count]).float().norm() < 2e-3 * expected[:count].float().norm()


def first_of_equals(tensor, count, dim):
    """torch's topk, which leaves open which of equals are taken."""
    values, indices = torch.sort(tensor, dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=values.narrow(dim, 0, count), indices=indices.narrow(dim, 0, count))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "pair_sum"), [(1, False), (2, True), (3, True), (4, False), (6, True)])
def test_the_native_choice_is_the_reference_s(groups, pair_sum, scores, platform, monkeypatch):
    """For random, tied and equal scores, and where all but two experts, or groups, have none."""
    monkeypatch.setattr(torch.Tensor, "topk", first_of_equals)
    random = torch.Generator().manual_seed(groups)
    count = 12
    weights = [torch.randn(count, *shape, generator=random) / 8 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    experts = [ExpertWeights(up.to(BF16), None, down.to(BF16), None) for up, down in zip(*weights, strict=True)]
    router = (torch.randn(count, HIDDEN, generator=random) / 16).to(BF16)
    lowest = torch.full((count,), -torch.inf)
    lowest[[1, 7]] = 0.0
    corrections = (torch.linspace(-0.2, 0.3, count), torch.zeros(count), None)
    x = torch.randn(21, HIDDEN, generator=random).to(BF16)
    for rows, bias in ((router, None), (router[:1].expand(count, -1), None), (router[torch.arange(count) // 3], None)):
        for correction in (*corrections, lowest):
            routing = Routing(
                3, correction is not None, scores, groups, -(-groups // 2), pair_sum, 2.5, correction=correction
            )
            layer = platform.experts.make(rows.contiguous(), bias, experts, routing)
            expected = layer.in_turn(x)
            with monkeypatch.context() as native:
                native.setattr(layer, "in_turn", SimpleNamespace(routing=routing))
                found = layer(x)
                assert torch.equal(layer(x[4:5]), found[4:5])  # whatever the rows beside it
            assert (found - expected).float().norm() < 2e-3 * expected.float().norm()
    biased = platform.experts.make(router, lowest, experts, Routing(2, True, scores, scale=1.5))
    assert (biased(x) - biased.in_turn(x)).float().norm() < 2e-3 * biased.in_turn(x).float().norm()


def test_a_row_without_numbers_leaves_the_native_choice_of_others(platform):
    layer = layer_of(platform, "floats", scores="sigmoid", groups=3, top_groups=2)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).to(BF16)
    expected = layer(x)
    x[2, 5] = torch.nan
    found = layer(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", ["floats", "4 bits"])
def test_clamped_gates_run_in_one_operator(kind, platform, monkeypatch):
    layer = layer_of(platform, kind, biased=True, gate=ClampedGate(1.702, 0.5))
    x = tokens_of(layer, 40)
    expected = layer.in_turn(x)
    monkeypatch.setattr(layer.in_turn, "experts", ())
    for count in (1, 40):
        assert (layer(x[:count]) - expected[:count]).float().norm() < 2e-2 * expected[:count].float().norm()


def test_what_there_was_no_memory_for_is_not_run_again(platform):
    layer = layer_of(platform, "floats")
    x = tokens_of(layer, 6)
    expected = layer(x)
    ops = [op for kept in layer._table._kept if isinstance(kept, ctypes.Array) for op in kept]
    sizes = [op.i0 for op in ops]
    for op in ops:
        op.i0 = 1 << 44
    with pytest.raises(MemoryError):
        layer(torch.randn(1500, HIDDEN).to(BF16))
    for op, size in zip(ops, sizes, strict=True):
        op.i0 = size
    assert torch.equal(layer(x), expected)


def test_a_token_that_is_not_finite_leaves_the_others_alone(platform):
    layer = layer_of(platform, "floats")
    x = tokens_of(layer, 6)
    expected = layer(x)
    for wrong in (float("nan"), float("inf")):
        nonfinite = x.clone()
        nonfinite[2, 5] = wrong
        found = layer(nonfinite)
        assert not found[2].isfinite().all()
        assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_the_first_of_equally_likely_experts_are_chosen(platform):
    layer = layer_of(platform, "floats")
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 1.0, -9.0, float("-inf"), 1.0, 1.0]], dtype=BF16)
    layer.in_turn.router = lambda x: logits.expand(len(x), -1).contiguous()
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1)).to(BF16)
    found = layer(x)
    shares = logits.float().softmax(-1)[0, [1, 2, 3]]
    expected = sum(
        down(up(x)).float() * share
        for (up, down), share in zip(layer.in_turn.experts[1:4], shares / shares.sum(), strict=True)
    )
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)


def test_what_all_tokens_take_is_weighted_and_added(platform):
    x, y = (torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(BF16) for seed in (1, 2))
    logits = torch.linspace(-90, 90, 40)[:, None].to(BF16)
    expected = x.float() + y.float() * logits.float().sigmoid()
    torch.testing.assert_close(platform.elementwise.add_weighted(x, y, logits), expected.to(BF16), atol=0, rtol=2**-7)


@pytest.mark.parametrize("name", ["parallel-moe", "parallel-shared"])
def test_a_model_of_experts_decodes_by_a_program(name, reference, drive, prompts, caplog, monkeypatch, tmp_path):
    texts = prompts(40, 11)
    path = reference(name).path

    def run(path=path, **options):
        driver = drive(path, **{"dtype": "bfloat16"} | options)
        for slot, text in enumerate(texts, start=1):
            driver.admit(slot, text)
        assert not driver.step([(slot, len(text)) for slot, text in enumerate(texts, start=1)]).failed
        for _ in range(20):
            assert not driver.step([(slot, 1) for slot in range(1, len(texts) + 1)]).failed
        return driver

    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        programs = run()
        assert programs.info.graph_rows
        assert run(write_gguf(path, tmp_path / "model.gguf", "Q8_0")).info.graph_rows
        assert not caplog.records
        run(dtype="float32")
    assert sum("experts are run one by one" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(CpuCapture, "record", lambda *arguments: None)
    alone = run()
    assert not alone.info.graph_rows
    assert alone.tokens == programs.tokens


@pytest.mark.parametrize("kind", ["floats", "int8", "4 bits"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_elsewhere_add_nothing_and_are_not_there(kind, scores, platform):
    """The operator's table has no products for them."""
    whole = layer_of(platform, kind, scores=scores)
    parts = []
    for local in (range(4), range(4, COUNT)):
        layer = layer_of(platform, kind, scores=scores, local=local, only=slice(local.start, local.stop))
        parts.append(layer)
    for count in (1, 5, 40):
        x = tokens_of(whole, count)
        expected, found = whole(x), sum(layer(x).float() for layer in parts)
        assert (found - expected).float().norm() < 1e-2 * expected.float().norm()
        in_turn = sum(layer.in_turn(x).float() for layer in parts)
        assert (in_turn - expected).float().norm() < 2e-2 * expected.float().norm()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_copies_of_experts_in_places_add_up_to_the_whole(scores, algorithm, platform):
    whole = layer_of(platform, "floats", scores=scores)
    places = np.array([8, 7, 6, 5, 4, 3, 2, 1, 0, 3, 4, 4])
    table = torch.from_numpy(dispatch_table(places, COUNT, 2, algorithm))
    dispatch, parts = Dispatch(torch.full_like(table, 11), len(places)), []
    for local in (range(6), range(6, 12)):
        only = places[local.start : local.stop].tolist()
        parts.append(layer_of(platform, "floats", scores=scores, local=local, dispatch=dispatch, only=only))
    dispatch.table.copy_(table)
    for count in (1, 5, 70):
        x = tokens_of(whole, count)
        expected, found = whole(x), sum(layer(x).float() for layer in parts)
        assert (found - expected).float().norm() < 1e-2 * expected.float().norm()
        in_turn = sum(layer.in_turn(x).float() for layer in parts)
        assert (in_turn - expected).float().norm() < 2e-2 * expected.float().norm()
