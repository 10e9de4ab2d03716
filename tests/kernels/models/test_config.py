"""config.json in the spellings that are found in the wild."""

from __future__ import annotations

import pytest

from kernels.contract.errors import ConfigError
from kernels.models.config import RopeConfig
from kernels.models.config_loader import parse_config, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
}


def test_defaults():
    config = parse_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.norm_eps, config.dtype) == (8, 8, 1e-6, None)
    assert config.rope == RopeConfig(theta=10000.0)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tied_embeddings))
    assert config.windows == (0, 0, 0, 0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype(key, value):
    assert parse_config(LLAMA | {key: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_rope_spellings(given):
    assert parse_config(LLAMA | given).rope == RopeConfig(theta=5e5, kind="linear", factor=4.0, original_length=2048)


def test_yarn_lengthens_the_context():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse_config(LLAMA | {"rope_scaling": yarn}).max_positions == 8192


def test_dynamic_scaling_changes_nothing_within_the_context():
    assert parse_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).rope.kind == "default"


def test_mistral_windows_every_layer():
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert parse_config(mistral | {"sliding_window": 512}).windows == (512,) * 4
    assert parse_config(mistral | {"sliding_window": None}).windows == (0,) * 4


def test_qwen_windows_the_layers_that_it_says():
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}
    assert parse_config(qwen).windows == (0,) * 4
    assert parse_config(qwen | {"use_sliding_window": True}).windows == (0,) * 4  # all below max_window_layers
    assert parse_config(qwen | {"use_sliding_window": True, "max_window_layers": 3}).windows == (0, 0, 0, 512)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_config(qwen | {"use_sliding_window": True, "layer_types": kinds}).windows == (512, 0, 512, 0)


def test_qwen2_has_biases_on_queries_keys_and_values_only():
    config = parse_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "LlamaForCausalLM"),
        ({"architectures": None}, "supported"),
        ({"architectures": 3}, "supported"),
        ({"architectures": [{}]}, "supported"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be at most 4096, and is 1099511627776"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 40, "num_experts_per_tok": 2},
         "num_local_experts must be at most 4096"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 9}, "odd"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": "yes"}, "rope"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"layer_types": ["full_attention"], "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True,
          "sliding_window": 5}, "layer_types"),
        ({"layer_types": [[]], "architectures": ["MistralForCausalLM"], "sliding_window": 5}, "layer_types"),
        ({"max_window_layers": None, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True,
          "sliding_window": 5}, "max_window_layers must be a whole number, and is None"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, says):
    with pytest.raises(ConfigError, match=says):
        parse_config(LLAMA | change)


def test_overrides_are_merged_key_by_key(tmp_path):
    (tmp_path / "config.json").write_text('{"rope_scaling": {"type": "linear", "factor": 2.0}, "x": [1, 2]}')
    with pytest.raises(ConfigError, match="architectures"):
        read_config(tmp_path)
    given = (
        '{"architectures": ["LlamaForCausalLM"], "rope_scaling": {"factor": 8.0}, "vocab_size": 9, "hidden_size": 8,'
    )
    given += '"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}'
    assert read_config(tmp_path, given).rope == RopeConfig(10000.0, "linear", 8.0, 64)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_file_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
