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

from tests.kits.gguf_writer import F32, kind_of, llama3_factors

__all__ = ["write_family"]

Tensors = dict[str, torch.Tensor]
Own = Callable[[gguf.GGUFWriter, dict[str, Any], Tensors], Tensors]


def write_family(model: Path, file: Path, kind: str = "F32", *, head: str = "", **overrides: Any) -> Path:
    """The checkpoint ``model`` as ``file``. Matrices have type ``kind`` where their rows allow it, the output to the
    vocabulary ``head`` if it is given. ``overrides``: keys of config.json that the converter would find otherwise."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | overrides
    config = {_SAME_KEYS.get(key, key): value for key, value in config.items()}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    arch = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, _OTHER_NAMES.get(config["architectures"][0], gguf.MODEL_ARCH_NAMES[arch]))
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
        chosen = kind_of(head) if head and name == "lm_head.weight" else chosen
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
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
}

_ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "ApertusForCausalLM": gguf.MODEL_ARCH.APERTUS,
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "BaichuanForCausalLM": gguf.MODEL_ARCH.BAICHUAN,
    "BailingMoeForCausalLM": gguf.MODEL_ARCH.BAILINGMOE,
    "BailingMoeV2ForCausalLM": gguf.MODEL_ARCH.BAILINGMOE2,
    "ChatGLMModel": gguf.MODEL_ARCH.CHATGLM,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "Cohere2MoeForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "DbrxForCausalLM": gguf.MODEL_ARCH.DBRX,
    "DeepseekV32ForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "ExaoneForCausalLM": gguf.MODEL_ARCH.EXAONE,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "GlmForCausalLM": gguf.MODEL_ARCH.CHATGLM,
    "GlmMoeDsaForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "Grok1ForCausalLM": gguf.MODEL_ARCH.GROK,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "InternLM2ForCausalLM": gguf.MODEL_ARCH.INTERNLM2,
    "KimiLinearForCausalLM": gguf.MODEL_ARCH.KIMI_LINEAR,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "MiMoV2FlashForCausalLM": gguf.MODEL_ARCH.MIMO2,
    "MiniCPM3ForCausalLM": gguf.MODEL_ARCH.MINICPM3,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "MiniMaxM3VLForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Mistral4ForCausalLM": gguf.MODEL_ARCH.MISTRAL4,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "PhimoeForCausalLM": gguf.MODEL_ARCH.PHIMOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "Step3p5ForCausalLM": gguf.MODEL_ARCH.STEP35,
    "XverseForCausalLM": gguf.MODEL_ARCH.XVERSE,
}


_OTHER_NAMES = {
    "Cohere2MoeForCausalLM": "cohere2moe",
    "DeepseekV32ForCausalLM": "deepseek32",
    "MiniMaxM3VLForCausalLM": "minimax-m3",
}
"""Names that older gguf packages lack, of architectures with another one's tensors."""


