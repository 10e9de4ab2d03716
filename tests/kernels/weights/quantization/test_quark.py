"""Checkpoints of AMD's Quark: FP8, int8 and MXFP4, also mixed by patterns of modules."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.quark import Quark
from kernels.weights.quantization.weights import Fp8Weight, Int8Weight, StaticActivation
from kernels.weights.tensors import StackedExpert
from tests.kits.declared import spec_of
from tests.kits.deepseek_v4_files import fp4
from tests.kits.quantized import rewrite

FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": False}
TOKENS = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
STATIC = {"qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}


def settings(weight, inputs=None, **more):
    own = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": own, "exclude": ["lm_head"], **more}


def fp8(module, weight):
    scales = weight.abs().amax(1) / 448
    values = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    return {f"{module}.weight": values, f"{module}.weight_scale": scales}, values.float() * scales[:, None]


def int8(module, weight):
    scale = weight.abs().max() / 127
    values = (weight / scale).round().to(torch.int8)
    zeros = torch.zeros((), dtype=torch.int8)
    made = {f"{module}.weight": values, f"{module}.weight_scale": scale, f"{module}.weight_zero_point": zeros}
    return made, values.float() * scale


def mxfp4(module, weight):
    packed, scales, floats = fp4(weight)
    made = {f"{module}.weight": packed.view(torch.uint8), f"{module}.weight_scale": scales.view(torch.uint8)}
    return made, floats


def mixed(module, weight):
    return (fp8 if "self_attn" in module else mxfp4)(module, weight)


CASES = {
    "fp8": (fp8, settings(FP8)),
    "int8": (int8, settings(INT8 | {"qscheme": "per_tensor"})),
    "mxfp4": (mxfp4, settings(MXFP4)),
    "mixed": (mixed, settings(MXFP4, layer_quant_config={"*self_attn*": {"weight": FP8, "input_tensors": None}})),
}


def scores(driver, text):
    driver.admit(1, text, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(text))]).prompt_logprobs, np.float32)


@pytest.mark.parametrize("name", ["native-qwen3", "native-moe"])
@pytest.mark.parametrize("case", CASES)
def test_weights_stand_for_their_floats(name, case, reference, drive, prompts, tmp_path):
    make, own = CASES[case]
    source, (text,) = reference(name).path, prompts(30)
    path = rewrite(source, tmp_path / "own", lambda module, weight: make(module, weight)[0], own)
    floats = rewrite(source, tmp_path / "floats", lambda module, weight: {f"{module}.weight": make(module, weight)[1]})
    found, expected = scores(drive(path), text), scores(drive(floats), text)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.abs(expected - scores(drive(source), text)).max() > 1e-3  # it was rounded


class Files(dict):
    def has(self, name):
        return name in self

    def read(self, name):
        return self[name]


@pytest.mark.parametrize(
    ("inputs", "expected"), [(None, None), (TOKENS, "dynamic"), (STATIC, StaticActivation), ({}, None)]
)
@pytest.mark.parametrize(("weight", "make", "kind"), [(FP8, fp8, Fp8Weight), (INT8, int8, Int8Weight)])
def test_inputs_are_quantized_as_the_settings_say(weight, make, kind, inputs, expected):
    files, spec = Files(make("x", torch.randn(8, 32))[0]), spec_of("x", (8, 32))
    files["x.input_scale"] = torch.tensor(0.5)
    scheme = Quark(settings(weight, inputs))
    assert ("x.input_scale" in scheme.tensors(spec)) == (expected is StaticActivation)
    found = scheme.read(files, spec)
    assert isinstance(found, kind)
    if expected is StaticActivation:
        assert float(found.activation.scale) == 0.5
    else:
        assert found.activation == expected


def test_experts_in_mxfp4_stay_in_four_bits():
    made, floats = mxfp4("x", torch.randn(8, 64))
    spec = dataclasses.replace(spec_of("x", (8, 64)), stacked=StackedExpert(0, 2, "y"))
    found = Quark(settings(MXFP4)).read(Files(made), spec)
    assert found.nbytes == 8 * 64 // 32 * 17
    torch.testing.assert_close(found.dequantize(torch.float32), floats)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"global_quant_config": None}, "global_quant_config must be an object"),
        ({"global_quant_config": {"weight": [FP8, FP8]}}, "global_quant_config.weight and .* must be objects"),
        (settings(MXFP4 | {"group_size": 16}), "dtype 'fp4' and qscheme 'per_group' is not read"),
        (settings(FP8 | {"dtype": "int4"}), "dtype 'int4' and qscheme 'per_channel' is not read"),
        (settings(INT8 | {"symmetric": False}), "dtype 'int8' .* is not read"),
        (settings(INT8, STATIC | {"symmetric": False}), "must be symmetric and have qscheme per_tensor"),
        (settings(FP8, STATIC | {"qscheme": "per_channel"}), "must be symmetric and have qscheme per_tensor"),
        (settings(FP8, layer_type_quant_config={"Linear": {}}), "layer_type_quant_config is not supported"),
        (settings(FP8, layer_quant_config={"*x": {"weight": None}}), "layer_quant_config.*x.weight and"),
        (settings(FP8, layer_quant_config=[1]), "layer_quant_config must be an object"),
        (settings(FP8, algo_config=[{"name": "rotation", "r1": True, "r4": True}]), "algo_config has r4, a rotation"),
        (settings(FP8, algo_config={"name": "rotation", "r3": True}), "algo_config has r3, a rotation"),
        (settings(FP8, algo_config=3), "algo_config must be a list of objects"),
        (settings(INT8, STATIC | {"dtype": "fp8_e4m3"}), "must be symmetric .* and the weight's dtype, int8"),
    ],
)
def test_other_settings_are_refused(change, says):
    with pytest.raises(ConfigError, match=says.replace("*x", r"\*x")):
        Quark(settings(FP8) | change)


def test_patterns_name_modules_by_the_wrappers_names_too():
    scheme = Quark(settings(MXFP4, layer_quant_config={"*language_model*self_attn*": {"weight": FP8}}))
    module = "model.layers.0.self_attn.q_proj"
    assert scheme.tensors(spec_of(module, (8, 64)))[f"{module}.weight"].dtypes == ("F8_E4M3",)
    assert scheme.tensors(spec_of("model.layers.0.mlp.x", (8, 64)))["model.layers.0.mlp.x.weight"].dtypes == ("U8",)


def test_patterns_name_modules_as_the_files_do():
    scheme = Quark(settings(MXFP4, layer_quant_config={"*block_sparse_moe*": {"weight": FP8}}))
    spec = spec_of("model.layers.0.mlp.x", (8, 64))
    spec = dataclasses.replace(spec, aliases=("model.layers.0.block_sparse_moe.w1.weight",))
    assert scheme.tensors(spec)["model.layers.0.mlp.x.weight"].dtypes == ("F8_E4M3",)


def test_scales_of_inputs_and_outputs_that_are_not_read_may_stand_there(reference, drive, prompts, tmp_path):
    """Of MXFP4's inputs in FP8, and of a cache in FP8."""

    def make(module, weight):
        own = {f"{module}.input_scale": torch.tensor(0.5)}
        if module.endswith("q_proj"):
            own |= {f"{module.removesuffix('.q_proj')}.prob_output_scale": torch.tensor(0.5)}
        return mxfp4(module, weight)[0] | own

    own = settings(MXFP4, STATIC | {"dtype": "fp8_e4m3"})
    path = rewrite(reference("native-qwen3").path, tmp_path, make, own)
    driver = drive(path)
    driver.admit(1, *prompts(5))
    assert len(driver.generate(1, 9)) == 9


def test_other_tensors_are_refused_before_weights_are_read(reference, drive, tmp_path):
    path = rewrite(
        reference("native-qwen3").path, tmp_path, lambda module, weight: int8(module, weight)[0], settings(FP8, STATIC)
    )
    assert detect_scheme(path, "").name == "quark fp8_e4m3, static inputs"
    assert json.loads((path / "config.json").read_text())["quantization_config"]["exclude"] == ["lm_head"]
    with pytest.raises(LoadError, match=r"q_proj.input_scale is missing"):
        drive(path)
