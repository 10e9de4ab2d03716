"""Layers of experts on simulated NPUs: grouped products give what experts one by one do, in graphs too."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

import numpy as np
import pytest
import torch
import torch_npu

from kernels.contract.step import SlotSampling
from kernels.devices.experts import (
    ClampedGate,
    Dispatch,
    ExpertsInTurn,
    ExpertWeights,
    Routing,
    choose,
    unbiased_refusal,
)
from kernels.devices.npu.experts import NpuExperts
from kernels.devices.npu.operators import FRACTAL_NZ
from kernels.devices.npu.soc import Soc
from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.models.layers.moe import gelu_and_mul
from kernels.weights.quantization.int8 import Int8Linear
from kernels.weights.quantization.packed import grouped
from kernels.weights.quantization.tokens import clip_tokens, fake_quantize_tokens
from kernels.weights.quantization.weights import StaticActivation, quantize_int8
from tests.kits.modelslim import write
from tests.kits.quantized import fp8_blocks, rewrite
from tests.kits.quantized_words import Rounded, awq, gptq

BF16 = torch.bfloat16
A3 = Soc("A3", "Ascend910_9391")
PAGE = 128
SHAPES = ((64, 64), (64, 32))
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": 16, "desc_act": False, "sym": False}
OPTIONS = {"device": "npu", "page_size": PAGE, "max_step_tokens": 256, "max_total_tokens": 16 * PAGE}


def refused(experts):
    return unbiased_refusal(experts, partial(NpuExperts.kind, soc=A3))


def weights(count, hidden, inner):
    generator = torch.Generator().manual_seed(4)

    def random(*shape):
        return torch.randn(*shape, generator=generator).div_(shape[-1] ** 0.5).to(BF16)

    return random(count, hidden), [(random(2 * inner, hidden), random(hidden, inner)) for _ in range(count)]


def gated(linear):
    def run(x):
        gate, up = linear(x).float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    return run


@pytest.mark.parametrize("whole", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_grouped_products_are_those_of_experts_one_by_one(whole, normalized, tokens):
    router, experts = weights(6, 64, 32)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(BF16)
    given, linears = [], []
    for gate_up, down in experts:
        if whole:
            first, second = quantize_int8(gate_up), quantize_int8(down)
            linears.append((gated(Int8Linear(first, None)), Int8Linear(second, None)))
            given.append(ExpertWeights(first.to(torch.device("npu")), None, second.to(torch.device("npu")), None))
        else:
            linears.append((gated(lambda x, w=gate_up: x @ w.t()), lambda x, w=down: x @ w.t()))
            given.append(ExpertWeights(gate_up.npu(), None, down.npu(), None))
    assert refused(given) is None
    onto = router.npu()
    found = NpuExperts(lambda x: x @ onto.t(), given, Routing(2, normalized), A3)(x.npu())
    expected = ExpertsInTurn(lambda x: x @ router.t(), linears, Routing(2, normalized))(x)
    torch.testing.assert_close(found.cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("gate", [None, gelu_and_mul], ids=["SwiGLU", "GELU"])
def test_weights_may_multiply_inputs_and_gates_be_others(chosen, gate):
    """Llama 4's experts, and those of Gemma 4 and Grok 2."""
    router, experts = weights(6, 64, 32)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    routing = Routing(chosen, gate is not None, "softmax" if gate else "sigmoid", on_inputs=gate is None)
    given = [ExpertWeights(gate_up.npu(), None, down.npu(), None) for gate_up, down in experts]
    onto = router.npu()
    result = NpuExperts(lambda x: x @ onto.t(), given, routing, A3, gate)(x.npu())
    linears = [
        (
            gated(lambda x, w=first: x @ w.t()) if gate is None else lambda x, w=first: gate(x @ w.t()),
            lambda x, w=last: x @ w.t(),
        )
        for first, last in experts
    ]
    expected = ExpertsInTurn(lambda x: x @ router.t(), linears, routing)(x)
    torch.testing.assert_close(result.cpu(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("last", [True, False], ids=["first rank", "other ranks"])
def test_experts_may_have_biases_and_clamped_gates(last):
    """gpt-oss's; the bias of the second product is one rank's."""
    router, experts = weights(6, 64, 32)
    gate, generator = ClampedGate(1.702, 1.5), torch.Generator().manual_seed(3)
    x, onto = 2 * torch.randn(9, 64, generator=generator).to(BF16), router.npu()
    given, linears = [], []
    for gate_up, down in experts:
        first, second = torch.randn(64, generator=generator).to(BF16), torch.randn(64, generator=generator).to(BF16)
        given.append(ExpertWeights(gate_up.npu(), first.npu(), down.npu(), second.npu() if last else None))
        linears.append(
            (
                lambda x, w=gate_up, b=first: gate((x @ w.t() + b).float()).to(BF16),
                lambda x, w=down, b=second: x @ w.t() + (b if last else 0),
            )
        )
    assert refused(given) is None
    result = NpuExperts(lambda x: x @ onto.t(), given, Routing(2, True), A3, gate)(x.npu())
    expected = ExpertsInTurn(lambda x: x @ router.t(), linears, Routing(2, True))(x)
    torch.testing.assert_close(result.cpu(), expected, atol=4e-2, rtol=3e-2)


@pytest.mark.parametrize("kind", [None, "int8", "4 groups"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, 1), (40, 2)])
def test_all_tokens_may_take_the_same_experts(kind, tokens, chosen):
    """Others have none then."""
    _, experts = weights(6, 64, 64)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(BF16)
    stacked, linears = [], []
    for pair in experts:
        forms = pair if kind is None else [rounded(kind, weight) for weight in pair]
        dense = pair if kind is None else [weight.dequantize(BF16) for weight in forms]
        first, second = (lambda x, w=w: x @ w.t() for w in dense)
        linears.append((gated(first), second))
        stacked.append(ExpertWeights(forms[0].to(torch.device("npu")), None, forms[1].to(torch.device("npu")), None))
    logits = torch.tensor([[0.0, 1.0, 5.0, -2.0, 3.0, 0.5]], dtype=BF16).expand(tokens, -1).contiguous()
    layer = NpuExperts(lambda x: logits.npu(), stacked, Routing(chosen, True), A3)
    expected = ExpertsInTurn(lambda x: logits, linears, Routing(chosen, True))(x)
    torch.testing.assert_close(layer(x.npu()).cpu(), expected, atol=3e-2, rtol=3e-2)


def test_what_the_operators_do_not_take_is_run_one_by_one():
    _, [(gate_up, down), *_] = weights(2, 64, 32)
    bias = torch.zeros(64)
    biased = [ExpertWeights(gate_up, bias, down, None), ExpertWeights(gate_up, None, down, None)]
    assert refused(biased) == "some have biases"
    assert "no kernel takes float32" in refused([ExpertWeights(gate_up.float(), None, down.float(), None)])
    whole = quantize_int8(gate_up)
    mixed = [ExpertWeights(whole, None, down, None), ExpertWeights(gate_up, None, down, None)]
    assert refused(mixed) == "they are of different kinds"
    halves = [grouped(torch.zeros(*shape, dtype=torch.uint8), torch.ones(shape[0], 4), None, 4) for shape in SHAPES]
    assert "no kernel takes GroupedWeight" in refused([ExpertWeights(halves[0], None, halves[1], None)])  # of 16 and 8
    assert "gates are of" in refused([ExpertWeights((gate_up, quantize_int8(gate_up)), None, down, None)])
    static = dataclasses.replace(whole, activation=StaticActivation(torch.ones(1)))
    assert "scales found before" in refused([ExpertWeights(static, None, down, None)])


def test_weights_are_in_tiles_where_the_device_keeps_them():
    """Floats and int8 by int8; of others the vendor does not say that they may be."""
    router, experts = weights(3, 64, 32)
    for kind, tiled in ((None, True), (quantize_int8, True), (lambda weight: rounded("int8", weight), False)):
        given = []
        for pair in experts:
            first, second = pair if kind is None else map(kind, pair)
            given.append(ExpertWeights(first.to("npu"), None, second.to("npu"), None))
        for soc, kept in ((A3, tiled), (Soc("A5", "Ascend950"), False)):
            layer = NpuExperts(lambda x: x @ router.npu().t(), given, Routing(2, True), soc)
            formats = {torch_npu.get_npu_format(stack.values) for stack in (layer.gate_up, layer.down)}
            assert formats == {FRACTAL_NZ if kept else 2}


@pytest.mark.parametrize("form", ["floats", "int8", "4 groups", "clipped", "biased"])
def test_an_expert_that_moves_is_overwritten_in_place(form):
    """Tiles would refuse it; rows do not, and the layer then is one of the experts in their new order."""
    router, experts = weights(2, 64, 64)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).to(BF16).npu()

    def part(weight):
        if form == "4 groups":
            return rounded(form, weight).to("npu")
        if form in ("floats", "biased"):
            return weight.npu()
        whole = quantize_int8(weight)
        return (dataclasses.replace(whole, clip=weight[0, :1].abs()) if form == "clipped" else whole).to("npu")

    given = [
        ExpertWeights(part(first), first[0].repeat(2).npu(), part(second), second[0].npu())
        if form == "biased"
        else ExpertWeights(part(first), None, part(second), None)
        for first, second in experts
    ]

    def layer(given, moves):
        table = torch.arange(2, dtype=torch.int32).view(1, 2).npu()
        routing = Routing(1, True, local=range(2), dispatch=Dispatch(table, 2, moves))
        return NpuExperts(lambda x: x @ router.npu().t(), given, routing, A3)

    moved, expected = layer(given, True), layer(given[::-1], True)(x).cpu()
    before = moved(x).cpu()
    assert torch_npu.get_npu_format(moved.gate_up.values) == 2
    for one, other in zip(moved.weights(0), moved.weights(1), strict=True):
        held = one.clone()
        one.copy_(other)
        other.copy_(held)
    assert torch.equal(moved(x).cpu(), expected)
    assert not torch.equal(before, expected)
    if form in ("floats", "int8"):
        with pytest.raises(ConstraintError, match="NZ"):
            [weight.clone() for weight in layer(given, False).weights(0)]


