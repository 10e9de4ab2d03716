"""Families whose layers keep states: ranks, quantized weights, and what is refused; ``test_equality`` compares the
families with transformers, ``test_cache_groups`` shares their prefixes.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.caches import CacheGroup, Latent, Paged, State
from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.select import select_device
from kernels.execution.layer_groups import check_groups
from kernels.models.config_loader import parse_config, read_config
from kernels.models.layers.delta_net import DeltaConfig
from kernels.models.registry import caches
from kernels.state.cache_dtype import choose_cache
from tests.kits.driver import COMMON, DELTA, SHARED
from tests.kits.parity import scored
from tests.kits.quantized import fp8_blocks, rewrite

CONFIG = COMMON | SHARED | DELTA | {"architectures": ["Qwen3NextForCausalLM"]}


def test_attention_keeps_tokens_and_delta_nets_keep_states(reference):
    config = read_config(reference("qwen3-next").path)
    states = State(((3, 2 * 2 * 12 + 4 * 10), (4, 12, 10)))
    assert caches(config) == (CacheGroup(Paged(2, 16, 16), (3,)), CacheGroup(states, (0, 1, 2, 4)))


def test_latent_attention_stands_beside_states(reference):
    config = read_config(reference("kimi-linear").path)
    states = State(((3, 3 * 2 * 12), (2, 12, 12)))
    assert caches(config) == (CacheGroup(Latent(24, 8), (4,)), CacheGroup(states, (0, 1, 2, 3)))


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_the_language_model_of_a_checkpoint_that_reads_images(name, reference, drive, prompts, tmp_path):
    model, (prompt,) = reference(name), prompts(20)
    raw = json.loads((model.path / "config.json").read_text())
    tied = raw.pop("tie_word_embeddings")
    (architecture,) = raw.pop("architectures")
    outer = {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "tie_word_embeddings": tied,
        "text_config": raw,
        "vision_config": {"hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    held = load_file(model.path / "model.safetensors")
    held = {name.replace("model.", "model.language_model."): tensor for name, tensor in held.items()}
    save_file(held | {"model.visual.blocks.0.norm1.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    driver = drive(tmp_path)
    driver.admit(1, prompt)
    assert driver.generate(1, 32) == model.greedy(prompt, 32)


def test_kimis_published_keys_are_read():
    published = {
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "model_max_length": 4096,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 3,
        },
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 2,
        "topk_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
    }
    config = parse_config(published)
    assert (config.recurrent, config.max_positions) == (frozenset((0, 1, 2, 4)), 4096)
    assert config.recurrence == DeltaConfig(4, 4, 8, 8, 3)
    experts = config.experts
    assert experts is not None
    assert (experts.layers, experts.chosen, experts.groups, experts.normalized) == ({1, 2, 3, 4}, 2, 2, True)
    published["linear_attn_config"]["kda_layers"] = [1, 2, 3]
    with pytest.raises(ConfigError, match="must name each layer once"):
        parse_config(published)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen4-plain"])
def test_quantized_projections_are_close(name, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [20])
    expected, exact = model.logprobs(prompt).numpy(), scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.2 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


@pytest.mark.parametrize(("name", "parts"), [("qwen3-next", ("ba",)), ("qwen4", ("b", "a"))])
def test_fp8_in_blocks_beside_floats_is_what_its_floats_are(name, parts, reference, drive, prompts, tmp_path):
    """Betas and decays stay in floats, as published checkpoints have them."""
    model, (prompt,) = reference(name), prompts(20)
    blocks = fp8_blocks(4, 4)
    kept = [f"model.layers.{layer}.linear_attn.in_proj_{part}" for layer in range(5) for part in parts]

    def change(module, weight):
        return {f"{module}.weight": weight} if module in kept else blocks(module, weight)

    settings = {"quant_method": "fp8", "weight_block_size": [4, 4], "modules_to_not_convert": kept}
    path = rewrite(model.path, tmp_path / "fp8", change, settings)
    floats = shutil.copytree(model.path, tmp_path / "floats")
    held = load_file(path / "model.safetensors")
    scales = {name.removesuffix("_scale_inv"): held.pop(name) for name in list(held) if name.endswith("_scale_inv")}
    for name, scale in scales.items():
        rows, columns = held[name].shape
        wide = scale.repeat_interleave(4, 0)[:rows].repeat_interleave(4, 1)[:, :columns]
        held[name] = held[name].float() * wide
    save_file(held, floats / "model.safetensors")
    expected, found = (scored(drive(directory), prompt, [20]) for directory in (floats, path))
    assert scales
    np.testing.assert_allclose(found, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": SpeculativeSettings("EAGLE", topk=2)}, "use --speculative-eagle-topk 1"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is for keys and values"),
        ({"invariant": True}, "leave --enable-deterministic-inference out"),
    ],
)
def test_options_without_a_form_for_states_are_refused(options, says, reference, drive):
    with pytest.raises(ConfigError, match=says):
        drive(reference("qwen3-next").path, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must say linear_attention or full_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ],
)
def test_what_is_wrong_with_the_sizes_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(CONFIG | change)


def test_a_group_of_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="the cache groups hold layers"):
        check_groups([CacheGroup(Paged(1, 2, 2), (0, 3))], 3)
    check_groups([CacheGroup(Paged(1, 2, 2), (0, 2)), CacheGroup(State(((2,),)), (0,))], 4)


def test_scales_of_a_checkpoint_for_an_8_bit_cache_are_not_used(tmp_path):
    raw = COMMON | SHARED | DELTA | {"architectures": ["Qwen3NextForCausalLM"], "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = [f"model.layers.3.self_attn.{part}_proj.{part}_scale" for part in "kv"]
    save_file({name: torch.tensor(0.5) for name in names}, tmp_path / "model.safetensors")
    for requested, dtype in (("", None), ("fp8_e4m3", torch.float8_e4m3fn)):
        config = RunnerConfig(str(tmp_path), device="cpu", kv_cache_dtype=requested)
        choice = choose_cache(config, read_config(tmp_path), torch.float32, select_device(config))
        assert (choice.dtype, choice.scales) == (dtype, None)
