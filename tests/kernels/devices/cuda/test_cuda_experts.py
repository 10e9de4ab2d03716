"""Layers of experts in two products: as experts one by one, and compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import triton

from kernels.contract.expert_placement import dispatch_table
from kernels.devices.cuda.moe import experts
from kernels.devices.cuda.moe.experts import CudaExperts
from kernels.devices.cuda.moe.routing import route
from kernels.devices.experts import ClampedGate, Dispatch, ExpertsInTurn, ExpertWeights, Routing, unbiased_refusal
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.tokens import clip_tokens, fake_quantize_tokens
from kernels.weights.quantization.weights import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    StaticActivation,
    quantize_fp8,
    quantize_int8,
)
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty

BF16 = torch.bfloat16
HIDDEN, INNER = 128, 64


def grouped(bits, group, zeros=False, shuffled=False, **more):
    def round_(weight):
        outputs, inputs = weight.shape
        generator = torch.Generator().manual_seed(outputs + group)

        def whole(*shape):
            return torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)

        values = whole(outputs, inputs)
        if bits == 4:
            values = values[:, 0::2] | values[:, 1::2] << 4
        scales = torch.rand(outputs, inputs // group, generator=generator) / (1 << bits)
        order = torch.randperm(inputs, generator=generator) if shuffled else None
        return GroupedWeight(values, scales, whole(*scales.shape) if zeros else None, group, bits, order, **more)

    return round_


def blocks(tall, wide, kind=torch.float32):
    def round_(weight):
        shape = -(-weight.shape[0] // tall), -(-weight.shape[1] // wide)
        scales = 2.0 ** torch.randint(-4, 2, shape, generator=torch.Generator().manual_seed(tall))
        return Fp8Weight(weight.float().to(torch.float8_e4m3fn), scales.to(kind), (tall, wide))

    return round_


def mxfp4(weight):
    generator = torch.Generator().manual_seed(weight.shape[1])
    outputs, inputs = weight.shape
    codes = torch.randint(0, 256, (outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    powers = torch.randint(121, 128, (outputs, inputs // 32), dtype=torch.uint8, generator=generator)
    return Mxfp4Weight.from_blocks(codes, powers, weight.dtype)


KINDS = {
    "floats": lambda weight: weight,
    "int8": quantize_int8,
    "int8 clipped": lambda weight: dataclasses.replace(quantize_int8(weight), clip=torch.tensor([0.7])),
    "fp8": quantize_fp8,
    "fp8 blocks": blocks(48, 64),
    "mxfp8": blocks(1, 32, torch.float8_e8m0fnu),
    "4 bits": grouped(4, 64),
    "4 bits, zeros": grouped(4, 32, zeros=True),
    "8 bits": grouped(8, 16, zeros=True),
    "act-order": grouped(4, 32, shuffled=True),
    "4 by 8": grouped(4, 16, activation="dynamic"),
    "mxfp4": mxfp4,
}


def layers(kind, dtype, device, count=5, hidden=HIDDEN, inner=INNER):
    """A router, and experts as a layer takes them and as functions."""
    generator = torch.Generator().manual_seed(count)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def linear(weight):
        if isinstance(weight, torch.Tensor):
            return lambda x: x.float() @ weight.float().t()
        dense = weight.dequantize(torch.float32)

        def run(x):
            x = x if weight.clip is None else clip_tokens(x, weight.clip)
            return (
                fake_quantize_tokens(x) if getattr(weight, "group", 0) and weight.activation else x
            ).float() @ dense.t()

        return run

    def gated(weight):
        both = linear(weight)
        return lambda x: torch.nn.functional.silu(both(x)[:, :inner]) * both(x)[:, inner:]

    given, functions = [], []
    for _ in range(count):
        pair = [random(2 * inner, hidden), random(hidden, inner)]
        pair = [KINDS[kind](weight) for weight in pair]
        pair = [weight if kind == "floats" else dataclasses.replace(weight, dtype=dtype) for weight in pair]
        first = gated(pair[0])
        functions.append((lambda x, first=first: first(x).to(dtype), linear(pair[1])))
        given.append(ExpertWeights(pair[0].to(device), None, pair[1].to(device), None))
    return random(count, hidden), given, functions


def refused(experts, capability=(9, 0)):
    return unbiased_refusal(experts, partial(CudaExperts.kind, capability=capability))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float16, 1), (torch.float32, 7), (torch.float16, 100), (BF16, 7)])
def test_two_products_are_those_of_experts_one_by_one(kind, dtype, tokens, device):
    if dtype == BF16 and device.type == "cpu":
        pytest.skip("the interpreter has no products of bfloat16")
    router, given, functions = layers(kind, dtype, device)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    assert refused(given) is None
    onto = router.to(device)
    found = CudaExperts(lambda x: x @ onto.t(), given, Routing(2, True))(x.to(device)).cpu()
    expected = ExpertsInTurn(lambda x: x @ router.t(), functions, Routing(2, True))(x)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert (found - expected).float().norm() <= limit * expected.float().norm()


@pytest.mark.parametrize("kind", ["floats", "int8", "fp8 blocks", "4 bits", "mxfp4"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (70, 1), (40, 2)])
def test_all_tokens_may_take_the_same_experts(kind, tokens, chosen, device):
    """More blocks of one expert's pairs than even routing has, and experts without any."""
    _, stacked, functions = layers(kind, torch.float16, device)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).half()
    logits = torch.tensor([[0.0, 1.0, -2.0, 6.0, 3.0]]).half().expand(tokens, -1).contiguous()
    result = CudaExperts(lambda x: logits.to(device), stacked, Routing(chosen, True))(x.to(device)).cpu()
    expected = ExpertsInTurn(lambda x: logits, functions, Routing(chosen, True))(x)
    assert (result - expected).float().norm() <= 2e-2 * expected.float().norm()


