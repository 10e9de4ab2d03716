"""Checkpoints of NVIDIA's Model Optimizer: each algorithm stands for its floats, and what is not read is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.modelopt import ModelOpt
from tests.kits.declared import spec_of
from tests.kits.quantized import fp8_blocks, rewrite

PROMPT = list(range(3, 40))
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ALL = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4")


def of_tensor(module, weight):
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {f"{module}.weight": values, f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.5)}


def of_outputs(module, weight):
    scale = weight.abs().amax(1) / 448
    return {f"{module}.weight": (weight / scale[:, None]).to(torch.float8_e4m3fn), f"{module}.weight_scale": scale}


def of_blocks(module, weight):
    made = fp8_blocks(128, 128)(module, weight)
    scales = made.pop(f"{module}.weight_scale_inv")
    return made | {f"{module}.weight_scale": scales[:, None, :, None]}


def of_powers(module, weight):
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2).log2().ceil() - 8).clamp(-127, 127)
    values = (groups / exponents.exp2()[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return {f"{module}.weight": values, f"{module}.weight_scale": (exponents + 127).to(torch.uint8)}


def of_fours(module, weight):
    groups = weight.unflatten(1, (-1, 16))
    wide = groups.abs().amax(2) / 6
    whole = wide.max() / 448
    scales = (wide / whole).to(torch.float8_e4m3fn)
    scaled = groups / (scales.float() * whole)[..., None]
    codes = (scaled.abs()[..., None] - NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.flatten(1).to(torch.uint8)
    return {
        f"{module}.weight": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": whole,
        f"{module}.input_scale": torch.tensor(0.01),
    }


CHANGES = dict(zip(ALL, (of_tensor, of_outputs, of_blocks, of_powers, of_fours, of_fours), strict=True))


class Files(dict):
    has = dict.__contains__
    read = dict.__getitem__


def scores(driver):
    driver.admit(1, PROMPT, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(PROMPT))]).prompt_logprobs, np.float32)


def settings_of(algorithm):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def read(algorithm, weight, module="model.layers.0.mlp.up_proj"):
    scheme, spec = ModelOpt(settings_of(algorithm)), spec_of(module, tuple(weight.shape))
    made = CHANGES[algorithm](module, weight)
    for name, stored in scheme.tensors(spec).items():
        assert name not in made or tuple(made[name].shape) in stored.shapes
    return scheme.read(Files(made), spec)


@pytest.mark.parametrize(("algorithm", "error"), [*zip(ALL, (0.04, 0.04, 0.04, 0.07, 0.17, 0.17), strict=True)])
def test_each_algorithm_stands_for_its_weight(algorithm, error):
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(2))
    found = read(algorithm, weight)
    away = (found.dequantize(torch.float32) - weight).abs() / weight.abs().amax()
    assert 0 < away.max() < error
    assert found.activation is None if algorithm == "W4A16_NVFP4" else found.activation is not None


def floats_of(algorithm):
    def floats(module, weight):
        return {f"{module}.weight": read(algorithm, weight, module).dequantize(torch.float32)}

    return floats


def test_a_model_of_experts_stands_for_its_floats(reference, drive, tmp_path):
    source = reference("sixteens-qwen3-moe").path
    made = rewrite(source, tmp_path / "words", of_fours, settings_of("W4A16_NVFP4"))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats_of("W4A16_NVFP4"))))
    np.testing.assert_allclose(scores(drive(made)), expected, atol=1e-3)
    assert np.abs(expected - scores(drive(source))).max() > 5e-3  # it was rounded


def test_experts_in_one_tensor_with_a_number_each_are_read(reference, drive, tmp_path):
    """As Step 3.7 Flash is published in NVFP4: ``weight_scale_2`` and ``input_scale`` [experts]; else floats."""

    def experts_alone(change):
        return lambda module, x: change(module, x) if ".experts." in module else {f"{module}.weight": x}

    source, algorithm = reference("step3p5").path, "W4A16_NVFP4"
    path = rewrite(source, tmp_path / "words", experts_alone(of_fours), settings_of(algorithm))
    tensors, joined = load_file(path / "model.safetensors"), {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdecimal() else 0 for part in name.split(".")]):
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            joined.setdefault(f"{layer}.{rest.partition('.')[2]}", []).append(tensors.pop(name))
    joined = {name: torch.stack(each) for name, each in joined.items()}
    assert joined["model.layers.1.moe.up_proj.weight_scale_2"].shape == (6,)
    save_file(tensors | joined, path / "model.safetensors")
    expected = scores(drive(rewrite(source, tmp_path / "floats", experts_alone(floats_of(algorithm)))))
    np.testing.assert_allclose(scores(drive(path)), expected, atol=1e-3)


def test_mixed_precision_names_modules_or_those_around_them(reference, drive, tmp_path):
    """Names are those inside a checkpoint that also reads images; a module that is not named is in floats."""
    kinds = {".experts.": "W4A16_NVFP4", "self_attn.q_proj": "FP8_PER_CHANNEL_PER_TOKEN"}

    def mixed(each):
        def change(module, weight):
            kind = next((kind for part, kind in kinds.items() if part in module), None)
            return {f"{module}.weight": weight} if kind is None else each(kind)(module, weight)

        return change

    source = reference("sixteens-qwen3-moe").path
    layers = {f"model.language_model.layers.{index}.mlp.experts": "W4A16_NVFP4" for index in range(6)}
    layers |= {f"model.language_model.layers.{index}.self_attn.q_proj": kinds["self_attn.q_proj"] for index in range(6)}
    settings = settings_of("MIXED_PRECISION") | {"quantized_layers": {a: {"quant_algo": b} for a, b in layers.items()}}
    result = scores(drive(rewrite(source, tmp_path / "words", mixed(CHANGES.get), settings)))
    expected = scores(drive(rewrite(source, tmp_path / "floats", mixed(floats_of))))
    assert np.abs(result - expected).mean() < 5e-3  # inputs of q_proj are rounded


def test_a_file_beside_config_json_names_the_algorithm(reference, drive, tmp_path):
    source = reference("sixteens-qwen3-moe").path
    made = rewrite(source, tmp_path / "words", of_fours)
    file = made / "hf_quant_config.json"
    named = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": named}))
    assert detect_scheme(made, "").name == detect_scheme(made, "modelopt").name == "modelopt W4A16_NVFP4"
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats_of("W4A16_NVFP4"))))
    np.testing.assert_allclose(scores(drive(made)), expected, atol=1e-3)
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert detect_scheme(made, "") is None
    for broken in ("[1]", "{", '{"quantization": 3}'):
        file.write_text(broken)
        with pytest.raises(ConfigError, match=r"hf_quant_config\.json"):
            detect_scheme(made, "")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (settings_of("W4A8_AWQ"), "quant_algo 'W4A8_AWQ' is not read; those that are read are FP8, "),
        (settings_of(None), "quant_algo None is not read"),
        (settings_of("MIXED_PRECISION"), "needs quantized_layers, an object"),
        (settings_of("MIXED_PRECISION") | {"quantized_layers": {"a": 1}}, r"quantized_layers\.a must be an object"),
        (settings_of("NVFP4") | {"group_size": 0.5}, "group_size must be a whole number above 0, and is 0.5"),
    ],
)
def test_settings_that_are_not_read_are_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        ModelOpt(settings)


def test_the_names_of_sglang_are_the_same_method(reference, tmp_path):
    for method in ("modelopt_fp4", "modelopt_mixed"):
        settings = settings_of("NVFP4") | {"quant_method": method}
        path = rewrite(reference("sixteens-qwen3-moe").path, tmp_path / method, of_fours, settings)
        assert detect_scheme(path, "").name == "modelopt NVFP4"


@pytest.mark.parametrize("whole", [0.0, -1.0, float("inf")])
def test_a_scale_that_is_none_is_refused(whole):
    weight, module = torch.ones(16, 32), "model.layers.0.mlp.up_proj"
    made = of_fours(module, weight) | {f"{module}.weight_scale_2": torch.tensor(whole)}
    with pytest.raises(LoadError, match=r"weight_scale_2 must be finite, and the latter above 0"):
        ModelOpt(settings_of("NVFP4")).read(Files(made), spec_of(module, (16, 32)))