def test_scales_of_whole_numbers_have_the_dtype_of_what_comes_out():
    """As A2 and A3 take them: bfloat16 beside bfloat16, else float32."""
    rows, counts = torch.ones(4, 64, dtype=torch.int8).npu(), torch.tensor([1, 3]).npu()
    values, tokens = torch.ones(2, 64, 32, dtype=torch.int8).npu(), torch.ones(4).npu()
    scales = torch.ones(2, 32).npu()
    for dtype, wrong, right in ((BF16, scales, scales.to(BF16)), (torch.float16, scales.to(BF16), scales)):

        def product(given, dtype=dtype):
            options = {"scale": [given], "per_token_scale": [tokens], "output_dtype": dtype, "group_list": counts}
            options |= {"split_item": 2, "group_type": 0, "group_list_type": 1}
            return torch_npu.npu_grouped_matmul([rows], [values], **options)[0]

        assert product(right).cpu().equal(torch.full((4, 32), 64, dtype=dtype))
        with pytest.raises(ConstraintError, match="scale: must be"):
            product(wrong)


def scores(driver, prompt):
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe", "qwen3-moe-one", "qwen3-moe-some", "mixtral"])
def test_graphs_generate_what_eager_steps_generate(name, reference, drive, prompts, simulator):
    """And that is likely to the model in float32."""
    model, (first, second) = reference(name), prompts(40, 9)
    outputs = []
    for graphs in (False, True):
        driver = drive(model.path, dtype="bfloat16", disable_graphs=not graphs, **OPTIONS)
        assert bool(driver.info.graph_rows) == graphs
        for slot, prompt in enumerate((first, second), start=1):
            driver.admit(slot, prompt)
            driver.step([(slot, len(prompt))])
        for _ in range(20):
            assert not driver.step([(1, 1), (2, 1)]).failed
        outputs.append(driver.tokens)
    assert outputs[0] == outputs[1]
    wide = model.logprobs(outputs[0][1])[39:-1]
    chosen = wide.gather(1, torch.tensor(outputs[0][1][40:])[:, None])[:, 0]
    assert (wide.amax(-1) - chosen).mean() < 0.3
    assert simulator.engine.calls["npu.npu_grouped_matmul.default"] > 0


