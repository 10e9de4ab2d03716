"""Writes small checkpoints as GGUF files the way llama.cpp's converter does, family by family.

Names of tensors are the gguf package's. What the converter changes beside names is in ``_FAMILIES``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.kits.gguf_writer import F32, kind_of

__all__ = ["write_family"]

Tensors = dict[str, torch.Tensor]
Own = Callable[[gguf.GGUFWriter, dict[str, Any], Tensors], Tensors]


def write_family(model: Path, file: Path, kind: str = "F32", **overrides: Any) -> Path:
    """The checkpoint ``model`` as ``file``. Matrices have type ``kind`` where their rows allow it. ``overrides``: keys
    of config.json that the converter would find otherwise."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | overrides
    config = {_SAME_KEYS.get(key, key): value for key, value in config.items()}
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _sizes(writer, config)
    tensors = _corrections(load_file(model / "model.safetensors"))
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    tensors = _stacked(_FAMILIES.get(arch, _plain)(writer, config, tensors))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values, router = tensor.float().contiguous().numpy(), name.endswith((".gate.weight", ".gate.wg.weight"))
        fits = values.ndim > 1 and not router and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind_of(kind)][0] == 0
        chosen = kind_of(kind) if fits else F32
        own = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        writer.add_tensor(own, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


_SAME_KEYS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "multi_query_group_num": "num_key_value_heads",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
}

_ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "ChatGLMModel": gguf.MODEL_ARCH.CHATGLM,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "ExaoneForCausalLM": gguf.MODEL_ARCH.EXAONE,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GlmForCausalLM": gguf.MODEL_ARCH.CHATGLM,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "XverseForCausalLM": gguf.MODEL_ARCH.XVERSE,
}


def _sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converter writes for all families."""
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if (eps := config.get("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := config.get("layer_norm_eps", config.get("norm_epsilon"))) is not None:
        writer.add_layer_norm_eps(eps)
    experts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if count := next((config[key] for key in experts if config.get(key)), 0):
        writer.add_expert_count(count)
    used = ("num_experts_per_tok", "moe_k", "moe_topk")
    if count and (chosen := next((config[key] for key in used if config.get(key)), 0)):
        writer.add_expert_used_count(chosen)
    for key, add in {
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "norm_topk_prob": writer.add_expert_weights_norm,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "logit_scale": writer.add_logit_scale,
    }.items():
        if config.get(key) is not None:
            add(config[key])
    _rope(writer, config)


def _rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    stated = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    rope = stated.get("full_attention", stated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in stated:
        writer.add_rope_freq_base_swa(stated["sliding_attention"]["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if (part := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(part * _head_dim(config)))


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _stacked(tensors: Tensors) -> Tensors:
    """One tensor of all experts of a layer for each projection."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in tensors.items():
        block, _, rest = name.partition(".experts.")
        number, _, part = rest.partition(".")
        if not number.isdigit():
            result[name] = tensor
        elif number == "0":
            count = sum(
                re.fullmatch(rf"{re.escape(block)}\.experts\.\d+\.{re.escape(part)}", other) is not None
                for other in tensors
            )
            result[f"{block}.experts.{part}"] = torch.stack(
                [tensors[f"{block}.experts.{n}.{part}"] for n in range(count)]
            )
    return result


