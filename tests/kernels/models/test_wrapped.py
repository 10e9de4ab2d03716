"""The language model of a checkpoint that also reads images says what transformers' whole model says of text."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError
from kernels.models.config_loader import read_config
from kernels.models.registry import LANGUAGE_MODEL_SIZES, LANGUAGE_MODELS, find
from kernels.weights.config_json import read_merged
from kernels.weights.wrapped import language_model, plain_name
from tests.kits.driver import (
    COMMON,
    DEEPSEEK,
    DELTA,
    DENSE,
    EXPERTS,
    HUNYUAN_V4,
    INDEXED,
    LLAMA3_ROPE,
    MINIMAX_M3,
    QWEN4,
    ROUTED,
)

TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
SIGLIP = TOWER | {"image_size": 16}
QWEN = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 8}
QWEN |= {"out_hidden_size": 48}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
WIDE_SECTIONS = SECTIONS | {"mrope_section": [2, 3, 3]}
PARTIAL = SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # transformers' name, language model, tower
    "exaone-4.5": (
        "Exaone4_5_",
        DENSE["exaone4-full"][1] | {"model_type": "exaone4"},
        QWEN | {"num_key_value_heads": 2},
    ),
    "gemma3": ("Gemma3", DENSE["gemma3"][1], SIGLIP),
    "gemma4": ("Gemma4", ROUTED["gemma4"][1], TOWER | {"num_key_value_heads": 2, "head_dim": 8}),
    "glm4v": ("Glm4v", {"rope_parameters": PARTIAL, "head_dim": 12}, QWEN),
    "glm4v-moe": ("Glm4vMoe", DEEPSEEK | {"num_key_value_heads": 2, "rope_parameters": PARTIAL, "head_dim": 12}, QWEN),
    "hunyuan-v4-vl": (
        "HYV4VL",
        {key: size for key, size in HUNYUAN_V4.items() if key != "attn_implementation"}
        | {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]}},
        TOWER | {"out_hidden_size": 48},
    ),
    "llava": ("Llava", {"model_type": "llama"}, SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 16}),
    "minimax-m3": (
        "MiniMaxM3VL",
        {key: size for key, size in MINIMAX_M3.items() if key not in ENDS},
        TOWER | {"image_size": 16, "temporal_patch_size": 1, "spatial_merge_size": 1},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "head_dim": 16}, SIGLIP),
    "mistral-large4": (  # under the vendor's names, with what its config.json leaves out
        "MistralLarge4",
        {key: size for key, size in INDEXED.items() if key != "q_lora_rank"} | {"num_hidden_layers": 4},
        SIGLIP | {"model_type": "pixtral"},
    ),
    "ministral3": ("Mistral3", DENSE["ministral3"][1] | {"model_type": "ministral3"}, SIGLIP),
    "qwen2-vl": ("Qwen2VL", {"rope_parameters": SECTIONS}, QWEN),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": SECTIONS}, QWEN),
    "qwen3-vl": (
        "Qwen3VL",
        {"rope_parameters": WIDE_SECTIONS, "head_dim": 16},
        QWEN | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        EXPERTS | {"rope_parameters": WIDE_SECTIONS},
        QWEN | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3.5": ("Qwen3_5", DELTA, QWEN),
    "qwen4": ("Qwen4Exp", QWEN4 | {"rope_parameters": PARTIAL | {"mrope_section": [2, 1, 1]}}, QWEN),
    "step-3.7": (
        "Step3p7",
        {"head_dim": 16, "num_hidden_layers": 4, "num_sliding_attention_heads": 6, "sliding_window": 11}
        | {"layer_types": ["full_attention", *2 * ["sliding_attention"], "full_attention"], "share_expert_dim": 24}
        | {"moe_layers_enum": "1,2,3", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"rope_theta": [500.0, 100.0, 100.0, 500.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5]}
        | {"rope_scaling": LLAMA3_ROPE, "moe_router_scaling_factor": 1.5}
        | {"swiglu_limits": [0.0, None, 2.0, 0.0], "swiglu_limits_shared": [1.0, 3.0, None, 0.0]},
        SIGLIP,
    ),
}


def saved(name: str, path: Any) -> Any:
    """transformers' model with random weights, saved as its vendor stores it."""
    family, text, tower = MODELS[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{family}Config")(text_config=COMMON | ENDS | text, vision_config=dict(tower))
    name = "MiniMaxM3SparseForConditionalGeneration" if family == "MiniMaxM3VL" else f"{family}ForConditionalGeneration"
    model = getattr(transformers, name)(config).eval()
    for part, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
        if part.endswith("A_log"):
            parameter.data.sub_(4.0)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_text_gets_the_tokens_of_the_whole_model(name, drive, prompts, tmp_path, caplog):
    model, (prompt,) = saved(name, tmp_path), prompts(20)
    tokens = [token + 3 for token in prompt if token < 200]
    expected = list(tokens)
    with torch.inference_mode():
        while len(expected) < 40:
            expected.append(int(model(input_ids=torch.tensor([expected])).logits[0, -1].argmax()))
    with caplog.at_level(logging.INFO):
        driver = drive(tmp_path)
    driver.admit(1, tokens)
    assert driver.generate(1, 40) == expected
    assert f"{type(model).__name__}: its language model is run" in caplog.text


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model.language_model.model.", ""]
)
def test_vendors_names_are_read(prefix, reference, drive, prompts, tmp_path):
    model, (prompt,) = reference("kimi-k2"), prompts(20)
    raw = json.loads((model.path / "config.json").read_text())
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": raw | {"model_type": "kimi_k2"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    head = prefix.removesuffix("model.") if prefix.startswith("language_model") else ""
    weights = {}
    for name, tensor in load_file(model.path / "model.safetensors").items():
        weights[(prefix or "model.") + name.removeprefix("model.") if "lm_head" not in name else head + name] = tensor
    save_file(weights | {"vision_tower.blocks.0.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    driver = drive(tmp_path)
    driver.admit(1, prompt)
    assert driver.generate(1, 40) == model.greedy(prompt, 40)


@pytest.mark.parametrize("architecture", ["Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"])
def test_phi_4_reads_text_without_its_adapters(architecture, reference, drive, prompts, tmp_path):
    model, (prompt,) = reference("phi3-full"), prompts(20)
    raw = json.loads((model.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    weights = load_file(model.path / "model.safetensors")
    if architecture == "Phi4MMForCausalLM":  # as the vendor stores it
        adapters = {}
        for name in [name for name in weights if "_proj.weight" in name]:
            module = name.removesuffix(".weight")
            weights[f"{module}.base_layer.weight"] = weights.pop(name)
            for part in ("lora_A.vision", "lora_B.vision", "lora_A.speech", "lora_B.speech"):
                adapters[f"{module}.{part}.weight"] = torch.ones(2)
        weights |= adapters
    save_file(weights | {"model.embed_tokens_extend.image_embed.x": torch.ones(2)}, tmp_path / "model.safetensors")
    driver = drive(tmp_path)
    driver.admit(1, prompt)
    assert driver.generate(1, 40) == model.greedy(prompt, 40)


def test_sizes_that_gemma_3_leaves_out_are_those_of_the_family(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    )
    config = read_config(tmp_path)
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.max_positions, config.rope.factor, config.windows[:6]) == (131072, 8.0, (*5 * [1024], 0))


def test_sizes_that_llava_leaves_out_are_those_of_llama_2(tmp_path):
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlavaNextForConditionalGeneration"], "text_config": text})
    )
    config = read_config(tmp_path)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32064, 4096, 11008)
    assert (config.layers, config.heads, config.kv_heads, config.max_positions) == (32, 32, 32, 4096)


def test_sizes_that_mistral_large_4_leaves_out_are_transformers_defaults(tmp_path):
    text = {"model_type": "mistral_large4_text"}
    raw = {"architectures": ["MistralLarge4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    assert (config.layers, config.heads, config.max_positions, config.norm_eps) == (72, 64, 1 << 20, 1e-5)
    assert (config.rope.factor, config.logit_softcap, sorted(config.unrotated)[:2]) == (2048.0, 30.0, [3, 7])
    if not hasattr(transformers, "MistralLarge4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no MistralLarge4")
    defaults = transformers.MistralLarge4TextConfig()
    sizes = LANGUAGE_MODEL_SIZES["mistral_large4_text"]
    assert {key: getattr(defaults, key) for key in sizes} == sizes


def test_every_language_model_has_a_family():
    assert {find([name])[0] for name in LANGUAGE_MODELS.values()} == set(LANGUAGE_MODELS.values())


def test_a_language_model_without_a_family_is_refused_by_its_wrapper(tmp_path):
    outer = {"architectures": ["MllamaForConditionalGeneration"], "text_config": {"model_type": "mllama_text_model"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ConfigError, match="MllamaForConditionalGeneration"):
        read_config(tmp_path)


def test_modules_that_stay_in_floats_lose_the_wrappers_prefix():
    settings = {
        "quant_method": "fp8",
        "modules_to_not_convert": ["model.language_model.layers.0.mlp.gate", "model.visual"],
    }
    result = language_model({"architectures": ["X"], "text_config": {}, "quantization_config": settings})
    assert result["quantization_config"]["modules_to_not_convert"] == ["model.layers.0.mlp.gate", "model.visual"]


def test_sizes_and_targets_of_modules_lose_the_wrappers_prefix():
    own, plain = "model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"
    settings = {
        "ignore": ["language_model.lm_head", "model.language_model.lm_head", "re:.*visual.*"],
        "extra_config": {own: {"bits": 8}},
        "config_groups": {"group_0": {"targets": [own, "Linear"]}, "group_1": "W8A8"},
    }
    result = language_model({"architectures": ["X"], "text_config": {}, "quantization_config": settings})
    assert result["quantization_config"] == {
        "ignore": ["lm_head", "lm_head", "re:.*visual.*"],
        "extra_config": {plain: {"bits": 8}},
        "config_groups": {"group_0": {"targets": [plain, "Linear"]}, "group_1": "W8A8"},
    }


def test_overrides_of_the_language_model_are_merged_into_it(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5.0}
    raw = {"architectures": ["X"], "text_config": {"vocab_size": 9, "hidden_size": 8, "rope_parameters": rope}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    over = {"text_config": {"hidden_size": 4, "rope_parameters": {"rope_theta": 7.0}}, "vocab_size": 3}
    result = read_merged(tmp_path, json.dumps(over))
    assert "text_config" not in result
    assert (result["vocab_size"], result["hidden_size"]) == (3, 4)
    assert result["rope_parameters"] == rope | {"rope_theta": 7.0}


def test_sections_of_images_leave_a_plain_rotation():
    rope = {"type": "mrope", "rope_type": "mrope", "mrope_section": [16, 24, 24]}
    raw = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}, "rope_scaling": rope}
    assert language_model(raw)["rope_scaling"] == {"type": "default", "rope_type": "default"}


def test_names_of_a_language_model_alone_are_unchanged():
    assert [plain_name(name) for name in ("model.layers.0.x", "lm_head.weight")] == [
        "model.layers.0.x",
        "lm_head.weight",
    ]