def test_gate_and_down_may_be_of_other_kinds(reference, drive, prompts, tmp_path):
    source, (prompt,) = reference("parallel-moe").path, prompts(40)
    for number, floats in enumerate((("down_proj",), ("gate_proj", "up_proj"))):
        kinds = dict.fromkeys(floats, "FLOAT")
        path, _ = write(
            source,
            tmp_path / str(number),
            lambda module, kinds=kinds: kinds.get(module.rpartition(".")[2], "W8A8_DYNAMIC"),
        )
        drivers = [drive(path, dtype="bfloat16", page_size=PAGE), drive(path, dtype="bfloat16", **OPTIONS)]
        assert drivers[1].info.graph_rows
        on_cpu, found = (scores(driver, prompt) for driver in drivers)
        assert np.abs(on_cpu - found).mean() < 0.4


def rounded(kind, weight):
    """In 4 bits, with zeros or not, in groups of 32 or not; or in 8. "by 8": of tokens that are rounded to 8 bits."""
    if kind == "int8":
        return dataclasses.replace(quantize_int8(weight), activation=None)
    if kind == "int8 clipped":
        return dataclasses.replace(quantize_int8(weight), clip=torch.tensor([0.9]))
    group = 32 if "groups" in kind else weight.shape[1]
    found = Rounded.of(weight.float(), int(kind[0]), group, "zeros" not in kind, "act-order" in kind)
    order = found.index.argsort(stable=True) if "act-order" in kind else None
    values = found.values.to(torch.uint8)
    zeros = found.zeros.to(torch.uint8) if "zeros" in kind else None
    made = grouped(values if order is None else values[:, order], found.scales, zeros, int(kind[0]), order)
    return dataclasses.replace(made, activation="dynamic" if "by 8" in kind else None)