def _interleave(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rows of queries and keys as llama.cpp rotates them: the halves of a head become neighbours."""
    result = dict(tensors)
    for part, heads in {
        "q": config["num_attention_heads"],
        "k": config.get("num_key_value_heads") or config["num_attention_heads"],
    }.items():
        for name in [name for name in tensors if f".{part}_proj." in name]:
            rows = tensors[name].unflatten(0, (heads, 2, -1))
            result[name] = rows.transpose(1, 2).reshape(tensors[name].shape)
    return result


def _windows(writer: gguf.GGUFWriter, config: dict[str, Any], pattern: bool = True) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if pattern and config.get("layer_types"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _plain(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    return tensors


def _llama(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_dimension_count(_head_dim(config))
    return _interleave(tensors, config)


def _chatglm(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_dimension_count(_head_dim(config) // 2)
    if "rope_ratio" in config:
        writer.kv_data[0].pop("chatglm.rope.freq_base")
        writer.add_rope_freq_base(10000.0 * config["rope_ratio"])
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if "inv_freq" not in name}


def _cohere2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _windows(writer, config, pattern=False)
    writer.add_rope_dimension_count(_head_dim(config))
    return tensors


def _ernie(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    return tensors


def _exaone(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_dimension_count(_head_dim(config))
    return tensors


def _exaone4(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _windows(writer, config)
    return tensors


def _exaone_moe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _windows(writer, config)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(
        config.get("first_k_dense_replace") or config["mlp_layer_types"].index("sparse")
    )
    return tensors


def _gemma(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.kv_data[0].pop("gemma3.attention.sliding_window_pattern", None)
    if config["model_type"] != "gemma":
        _windows(writer, config, pattern=False)
    for key, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }.items():
        if config.get(key):
            add(config[key])
    return {name: tensor + 1.0 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def _glm4_moe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(
        config.get("first_k_dense_replace") or config["mlp_layer_types"].index("sparse")
    )
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    return tensors


def _corrections(tensors: Tensors) -> Tensors:
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): held for name, held in tensors.items()}


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    result = _llama(writer, config, tensors)
    for name in [name for name in result if name.endswith("block_sparse_moe.input_linear.weight")]:
        gate, up = result.pop(name).chunk(2, 1)
        layer = name.split(".")[2]
        result |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    return result


def _hunyuan_moe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)
    return tensors


def _minimax(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.kv_data[0].pop("minimax-m2.rope.dimension_count", None)
    writer.add_rope_dimension_count(config["rotary_dim"])
    return tensors


def _ministral3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
    writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
    return _llama(writer, config, tensors)


def _olmo(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(config["clip_qkv"])
    return _interleave(tensors, config)


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    rope = config["rope_parameters"]
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(config.get("sliding_window") or 0)
    for part in ("long", "short"):
        writer.add_tensor(f"rope_factors_{part}.weight", np.array(rope[f"{part}_factor"], np.float32))
    return tensors


def _smollm3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    return _llama(writer, config, tensors)


def _stablelm(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_parallel_residual(config["use_parallel_residual"])
    return tensors


_FAMILIES: Mapping[gguf.MODEL_ARCH, Own] = {
    gguf.MODEL_ARCH.ARCEE: _llama,
    gguf.MODEL_ARCH.CHATGLM: _chatglm,
    gguf.MODEL_ARCH.COHERE2: _cohere2,
    gguf.MODEL_ARCH.ERNIE4_5_MOE: _ernie,
    gguf.MODEL_ARCH.EXAONE: _exaone,
    gguf.MODEL_ARCH.EXAONE4: _exaone4,
    gguf.MODEL_ARCH.EXAONE_MOE: _exaone_moe,
    gguf.MODEL_ARCH.GEMMA2: _gemma,
    gguf.MODEL_ARCH.GEMMA3: _gemma,
    gguf.MODEL_ARCH.GEMMA: _gemma,
    gguf.MODEL_ARCH.GLM4_MOE: _glm4_moe,
    gguf.MODEL_ARCH.GRANITE: _granite,
    gguf.MODEL_ARCH.GRANITE_MOE: _granite,
    gguf.MODEL_ARCH.HUNYUAN_MOE: _hunyuan_moe,
    gguf.MODEL_ARCH.MINIMAXM2: _minimax,
    gguf.MODEL_ARCH.MISTRAL3: _ministral3,
    gguf.MODEL_ARCH.OLMO2: _exaone4,
    gguf.MODEL_ARCH.OLMO: _olmo,
    gguf.MODEL_ARCH.PHI3: _phi3,
    gguf.MODEL_ARCH.SMOLLM3: _smollm3,
    gguf.MODEL_ARCH.STABLELM: _stablelm,
    gguf.MODEL_ARCH.XVERSE: _llama,
}