def _sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converter writes for all families."""
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 0)
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
    used = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    if count and (chosen := next((config[key] for key in used if config.get(key)), 0)):
        writer.add_expert_used_count(chosen)
    for key, add in {
        "n_group": writer.add_expert_group_count,
        "num_expert_group": writer.add_expert_group_count,
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
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, _head_dim(config)))
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


def _afmoe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _windows(writer, config, pattern=False)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_scale(config["route_scale"])
    return {name.replace(".expert_bias", ".expert_bias.bias"): held for name, held in tensors.items()}


def _apertus(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    for part, add in {
        "alpha_p": writer.add_xielu_alpha_p,
        "alpha_n": writer.add_xielu_alpha_n,
        "beta": writer.add_xielu_beta,
        "eps": writer.add_xielu_eps,
    }.items():
        layers = range(config["num_hidden_layers"])
        add([tensors.pop(f"model.layers.{layer}.mlp.act_fn.{part}").float().item() for layer in layers])
    return tensors


def _baichuan(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    result = {}
    for name, held in tensors.items():
        parts = zip("qkv", held.chunk(3), strict=True) if ".W_pack." in name else ()
        result |= {name.replace("W_pack", f"{part}_proj"): each for part, each in parts} or {name: held}
    return _llama(writer, config, result)


def _bailing(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_shared_count(config["num_shared_experts"])
    keys, result = config["num_key_value_heads"] * _head_dim(config), {}
    for name, held in tensors.items():
        if ".query_key_value." in name:
            parts = zip("qkv", held.tensor_split((len(held) - 2 * keys, len(held) - keys)), strict=True)
            result |= {
                name.replace("attention.query_key_value", f"self_attn.{part}_proj"): each for part, each in parts
            }
        elif name == "lm_head.weight" and config.get("norm_head"):
            result[name] = held / (held.norm(dim=0, keepdim=True) + 1e-7)
        else:
            result[name.replace("attention.dense", "self_attn.o_proj")] = held
    return _llama(writer, config, result)


def _bailing2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_dimension_count(int(config["partial_rotary_factor"] * _head_dim(config)))
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    return {name.replace(".expert_bias", ".expert_bias.bias"): held for name, held in tensors.items()}


def _chatglm(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_rope_dimension_count(_head_dim(config) // 2)
    if "rope_ratio" in config:
        writer.kv_data[0].pop("chatglm.rope.freq_base")
        writer.add_rope_freq_base(10000.0 * config["rope_ratio"])
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if "inv_freq" not in name}


def _cohere2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    experts = "num_experts" in config
    _windows(writer, config, pattern=experts)
    writer.add_rope_dimension_count(_head_dim(config))
    if not experts:
        return tensors
    _without(writer, "feed_forward_length")
    kinds = config["mlp_layer_types"]
    writer.add_feed_forward_length(config["prefix_dense_intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_leading_dense_block_count(kinds.index("sparse"))
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["num_shared_experts"] * config["intermediate_size"])
    choice = {"softmax": gguf.ExpertGatingFuncType.SOFTMAX, "sigmoid": gguf.ExpertGatingFuncType.SIGMOID}
    writer.add_expert_gating_func(choice[config["expert_selection_fn"]])
    result, names = {}, {"gate.weight": "gate_inp"}
    for part in ("gate", "up", "down"):
        names |= {f"experts.{part}_proj.weight": f"{part}_exps", f"shared_experts.{part}_proj.weight": f"{part}_shexp"}
    for name, held in _stacked(tensors).items():
        own = names.get(name.partition(".mlp.")[2])
        result[f"blk.{name.split('.')[2]}.ffn_{own}.weight" if own else name] = held
    return result


def _dbrx(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    attention, sparse = config["attn_config"], config["ffn_config"]
    writer.kv_data[0].pop("dbrx.attention.head_count_kv")
    writer.kv_data[0].pop("dbrx.feed_forward_length")
    writer.add_feed_forward_length(sparse["ffn_hidden_size"])
    writer.add_head_count_kv(attention["kv_n_heads"])
    writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_expert_count(sparse["moe_num_experts"])
    writer.add_expert_used_count(sparse["moe_top_k"])
    writer.add_layer_norm_eps(1e-5)
    result = {}
    for name, held in tensors.items():
        if ".experts.mlp." in name:
            held = held.view(sparse["moe_num_experts"], sparse["ffn_hidden_size"], -1)
            name, held = f"{name}.weight", held.transpose(1, 2) if name.endswith("w2") else held
        result[name] = held
    return result


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


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    kinds, shared, count = config["layer_types"], config["num_kv_shared_layers"], config["num_hidden_layers"]
    own = config.get("per_layer_config") or {}
    full = next(iter(own.values())) if own else {"head_dim": config["global_head_dim"]}
    dim, metadata = full["head_dim"], writer.kv_data[0]
    for key in ("key_length", "value_length", "head_count_kv"):
        metadata.pop(f"gemma4.attention.{key}", None)
    metadata.pop("gemma4.feed_forward_length")
    inner = config["intermediate_size"]
    wide = 2 if config["use_double_wide_mlp"] else 1
    writer.add_feed_forward_length([inner if layer < count - shared else wide * inner for layer in range(count)])
    heads = config["num_key_value_heads"], full.get("num_key_value_heads") or config["num_key_value_heads"]
    writer.add_head_count_kv([heads[kind == "full_attention"] for kind in kinds])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    metadata.pop("gemma4.rope.dimension_count", None)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    _windows(writer, config)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("top_k_experts"):
        writer.add_expert_used_count(config["top_k_experts"])
    rotated = int(dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32))
    result = {}
    for name, held in tensors.items():
        layer = f"blk.{name.split('.')[2]}"
        if name.endswith("router.scale"):
            result[f"{layer}.ffn_gate_inp.scale"] = held
        elif name.endswith("per_expert_scale"):
            result[f"{layer}.ffn_down_exps.scale"] = held
        else:
            result[f"{name}.weight" if name.endswith(("layer_scalar", "_proj")) else name] = held
    return result


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
    for key, add in {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }.items():
        if config.get(key) is not None:
            add(config[key])
    result = _llama(writer, config, tensors)
    for name in [name for name in result if name.endswith("block_sparse_moe.input_linear.weight")]:
        gate, up = result.pop(name).chunk(2, 1)
        layer = name.split(".")[2]
        result |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    return result


def _grok(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    for key, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "router_logit_softcapping": writer.add_router_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attn_temperature_len": writer.add_attn_temperature_length,
        "embedding_multiplier_scale": writer.add_embedding_scale,
        "output_multiplier_scale": writer.add_logit_scale,
    }.items():
        add(config[key])
    writer.add_attn_output_scale(_head_dim(config) ** -0.5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(16.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    return _by_projection(tensors)


def _by_projection(tensors: Tensors) -> Tensors:
    """Mixtral's names of experts."""
    experts = {"w1": "gate", "w2": "down", "w3": "up"}
    result = {}
    for name, held in _stacked(tensors).items():
        if ".experts." in name:
            name = f"blk.{name.split('.')[2]}.ffn_{experts[name.split('.')[-2]]}_exps.weight"
        result[name] = held
    return result


