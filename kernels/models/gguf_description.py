"""Converts a GGUF file's metadata to the equivalent config.json and generation_config.json.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No PyTorch: the engine's process reads it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels.contract.errors import ConfigError, GgufError
from kernels.contract.limits import MAX_EXPERTS, MAX_EXPERTS_OF_MODEL
from kernels.models.gguf_families import FAMILIES, PERMUTED, latent
from kernels.models.gguf_metadata import Metadata
from kernels.models.registry import BUILT_IN, Entry, find_gguf
from kernels.weights.gguf.header import GgufHeader
from kernels.weights.gguf.joined import cut

__all__ = ["describe", "generation_defaults", "named"]

_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"})
"""Control tokens that end an answer wherever they are found: many files name only one of theirs."""

_DEEPSEEK = "deepseek2"
_LATENT = (_DEEPSEEK, "deepseek32", "glm-dsa", "mistral4")
_CONTROL = 3
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
_PHIMOE_FACTOR = 1.243163121016122  # on cosines and sines, in all models: long_mscale of config.json
_MISTRAL4_GROWTH = 0.1  # of queries, which the converter leaves out: llama_4_scaling_beta of config.json
_STORED = {
    "attention_value_scale": "attention.value_scale",
    "clip_qkv": "attention.clamp_kqv",
    "embedding_multiplier_scale": "embedding_scale",
    "factor": "rope.scaling.factor",
    "head_dim": "attention.key_length",
    "index_head_dim": "attention.indexer.key_length",
    "index_local_blocks": "attention.indexer.local_blocks",
    "index_n_heads": "attention.indexer.head_count",
    "index_topk_blocks": "attention.indexer.top_k",
    "indexer_types": "attention.indexer.types",
    "moe_router_scaling_factor": "expert_weights_scale",
    "mscale": "rope.scaling.yarn_log_multiplier",
    "n_group": "expert_group_count",
    "n_shared_experts": "expert_shared_count",
    "num_attention_heads": "attention.head_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_sliding_attention_heads": "attention.head_count",
    "output_multiplier_scale": "logit_scale",
    "partial_rotary_factor": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "routed_scaling_factor": "expert_weights_scale",
    "swiglu_limits": "swiglu_clamp_exp",
    "swiglu_limits_shared": "swiglu_clamp_shexp",
    "topk_group": "expert_group_used_count",
    "v_head_dim": "attention.value_length",
}
"""The keys of a file, behind the architecture's name, by those of config.json that errors name."""
_SAMPLING = ("temp", "top_k", "top_p", "min_p")


def named(error: ConfigError, path: str | Path, name: str) -> GgufError:
    """``error`` in what ``describe`` gives of a file of the architecture ``name``, with the keys that the file has."""
    text = str(error).removeprefix("config.json: ")
    keys = dict.fromkeys(key for key in re.findall(r"\w+", text) if key in _STORED)
    stored = "".join(f"; {key} is {name}.{_STORED[key]} in the file" for key in keys)
    return GgufError(f"{path}: {text}{stored}")


