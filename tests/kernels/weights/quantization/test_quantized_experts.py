"""Models of experts whose experts are quantized: every layout stands for its floats, and what chooses them stays."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.devices.cpu.device import CpuDevice
from kernels.weights.quantization.detect import METHODS
from kernels.weights.quantization.four_bits import four_by_eight
from kernels.weights.quantization.int8 import sums_are_exact
from kernels.weights.quantization.tokens import clip_tokens, fake_quantize_tokens
from kernels.weights.quantization.weights import GroupedWeight, Int8Weight
from tests.bench import quantization
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.declared import spec_of
from tests.kits.modelslim import write
from tests.kits.quantized import fp8_blocks, fp8_rows, rewrite
from tests.kits.quantized_words import awq, dequantized, four_bit_bytes, four_bit_pairs, gptq, int8_rows, packed

PROMPT = [7, 19, 101, 33, 54, 2, 90, 61, 17, 44, 5, 12]
SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)
EXPERT = "model.layers.1.mlp.experts.3"
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "modules_to_not_convert": ["gate"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": False, "data_type": "int"}
ROUND["extra_config"] = {gate: {"bits": 16} for gate in GATES}


def numbers(bits, strategy, **more):
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, **more}


TOKENS = numbers(8, "token", dynamic=True)


def compressed(kind, *groups):
    """``groups``: targets, weights, inputs, and what else each has."""
    described = {
        f"group_{index}": {"targets": targets, "weights": weights, "input_activations": inputs, **more}
        for index, (targets, weights, inputs, more) in enumerate(groups)
    }
    method = {"quant_method": "compressed-tensors", "format": kind, "config_groups": described}
    return method | {"ignore": ["lm_head", *GATES]}


def four_by_eights(clips):
    dense = (["Linear"], numbers(8, "channel"), TOKENS, {})
    return compressed(
        "int-quantized", dense, (["MoEGMM"], numbers(4, "channel"), TOKENS, {"activation_use_clip": clips})
    )


def experts_only(change, others):
    return lambda module, weight: (change if ".experts." in module else others)(module, weight)


def groups_of(bits, **more):
    return numbers(bits, "group", group_size=16, **more)


LINEAR = ["Linear"]
WEIGHT_ONLY = {
    "awq 4": (awq(4, 16), AWQ, dequantized(4, 16)),
    "awq 8": (awq(8, 16), AWQ | {"bits": 8}, dequantized(8, 16)),
    "gptq 4": (gptq(4, 16), GPTQ, dequantized(4, 16)),
    "gptq 8": (gptq(8, 16), GPTQ | {"bits": 8}, dequantized(8, 16)),
    "gptq act-order": (gptq(4, 16, True), GPTQ | {"desc_act": True}, dequantized(4, 16, shuffled=True)),
    "auto-round 4": (gptq(4, 16), ROUND, dequantized(4, 16)),
    "auto-round 8": (gptq(8, 16), ROUND | {"bits": 8}, dequantized(8, 16)),
    "auto-round awq": (awq(4, 16), ROUND | {"packing_format": "auto_round:auto_awq"}, dequantized(4, 16)),
    "packed": (
        packed(4, 16),
        compressed("pack-quantized", (LINEAR, groups_of(4), None, {})),
        dequantized(4, 16, True),
    ),
    "packed zeros": (
        packed(4, 16, False),
        compressed("pack-quantized", (LINEAR, groups_of(4, symmetric=False), None, {})),
        dequantized(4, 16),
    ),
}
ROUNDED_INPUTS = {
    "int8": (int8_rows(), compressed("int-quantized", (LINEAR, numbers(8, "channel"), TOKENS, {}))),
    "fp8": (fp8_rows, {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": GATES}),
    "fp8 blocks": (fp8_blocks(16, 16), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "4 by 8": (experts_only(four_bit_pairs(), int8_rows()), four_by_eights(False)),
    "4 by 8, clipped": (experts_only(four_bit_pairs(0.9), int8_rows()), four_by_eights(True)),
    "4 by 8 in groups": (
        four_bit_bytes(16),
        compressed("int-quantized", (LINEAR, groups_of(4), TOKENS, {})),
    ),
    "4 by 8, packed": (packed(4, 16), compressed("pack-quantized", (LINEAR, groups_of(4), TOKENS, {}))),
}


def scores(driver):
    driver.admit(1, PROMPT, sampling=SCORED)
    return np.frombuffer(driver.step([(1, len(PROMPT))]).prompt_logprobs, np.float32)


class Files(dict):
    has = dict.__contains__
    read = dict.__getitem__


def stands_for(change, settings):
    """What a scheme reads of each module, in floats."""
    scheme = METHODS[settings["quant_method"]](settings)

    def floats(module, weight):
        found = scheme.read(Files(change(module, weight)), spec_of(module, tuple(weight.shape)))
        return {f"{module}.weight": found.dequantize(torch.float32)}

    return floats


@pytest.mark.parametrize(
    ("name", "layout"), [*(("parallel-moe", layout) for layout in WEIGHT_ONLY), ("parallel-shared", "gptq 4")]
)
def test_experts_of_weights_alone_stand_for_their_floats(name, layout, reference, drive, tmp_path):
    change, settings, floats = WEIGHT_ONLY[layout]
    source = reference(name).path
    quantized = drive(rewrite(source, tmp_path / "words", change, settings))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats)))
    np.testing.assert_allclose(scores(quantized), expected, atol=1e-3)
    assert np.abs(expected - scores(drive(source))).max() > 5e-3  # it was rounded


@pytest.mark.parametrize("layout", ROUNDED_INPUTS)
def test_experts_with_rounded_inputs_are_near_their_floats(layout, reference, drive, tmp_path):
    change, settings = ROUNDED_INPUTS[layout]
    source = reference("parallel-moe").path
    quantized = scores(drive(rewrite(source, tmp_path / "words", change, settings)))
    expected = scores(drive(rewrite(source, tmp_path / "floats", stands_for(change, settings))))
    near = 0.4 if "clipped" in layout else 0.2
    if layout.startswith("fp8"):
        near = 1e-3  # in float32 e4m3 is dequantized, and its inputs are left as they are
    assert np.abs(quantized - expected).mean() < near
    assert np.abs(expected - scores(drive(source))).max() > 5e-3


MIXED = {"mlp.experts.1": "W4A4_DYNAMIC", "mlp.experts": "W4A8_DYNAMIC", "k_proj": "FLOAT"}


def mixed(module):
    return next((kind for part, kind in MIXED.items() if part in module), "W8A8_DYNAMIC")


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("W8A8_DYNAMIC", 0),
        ("W4A4_DYNAMIC", 0),
        ("W4A8_DYNAMIC", 0),
        ("W4A8_DYNAMIC", 16),
        ("W8A8_MXFP8", 0),
        (mixed, 0),
    ],
)
@pytest.mark.parametrize("name", ["parallel-moe", "parallel-shared"])
def test_modelslim(name, kind, group, reference, drive, tmp_path):
    source = reference(name).path
    paths = write(source, tmp_path, kind if callable(kind) else lambda module: kind, group=group)
    quantized, expected = (scores(drive(path)) for path in paths)
    assert np.abs(quantized - expected).mean() < (1e-3 if kind == "W8A8_MXFP8" else 0.3)


def test_an_exponent_that_is_no_number_is_reported(reference, drive, tmp_path):
    def broken(description, tensors):
        tensors[f"{EXPERT}.up_proj.weight_scale"][1] = 255

    path, _ = write(reference("parallel-moe").path, tmp_path, lambda module: "W8A8_MXFP8", edit=broken)
    with pytest.raises(LoadError, match=rf"{EXPERT}\.up_proj\.weight_scale contains NaN"):
        drive(path)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_floats_are_rounded_while_they_are_loaded(kind, reference, drive):
    source = reference("parallel-moe").path
    plain, quantized = drive(source), drive(source, quantization=kind)
    most = 0.5 if sums_are_exact() else 0.9  # weights are kept twice where products would saturate
    assert quantized.info.weight_bytes < most * plain.info.weight_bytes or kind == "fp8"  # which has none in float32
    assert 0 < np.abs(scores(quantized) - scores(plain)).mean() < 1.5


def made(inputs=64, outputs=32, groups=1, clip=None):
    generator = torch.Generator().manual_seed(inputs + groups)
    values = torch.randint(-8, 8, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, groups, generator=generator) / 10
    return values, scales, dataclasses.replace(four_by_eight(values, scales, clip), dtype=torch.float32)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("clip", [None, torch.tensor([0.75])])
def test_tokens_are_clipped_and_rounded_as_the_scheme_says(groups, clip, caplog):
    values, scales, weight = made(groups=groups, clip=clip)
    assert isinstance(weight, GroupedWeight if groups > 1 else Int8Weight)
    dense = values * scales.repeat_interleave(64 // groups, 1)
    torch.testing.assert_close(weight.dequantize(torch.float32), dense)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    most = x.abs().amax(1, keepdim=True) * (1.0 if clip is None else clip)
    rounded = (x.clamp(-most, most) / (most / 127)).round() * (most / 127)
    platform = CpuDevice(1)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        linears = [platform.linear.make_projection(weight, None) for _ in range(2)]
    assert sum("inputs that are rounded to 8 bits" in record.message for record in caplog.records) == (groups > 1)
    for linear in linears:
        torch.testing.assert_close(linear(x), rounded @ dense.t(), atol=1e-4, rtol=1e-4)
    assert (linears[0](x) - x @ dense.t()).abs().max() > 5e-3


def test_a_token_that_is_not_finite_stays_so():
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    x[2, 3] = float("inf")
    for found in (fake_quantize_tokens(x), fake_quantize_tokens(clip_tokens(x, torch.tensor([0.5])))):
        assert found[0].isfinite().all()
        assert not found[1].isfinite().all()
        assert not found[2].isfinite().all()


def changed(source, tmp_path, layout, edit):
    path = rewrite(source, tmp_path / "words", *ROUNDED_INPUTS[layout])
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_share_of_the_largest_that_is_none_is_refused(reference, drive, tmp_path):
    def edit(tensors):
        tensors[f"{EXPERT}.down_proj.alpha"] = torch.tensor([1.5])

    path = changed(reference("parallel-moe").path, tmp_path, "4 by 8, clipped", edit)
    with pytest.raises(LoadError, match=r"experts\.3\.down_proj\.alpha must be above 0 and at most 1, and is 1\.5"):
        drive(path)


def test_a_clip_without_its_setting_is_refused(reference, drive, tmp_path):
    def edit(tensors):
        tensors[f"{EXPERT}.down_proj.alpha"] = torch.tensor([0.5])

    path = changed(reference("parallel-moe").path, tmp_path, "4 by 8", edit)
    with pytest.raises(LoadError, match=r"experts\.3\.down_proj\.alpha is in the checkpoint and not in the model"):
        drive(path)


def test_an_experts_scale_that_is_missing_is_named(reference, drive, tmp_path):
    def edit(tensors):
        del tensors[f"{EXPERT}.up_proj.weight_scale"]

    path = changed(reference("parallel-moe").path, tmp_path, "4 by 8", edit)
    with pytest.raises(LoadError, match=r"experts\.3\.up_proj\.weight_scale is missing"):
        drive(path)


def test_weights_that_were_not_rounded_to_four_bits_are_refused(reference, drive, tmp_path):
    def edit(tensors):
        tensors[f"{EXPERT}.up_proj.weight"][0, 0] = 9

    path = changed(reference("parallel-moe").path, tmp_path, "4 by 8 in groups", edit)
    with pytest.raises(LoadError, match=r"experts\.3\.up_proj\.weight must be integers of -8 to 7"):
        drive(path)


def test_inputs_are_clipped_for_weights_of_four_bits_only():
    group = (LINEAR, numbers(8, "channel"), TOKENS, {"activation_use_clip": True})
    with pytest.raises(ConfigError, match="inputs are clipped for int-quantized weights of 4 bits only"):
        METHODS["compressed-tensors"](compressed("int-quantized", group))


def test_a_table_of_experts_has_no_rows_of_the_dense_model(capsys):
    with pytest.raises(SystemExit):
        quantization.main(["--experts", "--schemes", "--checkpoints", "gguf-iq1_s", "gptq-4"])
    assert "no model of experts is written as gguf-iq1_s" in capsys.readouterr().err


def in_one_tensor(source, target, rows, fused):
    """Experts in fp8 of blocks of ``rows`` by 16, all of a layer in one tensor. ``fused``: blocks are those of gate's
    rows and then up's, else each has its own."""
    blocks, settings = fp8_blocks(rows, 16), {"quant_method": "fp8", "weight_block_size": [rows, 16]}
    path = rewrite(source, target, lambda module, weight: {f"{module}.weight": weight}, settings)
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        block = f"model.layers.{layer}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            parts = [
                [
                    tensors.pop(f"{block}.{expert}.{part}.weight")
                    for part in (("gate_proj", "up_proj") if "up" in name else (name,))
                ]
                for expert in range(7)
            ]
            made = [[blocks("", x) for x in ([torch.cat(each)] if fused else each)] for each in parts]
            for kind, end in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
                tensors[f"{block}.{name}{end}"] = torch.stack([torch.cat([one[kind] for one in each]) for each in made])
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("rows", "fused"), [(16, True), (24, False)])
def test_blocks_of_experts_in_one_tensor_are_read(rows, fused, reference, drive, tmp_path):
    source = reference("parallel-moe").path
    path = in_one_tensor(source, tmp_path / "words", rows, fused)
    settings = {"quant_method": "fp8", "weight_block_size": [rows, 16]}
    floats = experts_only(
        stands_for(fp8_blocks(rows, 16), settings), lambda module, weight: {f"{module}.weight": weight}
    )
    np.testing.assert_allclose(
        scores(drive(path)), scores(drive(rewrite(source, tmp_path / "floats", floats))), atol=1e-3
    )


@pytest.mark.parametrize("rows", [24, 20])
def test_blocks_of_rows_of_two_projections_are_refused(rows, reference, drive, tmp_path):
    path = in_one_tensor(reference("parallel-moe").path, tmp_path, rows, True)
    with pytest.raises(LoadError, match=rf"experts\.gate_up_proj_scale_inv has a scale for each {rows} of the 64 rows"):
        drive(path)


@pytest.mark.long
def test_two_ranks_generate_what_one_generates(reference, drive, prompts, tmp_path):
    source, texts = reference("parallel-moe").path, prompts(5, 23)
    path = rewrite(source, tmp_path / "awq", *WEIGHT_ONLY["awq 4"][:2])
    (reported,), (also,) = run_ranks([{"model": str(path), "prompts": texts, "length": 30}])
    alone = drive(path)
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 30)
    assert reported["tokens"] == also["tokens"] == [alone.tokens[slot] for slot in sorted(alone.tokens)]
