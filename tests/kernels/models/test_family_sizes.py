"""What families read from config.json beyond the sizes that all have, and what they refuse by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.caches import CacheGroup, Paged, Window
from kernels.contract.errors import ConfigError
from kernels.models.config import ModelConfig, QueryGrowth, local_config
from kernels.models.config_loader import parse_config
from kernels.models.layers.lightning import LightningConfig
from kernels.models.layers.rotary import alibi_slopes
from kernels.models.minimax import MiniMaxConfig
from kernels.models.registry import BUILT_IN, caches
from kernels.models.step3p5 import Step3p5Config
from tests.kits.driver import COMMON, DBRX, LONGCAT, YARN_ROPE
from tests.kits.published import PUBLISHED

SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OTHER_SCALES = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6} | {
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
OTHER_PARTS = {
    "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}
STEP = PUBLISHED["step3p5"]


def read(architecture: str, **more: object) -> ModelConfig:
    name = "ChatGLMModel" if architecture == "ChatGLM" else f"{architecture}ForCausalLM"
    return parse_config(COMMON | {"num_hidden_layers": 4} | more | {"architectures": [name]})


@pytest.mark.parametrize(
    ("architecture", "more", "says"),
    [
        ("ChatGLM", {"post_layer_norm": False}, "post_layer_norm must be True, and is False"),
        ("ChatGLM", {"add_bias_linear": True}, "add_bias_linear must be False, and is True"),
        ("BailingMoe", SPARSE | {"score_function": "best"}, "score_function must be softmax or sigmoid"),
        ("Grok1", SPARSE | {"rope_type": "yarn"}, "rope_type 'yarn' is not supported; Grok 2 is run with original"),
        ("Grok1", SPARSE | {"attn_temperature_len": 1}, "attn_temperature_len must be more than 1 token or -1"),
        ("LongcatFlash", LONGCAT | {"router_bias": True}, "router_bias is not supported"),
        ("LongcatFlash", LONGCAT | {"zero_expert_type": "copy"}, "zero_expert_type 'copy' is not supported"),
        ("HunYuanDenseV1", {"use_cla": True}, "use_cla True is not supported; False is"),
        ("HunYuanDenseV1", {"use_qk_norm": False}, "use_qk_norm False is not supported; True is"),
        (
            "MiniMaxText01",
            EXPERTS | {"postnorm": False},
            "postnorm False is not supported; MiniMax-Text is run with True",
        ),
        ("MiniMaxText01", EXPERTS | {"attn_type_list": [0, 1]}, "attn_type_list must say 0 or 1 for each layer"),
        ("Phimoe", EXPERTS | {"rope_scaling": OTHER_SCALES}, "another short_mscale than long_mscale"),
        ("MiMoV2Flash", SPARSE | {"rope_parameters": OTHER_PARTS}, "rotates other parts of heads in windows"),
        ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is for embeddings"),
        ("Phimoe", {"num_local_experts": 1, "num_experts_per_tok": 1}, "num_local_experts 1 is less than the 2"),
        ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": [1, 2, 1, 1]}, "moe_topk must be the same in all layers"),
        ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": []}, "moe_topk must be the same in all layers"),
        ("Dbrx", DBRX | {"attn_config": 3}, "attn_config must be an object"),
        (
            "Dbrx",
            DBRX | {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "moe_normalize_expert_weights must be 1 or null",
        ),
        ("Cohere2Moe", SPARSE | {"num_shared_experts": -1}, "num_shared_experts must be a whole number"),
        ("Cohere2Moe", SPARSE | {"expert_selection_fn": "best"}, "expert_selection_fn must be softmax or sigmoid"),
        (
            "Cohere2Moe",
            SPARSE | {"shared_expert_combination_strategy": "most"},
            "shared_expert_combination_strategy must be sum or average",
        ),
        ("Cohere2Moe", SPARSE | {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number"),
        ("Olmo", {"clip_qkv": -1.0}, "clip_qkv must be a number above 0"),
        ("Gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is for embeddings"),
        ("Gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers must be less than 4 layers"),
        ("Gemma4", {"num_kv_shared_layers": 1}, "leaves no layer whose cache layer 3 reads"),
        ("Gemma4", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must say the same of each layer"),
        ("Gemma4", {"per_layer_config": {"3": 8}}, "per_layer_config must have objects"),
        (
            "Gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type 'yarn' of full attention",
        ),
        (
            "Gemma4",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_global_key_value_heads 3",
        ),
        ("Llama4", SPARSE | {"no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each layer"),
        ("Llama4", SPARSE | {"moe_layers": 3}, "moe_layers must be a list of layers"),
        (
            "Llama4",
            SPARSE | {"layer_types": 4 * ["sliding_attention"]},
            "layer_types must say full_attention or chunked_attention",
        ),
        ("Step3p5", STEP | {"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not supported"),
        ("Step3p5", STEP | {"norm_expert_weight": False}, "norm_expert_weight False is not supported"),
        ("Step3p5", STEP | {"use_rope_layers": [True, False, True, True]}, "use_rope_layers must be true"),
        ("Step3p5", STEP | {"moe_layers_enum": 3}, "moe_layers_enum must name layers, and is 3"),
        ("Step3p5", STEP | {"moe_layers_enum": "1,x"}, "moe_layers_enum must name layers, and is '1,x'"),
        ("Step3p5", STEP | {"sliding_window": None}, "sliding_window must be a whole number"),
        ("Step3p5", STEP | {"rope_parameters": 3}, "rope_parameters must be an object, and is 3"),
        ("Step3p5", STEP | {"rope_theta": [1.0, 2.0, 3.0, 1.0]}, "rope_theta must have one number for each layer"),
        ("Step3p5", STEP | {"rope_theta": [1.0, 2.0]}, "rope_theta must have one number for each layer"),
        ("Step3p5", STEP | {"rope_scaling": 2.0}, "rope_scaling must be an object, for full_attention alone"),
        ("Step3p5", STEP | {"rope_scaling": YARN_ROPE, "yarn_only_types": []}, "for full_attention alone, not \\[\\]"),
        ("Step3p5", STEP | {"attention_other_setting": 6}, "attention_other_setting must be an object"),
        (
            "Step3p5",
            STEP | {"attention_other_setting": {"num_attention_groups": 3}},
            "attention_other_setting.num_attention_groups 3 must be 2",
        ),
        ("Step3p5", STEP | {"num_sliding_attention_heads": 5}, "num_sliding_attention_heads 5 is not a multiple"),
        ("Step3p5", STEP | {"per_layer_config": {"1": {"num_attention_heads": 6}}}, "per_layer_config must say"),
        ("Step3p5", STEP | {"swiglu_limits": [1.0]}, "swiglu_limits must have a number or null for each layer"),
        ("Step3p5", STEP | {"swiglu_limits_shared": [1.0, -2.0, 0.0, None]}, "swiglu_limits_shared must be a number"),
    ],
)
def test_what_cannot_be_run_is_named(architecture: str, more: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(architecture, **more)


def test_first_files_of_gemma_mean_the_approximation_by_tanh() -> None:
    assert read("Gemma", hidden_act="gelu").activation == "gelu_tanh"


def test_sizes_that_hunyuan_lists_for_each_layer_are_read() -> None:
    config = read("HunYuanMoEV1", num_experts=4, moe_topk=[2] * 4, moe_intermediate_size=[24] * 4)
    assert config.experts is not None
    assert (config.experts.chosen, config.experts.inner, config.experts.shared) == (2, 24, 24)


def test_alpha_of_hunyuan_stretches_the_base() -> None:
    config = read("HunYuanDenseV1", head_dim=16, rope_scaling={"type": "dynamic", "alpha": 50.0})
    assert config.rope.theta == pytest.approx(10000.0 * 50.0 ** (16 / 14))


def test_models_of_baichuan_differ_by_keys_and_sizes() -> None:
    first, second = read("Baichuan", vocab_size=64000), read("Baichuan", max_position_embeddings=None)
    assert (first.alibi, first.rope.kind, first.head_norm) == (False, "default", "")
    assert (second.alibi, second.rope.kind, second.head_norm, second.max_positions) == (True, "none", "rows", 4096)


@pytest.mark.parametrize("heads", [4, 6, 40])
def test_slopes_of_heads_are_those_of_the_paper(heads: int) -> None:
    slopes = alibi_slopes(heads)
    power = 2 ** int(math.log2(heads))
    assert slopes[:power] == pytest.approx([2 ** (-8 * head / power) for head in range(1, power + 1)])
    between = [2 ** (-8 * head / (2 * power)) for head in range(1, 2 * power + 1)][::2]
    assert slopes[power:] == pytest.approx(between[: heads - power])


def test_published_keys_of_minimax_text_are_those_of_transformers() -> None:
    factors = ("linear_attention_alpha", "linear_attention_beta", "full_attention_alpha", "full_attention_beta")
    more = {f"layernorm_{name}": 1.5 + place for place, name in enumerate((*factors, "mlp_alpha", "mlp_beta"))}
    published = {"attn_type_list": [0, 0, 0, 1], "head_dim": 16, "rotary_dim": 8, "postnorm": True}
    found = read("MiniMaxText01", **EXPERTS, **more, **published)
    assert isinstance(found, MiniMaxConfig)
    assert (found.recurrent, found.factors) == ({0, 1, 2}, (1.5, 2.5, 3.5, 4.5, 5.5, 6.5))
    assert (found.recurrence, found.rotary_dim) == (LightningConfig(4, 16, 4), 8)


def test_published_names_of_mimo_v2_are_read() -> None:
    published = {"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "sliding_window_size": 20}
    sizes = {"head_dim": 24, "v_head_dim": 10, "num_key_value_heads": 1, "swa_num_key_value_heads": 4}
    config = read("MiMoV2Flash", swa_rope_theta=300.0, routed_scaling_factor=None, **SPARSE | published | sizes)
    assert list(config.windows) == [0, 21, 21, 0]
    assert {layer: rope.theta for layer, rope in config.ropes.items()} == {1: 300.0, 2: 300.0}
    assert (config.rope.theta, config.rotary_dim) == (5e6, 8)
    assert config.experts is not None
    assert sorted(config.experts.layers) == [1, 2, 3]
    assert caches(config, windows=True) == (
        CacheGroup(Paged(1, 24, 24), (0, 3)),
        CacheGroup(Window(Paged(4, 24, 24), 21), (1, 2)),
    )
    assert list(read("MiMoV2Flash", num_hidden_layers=7, **SPARSE).windows) == [0, 129, 129, 129, 129, 0, 129]
    assert config.eager_with({"caps", "sinks"}) == "attention with heads of two sizes"
    with pytest.raises(ConfigError, match="v_head_dim 30 is more than head_dim 24"):
        read("MiMoV2Flash", **SPARSE | sizes | {"v_head_dim": 30})


def test_layers_of_step_differ_in_heads_rotation_and_limits() -> None:
    config = read("Step3p5", **STEP | {"vocab_size": 212, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert isinstance(config, Step3p5Config)
    assert config.experts is not None
    assert (sorted(config.experts.layers), config.windows) == ([1, 2, 3], (0, 21, 21, 0))
    assert [config.layer(index).heads for index in range(4)] == [4, 6, 6, 4]
    assert [config.layer(index).rotary_dim for index in range(4)] == [8, 16, 16, 8]
    assert (config.rope.theta, config.rope.factor) == (500.0, 2.0)
    assert {(rope.theta, rope.factor) for rope in config.ropes.values()} == {(100.0, 1.0)}
    assert (config.limits, config.shared_limits) == ((0.0, 0.0, 2.0, 0.0), (1.0, 3.0, 0.0, 0.0))
    half, quarter = (local_config(config, size) for size in (2, 4))
    assert isinstance(half, Step3p5Config)
    assert isinstance(quarter, Step3p5Config)
    assert [half.layer(index).heads for index in range(2)] == [2, 3]
    with pytest.raises(ConfigError, match=r"the 6 heads of layers with a window cannot be divided .* 4"):
        quarter.layer(1)


def test_step_without_lists_has_full_attention_and_three_plain_layers() -> None:
    sizes = {"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2}
    config = read("Step3p5", **sizes, num_hidden_layers=5)
    assert config.experts is not None
    assert (config.windows, sorted(config.experts.layers)) == ((0,) * 5, [3, 4])
    assert (config.experts.inner, config.experts.shared, config.head_dim, config.rope.theta) == (1280, 1280, 128, 1e4)


def test_parts_that_are_not_given_are_those_of_transformers() -> None:
    parts = {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    config = read("MiMoV2Flash", **SPARSE, head_dim=192, rope_parameters=parts)
    assert {config.rope.dim, *(rope.dim for rope in config.ropes.values())} == {64}
    full = {"full_attention": {"rope_type": "proportional", "factor": 2.0}}
    config = read("Gemma4", global_head_dim=32, rope_parameters=full, num_kv_shared_layers=None)
    assert {(rope.dim, rope.factor) for rope in config.ropes.values() if rope.kind == "proportional"} <= {(32, 2.0)}
    assert 32 in {config.rope.dim, *(rope.dim for rope in config.ropes.values())}


def test_spellings_of_the_published_files_are_known() -> None:
    assert read("PhiMoE", **EXPERTS, router_jitter_noise=0.0).experts is not None
    assert read("BaiChuan").layers == 4
    assert "ExaoneMoEForCausalLM" in {entry.architecture for entry in BUILT_IN}


def test_longcat_takes_other_names_of_sizes() -> None:
    config = read("LongcatFlash", **{key: value for key, value in LONGCAT.items() if key != "num_layers"})
    assert config.layers == 4
    assert config.experts is not None
    assert (config.experts.layers, config.experts.identities) == ({0, 2}, 3)


def test_ministral_3_grows_queries_if_nothing_is_said_of_rotation() -> None:
    config = read("Ministral3")
    assert (config.rope.kind, config.rope.theta) == ("yarn", 1e6)
    assert config.query_growth == QueryGrowth(0.1, 16384)


def test_phimoe_takes_the_factor_for_long_contexts() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "long_mscale": 1.3}
    rope = read("Phimoe", num_local_experts=4, num_experts_per_tok=2, rope_scaling=scaling,
                original_max_position_embeddings=64).rope  # fmt: skip
    assert (rope.kind, rope.attention_factor) == ("longrope", 1.3)


def test_layers_of_gemma_4_share_the_last_cache_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = read("Gemma4", num_hidden_layers=5, layer_types=kinds, num_kv_shared_layers=2, global_head_dim=32)
    assert config.shared_caches == {3: 2, 4: 1}
    groups = caches(config, windows=True)
    assert groups == (
        CacheGroup(Paged(2, 32, 32), (1,)),
        CacheGroup(Window(Paged(2, 256, 256), 512), (0, 2)),
    )


def test_keys_that_gemma_4_holds_and_does_not_use_are_left_out(reference: Any, drive: Any, tmp_path: Path) -> None:
    model = reference("gemma4")
    weights = load_file(model.path / "model.safetensors")
    extra = {f"model.layers.5.self_attn.{part}_proj.weight": torch.zeros(64, 48) for part in "kv"}
    save_file(weights | extra, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((model.path / "config.json").read_bytes())
    assert drive(tmp_path).info.architecture == "Gemma4ForCausalLM"


@pytest.mark.parametrize(
    ("more", "windows", "still", "sparse"),
    [
        ({}, [-64, -64, -64, 0], {3}, {0, 1, 2, 3}),
        ({"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}, [-64, 0, -64, 0], {1, 3}, {1, 3}),
        ({"no_rope_layers": [0, 1, 1, 1], "moe_layers": [2, 9]}, [0, -64, -64, -64], {0}, {2}),
        ({"layer_types": ["full_attention", *3 * ["chunked_attention"]]}, [0, -64, -64, -64], {3}, {0, 1, 2, 3}),
        ({"attention_chunk_size": None}, [0, 0, 0, 0], {3}, {0, 1, 2, 3}),
    ],
)
def test_layers_of_llama_4_follow_config_json(
    more: dict[str, object], windows: list[int], still: set[int], sparse: set[int]
) -> None:
    config = read("Llama4", **SPARSE | {"attention_chunk_size": 64} | more)
    assert list(config.windows) == windows
    assert set(config.ropes) == still
    assert config.experts is not None
    assert config.experts.layers == sparse


def test_chunks_refuse_what_they_are_not_for(reference: Any, drive: Any) -> None:
    path = reference("llama4").path
    for options, says in (
        ({"invariant": True}, "Llama4ForCausalLM has attention in chunks, for which no attention"),
        ({"page_size": 64}, "attention_chunk_size 32 of Llama4ForCausalLM is not a multiple of --page-size 64"),
    ):
        with pytest.raises(ConfigError, match=says):
            drive(path, **options)


@pytest.mark.parametrize(
    ("more", "windows", "still"),
    [
        ({}, [9, 9, 9, 0], {3}),
        ({"first_k_dense_replace": 1}, [0, 9, 9, 9], set()),
        ({"first_k_dense_replace": 1, "sliding_window_pattern": 3}, [0, 9, 9, 0], {3}),
        ({"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2}, [9, 0, 9, 9], {1}),
    ],
)
def test_dense_layers_of_cohere_count_windows_apart(
    more: dict[str, object], windows: list[int], still: set[int]
) -> None:
    config = read("Cohere2Moe", sliding_window=9, **SPARSE | more)
    assert list(config.windows) == windows
    assert set(config.ropes) == still