def describe(header: GgufHeader) -> dict[str, Any]:
    """The object of config.json. Raises GgufError, naming the key."""
    meta = Metadata(header)
    name = meta.name
    entry = find_gguf(name, bool(header.metadata.get(f"{name}.expert_count")))
    if entry is None:
        read = ", ".join(sorted({entry.gguf for entry in BUILT_IN if entry.gguf}))
        raise GgufError(
            f"{header.path} has architecture {name!r} (general.architecture); those that are read from GGUF are "
            f"{read} (Mistral and Mixtral are llama): use a model of one of these"
        )
    if meta.number("split.count", 1) > 1:
        raise GgufError(
            f"{header.path} is one of several files of a model; join them with llama-gguf-split --merge and give the "
            "whole one"
        )
    if header.metadata.get(f"{name}.attention.causal") is False:
        raise meta.refused("attention to later tokens (attention.causal)")
    layers = meta.block_count
    own = FAMILIES[name](meta) if name in FAMILIES else _experts(header, meta, entry)
    if name == _DEEPSEEK:
        own |= latent(meta)
        if meta.number(".attention.temperature_scale", 0.0):  # Mistral Large 3
            own |= {"architectures": ["Mistral4ForCausalLM"]}
    hidden = meta.size(f"{name}.embedding_length")
    heads = own.get("num_attention_heads") or meta.size(f"{name}.attention.head_count")
    dim = own.get("qk_rope_head_dim") or meta.head_dim
    if "v_head_dim" not in own and meta.size(f"{name}.attention.value_length", dim) != dim:
        raise GgufError(f"{header.path}: heads of keys and of values of different sizes are not supported")
    rotated = meta.size(f"{name}.rope.dimension_count", dim)
    if rotated > dim or (rotated < dim and name in PERMUTED):
        raise meta.wrong(
            ".rope.dimension_count", f"{'' if name in PERMUTED else 'at most '}the {dim} numbers of a head"
        )
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise GgufError(f"{header.path} has no matrix token_embd.weight: it is no whole model; download it again")
    if layers * own.get("num_experts", 0) > MAX_EXPERTS_OF_MODEL:
        max_experts = MAX_EXPERTS_OF_MODEL // layers
        raise meta.wrong(f"{name}.expert_count", f"at most {max_experts} in each of {layers} layers")
    tensors = cut(header.tensors)
    window = 0 if entry.gguf_window == "ignored" else meta.number(f"{name}.attention.sliding_window", 0)  # 0: none
    eps = "rms_" if f"{name}.attention.layer_norm_rms_epsilon" in header.metadata else ""
    norm_eps = meta.positive(f"{name}.attention.layer_norm_{eps}epsilon", 1e-5)
    return {
        "architectures": ["DeepseekV3ForCausalLM" if own.get("correction") else entry.architecture],
        "model_type": name,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": own.get("intermediate_size")
        or meta.size(f"{name}.feed_forward_length", own.get("moe_intermediate_size")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or meta.size(f"{name}.attention.head_count_kv", heads),
        "head_dim": dim,
        "rms_norm_eps": norm_eps,
        "layer_norm_eps": norm_eps,
        "max_position_embeddings": meta.size(f"{name}.context_length"),
        "rope_parameters": _rope(header, meta, name, rotated) | {"partial_rotary_factor": (rotated + 0.5) / dim},
        "attention_bias": any(tensor.endswith(".attn_q.bias") for tensor in tensors),
        "mlp_bias": any(tensor.endswith(".ffn_down.bias") for tensor in tensors),
        "sliding_window": meta.size(f"{name}.attention.sliding_window") if window else None,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header) or None,
        **own,
    }


def _deepseek_experts(header: GgufHeader, meta: Metadata) -> dict[str, Any]:
    """DeepSeek's experts. ``correction``: whether their choice is corrected, as from DeepSeek V3 on."""
    groups = int(meta.number(f"{_DEEPSEEK}.expert_group_count", 1)) or 1
    return {
        "moe_intermediate_size": meta.size(f"{_DEEPSEEK}.expert_feed_forward_length"),
        "n_shared_experts": int(meta.number(f"{_DEEPSEEK}.expert_shared_count", 0)),
        "first_k_dense_replace": int(meta.number(f"{_DEEPSEEK}.leading_dense_block_count", 0)),
        "norm_topk_prob": bool(header.metadata.get(f"{_DEEPSEEK}.expert_weights_norm")),
        "routed_scaling_factor": meta.number(f"{_DEEPSEEK}.expert_weights_scale", 1.0) or 1.0,
        "n_group": groups,
        "topk_group": int(meta.number(f"{_DEEPSEEK}.expert_group_used_count", groups)) or groups,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "correction": any(tensor.endswith(".exp_probs_b.bias") for tensor in header.tensors),
    }


def _experts(header: GgufHeader, meta: Metadata, entry: Entry) -> dict[str, Any]:
    """What is said of experts; empty: there are none. llama.cpp makes the weights of those that are chosen add up to
    one, whatever the model's maker says of it, but for families with a shared expert."""
    name = meta.text("general.architecture")
    if not meta.number(f"{name}.expert_count", 0):
        if name.endswith("moe"):
            raise meta.wrong(f"{name}.expert_count", "a whole number of at least 1")
        return {}
    if not entry.gguf_experts:
        read = ", ".join(sorted(each.gguf for each in BUILT_IN if each.gguf_experts))
        raise GgufError(
            f"{header.path} is a mixture of experts of {name} ({name}.expert_count); those that are read are {read}: "
            "use a model of one of these"
        )
    count, used = meta.size(f"{name}.expert_count"), meta.size(f"{name}.expert_used_count")
    if count > MAX_EXPERTS:
        raise meta.wrong(f"{name}.expert_count", f"at most {MAX_EXPERTS}")
    if name == _DEEPSEEK:
        return {"num_experts": count, "num_experts_per_tok": used} | _deepseek_experts(header, meta)
    result = {"num_experts": count, "num_experts_per_tok": used, "norm_topk_prob": not entry.gguf_shared_expert}
    if entry.gguf_shared_expert:
        return result | _beside_the_shared(meta, name, used)
    shared = next((tensor for tensor in header.tensors if tensor.partition(".weight")[0].endswith("_shexp")), "")
    if shared or meta.number(f"{name}.expert_shared_count", 0):
        raise GgufError(
            f"{header.path} has an expert that all tokens take ({shared or f'{name}.expert_shared_count'}), which a "
            f"model of {name} has not here; use one that has none"
        )
    if name == "llama":
        return result
    return result | {"moe_intermediate_size": meta.size(f"{name}.expert_feed_forward_length")}


