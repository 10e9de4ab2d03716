"""Whole models of quantized weights on the CPU, and checkpoints that are refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.understudy import MODEL_DIR
from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native.library import build
from kernels.execution import load
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.int8 import Int8Linear, sums_are_exact
from kernels.weights.quantization.weights import Fp8Weight, StaticActivation, quantize_fp8, quantize_int8
from tests.kits.native import needs_native
from tests.kits.quantized import fp8_blocks, fp8_rows, rewrite

PROMPT = [7, 19, 101, 33, 54, 2, 90, 61, 17, 44, 5, 12]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)


def scores(driver, prompt=PROMPT):
    driver.admit(1, prompt, sampling=SCORED)
    return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)


def floats(source, target, quantize):
    """The checkpoint of what quantized weights stand for."""
    return rewrite(
        source, target, lambda module, weight: {f"{module}.weight": quantize(weight).dequantize(torch.float32)}
    )


@pytest.mark.parametrize("name", ["llama-biased", "qwen3"])
@pytest.mark.parametrize(("kind", "quantize", "near"), [("int8", quantize_int8, 0.06), ("fp8", quantize_fp8, 1e-4)])
def test_weights_are_quantized_while_they_are_loaded(kind, quantize, near, name, reference, drive, tmp_path, caplog):
    source = reference(name).path
    plain = drive(source)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        quantized = drive(source, quantization=kind)
    assert quantized.info.parameters == plain.info.parameters
    if kind == "int8":
        most = 0.6 if sums_are_exact() else 0.9  # weights are kept twice where products would saturate
        assert quantized.info.weight_bytes < most * plain.info.weight_bytes
    else:  # dequantized: as large as it was
        assert quantized.info.weight_bytes == plain.info.weight_bytes
    reported = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert len(reported) == (kind == "fp8")  # int8 runs as it is
    exact = scores(drive(floats(source, tmp_path / "floats", quantize)))
    found = scores(quantized)
    assert np.abs(found - exact).mean() < near
    assert not np.array_equal(found, scores(plain))


@pytest.mark.parametrize("block", [None, (16, 32), (128, 128)])
def test_fp8_checkpoints_stand_for_their_floats(block, reference, drive, tmp_path):
    source = reference("qwen2").path
    change = fp8_rows if block is None else fp8_blocks(*block)
    settings = FP8 if block is None else FP8 | {"weight_block_size": list(block)}
    path = rewrite(source, tmp_path / "fp8", change, settings)

    def dequantized(module, weight):
        held = change(module, weight)
        scales = held.get(f"{module}.weight_scale_inv", held.get(f"{module}.weight_scale"))
        weight = Fp8Weight(held[f"{module}.weight"], scales if block else scales.flatten(), block)
        return {f"{module}.weight": weight.dequantize(torch.float32)}

    expected = drive(rewrite(source, tmp_path / "floats", dequantized))
    for quantization in ("", "fp8"):
        np.testing.assert_allclose(scores(drive(path, quantization=quantization)), scores(expected), atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_cache_is_sized_by_what_weights_take_in_memory(kind, reference, drive, monkeypatch):
    source, sized = reference("qwen2").path, []
    pages = load.cache_pages
    monkeypatch.setattr(load, "cache_pages", lambda *args, **named: (sized.append(args[3]), pages(*args, **named))[1])
    quantized, plain = drive(source, quantization=kind), drive(source)
    assert sized == [quantized.info.weight_bytes, plain.info.weight_bytes]
    assert (sized[0] == sized[1]) == (kind == "fp8")  # which has no kernel here


def test_weights_of_several_kinds_in_one_layer(reference, drive, tmp_path):
    """The query projection stays in floats, so the fused one is of two kinds."""
    source = reference("qwen2").path
    skip = FP8 | {"modules_to_not_convert": ["q_proj", "model.layers.1.mlp"]}

    def change(module, weight):
        plain = "q_proj" in module or "layers.1.mlp" in module
        return {f"{module}.weight": weight} if plain else fp8_rows(module, weight)

    def dequantized(module, weight):
        held = change(module, weight)
        scale = held.get(f"{module}.weight_scale")
        return {f"{module}.weight": weight if scale is None else held[f"{module}.weight"].float() * scale}

    mixed = drive(rewrite(source, tmp_path / "mixed", change, skip))
    expected = drive(rewrite(source, tmp_path / "floats", dequantized))
    np.testing.assert_allclose(scores(mixed), scores(expected), atol=1e-4)


def dropped(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]


def other_blocks(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1, 1)


def other_type(tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (dropped, r"model.layers.1.mlp.up_proj.weight_scale_inv is missing"),
        (other_blocks, r"q_proj.weight_scale_inv has shape \[1, 1\], config.json \(fp8, blocks of 16 by 16\) asks for"),
        (other_type, r"q_proj.weight is stored as BF16, not as one of F8_E4M3"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_tensors_name(change, reported, reference, drive, tmp_path):
    settings = FP8 | {"weight_block_size": [16, 16]}
    path = rewrite(reference("qwen2").path, tmp_path / "fp8", fp8_blocks(16, 16), settings)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=reported):
        drive(path)


@pytest.mark.parametrize(
    ("settings", "quantization", "reported"),
    [
        ({"quant_method": "aqlm"}, "", "quantized by aqlm"),
        ({"bits": 4}, "", "does not name"),
        (FP8, "int8", "quantized by fp8, and --quantization asks for int8"),
        (FP8 | {"activation_scheme": "both"}, "", "activation_scheme"),
        (FP8 | {"weight_block_size": [128]}, "", "weight_block_size"),
        ("fp8", "", "must be an object"),
        (None, "awq", "in floats"),
    ],
)
def test_a_scheme_that_is_not_detected_is_refused(settings, quantization, reported, reference, tmp_path):
    path = rewrite(
        reference("qwen2").path, tmp_path / "q", lambda module, weight: {f"{module}.weight": weight}, settings
    )
    with pytest.raises(ConfigError, match=reported):
        detect_scheme(path, quantization)


def test_overrides_are_merged_into_what_the_checkpoint_says(reference, tmp_path):
    path = rewrite(reference("qwen2").path, tmp_path / "q", fp8_rows, FP8)
    with pytest.raises(ConfigError, match="activation_scheme must be dynamic or static, and is 'both'"):
        detect_scheme(path, "", '{"quantization_config": {"activation_scheme": "both"}}')


@needs_native
@pytest.mark.parametrize(("outputs", "inputs"), [(384, 1024), (33, 64), (100, 192)])
@pytest.mark.parametrize("static", [False, True])
def test_native_products_are_those_of_whole_numbers(outputs, inputs, static):
    build()
    platform = CpuDevice(2)
    platform.select_dtype("bfloat16", None)
    torch.manual_seed(outputs)
    weight = quantize_int8(torch.randn(outputs, inputs))
    if static:
        activation = StaticActivation(torch.tensor([0.03]), torch.tensor([5.0]))
        correction = torch.randint(-9999, 9999, (outputs,), dtype=torch.int32)
        weight = type(weight)(weight.values, weight.scales, activation, correction)
    bias = torch.randn(outputs).bfloat16()
    linear, expected = platform.linear.make_quantized(weight, bias), Int8Linear(weight, bias)
    for rows in (1, 2, 16, 17, 33, 300):
        x = torch.randn(rows, inputs).bfloat16()
        torch.testing.assert_close(linear(x), expected(x), rtol=1e-2, atol=1e-4)
        assert torch.equal(linear(x)[:1], linear(x[:1])), "a row's result depends on the rows around it"
    x[3, 5], x[4, 7], x[5] = torch.nan, -torch.inf, 0
    for found in (linear(x), expected(x)):
        broken = torch.zeros(len(x), dtype=torch.bool)
        broken[3:5] = True
        assert torch.equal(~found.isfinite().all(1), broken), "a token that is not finite must not become one that is"
    if static:
        x = torch.randn(4, inputs).bfloat16() * 1e12
        torch.testing.assert_close(linear(x), expected(x), rtol=1e-2, atol=1e-4)


@needs_native
def test_quantized_decodes_run_as_one_program(drive, monkeypatch):
    build()
    prompt = list(range(40, 72))
    quantized = drive(MODEL_DIR, dtype="bfloat16", quantization="int8")
    quantized.admit(1, prompt)
    tokens = quantized.generate(1, 48)
    assert quantized.info.graph_rows
    monkeypatch.setattr(CpuCapture, "decodes", lambda *args, **options: None)
    monkeypatch.setattr(CpuCapture, "native_pass", lambda *args, **options: None)
    one_by_one = drive(MODEL_DIR, dtype="bfloat16", quantization="int8")
    assert not one_by_one.info.graph_rows
    one_by_one.admit(1, prompt)
    assert one_by_one.generate(1, 48) == tokens
    assert quantized.info.weight_bytes < 0.65 * drive(MODEL_DIR, dtype="bfloat16").info.weight_bytes
