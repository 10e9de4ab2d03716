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
from kernels.models.bailing_hybrid import BailingHybridConfig, head_config
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
    states = State(((3, 3 * 4 * 12), (4, 12, 12)))
    assert caches(read_config(reference("ling3").path)) == (
        CacheGroup(Latent(24, 8), (1, 3)),
        CacheGroup(states, (0, 2)),
    )


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


def test_a_convolution_over_one_token_has_an_empty_state(reference, drive, prompts):
    """``conv_L_cache`` 1."""
    model, (prompt,) = reference("lfm3-one-tap"), prompts(40)
    found = scored(drive(model.path), prompt, [20, 1, 19])
    np.testing.assert_allclose(found, model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


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


LING3 = {  # keys as published
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "expert_swiglu_limit_list": [0, 0, 0, 0, 4.0, 7.0, 0],
    "first_k_dense_replace": 1,
    "gated_attention_proj_granularity_type": "head_wise",
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "kda_lower_bound": -5,
    "kda_safe_gate": True,
    "kv_lora_rank": 16,
    "layer_group_size": 3,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
    "n_group": 2,
    "no_kda_lora": True,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": None,
    "qk_head_dim": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rope_interleave": True,
    "rope_theta": 6000000,
    "rotary_dim": 8,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "share_expert_swiglu_limit_list": None,
    "short_conv_kernel_size": 3,
    "topk_group": 1,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 12,
    "vocab_size": 64,
}


def test_ling_3s_published_keys_are_read():
    config = parse_config(LING3)
    assert isinstance(config, BailingHybridConfig)
    assert config.recurrent == {0, 1, 3, 4}
    assert config.recurrence == DeltaConfig(2, 2, 16, 16, 3)
    assert (config.head_dim, config.rope.theta, config.rope_interleaved) == (8, 6e6, True)
    assert (config.decay_bound, config.limits, config.shared_limits) == (-5.0, (0, 0, 0, 0, 4.0, 7.0), (0.0,) * 6)
    experts = config.experts
    assert experts is not None
    assert (experts.layers, experts.count, experts.shared, experts.corrected) == ({1, 2, 3, 4, 5}, 8, 16, True)
    plain = parse_config(LING3 | {"kda_safe_gate": False, "kda_lower_bound": None})
    assert isinstance(plain, BailingHybridConfig)
    assert plain.decay_bound == 0.0


def test_the_head_of_ling_3_is_a_layer_of_latent_attention():
    target = parse_config(LING3)
    assert isinstance(target, BailingHybridConfig)
    head = head_config(LING3 | {"expert_swiglu_limit_list": [0] * 6 + [2.0]}, target, "layers.6")
    assert (head.layers, head.recurrent, head.limits, head.shared_limits) == (1, frozenset(), (2.0,), (0.0,))
    assert head.experts is not None
    assert head.experts.layers == {0}
    with pytest.raises(ConfigError, match="mtp_use_kda is not supported"):
        head_config(LING3 | {"mtp_use_kda": True}, target, "layers.6")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"no_kda_lora": False}, "no_kda_lora False is not supported; Ling 3 is run with True"),
        ({"num_hidden_layers": 7}, "7 is not a multiple of layer_group_size 3; add layer_types"),
        ({"kda_lower_bound": 5}, "kda_lower_bound must be a number below 0, and is 5"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size 8 is not supported"),
        ({"expert_swiglu_limit_list": [1.0]}, "expert_swiglu_limit_list must have a number or null for each layer"),
    ],
)
def test_what_is_wrong_with_the_sizes_of_ling_3_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(LING3 | change)


def test_experts_of_ling_3_are_within_the_limits_of_their_layers(reference, drive, prompts, tmp_path):
    """transformers does not read the limits: its experts are replaced by the published formula. It also saves another
    name of delta layers' output than the published one."""
    model, (prompt,) = reference("ling3"), prompts(20)
    limits = {"expert_swiglu_limit_list": [0, 0, 0.3, None, 0], "share_expert_swiglu_limit_list": [0, 0, 0, 0.2, 0]}
    path = shutil.copytree(model.path, tmp_path / "limited")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | limits))
    held = load_file(path / "model.safetensors")
    for layer in (0, 2):
        name = f"model.layers.{layer}.attention"
        held[f"{name}.o_proj.weight"] = held.pop(f"{name}.dense.weight")
    save_file(held, path / "model.safetensors")
    routed, shared = model.model.model.layers[2].mlp.experts, model.model.model.layers[3].mlp.shared_experts

    def limited(both: torch.Tensor, limit: float) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def all_experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = limited(torch.einsum("th,eoh->teo", x, routed.gate_up_proj), 0.3)
        results = torch.einsum("teo,eho->teh", inner, routed.down_proj)
        return (results[torch.arange(len(x))[:, None], chosen] * weights.unsqueeze(-1)).sum(1)

    def shared_expert(x: torch.Tensor) -> torch.Tensor:
        return shared.down_proj(limited(torch.cat((shared.gate_proj(x), shared.up_proj(x)), -1), 0.2))

    plain = model.logprobs(prompt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routed, "forward", all_experts)
        patch.setattr(shared, "forward", shared_expert)
        expected = model.logprobs(prompt)
    assert (expected - plain).abs().max() > 0.1
    np.testing.assert_allclose(scored(drive(path), prompt, [20]), expected.numpy(), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ling3", "qwen3-next", "qwen4-plain"])
def test_quantized_projections_are_close(name, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(20)
    found = scored(drive(model.path, quantization="int8"), prompt, [20])
    expected, exact = model.logprobs(prompt).numpy(), scored(drive(model.path), prompt, [20])
    assert np.abs(found - expected).mean() < 0.2 * np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(found - exact).max() > 0  # it was quantized


@pytest.mark.parametrize(
    ("name", "parts"),
    [("ling3", ("b_proj",)), ("qwen3-next", ("in_proj_ba",)), ("qwen4", ("in_proj_b", "in_proj_a"))],
)
def test_fp8_in_blocks_beside_floats_is_what_its_floats_are(name, parts, reference, drive, prompts, tmp_path):
    """Betas and decays stay in floats, as published checkpoints have them."""
    model, (prompt,) = reference(name), prompts(20)
    blocks = fp8_blocks(4, 4)
    layer = "attention" if name == "ling3" else "linear_attn"
    kept = [f"model.layers.{index}.{layer}.{part}" for index in range(5) for part in parts]

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