def _beside_the_shared(meta: Metadata, name: str, used: int) -> dict[str, Any]:
    """Sizes of experts, and of the one that all tokens take. Early files say neither: then those that a
    token takes are together as wide as that one, which is as wide as a plain layer."""
    whole = meta.size(f"{name}.feed_forward_length")
    return {
        "moe_intermediate_size": meta.size(f"{name}.expert_feed_forward_length", max(whole // used, 1)),
        "shared_expert_intermediate_size": meta.size(f"{name}.expert_shared_feed_forward_length", whole),
    }


def generation_defaults(header: GgufHeader) -> dict[str, Any]:
    """The object of generation_config.json: what ends an answer, and how the maker wants it sampled."""
    result: dict[str, Any] = {"eos_token_id": ends} if (ends := _ends(header)) else {}
    for key in _SAMPLING:
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            result["temperature" if key == "temp" else key] = value
    return result


def _rope(header: GgufHeader, meta: Metadata, name: str, dim: int) -> dict[str, Any]:
    kind = meta.text(f"{name}.rope.scaling.type", "none")
    theta = meta.positive(f"{name}.rope.freq_base", 10000.0)
    factor = meta.number(f"{name}.rope.scaling.factor", meta.number(f"{name}.rope.scale_linear", 1.0)) or 1.0
    result: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if "rope_freqs.weight" in header.tensors:  # what Llama 3.1's way of stretching comes to
        return result | {"rope_type": "factors", "factors": list(meta.floats("rope_freqs.weight", dim // 2))}
    if "rope_factors_long.weight" in header.tensors:  # of Phi
        stretched = {part: list(meta.floats(f"rope_factors_{part}.weight", dim // 2)) for part in ("short", "long")}
        result |= {f"{part}_factor": factors for part, factors in stretched.items()}
        original = meta.size(f"{name}.rope.scaling.original_context_length", meta.size(f"{name}.context_length"))
        result |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        attention = meta.number(f"{name}.rope.scaling.attn_factor", 0.0)
        if name == "phimoe":  # whose files have Phi-3's factor
            attention = _PHIMOE_FACTOR
        return result | ({"attention_factor": attention} if attention else {})
    if kind == "yarn":
        attention = meta.number(f"{name}.rope.scaling.attn_factor", 1.0)
        result |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": meta.size(
                f"{name}.rope.scaling.original_context_length", meta.size(f"{name}.context_length")
            ),
            "beta_fast": meta.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": attention * (1.0 + 0.1 * math.log(factor)) if factor > 1.0 else attention,
        }
        if name == "gpt-oss":  # whose correction range is not rounded
            result |= {"truncate": False}
        if name == "mistral3" and meta.get(".rope.scaling.yarn_log_multiplier"):
            result |= {"attention_factor": attention}  # what cos and sin would grow by is taken from them again
            if growth := meta.number(".attention.temperature_scale", 0.0):
                result |= {"llama_4_scaling_beta": growth}
        if name in _LATENT:  # they scale queries times keys in place of cos and sin
            stretch = 10.0 * meta.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0)
            result |= {"attention_factor": 1.0, "mscale": stretch, "mscale_all_dim": stretch}
        growth = meta.number(".attention.temperature_scale", _MISTRAL4_GROWTH if name == "mistral4" else 0.0)
        if name in _LATENT and growth:
            result |= {"llama_4_scaling_beta": growth}
    elif kind not in ("none", "linear"):
        raise GgufError(f"{name}.rope.scaling.type {kind!r} is not supported; supported are none, linear, yarn")
    elif factor != 1.0:
        result |= {"rope_type": "linear", "factor": factor}
    return result


def _dtype(header: GgufHeader) -> str:
    """The dtype of a file with float weights; bfloat16 for quantized weights, which are multiplied with it."""
    wide = ("ffn_gate_inp", "ssm_", "shortconv.conv")  # in float32 whatever the others are
    stored = header.tensors.items()
    matrices = [one for name, one in stored if len(one.shape) > 1 and not any(part in name for part in wide)]
    kinds = {one.kind for one in matrices}
    return _FLOATS.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _ends(header: GgufHeader) -> list[int]:
    metadata: Mapping[str, Any] = header.metadata
    result = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        result += [index for index, (token, kind) in pairs if kind == _CONTROL and token in _ENDS]
    return list(dict.fromkeys(index for index in result if type(index) is int))
