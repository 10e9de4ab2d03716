"""Checkpoints of AWQ, GPTQ, auto-round and compressed-tensors: what they stand for, and which are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.quantization.detect import METHODS, detect_scheme
from kernels.weights.quantization.weights import PartError, StaticActivation
from kernels.weights.tensors import Part, Shard
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.declared import declared, spec_of
from tests.kits.quantized import rewrite
from tests.kits.quantized_words import Rounded, awq, dequantized, gptq, int8_rows, packed

PROMPT = [7, 19, 101, 33, 54, 2, 90, 61, 17, 44, 5, 12]
SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)


def awq_settings(bits=4, group=16):
    return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}


def gptq_settings(bits=4, group=16, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


def compressed(kind, weights, inputs=None, ignore=("lm_head",), targets=("Linear",)):
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def whole(bits=4, **more):
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16, **more}


ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
MX4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
ONE_BY_ONE = {"strategy": "group", "group_size": 16, "dynamic": False}
TWO_STEPS = {"type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
PACKED = "pack-quantized"
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": False, "data_type": "int"}
LAYOUTS = {
    "awq 4": (awq(4, 16), awq_settings(), dequantized(4, 16)),
    "awq 8": (awq(8, 16), awq_settings(8), dequantized(8, 16)),
    "gptq 4": (gptq(4, 16), gptq_settings(), dequantized(4, 16)),
    "gptq 8": (gptq(8, 16), gptq_settings(8), dequantized(8, 16)),
    "gptq v2": (gptq(4, 16, less=0), gptq_settings(checkpoint_format="gptq_v2"), dequantized(4, 16)),
    "gptq act-order": (gptq(4, 16, True), gptq_settings(desc_act=True), dequantized(4, 16, shuffled=True)),
    "auto-round": (gptq(4, 16), ROUND, dequantized(4, 16)),
    "auto-round awq": (awq(4, 16), ROUND | {"packing_format": "auto_round:auto_awq"}, dequantized(4, 16)),
    "auto-round zeros": (gptq(8, 16, less=0), ROUND | {"bits": 8, "packing_format": "auto_round"}, dequantized(8, 16)),
    "auto-round v2": (gptq(4, 16, less=0), ROUND | {"packing_format": "auto_round:gptqmodel"}, dequantized(4, 16)),
    "packed 4": (packed(4, 16), compressed(PACKED, whole()), dequantized(4, 16, True)),
    "packed 8": (packed(8, 16), compressed(PACKED, whole(8)), dequantized(8, 16, True)),
    "packed zeros": (packed(4, 16, False), compressed(PACKED, whole(symmetric=False)), dequantized(4, 16)),
    "packed act-order": (
        packed(4, 16, shuffled=True),
        compressed(PACKED, whole(actorder="group")),
        dequantized(4, 16, True, True),
    ),
}


def scores(driver, prompt=PROMPT):
    driver.admit(1, prompt, sampling=SCORED)
    return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_stands_for_its_floats(layout, reference, drive, tmp_path):
    change, settings, floats = LAYOUTS[layout]
    source = reference("qwen2").path
    quantized = drive(rewrite(source, tmp_path / "words", change, settings))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats)))
    np.testing.assert_allclose(scores(quantized), expected, atol=1e-3)
    assert np.abs(expected - scores(drive(source))).max() > 5e-3  # of 4 and of 8 bits alike: it was rounded
    # Groups of 16 have no kernel: what is counted is what they are dequantized to.
    assert quantized.info.weight_bytes == drive(source, dtype="float32").info.weight_bytes


@pytest.mark.parametrize(("scale", "offset"), [(None, None), (0.03, None), (0.03, 9)])
def test_int8_of_compressed_tensors(scale, offset, reference, drive, tmp_path):
    source = reference("qwen2").path
    inputs = TOKENS if scale is None else STATIC | {"symmetric": offset is None}
    settings = compressed("int-quantized", ROWS, inputs, ["re:.*[k]_proj"], ["re:.*[qkv]_proj"])

    def change(module, weight):
        rounded = module.endswith(("q_proj", "v_proj"))
        return int8_rows(scale, offset)(module, weight) if rounded else {f"{module}.weight": weight}

    def floats(module, weight):
        held = change(module, weight)
        found = held[f"{module}.weight"].float()
        return {f"{module}.weight": found * held.get(f"{module}.weight_scale", 1)}

    quantized = scores(drive(rewrite(source, tmp_path / "int8", change, settings)))
    expected = scores(drive(rewrite(source, tmp_path / "floats", floats)))
    assert 0 < np.abs(quantized - expected).mean() < 0.2  # inputs are rounded, too


@pytest.mark.parametrize("scale", [0.0, -0.1, float("inf"), float("nan")])
def test_a_scale_of_inputs_that_is_none_is_refused(scale):
    class Files(dict):
        has = dict.__contains__
        read = dict.__getitem__

    scheme = METHODS["compressed-tensors"](compressed("int-quantized", ROWS, STATIC | {"symmetric": True}))
    with pytest.raises(LoadError, match=r"m\.input_scale must be above 0 and finite"):
        scheme.read(Files(int8_rows(scale)("m", torch.ones(6, 32))), spec_of("m", (6, 32)))


def rotated(location):
    """Settings of a checkpoint with a rotation."""
    one = {"targets": ["re:.*down_proj"], "location": location, "inverse": False, "ignore": []}
    return {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": [one]}}}}


def rounding_outputs():
    settings = compressed("int-quantized", ROWS, TOKENS)
    settings["config_groups"]["group_0"]["output_activations"] = TOKENS
    return settings


def clipping(value):
    settings = compressed("int-quantized", ROWS)
    settings["config_groups"]["group_0"]["activation_use_clip"] = value
    return settings


@pytest.mark.parametrize("more", [{"sparsity_config": None, "ignore": None}, {"transform_config": {}}])
def test_what_is_omitted_may_be_null(more):
    settings = compressed("int-quantized", ROWS) | more
    assert METHODS["compressed-tensors"](settings).tensors(spec_of("m", (8, 32))) is not None


def test_rotations_of_weights_were_made_before():
    settings = compressed("int-quantized", ROWS) | rotated("weight_input")
    assert METHODS["compressed-tensors"](settings).tensors(spec_of("m", (8, 32))) is not None


def test_a_scale_an_output_may_be_called_a_group_of_minus_one():
    settings = compressed(PACKED, whole(strategy="channel", group_size=-1))
    assert METHODS["compressed-tensors"](settings).tensors(spec_of("m", (8, 32)))["m.weight_scale"].shapes == ((8, 1),)


def test_an_offset_of_inputs_is_taken_off_the_sums():
    class Files(dict):
        has = dict.__contains__
        read = dict.__getitem__

    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    scheme = METHODS["compressed-tensors"](compressed("int-quantized", ROWS, STATIC))
    found = scheme.read(Files(int8_rows(0.02, 7)("m", weight)), spec_of("m", (6, 32)))
    assert isinstance(found.activation, StaticActivation)
    x = torch.randint(-40, 40, (32,)) * 0.02
    rounded = (x / 0.02).round() + 7
    sums = (found.values.int() @ rounded.int() + found.correction) * found.scales * 0.02
    torch.testing.assert_close(sums, found.dequantize(torch.float32) @ x, rtol=1e-4, atol=1e-4)


def test_fp8_of_compressed_tensors(reference, drive, tmp_path):
    source = reference("qwen2").path
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    settings = compressed("float-quantized", weights, TOKENS | {"type": "float"}, targets=["re:.*mlp"])

    def change(module, weight):
        scale = weight.abs().max().reshape(1) / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        mine = {f"{module}.weight": values, f"{module}.weight_scale": scale}
        return mine if ".mlp." in module else {f"{module}.weight": weight}

    def floats(module, weight):
        held = change(module, weight)
        return {f"{module}.weight": held[f"{module}.weight"].float() * held.get(f"{module}.weight_scale", 1)}

    quantized = drive(rewrite(source, tmp_path / "fp8", change, settings))
    np.testing.assert_allclose(
        scores(quantized), scores(drive(rewrite(source, tmp_path / "floats", floats))), atol=1e-3
    )


def test_modules_of_other_sizes(reference, drive, tmp_path):
    """auto-round's extra_config and GPTQModel's rules."""
    source = reference("qwen2").path
    own = {"model.layers.0.mlp.up_proj": {"bits": 8}, ".*layers.1.*": {"bits": 16}}
    rules = {"+:.*0.mlp.up_proj": {"bits": 8}, "-:.*layers.1": {}}

    def change(module, weight):
        if "layers.1" in module:
            return {f"{module}.weight": weight}
        return gptq(8 if module.endswith("0.mlp.up_proj") else 4, 16)(module, weight)

    found = [
        scores(drive(rewrite(source, tmp_path / str(i), change, settings)))
        for i, settings in enumerate((ROUND | {"extra_config": own}, gptq_settings(dynamic=rules)))
    ]
    np.testing.assert_array_equal(*found)


def test_what_auto_round_says_of_modules_comes_in_order():
    """A whole name before all patterns, which are searched and of which the first counts."""
    own = {
        "mlp.up": {"bits": 8},
        "layers.1.mlp": {"bits": 16},
        "(": {"bits": 16},
        "q_proj": {},
        "attn.q_": {"bits": 8},
        "model.layers.1.mlp.down_proj": {"group_size": 8},
        "head$": {"bits": 8},
    }
    scheme = METHODS["auto-round"](ROUND | {"extra_config": own, "modules_to_not_convert": ["k_proj"]})

    def words(module):
        """Of 32 inputs, and the groups they make."""
        found = scheme.tensors(spec_of(module, (8, 32)))
        return found and (found[f"{module}.qweight"].shapes[0][0], found[f"{module}.scales"].shapes[0][0])

    assert words("model.layers.0.mlp.gate_proj") == (4, 2)
    assert words("model.layers.0.mlp.up_proj") == (8, 2)
    assert words("model.layers.1.mlp.up_proj") == (8, 2)
    assert words("model.layers.1.mlp.gate_proj") is None
    assert words("model.layers.1.mlp.down_proj") == (4, 4)
    assert words("model.layers.0.self_attn.q_proj") == (8, 2)
    assert words("model.layers.0.self_attn.k_proj") is None
    assert words("lm_head") == (8, 2)


SCALES = {"awq 4": "scales", "gptq 4": "scales", "auto-round": "scales", "packed 4": "weight_scale"}


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", SCALES)
def test_scales_that_are_not_finite_are_refused_by_name(layout, number, reference, drive, tmp_path):
    change, settings, _ = LAYOUTS[layout]
    path = rewrite(reference("qwen2").path, tmp_path / "q", change, settings)
    tensors, name = load_file(path / "model.safetensors"), f"model.layers.1.mlp.up_proj.{SCALES[layout]}"
    tensors[name].view(-1)[3] = number
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=re.escape(f"{name} has scales that are not finite")):
        drive(path)


def test_a_bias_that_the_model_has_not_must_be_zero(reference, drive, tmp_path):
    path = rewrite(reference("qwen2").path, tmp_path / "q", gptq(4, 16), gptq_settings())
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    tensors[name] = torch.zeros(tensors["model.layers.0.mlp.up_proj.scales"].shape[1])
    save_file(tensors, path / "model.safetensors")
    drive(path)
    tensors[name][3] = 1.0
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=re.escape(f"{name} is in the checkpoint and not in the model")):
        drive(path)


@pytest.mark.parametrize(
    ("layout", "name", "value", "reported"),
    [
        ("awq 4", "scales", None, "up_proj.scales is missing"),
        ("awq 4", "qzeros", torch.zeros(1, 2, dtype=torch.int32), r"up_proj.qzeros has shape \[1, 2\], config.json"),
        ("gptq 4", "qweight", torch.zeros(2, 2), r"up_proj.qweight has shape \[2, 2\], config.json \(gptq 4 bit"),
        ("gptq 4", "g_idx", torch.zeros(48, dtype=torch.int32), "up_proj.g_idx does not put 16 inputs into each"),
        ("gptq act-order", "g_idx", None, "up_proj.g_idx is missing"),
        ("packed 4", "weight_scale", None, "up_proj.weight_scale is missing"),
        ("packed act-order", "weight_g_idx", None, "up_proj.weight_g_idx is missing"),
        ("packed 4", "weight_shape", torch.tensor([7, 7]), r"up_proj.weight_shape says \[7, 7\], config.json asks"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_the_tensors_name(
    layout, name, value, reported, reference, drive, tmp_path
):
    change, settings, _ = LAYOUTS[layout]
    path = rewrite(reference("qwen2").path, tmp_path / "q", change, settings)
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{name}"]
    if value is not None:
        tensors[f"model.layers.0.mlp.up_proj.{name}"] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(LoadError, match=reported):
        drive(path)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_group_size_that_is_not_the_checkpoints_is_reported(method, reference, drive, tmp_path):
    change, settings, _ = LAYOUTS[f"{method} 4"]
    path = rewrite(reference("qwen2").path, tmp_path / "8", change, settings | {"group_size": 8})
    with pytest.raises(LoadError, match=r"scales has shape \[3, 48\], config.json .* asks for \[\[?6, 48\]"):
        drive(path)
    path = rewrite(reference("qwen2").path, tmp_path / "32", change, settings | {"group_size": 32})
    with pytest.raises(LoadError, match="48 inputs, which are no whole number of groups of 32"):
        drive(path)


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        (awq_settings(3), "bits must be 4 or 8, and is 3"),
        (gptq_settings(3), "bits must be 4 or 8, and is 3"),
        (gptq_settings(group=0), "group_size must be a size"),
        (awq_settings() | {"version": "gemv"}, "version gemm"),
        (gptq_settings(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (gptq_settings(dynamic={"-:(": {}}), "no regular expression"),
        (gptq_settings(dynamic=["-:.*"]), r"dynamic must be an object of rules by pattern, and is \['-:"),
        (gptq_settings(dynamic={"+:.*": 8}), r"dynamic must give '\+:\.\*' an object of sizes, and gives 8"),
        (ROUND | {"extra_config": ["lm_head"]}, "extra_config must be an object of sizes by module"),
        (ROUND | {"extra_config": {"lm_head": 8}}, "extra_config must give 'lm_head' an object with whole bits"),
        (ROUND | {"extra_config": {"lm_head": {"bits": "8"}}}, "an object with whole bits"),
        (ROUND | {"packing_format": "auto_round:gguf"}, "packing_format 'auto_round:gguf' is not read"),
        (ROUND | {"act_bits": 8}, "act_bits 16"),
        (ROUND | {"act_bits": {"a": 1}}, "act_bits 16"),
        (ROUND | {"modules_to_not_convert": 1.5}, "modules_to_not_convert must be a list of modules, and is 1.5"),
        (awq_settings() | {"modules_to_not_convert": "gate"}, "modules_to_not_convert must be a list of modules"),
        ({"quant_method": "fp8", "ignored_layers": [7]}, r"ignored_layers must be a list of modules, and is \[7\]"),
        (compressed("int-quantized", ROWS) | {"sparsity_config": 7}, "sparse weights"),
        (compressed(PACKED, whole(3)), "int weights of 3 bits, a scale for each group .* is not read"),
        (compressed(PACKED, whole(group_size=None)), r"config_groups\.group_0\.weights: .* requires group_size"),
        (compressed("nvfp4-pack-quantized", whole(type="float")), r"float weights of 4 bits.* groups of 16 \(strategy"),
        (compressed("mxfp8-quantized", whole(8, type="float")), "floats of 8 bits in groups of 32"),
        (compressed("mxfp4-pack-quantized", MX4 | {"symmetric": False}), "its weights must be symmetric"),
        (compressed("mxfp4-pack-quantized", MX4, TOKENS), "its inputs must be floats"),
        (compressed("marlin-24", whole()), r"\(marlin-24\): this is not read"),
        (compressed("int-quantized", ROWS, TOKENS | {"num_bits": 4}), "inputs of int 4"),
        (compressed("int-quantized", ROWS, TOKENS | {"symmetric": False}), "must be symmetric"),
        (compressed("int-quantized", ROWS, targets=["re:("]), r"group_0\.targets: '\(' is no regular expression"),
        (compressed("int-quantized", ROWS) | {"config_groups": {}}, "config_groups is empty"),
        (
            compressed("int-quantized", {"num_bits": "eight"}),  # and not of the list that might stand there
            r"^quantization_config: config_groups\.group_0\.weights\.num_bits: Input should [^;]*; use [^;]*$",
        ),
        (compressed("int-quantized", ROWS, TOKENS | ONE_BY_ONE), r"found before must share it \(strategy tensor"),
        (compressed("float-quantized", ROWS | {"type": "float"}, TOKENS | TWO_STEPS), "scales are found in two steps"),
        (rounding_outputs(), r"config_groups\.group_0\.output_activations: outputs are not rounded"),
        (compressed("int-quantized", ROWS | {"bits": 8}), r"config_groups\.group_0\.weights\.bits: Extra inputs"),
        (compressed("int-quantized", ROWS | {"strategy": "row"}), r"config_groups\.group_0\.weights\.strategy: "),
        (compressed("int-quantized", ROWS | {"group_size": "x"}), r"0\.weights\.group_size must be .*, and is 'x'"),
        (compressed("int-quantized", ROWS) | {"kv_cache_scheme": {"group_size": []}}, r"_scheme\.group_size must"),
        (compressed("int-quantized", ROWS | {"scale_dtype": "\ud800"}), "refuses it: .* surrogates not allowed; use"),
        (compressed("int-quantized", ROWS) | {"transform_config": 7}, "quantization_config: transform_config: Input"),
        (compressed("int-quantized", ROWS | {"symmetric": False}), "not packed must be symmetric"),
        (compressed("int-quantized", None, TOKENS), r"config_groups\.group_0\.weights is missing"),
        (
            compressed("int-quantized", ROWS) | {"config_groups": {"W9A9": ["Linear"]}},
            r"compressed-tensors 0\.\d+\.\d+ refuses it: .*Unknown preset scheme name W9A9",
        ),
        (compressed("int-quantized", ROWS) | {"config_groups": 7}, r"quantization_config: config_groups: Input should"),
        (clipping("yes"), r"activation_use_clip must be true or false, and is 'yes'"),
        (compressed("int-quantized", ROWS) | {"transform_config": {"a": 1}}, r"transform_config\.config_groups: Field"),
        (compressed("int-quantized", ROWS) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (compressed("int-quantized", ROWS) | rotated("input"), "transform_config has R4, which rotates by input"),
    ],
)
def test_what_is_not_read_is_refused(settings, reported, reference, tmp_path):
    path = rewrite(
        reference("qwen2").path, tmp_path / "q", lambda module, weight: {f"{module}.weight": weight}, settings
    )
    with pytest.raises(ConfigError, match=reported):
        detect_scheme(path, "")


def test_parts_of_ranks_make_up_the_whole():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))

    class Files(dict):
        has = dict.__contains__
        read = dict.__getitem__

    for change, settings in ((awq(4, 16), awq_settings()), (gptq(8, 16), gptq_settings(8))):
        found = METHODS[settings["quant_method"]](settings).read(Files(change("m", weight)), spec_of("m", (32, 64)))
        full = found.dequantize(torch.float32)
        torch.testing.assert_close(full, Rounded.of(weight, settings["bits"], 16).floats())
        for dimension, half in ((0, 16), (1, 32)):
            parts = [found.part(Part(dimension, i * half, i * half + half)) for i in range(2)]
            torch.testing.assert_close(torch.cat([part.dequantize(torch.float32) for part in parts], dimension), full)
    ordered = METHODS["gptq"](gptq_settings()).read(Files(gptq(4, 16, True)("m", weight)), spec_of("m", (32, 64)))
    with pytest.raises(PartError, match="act-order"):
        ordered.part(Part(1, 0, 32))


@pytest.mark.long
def test_two_ranks_generate_what_one_generates(reference, drive, prompts, tmp_path):
    source, texts = reference("parallel-qwen3").path, prompts(5, 23)
    paths = [
        rewrite(source, tmp_path / "awq", awq(4, 8), awq_settings(4, 8)),
        rewrite(
            source,
            tmp_path / "packed",
            packed(8, 8, False),
            compressed(PACKED, whole(8, symmetric=False, group_size=8)),
        ),
    ]
    first, second = run_ranks([{"model": str(path), "prompts": texts, "length": 30} for path in paths])
    for path, reported, also in zip(paths, first, second, strict=True):
        alone = drive(path)
        for slot, text in enumerate(texts, start=1):
            alone.admit(slot, text)
            alone.generate(slot, 30)
        assert reported["tokens"] == also["tokens"] == [alone.tokens[slot] for slot in sorted(alone.tokens)]
        assert alone.info.weight_bytes / 2 < reported["weight_bytes"] < 0.7 * alone.info.weight_bytes


def test_ranks_cannot_share_inputs_in_an_order_of_their_own(reference, tmp_path):
    path = rewrite(reference("parallel-qwen3").path, tmp_path / "q", gptq(4, 8, True), gptq_settings(4, 8))
    placement = Placement(torch.float32, torch.device("cpu"), Shard(0, 2))
    weights = open_weights(CheckpointFiles(str(path)), declared(path), placement, detect_scheme(path, ""))
    with pytest.raises(LoadError, match=r"layers.0.mlp.down_proj \(gptq 4 bit, .*act-order"):
        weights.projection(["model.layers.0.mlp.down_proj"])