def test_scales_of_128_inputs_have_blocks_of_as_many():
    assert experts._choose_tile(500, 128, 8, large=True).block == 128
    assert {experts._choose_tile(500, *kind, large=True).block for kind in ((64, 8), (128, 4), (0, 8))} == {64}


@pytest.mark.parametrize("kind", ["floats", "mxfp4", "4 bits, zeros"])
@pytest.mark.parametrize(("biases", "tokens"), [((True, True), 1), ((True, True), 40), ((True, False), 7)])
def test_experts_with_biases_and_clamped_gates(kind, biases, tokens, device):
    """As gpt-oss has them, on the first rank and on others."""
    router, given, _ = layers(kind, torch.float16, device)
    gate, generator = ClampedGate(1.702, 1.5), torch.Generator().manual_seed(3)
    x = 2 * torch.randn(tokens, HIDDEN, generator=generator).half()
    functions = []
    for index, expert in enumerate(given):
        first, last = (
            torch.randn(2 * INNER, generator=generator).half(),
            torch.randn(HIDDEN, generator=generator).half(),
        )
        last = last if biases[1] else torch.zeros_like(last)
        up, down = (
            (weight if kind == "floats" else weight.dequantize(torch.float32)).float().cpu()
            for weight in (expert.gate_up, expert.down)
        )
        functions.append(
            (
                lambda x, up=up, first=first: gate(x.float() @ up.t() + first.float()).half(),
                lambda x, down=down, last=last: x.float() @ down.t() + last.float(),
            )
        )
        last = last.to(device) if biases[1] else None
        given[index] = dataclasses.replace(expert, gate_up_bias=first.to(device), down_bias=last)
    assert refused(given) is None
    onto = router.to(device)
    found = CudaExperts(lambda x: x @ onto.t(), given, Routing(2, True), gate)(x.to(device)).cpu()
    expected = ExpertsInTurn(lambda x: x @ router.t(), functions, Routing(2, True))(x)
    assert (found - expected).float().norm() <= 5e-3 * expected.float().norm()