def prepared(weight, x):
    x = x if weight.clip is None else clip_tokens(x, weight.clip)
    return fake_quantize_tokens(x) if weight.activation else x


FORMS = ("4", "4 zeros", "4 groups", "4 groups zeros", "4 groups act-order", "4 groups by 8", "8 zeros", "int8")


@pytest.mark.parametrize("kind", [*FORMS, "int8 clipped"])
def test_weights_that_are_made_floats_on_the_way(kind):
    router, experts = weights(6, 64, 64)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    given, linears = [], []
    for pair in experts:
        narrow = [rounded(kind, weight) for weight in pair]
        dense = [weight.dequantize(BF16) for weight in narrow]
        first, second = (lambda x, w=w, one=one: prepared(one, x) @ w.t() for one, w in zip(narrow, dense, strict=True))
        linears.append((gated(first), second))
        given.append(ExpertWeights(narrow[0].to(torch.device("npu")), None, narrow[1].to(torch.device("npu")), None))
    assert refused(given) is None
    onto = router.npu()
    layer = NpuExperts(lambda x: x @ onto.t(), given, Routing(2, True), A3)
    found = layer(x.npu())
    expected = ExpertsInTurn(lambda x: x @ router.t(), linears, Routing(2, True))(x)
    torch.testing.assert_close(found.cpu(), expected, atol=3e-2, rtol=3e-2)


def test_words_of_four_bits_are_in_graphs(reference, drive, prompts, tmp_path):
    source, (prompt,) = reference("parallel-moe").path, prompts(40)
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["gate"]}
    path = rewrite(source, tmp_path, awq(4, 32), settings)
    drivers = [drive(path, dtype="bfloat16", page_size=PAGE), drive(path, dtype="bfloat16", **OPTIONS)]
    assert drivers[1].info.graph_rows
    on_cpu, found = (scores(driver, prompt) for driver in drivers)
    assert np.abs(on_cpu - found).mean() < 0.4
    assert len(drivers[1].generate(1, 50)) == 50


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("parallel-moe", kind) for kind in ("int8", "W8A8_DYNAMIC", "W4A8_DYNAMIC")),
        ("parallel-shared", "W8A8_DYNAMIC"),
    ],
)
def test_quantized_experts_are_in_graphs(name, kind, reference, drive, prompts, tmp_path):
    source, (prompt,) = reference(name).path, prompts(40)
    path, flag = (source, "int8") if kind == "int8" else (write(source, tmp_path, lambda module: kind)[0], "")
    drivers = [
        drive(path, quantization=flag, dtype="bfloat16", page_size=PAGE),
        drive(path, quantization=flag, dtype="bfloat16", **OPTIONS),
    ]
    assert drivers[1].info.graph_rows
    on_cpu, found = (scores(driver, prompt) for driver in drivers)
    assert np.abs(on_cpu - found).mean() < 0.4
    assert len(drivers[1].generate(1, 50)) == 50


