"""What config.json says of a family beside the sizes that all have, by the family's name in GGUF files.

Names of keys and their defaults are llama.cpp's (gguf-py/gguf/constants.py, src/models). No PyTorch: the engine's
process reads it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels.contract.limits import MAX_EXPERTS
from kernels.models.gguf_metadata import Metadata

__all__ = ["FAMILIES", "PERMUTED"]

PERMUTED = frozenset({"llama", "arcee", "granite", "granitemoe", "mistral3", "olmo", "smollm3", "xverse"})
"""Architectures whose files interleave the halves of query and key heads, so that a part of a head is not rotated
alone."""

_WINDOW = ".attention.sliding_window"


def _plain(meta: Metadata) -> dict[str, Any]:
    return {}


def _experts(meta: Metadata) -> dict[str, Any]:
    """Sizes and routing of experts, by DeepSeek's names."""
    count, used = meta.size(".expert_count"), meta.size(".expert_used_count")
    if count > MAX_EXPERTS:
        raise meta.wrong(".expert_count", f"at most {MAX_EXPERTS}")
    groups = meta.count(".expert_group_count") or 1
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.size(".expert_feed_forward_length", meta.get(".feed_forward_length")),
        "first_k_dense_replace": meta.count(".leading_dense_block_count"),
        "norm_topk_prob": bool(meta.get(".expert_weights_norm")),
        "routed_scaling_factor": meta.number(".expert_weights_scale", 1.0) or 1.0,
        "n_shared_experts": meta.count(".expert_shared_count"),
        "n_group": groups,
        "topk_group": meta.count(".expert_group_used_count") or groups,
    }


def _windows(meta: Metadata, every: int, default: int = 0) -> dict[str, Any]:
    """The sliding window and the layers that have it: all but every n-th, if the file says nothing else. ``default``:
    tokens of the window, if the file says nothing."""
    window, stated = meta.count(_WINDOW, default), meta.layers(f"{_WINDOW}_pattern")
    if not window:
        return {"sliding_window": None}
    if stated is None:
        every = meta.count(f"{_WINDOW}_pattern", every)
        stated = [not every or (layer + 1) % every != 0 for layer in range(meta.block_count)]
    kinds = ["sliding_attention" if own else "full_attention" for own in stated]
    return {"sliding_window": window, "layer_types": kinds}


def _cohere(meta: Metadata) -> dict[str, Any]:
    return {"logit_scale": meta.number(".logit_scale", 1.0), "use_qk_norm": meta.has(".attn_q_norm.weight")}


def _cohere2(meta: Metadata) -> dict[str, Any]:
    return {"logit_scale": meta.number(".logit_scale", 1.0)} | _windows(meta, 4)


