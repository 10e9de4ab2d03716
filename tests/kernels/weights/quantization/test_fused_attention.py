"""MiMo-V2.5's projection of queries, keys and values in parts, in fp8 with scales of each part's own blocks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.step import SlotSampling
from kernels.models.config_loader import parse_config
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.quantized import fp8_blocks

PARTS, BLOCK = 2, 16


def fused(source, target):
    """The checkpoint ``source`` as MiMo-V2.5's are, in ``target``/fused, and the same weights in floats."""
    raw = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    floats = dict(weights)
    for layer in range(raw["num_hidden_layers"]):
        module = f"model.layers.{layer}.self_attn"
        names = [f"{module}.{part}_proj.weight" for part in "qkv"]
        stripes = [torch.cat(rows) for rows in zip(*(weights.pop(name).chunk(PARTS) for name in names), strict=True)]
        made = [fp8_blocks(BLOCK, BLOCK)(module, stripe) for stripe in stripes]
        weights[f"{module}.qkv_proj.weight"] = torch.cat([one[f"{module}.weight"] for one in made])
        weights[f"{module}.qkv_proj.weight_scale_inv"] = torch.cat([one[f"{module}.weight_scale_inv"] for one in made])
        rows = [len(floats[name]) // PARTS for name in names]
        pieces = [_floats(one, module).split(rows) for one in made]
        floats |= {name: torch.cat(one) for name, one in zip(names, zip(*pieces, strict=True), strict=True)}
    for name, tensors, more in (
        (
            "fused",
            weights,
            {"attention_projection_layout": "fused_qkv", "architectures": ["MiMoV2ForCausalLM"]}
            | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}},
        ),
        ("floats", floats, {}),
    ):
        (target / name).mkdir()
        (target / name / "config.json").write_text(json.dumps(raw | more))
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / name / "model.safetensors")


def _floats(made, module):
    values, scales = made[f"{module}.weight"], made[f"{module}.weight_scale_inv"]
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * wide[: values.shape[0], : values.shape[1]]


def scores(driver, text):
    driver.admit(1, text, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
    return np.frombuffer(driver.step([(1, len(text))]).prompt_logprobs, np.float32)


def test_parts_stand_for_queries_keys_and_values(reference, drive, prompts, tmp_path):
    model, (text,) = reference("mimo-v2-two-parts"), prompts(60)
    fused(model.path, tmp_path)
    found, expected, other = (
        scores(drive(path), text) for path in (tmp_path / "fused", tmp_path / "floats", model.path)
    )
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert np.abs(expected - other).max() > 5e-3  # it was rounded


def test_ranks_divide_the_parts(reference, drive, prompts, tmp_path):
    model, (text,) = reference("mimo-v2-two-parts"), prompts(37)
    fused(model.path, tmp_path)
    driver = drive(tmp_path / "fused")
    driver.admit(1, text)
    expected = driver.generate(1, 43)
    first, second = run_ranks([{"model": str(tmp_path / "fused"), "prompts": [text], "length": 43}])
    assert first[0]["tokens"] == second[0]["tokens"] == [expected]


def test_scales_of_the_whole_projection_are_refused(reference, drive, tmp_path):
    fused(reference("mimo-v2-two-parts").path, tmp_path)
    file = tmp_path / "fused" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, file)
    with pytest.raises(LoadError, match=rf"{name} has shape"):
        drive(tmp_path / "fused")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_projection_layout": "fused_kv"}, "attention_projection_layout 'fused_kv' is not supported"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "fused_qkv is read with quant_method fp8 alone"),
        ({"quantization_config": None}, "fused_qkv is read with quant_method fp8 alone"),
        ({"swa_num_key_value_heads": 1}, "must divide num_attention_heads 4 and swa_num_key_value_heads 1"),
        ({"swa_head_dim": 20}, "swa_head_dim 20 is not supported; supported is head_dim, 24"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True is not supported"),
    ],
)
def test_other_layouts_are_refused(change, says, reference, tmp_path):
    fused(reference("mimo-v2-two-parts").path, tmp_path)
    raw = json.loads((tmp_path / "fused" / "config.json").read_text())
    with pytest.raises(ConfigError, match=says):
        parse_config(raw | change, quantized=True)


def test_a_plain_rotation_is_that_of_full_attention(reference, tmp_path):
    fused(reference("mimo-v2-two-parts").path, tmp_path)
    raw = json.loads((tmp_path / "fused" / "config.json").read_text())
    flat = {"rope_type": "default", "rope_theta": 7e6, "partial_rotary_factor": 0.334}
    own = {key: value for key, value in raw.items() if key != "rms_norm_eps"} | {"layernorm_epsilon": 3e-6}
    found = parse_config(own | {"rope_parameters": flat, "swa_rope_theta": 200.0}, quantized=True)
    assert (found.rope.theta, {rope.theta for rope in found.ropes.values()}) == (7e6, {200.0})
    assert (found.rope.dim, found.norm_eps) == (8, 3e-6)