@pytest.mark.parametrize(
    ("form", "reported"),
    [
        (lambda path, to: write(path, to, lambda module: "W4A8_DYNAMIC", group=32)[0], False),
        (lambda path, to: write(path, to, lambda module: "W8A8_MXFP8")[0], True),
        (lambda path, to: rewrite(path, to, fp8_blocks(16, 16), FP8), True),
        (lambda path, to: rewrite(path, to, gptq(8, 16), GPTQ), True),
        (
            lambda path, to: write(path, to, lambda module: "FLOAT" if "gate_proj" in module else "W8A8_DYNAMIC")[0],
            True,
        ),
    ],
    ids=["4 by 8 in groups", "mxfp8", "fp8 blocks", "8 bits in groups", "gates of another kind"],
)
def test_experts_in_forms_of_no_kernel_are_in_graphs(form, reported, reference, drive, prompts, tmp_path, caplog):
    path, (prompt,) = form(reference("parallel-moe").path, tmp_path), prompts(20)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(path, dtype="bfloat16", **OPTIONS)
    assert sum("experts in" in record.message for record in caplog.records) == reported
    assert driver.info.graph_rows
    found, on_cpu = scores(driver, prompt), scores(drive(path, dtype="bfloat16", page_size=PAGE), prompt)
    assert np.abs(on_cpu - found).mean() < 0.4
    assert len(driver.generate(1, 30)) == 30


def test_experts_that_run_one_by_one_leave_decodes_out_of_graphs(reference, drive, prompts, tmp_path, caplog):
    def mixed(module):
        return "W8A8_DYNAMIC" if ".experts.1." in module else "FLOAT"

    path, _ = write(reference("parallel-moe").path, tmp_path, mixed)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        driver = drive(path, dtype="bfloat16", **OPTIONS)
    reported = [record.message for record in caplog.records if "experts are run one by one" in record.message]
    assert len(reported) == 1
    assert "they are of different kinds" in reported[0]
    assert not driver.info.graph_rows
    (prompt,) = prompts(20)
    driver.admit(1, prompt)
    assert len(driver.generate(1, 30)) == 30


def test_what_the_device_does_not_take():
    x, weight = torch.ones(4, 32, dtype=BF16).npu(), torch.ones(3, 32, 16, dtype=BF16).npu()
    counts = torch.tensor([1, 0, 3]).npu()
    right = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    assert torch_npu.npu_grouped_matmul([x], [weight], group_list=counts, **right)[0].shape == (4, 16)
    with pytest.raises(ConstraintError, match="group_list: must be int64"):
        torch_npu.npu_grouped_matmul([x], [weight], group_list=counts.int(), **right)
    with pytest.raises(ConstraintError, match=r"weight: must be \[experts, 32, N\]"):
        torch_npu.npu_grouped_matmul([x], [weight.transpose(1, 2)], group_list=counts, **right)
    with pytest.raises(ConstraintError, match="scale: must be one tensor of"):
        torch_npu.npu_grouped_matmul(
            [x.to(torch.int8)], [weight.to(torch.int8)], group_list=counts, output_dtype=BF16, **right
        )
    experts = torch.zeros(4, 2, dtype=torch.int32).npu()
    with pytest.raises(ConstraintError, match="expert_idx: must be int32"):
        torch_npu.npu_moe_init_routing_v2(x, experts.long(), active_num=8, expert_num=3)
    with pytest.raises(ConstraintError, match="active_num: 7 is not simulated: 8 is"):
        torch_npu.npu_moe_init_routing_v2(x, experts, active_num=7, expert_num=3)
    with pytest.raises(ConstraintError, match="k: must be 1 to 3, is 4"):
        torch_npu.npu_moe_gating_top_k_softmax_v2(torch.ones(2, 3).npu(), k=4)
    with pytest.raises(ConstraintError, match="renorm: must be 0 or 1, is 2"):
        torch_npu.npu_moe_gating_top_k_softmax_v2(torch.ones(2, 3).npu(), k=2, renorm=2)
    logits, bias = torch.ones(2, 8).npu(), torch.zeros(8).npu()
    with pytest.raises(ConstraintError, match="group_count: leaves groups of two experts or fewer"):
        torch_npu.npu_moe_gating_top_k(logits, 2, bias=bias, group_count=4, k_group=1, norm_type=1)
    with pytest.raises(ConstraintError, match="bias: must be float32"):
        torch_npu.npu_moe_gating_top_k(logits, 2, bias=bias.half(), norm_type=1)
    scales, index = torch.ones(2, 2, dtype=BF16).npu(), torch.arange(4, dtype=torch.int32).npu()
    rows = torch.ones(4, 32, dtype=BF16).npu()
    with pytest.raises(ConstraintError, match="drop_pad_mode: is not simulated but for 2"):
        torch_npu.npu_moe_finalize_routing(rows, None, None, None, scales, index, experts[:2])
    with pytest.raises(ConstraintError, match="scales: must be bfloat16"):
        torch_npu.npu_moe_finalize_routing(rows, None, None, None, scales.float(), index, experts[:2], drop_pad_mode=2)
    narrow, values = torch.ones(4, 32, dtype=torch.int8).npu(), torch.ones(3, 32, 16, dtype=torch.int8).npu()
    with pytest.raises(ConstraintError, match="group_list_type: is not simulated but for 1"):
        torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            narrow, [values], [torch.ones(3, 16).npu()], torch.ones(4).npu(), counts
        )
    with pytest.raises(ConstraintError, match="weight_scale: must be float32"):
        torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            narrow, [values], [torch.ones(3, 16, dtype=BF16).npu()], torch.ones(4).npu(), counts, group_list_type=1
        )