@pytest.mark.parametrize("kind", ["floats", "fp8", "4 bits"])
@pytest.mark.parametrize("mean_pairs", [8, 20, 40, 100, 200])
def test_every_tile_multiplies_the_same(kind, mean_pairs, device, monkeypatch):
    router, given, _ = layers(kind, torch.float16, device)
    onto, x = router.to(device), torch.randn(mean_pairs * 5 // 2, HIDDEN, dtype=torch.float16, device=device)
    layer = CudaExperts(lambda x: x @ onto.t(), given, Routing(2, True))
    found = layer(x)
    monkeypatch.setattr(experts, "has_large_shared_memory", lambda device: False)
    expected = layer(x)
    assert (found - expected).float().norm() <= 5e-3 * expected.float().norm()


def test_what_the_kernel_does_not_take():
    _, given, _ = layers("int8", BF16, "cpu")
    first = given[0]
    assert refused(given, (8, 0)) is None
    assert refused(layers("fp8", BF16, "cpu")[1], (8, 0)) == "no kernel takes Fp8Weight of [128, 128]"
    assert refused([*given, *layers("floats", BF16, "cpu")[1]]) == "they are of different kinds"
    static = dataclasses.replace(first.down, activation=StaticActivation(torch.ones(1)))
    for change, reason in (
        ({"down_bias": torch.zeros(80)}, "some have biases"),
        ({"down": dataclasses.replace(first.down, clip=torch.ones(1))}, "they are of different kinds"),
        ({"down": static}, "no kernel takes inputs that are rounded by scales found before"),
        ({"gate_up": (first.gate_up, first.down)}, "gates are of another kind than what they are multiplied with"),
    ):
        assert refused([*given[1:], dataclasses.replace(first, **change)]) == reason
    assert "no kernel takes" in refused(layers("fp8 blocks", BF16, "cpu")[1], (8, 0))
    assert CudaExperts.kind(grouped(4, 8)(torch.zeros(32, 32)), (9, 0)) is None


def narrow(outputs, inputs, dtype, *scales, **more):
    kind = Int8Weight if dtype == torch.int8 else Fp8Weight
    return kind(empty(outputs, inputs, dtype=dtype), empty(*(scales or (outputs,)), dtype=torch.float32), **more)


def in_groups(outputs, inputs, bits, zeros):
    groups = outputs, inputs // 128
    values = empty(outputs, inputs * bits // 8, dtype=torch.uint8)
    zero = empty(*groups, dtype=torch.uint8) if zeros else None
    return GroupedWeight(values, empty(*groups, dtype=torch.float16), zero, 128, bits)


FORMS = (
    empty,
    lambda *shape: narrow(*shape, torch.int8),
    lambda *shape: in_groups(*shape, 4, True),
    lambda *shape: in_groups(*shape, 8, False),
    lambda *shape: narrow(*shape, torch.float8_e4m3fn),
    lambda *shape: narrow(*shape, torch.float8_e4m3fn, shape[0] // 128, shape[1] // 128, block=(128, 128)),
)


@pytest.mark.long
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles(capability, monkeypatch, tmp_path):
    """For 128 experts of which a token takes 8, as Qwen3-30B-A3B has them, and for those of gpt-oss-20b."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    with compiling(monkeypatch, capability) as found:
        for form in FORMS[: len(FORMS) if capability >= 90 else 4]:
            weights = [form(*shape) for shape in ((1536, 2048), (2048, 768))]
            onto, expert = empty(2048, 128), ExpertWeights(weights[0], None, weights[1], None)
            layer = CudaExperts(lambda x, onto=onto: x @ onto, [expert] * 128, Routing(8, True))
            for tokens in (1, 300):
                layer(empty(tokens, 2048))
        packed = (
            Mxfp4Weight.from_blocks(
                empty(2880 * both, 90, 16, dtype=torch.uint8), empty(2880 * both, 90, dtype=torch.uint8), BF16
            )
            for both in (2, 1)
        )
        first, last = packed
        expert = ExpertWeights(first, empty(5760), last, empty(2880))
        onto = empty(2880, 32)
        layer = CudaExperts(lambda x: x @ onto, [expert] * 32, Routing(4, True), ClampedGate(1.702, 7.0))
        for tokens in (1, 300):
            layer(empty(tokens, 2880))
    assert len(found) >= 6
    products = [kernel for kernel in found if kernel.kernel == "moe_gemm_kernel"]
    assert products
    assert all(kernel.shared <= SHARED[capability] and kernel.spilled == 0 for kernel in products)


@pytest.mark.parametrize("kind", ["floats", "int8 clipped", "fp8 blocks", "4 bits, zeros"])
@pytest.mark.parametrize("scores", ["softmax", "mixer"])
def test_experts_elsewhere_add_nothing(kind, scores, device):
    router, given, functions = layers(kind, torch.float16, device)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(7)).half()
    onto, routing = router.to(device), Routing(2, scores == "softmax", scores, jitter=0.1)
    expected = ExpertsInTurn(lambda x: x @ router.t(), functions, routing)(x)
    found, in_turn = torch.zeros(7, HIDDEN), torch.zeros(7, HIDDEN)
    for local in (range(1), range(1, 4), range(4, 5)):
        some, part = slice(local.start, local.stop), dataclasses.replace(routing, local=local)
        found += CudaExperts(lambda x: x @ onto.t(), given[some], part)(x.to(device)).cpu().float()
        in_turn += ExpertsInTurn(lambda x: x @ router.t(), functions[some], part)(x).float()
    assert (found - expected).norm() <= 2e-2 * expected.float().norm()
    assert (in_turn - expected).norm() <= 2e-2 * expected.float().norm()


@pytest.mark.parametrize("scores", ["softmax", "mixer"])
@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
def test_copies_of_experts_in_places_add_up_to_the_whole(scores, algorithm, device):
    """A table that is overwritten, as when experts move, is read by the next pass."""
    router, given, functions = layers("floats", torch.float16, device)
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(7)).half()
    onto, routing = router.to(device), Routing(2, scores == "softmax", scores, jitter=0.1)
    expected = ExpertsInTurn(lambda x: x @ router.t(), functions, routing)(x)
    places = np.array([4, 3, 2, 1, 0, 3, 4, 4])
    table = torch.from_numpy(dispatch_table(places, 5, 2, algorithm))
    dispatch = Dispatch(torch.full_like(table, 7).to(device), len(places))
    found = torch.zeros(70, HIDDEN)
    for local in (range(4), range(4, 8)):
        part = dataclasses.replace(routing, local=local, dispatch=dispatch)
        some = [given[expert] for expert in places[local.start : local.stop]]
        layer = CudaExperts(lambda x: x @ onto.t(), some, part)
        dispatch.table.copy_(table)
        found += layer(x.to(device)).cpu().float()
    assert (found - expected).norm() <= 2e-2 * expected.float().norm()


def test_the_best_two_of_groups_leave_the_first_local_expert_alone(device):
    groups = {"groups": 2, "top_groups": 1, "pair_sum": True, "scores": "sigmoid"}
    logits = torch.tensor([[5.0, 1.0, 4.0, 0.0, 0.0, 0.0]], device=device)
    found = route(logits, Routing(2, True, local=range(2, 4), **groups))
    assert found.experts.sort(-1).values.tolist() == [[0, 2]]  # the first one here, and one elsewhere


@pytest.mark.parametrize("kind", ["floats", "int8 clipped", "fp8 blocks", "4 bits, zeros"])
def test_an_expert_whose_weights_are_overwritten_is_another(kind, device):
    router, given, _ = layers(kind, torch.float16, device)
    if kind == "4 bits, zeros":  # which are alike in all experts
        first, last = given[3].gate_up, given[3].down
        first = dataclasses.replace(first, values=first.values ^ 5, zeros=first.zeros ^ 3, scales=first.scales * 2)
        given[3] = ExpertWeights(first, None, dataclasses.replace(last, zeros=last.zeros ^ 6), None)
    onto, routing = router.to(device), Routing(2, True, local=range(2))
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(7)).half().to(device)
    layer, wanted = (CudaExperts(lambda x: x @ onto.t(), [given[0], given[one]], routing) for one in (1, 3))
    assert not torch.equal(layer(x), wanted(x))
    for target, source in zip(layer.weights(1), wanted.weights(1), strict=True):
        target.copy_(source)
    assert torch.equal(layer(x), wanted(x))