def _ernie(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    return experts | {
        "moe_num_experts": experts["num_experts"],
        "moe_k": experts["num_experts_per_tok"],
        "moe_num_shared_experts": experts["n_shared_experts"],
        "moe_layer_start_index": experts["first_k_dense_replace"],
        "moe_layer_interval": meta.size(".interleave_moe_layer_step", 1),
        "use_bias": meta.has(".attn_output.bias"),
    }


def _exaone4(meta: Metadata) -> dict[str, Any]:
    """Early files of the large model, which has 64 layers, have no window."""
    return _windows(meta, 4, 4096 if meta.block_count == 64 else 0)


def _exaone_moe(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    return experts | {"num_shared_experts": experts["n_shared_experts"]} | _windows(meta, 4, 128)


def _gemma(meta: Metadata) -> dict[str, Any]:
    """Norms are stored whole, and not less one."""
    return {"whole_norms": True}


def _gemma2(meta: Metadata) -> dict[str, Any]:
    return {
        **_gemma(meta),
        **_windows(meta, 2, 4096),
        "query_pre_attn_scalar": _query_scalar(meta, 46),
        "attn_logit_softcapping": meta.number(".attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": meta.number(".final_logit_softcapping", 30.0) or None,
    }


def _gemma3(meta: Metadata) -> dict[str, Any]:
    return {
        **_gemma(meta),
        **_windows(meta, 6),
        "query_pre_attn_scalar": _query_scalar(meta, 62),
        "final_logit_softcapping": meta.number(".final_logit_softcapping", 0.0) or None,
        "rope_local_base_freq": meta.number(".rope.freq_base_swa", 10000.0),
    }


def _query_scalar(meta: Metadata, layers: int) -> int:
    """One over the square of what queries times keys are multiplied with: the size of a head; of the largest model,
    which has so many ``layers``, the width of the residual stream over its heads."""
    mean = meta.size(".embedding_length") // meta.size(".attention.head_count")
    return mean if meta.block_count == layers else meta.size(".attention.key_length", mean)


def _glm4(meta: Metadata) -> dict[str, Any]:
    sections = meta.get(".rope.dimension_sections")
    if isinstance(sections, list) and any(sections[1:]):
        raise meta.refused("positions of images (rope.dimension_sections)")
    return {}


def _glm4_moe(meta: Metadata) -> dict[str, Any]:
    return _experts(meta) | {"use_qk_norm": meta.has(".attn_q_norm.weight")}


def _granite(meta: Metadata) -> dict[str, Any]:
    if meta.get(".rope.scaling.finetuned") is False:
        raise meta.refused("no positions (rope.scaling.finetuned)")
    return {
        "embedding_multiplier": meta.number(".embedding_scale", 1.0) or 1.0,
        "residual_multiplier": meta.number(".residual_scale", 1.0) or 1.0,
        "attention_multiplier": meta.number(".attention.scale", 0.0) or None,
        "logits_scaling": meta.number(".logit_scale", 1.0) or 1.0,
    }


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    if meta.has(".ffn_gate_shexp.weight"):
        raise meta.refused("an expert that all tokens take (ffn_gate_shexp)")
    return _experts(meta) | _granite(meta)


def _hunyuan_moe(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    width = meta.size(".expert_shared_feed_forward_length", experts["moe_intermediate_size"])
    return experts | {"num_shared_expert": width // experts["moe_intermediate_size"]}


def _inner_of_experts(meta: Metadata) -> dict[str, Any]:
    """Of families whose experts alone have an inner width."""
    experts = _experts(meta)
    return experts | {"intermediate_size": experts["moe_intermediate_size"]}


def _olmo(meta: Metadata) -> dict[str, Any]:
    return {"clip_qkv": meta.number(".attention.clamp_kqv", 0.0) or None}


def _olmo2(meta: Metadata) -> dict[str, Any]:
    if not meta.count(_WINDOW):
        return {}
    local = meta.number(".rope.freq_base_swa", meta.number(".rope.freq_base", 10000.0))
    return {"architectures": ["Olmo3ForCausalLM"], "rope_local_base_freq": local} | _windows(meta, 4)


def _smollm3(meta: Metadata) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def _stablelm(meta: Metadata) -> dict[str, Any]:
    return {
        "use_qkv_bias": meta.has(".attn_q.bias"),
        "use_parallel_residual": not meta.has(".ffn_norm.weight"),
        "qk_layernorm": meta.has(".attn_q_norm.weight"),
    }


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    """Files leave out the window, which all models of the family have."""
    return {
        "use_bias": meta.has(".attn_q.bias"),
        "norm_epsilon": meta.number(".attention.layer_norm_epsilon", 1e-5),
        "sliding_window": meta.size(_WINDOW, 4096),
    }


FAMILIES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "arcee": _plain,
    "chatglm": _plain,
    "cohere2": _cohere2,
    "command-r": _cohere,
    "ernie4_5-moe": _ernie,
    "exaone": _plain,
    "exaone4": _exaone4,
    "exaone-moe": _exaone_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _inner_of_experts,
    "mistral3": _plain,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _inner_of_experts,
    "seed_oss": _plain,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "xverse": _plain,
}
"""Keys of config.json by ``general.architecture``. Families that are not here: see ``gguf_description``."""