def test_fused_products_keep_scales_in_float32():
    _, experts = weights(3, 64, 32)
    whole = [[quantize_int8(part) for part in pair] for pair in experts]
    npu = torch.device("npu")
    given = [ExpertWeights(first.to(npu), None, second.to(npu), None) for first, second in whole]
    stacked = NpuExperts(lambda x: x, given, Routing(2, True), A3)
    expected = torch.stack([first.scales for first, _ in whole])
    assert not torch.equal(expected, expected.to(BF16).float())
    assert torch.equal(stacked.gate_up.scales.cpu(), expected)
    assert stacked.down.scales.dtype == BF16  # npu_grouped_matmul takes no other for such outputs
    apart = NpuExperts(lambda x: x, given, Routing(2, True), Soc("A5", "Ascend950"))
    assert apart.gate_up.scales.dtype == BF16


ROUTINGS = {
    "softmax": Routing(3, False),
    "renormalized": Routing(3, True),
    "sigmoid with a bias": Routing(3, True, "sigmoid", scale=2.5),
    "in groups": Routing(3, True, "sigmoid", groups=4, top_groups=2, pair_sum=True, scale=1.5),
    "by the best of a group": Routing(3, True, "sigmoid", groups=4, top_groups=2),
    "sigmoid alone": Routing(3, False, "sigmoid"),
}


@pytest.mark.parametrize("form", ROUTINGS)
def test_operators_choose_the_same_experts(form):
    generator = torch.Generator().manual_seed(7)
    routing = ROUTINGS[form]
    if routing.scores == "sigmoid" and routing.normalized:
        routing = dataclasses.replace(routing, correction=torch.randn(16, generator=generator).npu())
    _, experts = weights(16, 64, 64)
    given = [ExpertWeights(first.npu(), None, second.npu(), None) for first, second in experts]
    logits = torch.randn(9, 16, generator=generator)
    expected, chosen = choose(logits.npu(), routing)
    found, taken = NpuExperts(lambda x: x, given, routing, A3)._choose(logits.npu())
    assert torch.equal(taken.sort(-1).values.cpu().long(), chosen.sort(-1).values.cpu())
    torch.testing.assert_close(found.sort(-1).values.cpu(), expected.sort(-1).values.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["floats", "int8", "fused", "clipped", "biased"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_elsewhere_add_nothing(form, tokens):
    """Also where no token takes an expert of a rank, and its rows have no meaning."""
    router, experts = weights(6, 64, 32)
    x, onto = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(BF16).npu(), router.npu()

    def part(weight):
        if form in ("floats", "biased"):
            return weight.npu()
        whole = quantize_int8(weight)
        return (dataclasses.replace(whole, clip=torch.tensor([0.7])) if form == "clipped" else whole).to("npu")

    biases = [[torch.full((64,), (number + each) / 8, dtype=BF16).npu() for each in (0, 1)] for number in range(6)]
    biases = biases if form == "biased" else [[None, None]] * 6
    given = [
        ExpertWeights(part(gate_up), first, part(down), last)
        for (gate_up, down), (first, last) in zip(experts, biases, strict=True)
    ]
    soc = A3 if form == "fused" else Soc("A5", "Ascend950")
    expected = NpuExperts(lambda x: x @ onto.t(), given, Routing(2, True), soc)(x).cpu()
    found = torch.zeros(tokens, 64)
    for local in (range(1), range(1, 4), range(4, 6)):
        some = given[local.start : local.stop]
        found += NpuExperts(lambda x: x @ onto.t(), some, Routing(2, True, local=local), soc)(x).cpu().float()
    torch.testing.assert_close(found, expected.float(), atol=3e-2, rtol=3e-2)