def _hunyuan_moe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)
    return tensors


def _internlm2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    kv_heads, dim, result = config["num_key_value_heads"], _head_dim(config), {}
    for name, held in tensors.items():
        if ".wqkv." in name:
            groups = held.unflatten(0, (kv_heads, -1, dim))
            parts = zip("qkv", groups.tensor_split((-2, -1), 1), strict=True)
            result |= {
                name.replace("attention.wqkv", f"self_attn.{part}_proj"): each.flatten(0, 2) for part, each in parts
            }
        else:
            result[name] = held
    return _llama(writer, config, result)


def _without(writer: gguf.GGUFWriter, *keys: str) -> None:
    """Take keys of ``_sizes`` away, so that others can be in their place."""
    for key in keys:
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)


_LATENT_KEYS = ("attention.key_length", "attention.value_length", "rope.dimension_count", "attention.head_count_kv")


def _latent(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """As DeepSeek's files since April 2025, without those of its first architecture."""
    _without(writer, *_LATENT_KEYS)
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    rope = config.get("rope_parameters") or {}
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_expert_shared_count(config.get("n_shared_experts") or config["num_shared_experts"])
    kinds = config.get("mlp_layer_types")
    writer.add_leading_dense_block_count(config["first_k_dense_replace"] if kinds is None else kinds.index("sparse"))
    result = {}
    for name, held in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            both = held.view(config["num_attention_heads"], -1, rank)
            keys, values = both.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
            result[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
            result[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            part = "gate_up" if "gate_up" in name else "down"
            result[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = held
        else:
            result[name] = held
    return result


def _indexed(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if config.get("indexer_types") and writer.arch == "glm-dsa":
        kinds = [kind == "full" for kind in config["indexer_types"]]
        writer.add_array("glm-dsa.attention.indexer.types", kinds)
    return _latent(writer, config, tensors)


def _kimi_linear(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    result = _latent(writer, config, _by_projection(tensors))
    kinds = config["layer_types"]
    _without(writer, "attention.head_count_kv")
    writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
    for name in list(result):
        held = result[name]
        if name.endswith("A_log"):
            result[name] = -held.exp().view(1, 1, -1, 1)
        elif "_conv1d." in name:
            result[name] = held.view(1, len(held), 1, -1)
        elif name.endswith("dt_bias"):
            result[name.replace("dt_bias", "dt_proj.bias")] = result.pop(name)
    return result


def _mimo2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    kinds = config["layer_types"]
    _without(writer, *_LATENT_KEYS)
    full = config["num_key_value_heads"]
    writer.add_head_count_kv([full if kind == "full_attention" else 2 * full for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(int(0.334 * config["head_dim"]))
    _windows(writer, config)
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    names = (".attention_sink_bias", ".sinks")
    result = {f"{name}.weight" if name.endswith(names) else name: held for name, held in tensors.items()}
    for name in [name for name in result if ".layers.1." in name and name.endswith("q_proj.weight")]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        result["blk.1.attn_qkv.weight"] = torch.cat([result.pop(part) for part in parts])
    return result


def _mistral4(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    return _latent(writer, config, tensors)


def _step35(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    count, other = config["num_hidden_layers"], config["attention_other_setting"]["num_attention_heads"]
    kinds = config["layer_types"][:count]
    _without(writer, "rope.dimension_count", "attention.head_count", "attention.head_count_kv", "rope.freq_base")
    writer.add_head_count([other if kind == "sliding_attention" else config["num_attention_heads"] for kind in kinds])
    writer.add_head_count_kv([config["num_attention_groups"]] * count)
    writer.add_rope_freq_base(config["rope_theta"][0])
    writer.add_rope_freq_base_swa(config["rope_theta"][1])
    if config.get("rope_scaling"):  # of layers with full attention, which rotate half a head; then ones
        half = llama3_factors(
            {"rope_theta": config["rope_theta"][0], **config["rope_scaling"]}, config["head_dim"] // 2
        )
        writer.add_tensor("rope_freqs.weight", np.concatenate((half, np.ones_like(half))))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_expert_used_count(config["moe_top_k"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(1)
    writer.add_array("step35.swiglu_clamp_exp", [float(limit or 0.0) for limit in config["swiglu_limits"][:count]])
    shared = [float(limit or 0.0) for limit in config["swiglu_limits_shared"][:count]]
    writer.add_array("step35.swiglu_clamp_shexp", shared)
    result = {}
    for name, held in _stacked(tensors).items():
        held = held + 1.0 if name.endswith("norm.weight") else held
        name = name.replace(".moe.experts.", ".moe.")
        result[f"{name}.bias" if name.endswith(".router_bias") else name] = held
    return result


def _minicpm3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _without(writer, *_LATENT_KEYS)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    return tensors


def _minimax(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _without(writer, "rope.dimension_count")
    writer.add_rope_dimension_count(config["rotary_dim"])
    return tensors if "index_n_heads" not in config else _minimax_m3(writer, config, tensors)


def _minimax_m3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _without(writer, "feed_forward_length")
    writer.add_feed_forward_length(config["dense_intermediate_size"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_expert_shared_count(1)
    for key, name in {
        "index_n_heads": "head_count",
        "index_head_dim": "key_length",
        "index_topk_blocks": "top_k",
        "index_block_size": "block_size",
        "index_local_blocks": "local_blocks",
    }.items():
        writer.add_uint32(f"{writer.arch}.attention.indexer.{name}", config[key])
    result, parts = {}, {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    for name, held in tensors.items():
        layer, (part, *_) = ".".join(name.split(".")[:3]).replace("model.layers", "blk"), name.split(".")[-2:]
        if ".index_" in name:
            name = f"{layer}.indexer.{part.removeprefix('index_')}.weight"
        elif ".mlp." in name or ".shared_experts." in name:
            name = f"{layer}.{parts[part]}{'' if '.mlp.' in name else '_shexp'}.weight"
        result[name] = held + 1 if name.endswith("norm.weight") else held
    return result


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


def _phimoe(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    if "short_factor" in config["rope_parameters"]:
        tensors = _phi3(writer, config, tensors)
        writer.add_rope_scaling_attn_factors(1.19)
    return _by_projection(tensors)


def _delta_nets(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Of Qwen3-Next; value heads of Qwen3.5 are reordered besides."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dims = config["linear_key_head_dim"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(dims[0])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(dims[1] * values)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    writer.add_array(
        f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in config["layer_types"]]
    )
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    result, ratio = {}, values // keys
    for name, tensor in _states(tensors).items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1.0
        if name.endswith("in_proj_qkvz.weight"):
            layer = name.split(".")[2]
            parts = tensor.unflatten(0, (keys, -1)).split((dims[0], dims[0], ratio * dims[1], ratio * dims[1]), 1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            result |= {f"blk.{layer}.attn_qkv.weight": torch.cat((q, k, v)), f"blk.{layer}.attn_gate.weight": z}
        else:
            result[name] = tensor if "qwen35" not in writer.arch else _tiled(name, tensor, keys, dims)
    return result


def _tiled(name: str, tensor: torch.Tensor, keys: int, dims: tuple[int, int]) -> torch.Tensor:
    """Value heads one of each key head after the other."""

    def tile(rows: torch.Tensor, dim: int) -> torch.Tensor:
        return rows.unflatten(0, (keys, -1, dim)).transpose(0, 1).flatten(0, 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        first = 2 * keys * dims[0]
        return torch.cat((tensor[:first], tile(tensor[first:], dims[1])))
    if "in_proj_z" in name:
        return tile(tensor, dims[1])
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")):
        return tile(tensor, 1)
    return tile(tensor.T, dims[1]).T if "linear_attn.out_proj" in name else tensor


def _states(tensors: Tensors) -> Tensors:
    """Decays are no logarithms, and convolutions matrices."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        elif "conv" in name and name.endswith(".weight") and tensor.ndim == 3:
            tensor = tensor[:, 0]
        result[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return result


def _mamba(writer: gguf.GGUFWriter, heads: int, dim: int, groups: int, state: int, tensors: Tensors) -> Tensors:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_ssm_time_step_rank(heads)
    result = _states(tensors)
    for name in result:
        if name.endswith((".A_log", ".D")):
            result[name] = result[name].unsqueeze(1)
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            result[name] = result[name].unflatten(0, (groups, -1))
    return result


def _key_heads(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    """Key heads of each layer, 0 where it has no attention."""
    writer.kv_data[0].pop(f"{writer.arch}.attention.head_count_kv")
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if "attention" in kind.removeprefix("linear_attention") else 0 for kind in kinds])


def _granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _key_heads(writer, config, config["layer_types"])
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    sizes = (config["mamba_n_heads"], config["mamba_d_head"], config["mamba_n_groups"], config["mamba_d_state"])
    result = _mamba(writer, *sizes, _granite(writer, config, tensors))
    ending = "_shexp" if config["num_local_experts"] else ""
    for name in [name for name in result if ".shared_mlp." in name]:
        held, layer = result.pop(name), name.split(".")[2]
        if "input" in name:
            gate, up = held.chunk(2)
            result |= {f"blk.{layer}.ffn_gate{ending}.weight": gate, f"blk.{layer}.ffn_up{ending}.weight": up}
        else:
            result[f"blk.{layer}.ffn_down{ending}.weight"] = held
    return result


def _nemotron(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    kinds = config["layers_block_type"]
    _key_heads(writer, config, kinds)
    writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
    inner = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
    writer.add_feed_forward_length([inner if kind in ("moe", "mlp") else 0 for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    else:
        for key in list(writer.kv_data[0]):
            if ".expert_" in key:
                writer.kv_data[0].pop(key)
    sizes = (config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"], config["ssm_state_size"])
    result = {}
    for name, held in _stacked(_mamba(writer, *sizes, _interleave(tensors, config))).items():
        if ".experts." in name:
            name = f"blk.{name.split('.')[2]}.ffn_{name.split('.')[-2].removesuffix('_proj')}_exps.weight"
        result[name.replace("mixer.dt_proj.bias", "mixer.dt.bias")] = held
    return result


def _falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    sizes = (config["mamba_n_heads"], config["mamba_d_ssm"] // config["mamba_n_heads"])
    groups, state, reads = config["mamba_n_groups"], config["mamba_d_state"], config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * reads,
        "q_proj": reads,
        "v_proj": reads,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    inner, shared = config["mamba_d_ssm"], groups * state
    widths = (inner, inner, shared, shared, config["mamba_n_heads"])
    parts = [torch.full((width, 1), part) for width, part in zip(widths, config["ssm_multipliers"], strict=True)]
    result = _mamba(writer, *sizes, groups, state, tensors)
    for name in result:
        module = name.split(".")[-2]
        if module == "in_proj":
            result[name] = result[name] * config["ssm_in_multiplier"] * torch.cat(parts)
        elif module in factors:
            result[name] = result[name] * factors[module]
    return result


def _lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _key_heads(writer, config, config["layer_types"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    else:  # as the converter computes it
        writer.kv_data[0].pop("lfm2.feed_forward_length")
        writer.add_feed_forward_length(next(len(held) for name, held in tensors.items() if name.endswith("w1.weight")))
    tensors.pop("lm_head.weight", None)
    return {
        name.replace(".expert_bias", ".expert_bias.bias"): held
        for name, held in _by_projection(_states(tensors)).items()
    }


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    _windows(writer, config, pattern=False)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    result = {}
    for name, held in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".experts." in name else ""
        ending = ".bias" if name.endswith("_bias") else ".weight"
        turned = held if name.endswith("_bias") or not layer else held.transpose(1, 2)
        if "gate_up_proj" in name:
            result[f"{layer}.ffn_gate_exps{ending}"] = turned[:, ::2]
            result[f"{layer}.ffn_up_exps{ending}"] = turned[:, 1::2]
        elif layer:
            result[f"{layer}.ffn_down_exps{ending}"] = turned
        else:
            result[f"{name}.weight" if name.endswith("sinks") else name] = held
    return result


def _llama4(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.kv_data[0].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    result = {}
    for name, held in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".experts." in name else ""
        if "gate_up_proj" in name:
            gate, up = held.transpose(1, 2).chunk(2, 1)
            result |= {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
        else:
            result[f"{layer}.ffn_down_exps.weight" if layer else name] = held.transpose(1, 2) if layer else held
    return result


def _smollm3(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    return _llama(writer, config, tensors)


def _stablelm(writer: gguf.GGUFWriter, config: dict[str, Any], tensors: Tensors) -> Tensors:
    writer.add_parallel_residual(config["use_parallel_residual"])
    return tensors


_FAMILIES: Mapping[gguf.MODEL_ARCH, Own] = {
    gguf.MODEL_ARCH.AFMOE: _afmoe,
    gguf.MODEL_ARCH.APERTUS: _apertus,
    gguf.MODEL_ARCH.ARCEE: _llama,
    gguf.MODEL_ARCH.BAICHUAN: _baichuan,
    gguf.MODEL_ARCH.BAILINGMOE: _bailing,
    gguf.MODEL_ARCH.BAILINGMOE2: _bailing2,
    gguf.MODEL_ARCH.CHATGLM: _chatglm,
    gguf.MODEL_ARCH.COHERE2: _cohere2,
    gguf.MODEL_ARCH.DBRX: _dbrx,
    gguf.MODEL_ARCH.ERNIE4_5_MOE: _ernie,
    gguf.MODEL_ARCH.EXAONE: _exaone,
    gguf.MODEL_ARCH.EXAONE4: _exaone4,
    gguf.MODEL_ARCH.EXAONE_MOE: _exaone_moe,
    gguf.MODEL_ARCH.FALCON_H1: _falcon_h1,
    gguf.MODEL_ARCH.GEMMA2: _gemma,
    gguf.MODEL_ARCH.GEMMA3: _gemma,
    gguf.MODEL_ARCH.GEMMA4: _gemma4,
    gguf.MODEL_ARCH.GEMMA: _gemma,
    gguf.MODEL_ARCH.GLM4_MOE: _glm4_moe,
    gguf.MODEL_ARCH.GLM_DSA: _indexed,
    gguf.MODEL_ARCH.GPT_OSS: _gpt_oss,
    gguf.MODEL_ARCH.GRANITE: _granite,
    gguf.MODEL_ARCH.GRANITE_HYBRID: _granite_hybrid,
    gguf.MODEL_ARCH.GRANITE_MOE: _granite,
    gguf.MODEL_ARCH.GROK: _grok,
    gguf.MODEL_ARCH.HUNYUAN_MOE: _hunyuan_moe,
    gguf.MODEL_ARCH.INTERNLM2: _internlm2,
    gguf.MODEL_ARCH.KIMI_LINEAR: _kimi_linear,
    gguf.MODEL_ARCH.LFM2: _lfm2,
    gguf.MODEL_ARCH.LFM2MOE: _lfm2,
    gguf.MODEL_ARCH.LLAMA4: _llama4,
    gguf.MODEL_ARCH.MIMO2: _mimo2,
    gguf.MODEL_ARCH.MINICPM3: _minicpm3,
    gguf.MODEL_ARCH.MINIMAXM2: _minimax,
    gguf.MODEL_ARCH.MISTRAL3: _ministral3,
    gguf.MODEL_ARCH.MISTRAL4: _mistral4,
    gguf.MODEL_ARCH.NEMOTRON_H_MOE: _nemotron,
    gguf.MODEL_ARCH.OLMO2: _exaone4,
    gguf.MODEL_ARCH.OLMO: _olmo,
    gguf.MODEL_ARCH.PHI3: _phi3,
    gguf.MODEL_ARCH.PHIMOE: _phimoe,
    gguf.MODEL_ARCH.QWEN35: _delta_nets,
    gguf.MODEL_ARCH.QWEN35MOE: _delta_nets,
    gguf.MODEL_ARCH.QWEN3NEXT: _delta_nets,
    gguf.MODEL_ARCH.SMOLLM3: _smollm3,
    gguf.MODEL_ARCH.STABLELM: _stablelm,
    gguf.MODEL_ARCH.STEP35: _step35,
    gguf.MODEL_ARCH.XVERSE: _llama,
}
