"""What config.json says of a family beside the sizes that all have, by the family's name in GGUF files.

Names of keys and their defaults are llama.cpp's (gguf-py/gguf/constants.py, src/models). No PyTorch: the engine's
process reads it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels.contract.limits import MAX_EXPERTS
from kernels.models.gguf_metadata import Metadata

__all__ = ["FAMILIES", "PERMUTED", "latent"]

PERMUTED = frozenset(
    ("llama", "arcee", "baichuan", "bailingmoe", "granite", "granitemoe", "internlm2", "mistral3", "olmo", "smollm3")
) | {"xverse"}
"""Architectures whose files interleave the halves of query and key heads, so that a part of a head is not rotated
alone."""

_WINDOW = ".attention.sliding_window"
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _plain(meta: Metadata) -> dict[str, Any]:
    return {}


def _count_of_experts(meta: Metadata) -> int:
    count = meta.size(".expert_count")
    if count > MAX_EXPERTS:
        raise meta.wrong(".expert_count", f"at most {MAX_EXPERTS}")
    return count


def _experts(meta: Metadata) -> dict[str, Any]:
    """Sizes and routing of experts, by DeepSeek's names."""
    count, used = _count_of_experts(meta), meta.size(".expert_used_count")
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
        "topk_group": (meta.count(".expert_group_used_count") or groups) if groups > 1 else 1,
    }


def _scores(meta: Metadata, default: int) -> str:
    """What makes weights of experts of a router's logits. ``default``: if the file does not say it, or says 0."""
    number = meta.count(".expert_gating_func") or default
    if number not in (1, 2):
        raise meta.wrong(".expert_gating_func", "1, which is softmax, or 2, which is sigmoid")
    return "softmax" if number == 1 else "sigmoid"


def latent(meta: Metadata) -> dict[str, Any]:
    """The sizes of latent attention. Newer files say those of heads beside those of the latent space, and have the
    weights of keys and values apart."""
    rotated = meta.size(".rope.dimension_count")
    whole = meta.size(".attention.key_length_mla", meta.get(".attention.key_length"))
    if rotated >= whole:
        raise meta.wrong(".rope.dimension_count", f"less than the {whole} numbers of a head")
    mean = meta.size(".embedding_length") // meta.size(".attention.head_count")  # if the file does not say it
    return {
        "q_lora_rank": meta.size(".attention.q_lora_rank") if meta.number(".attention.q_lora_rank", 0) else None,
        "kv_lora_rank": meta.size(".attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": meta.size(".attention.value_length_mla", meta.get(".attention.value_length", mean)),
        "kv_b_apart": meta.has(".attn_k_b.weight"),
    }


def _windows(meta: Metadata, every: int, default: int = 0) -> dict[str, Any]:
    """The sliding window and the layers that have it: all but every n-th, if the file says nothing else. ``default``:
    tokens of the window, if the file says nothing."""
    window, stated = meta.count(_WINDOW, default), meta.flags(f"{_WINDOW}_pattern")
    if not window:
        return {"sliding_window": None}
    if stated is None:
        every = meta.count(f"{_WINDOW}_pattern", every)
        stated = [not every or (layer + 1) % every != 0 for layer in range(meta.block_count)]
    kinds = ["sliding_attention" if own else "full_attention" for own in stated]
    return {"sliding_window": window, "layer_types": kinds}


def _afmoe(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    return (
        experts
        | _windows(meta, 4)
        | {
            "num_dense_layers": experts["first_k_dense_replace"],
            "num_shared_experts": experts["n_shared_experts"],
            "route_scale": experts["routed_scaling_factor"],
            "mup_enabled": True,
        }
    )


def _baichuan(meta: Metadata) -> dict[str, Any]:
    """Files say nothing of rotation. The models of 13B, which have 40 layers, have none."""
    alibi = {"max_position_embeddings": None, "model_max_length": meta.size(".context_length")}
    return {"qkv_apart": True} | (alibi if meta.block_count == 40 else {})


def _apertus(meta: Metadata) -> dict[str, Any]:
    """Numbers of xIELU are in the metadata, one for each layer or one for all."""
    parts = [meta.numbers(f"xielu.{part}") for part in _XIELU]
    for part, numbers in zip(_XIELU, parts, strict=True):
        if numbers is None:
            raise meta.wrong(f"xielu.{part}", f"a number for each of {meta.block_count} layers")
    return {"xielu": list(zip(*(numbers or () for numbers in parts), strict=True))}


def _bailing(meta: Metadata) -> dict[str, Any]:
    """Rows of the output have the length that they are normed to."""
    experts = _experts(meta)
    return experts | {
        "qkv_apart": True,
        "num_shared_experts": experts["n_shared_experts"],
        "use_qkv_bias": meta.has(".attn_q.bias"),
        "use_bias": meta.has(".attn_output.bias"),
    }


def _bailing2(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    return experts | {
        "num_shared_experts": experts["n_shared_experts"],
        "score_function": _scores(meta, 1),
        "moe_router_enable_expert_bias": meta.has(".exp_probs_b.bias"),
        "use_qk_norm": meta.has(".attn_q_norm.weight"),
        "use_qkv_bias": meta.has(".attn_qkv.bias"),
        "use_bias": meta.has(".attn_output.bias"),
    }


def _cohere(meta: Metadata) -> dict[str, Any]:
    return {"logit_scale": meta.number(".logit_scale", 1.0), "use_qk_norm": meta.has(".attn_q_norm.weight")}


def _indexed(meta: Metadata) -> dict[str, Any]:
    """DeepSeek V3.2 and GLM-5. Early files do not say which layers have an indexer: all, or where a million tokens fit,
    the first three and every fourth from there on."""
    result = _experts(meta) | latent(meta)
    result |= {
        "index_n_heads": meta.size(".attention.indexer.head_count"),
        "index_head_dim": meta.size(".attention.indexer.key_length"),
        "index_topk": meta.size(".attention.indexer.top_k"),
    }
    if (kinds := meta.flags(".attention.indexer.types")) is not None:
        return result | {"indexer_types": ["full" if own else "shared" for own in kinds]}
    some = meta.name == "glm-dsa" and meta.size(".context_length") >= 1 << 20
    return result | ({"index_topk_freq": 4, "index_skip_topk_offset": 3} if some else {})


def _cohere2(meta: Metadata) -> dict[str, Any]:
    return {"logit_scale": meta.number(".logit_scale", 1.0)} | _windows(meta, 4)


def _cohere2_moe(meta: Metadata) -> dict[str, Any]:
    """Results of the experts and of the one that all tokens take are averaged. The first layers, without experts,
    rotate."""
    experts, rms = _experts(meta), meta.get(".attention.layer_norm_rms_epsilon")
    return (
        experts
        | _windows(meta, 4)
        | {
            "intermediate_size": experts["moe_intermediate_size"],
            "prefix_dense_intermediate_size": meta.size(".feed_forward_length"),
            "num_shared_experts": experts["n_shared_experts"],
            "expert_selection_fn": _scores(meta, 2),
            "logit_scale": meta.number(".logit_scale", 1.0),
            "rms_norm_eps": rms,
        }
    )


def _dbrx(meta: Metadata) -> dict[str, Any]:
    """Weights of the experts that a token takes add up to one, as in all models of the family."""
    sparse = {
        "ffn_hidden_size": meta.size(".feed_forward_length"),
        "moe_num_experts": meta.size(".expert_count"),
        "moe_top_k": meta.size(".expert_used_count"),
    }
    attention = {"clip_qkv": meta.number(".attention.clamp_kqv", 0.0)}
    return {
        "num_experts": _count_of_experts(meta),
        "ffn_config": sparse,
        "attn_config": attention,
        "experts_apart": True,
    }


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


def _gemma4(meta: Metadata) -> dict[str, Any]:
    """Heads of layers with a window are of another size, and so may be numbers of key heads and feed-forward layers."""
    windows = _windows(meta, 6, 512)
    kinds = windows.get("layer_types") or []
    if "full_attention" not in kinds or "sliding_attention" not in kinds:
        raise meta.wrong(f"{_WINDOW}_pattern", "true for some layers and false for others")
    full, local = kinds.index("full_attention"), kinds.index("sliding_attention")
    dim, small = meta.size(".attention.key_length"), meta.size(".attention.key_length_swa")
    if meta.size(".rope.dimension_count_swa", small) != small:
        raise meta.wrong(".rope.dimension_count_swa", f"the {small} numbers of a head")
    inner, heads = meta.layers(".feed_forward_length"), meta.layers(".attention.head_count_kv")
    equal = f"blk.{full}.attn_v.weight" not in meta.header.tensors
    if heads is not None and heads[full] != heads[local] and not equal:
        raise meta.refused("other key heads in layers with full attention, whose values are not keys")
    rotated = sum(factor < 1e9 for factor in meta.floats("rope_freqs.weight", dim // 2))
    inputs = meta.count(".embedding_length_per_layer_input")
    table = meta.header.tensors.get("per_layer_token_embd.weight")
    result = windows | {
        "head_dim": small,
        "global_head_dim": dim,
        "attention_k_eq_v": equal,
        "num_kv_shared_layers": meta.count(".attention.shared_kv_layers"),
        "hidden_size_per_layer_input": inputs,
        "final_logit_softcapping": meta.number(".final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.number(".rope.freq_base_swa", 10000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": meta.number(".rope.freq_base", 1000000.0),
                "partial_rotary_factor": 2.0 * rotated / dim,
            },
        },
    }
    if table is not None:
        result["vocab_size_per_layer_input"] = table.shape[0]
    if inner is not None:
        result |= {"intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] == 2 * inner[0]}
    if heads is not None:
        result |= {"num_key_value_heads": heads[local], "num_global_key_value_heads": heads[full]}
    if meta.count(".expert_count"):
        experts = _experts(meta)
        result |= experts | {
            "enable_moe_block": True,
            "top_k_experts": experts["num_experts_per_tok"],
            "experts_apart": True,
        }
    return result


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


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    inner = {"intermediate_size": experts["moe_intermediate_size"], "experts_apart": True}
    return experts | inner | _windows(meta, 2, 128) | {"attention_bias": True}


def _granite(meta: Metadata) -> dict[str, Any]:
    if meta.get(".rope.scaling.finetuned") is False:
        raise meta.refused("no positions (rope.scaling.finetuned)")
    return _multipliers(meta)


def _multipliers(meta: Metadata) -> dict[str, Any]:
    return {
        "embedding_multiplier": meta.number(".embedding_scale", 1.0) or 1.0,
        "residual_multiplier": meta.number(".residual_scale", 1.0) or 1.0,
        "attention_multiplier": meta.number(".attention.scale", 0.0) or meta.head_dim**-0.5,
        "logits_scaling": meta.number(".logit_scale", 1.0) or 1.0,
    }


def _granite_hybrid(meta: Metadata) -> dict[str, Any]:
    plain = _multipliers(meta) | _mamba(meta)
    kinds = ["attention" if heads else "mamba" for heads in _key_heads(meta)]
    width = meta.size(".expert_shared_feed_forward_length", meta.get(".feed_forward_length"))
    return plain | {
        "layer_types": kinds,
        "gates_apart": True,
        "shared_intermediate_size": width,
        "num_local_experts": meta.count(".expert_count"),
        "num_experts_per_tok": max(meta.count(".expert_used_count"), 1),
        "position_embedding_type": "nope" if meta.get(".rope.scaling.finetuned") is False else "rope",
    }


def _key_heads(meta: Metadata) -> list[int]:
    """Key heads of each layer, 0 where it is not attention."""
    heads = meta.layers(".attention.head_count_kv")
    if heads is None or not all(type(one) is int for one in heads):
        raise meta.wrong(".attention.head_count_kv", f"a number for each of {meta.block_count} layers")
    return heads


def _llama4(meta: Metadata) -> dict[str, Any]:
    """What files leave out is llama.cpp's: heads are not normed with 128 experts, a window of 0 means no chunks, and
    then all layers rotate."""
    experts = _experts(meta)
    own: dict[str, Any] = {
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": meta.size(".feed_forward_length"),
        "interleave_moe_layer_step": meta.size(".interleave_moe_layer_step", 1),
        "use_qk_norm": experts["num_experts"] != 128,
        "experts_apart": True,
    }
    if meta.get(_WINDOW) == 0:
        own |= {"attention_chunk_size": None, "no_rope_layers": [1] * meta.block_count}
    return experts | own


def _mamba(meta: Metadata) -> dict[str, Any]:
    """Sizes of Mamba 2, by Granite's and by Nemotron's names."""
    heads, inner = meta.size(".ssm.time_step_rank"), meta.size(".ssm.inner_size")
    sizes = {
        ("mamba_n_heads", "mamba_num_heads"): heads,
        ("mamba_d_head", "mamba_head_dim"): inner // heads,
        ("mamba_n_groups", "n_groups"): meta.size(".ssm.group_count"),
        ("mamba_d_state", "ssm_state_size"): meta.size(".ssm.state_size"),
        ("mamba_d_conv", "conv_kernel"): meta.size(".ssm.conv_kernel"),
        ("mamba_d_ssm",): inner,
        ("mamba_conv_bias", "use_conv_bias"): meta.has(".ssm_conv1d.bias"),
        ("mamba_proj_bias", "use_bias"): meta.has(".ssm_in.bias"),
        ("mamba_expand",): max(1, inner // meta.size(".embedding_length")),
    }
    return {name: value for names, value in sizes.items() for name in names}


def _nemotron(meta: Metadata) -> dict[str, Any]:
    """Layers have attention, a feed-forward layer or experts, by the numbers of theirs, or else Mamba."""
    inner = meta.layers(".feed_forward_length")
    if inner is None:
        raise meta.wrong(".feed_forward_length", f"a number for each of {meta.block_count} layers")
    routed = meta.count(".expert_count") > 0
    kinds = [
        "attention" if heads else ("moe" if routed else "mlp") if width else "mamba"
        for heads, width in zip(_key_heads(meta), inner, strict=True)
    ]
    experts = _experts(meta) if routed else {}
    return (
        experts
        | _mamba(meta)
        | {
            "layers_block_type": kinds,
            "layer_norm_epsilon": meta.number(
                ".attention.layer_norm_rms_epsilon", meta.number(".attention.layer_norm_epsilon", 1e-5)
            ),
            "moe_latent_size": meta.count(".moe_latent_size") or None,
            "moe_shared_expert_intermediate_size": meta.count(".expert_shared_feed_forward_length"),
        }
    )


def _falcon_h1(meta: Metadata) -> dict[str, Any]:
    """Weights hold the multipliers."""
    return _mamba(meta) | {
        "mamba_rms_norm": meta.has(".ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": meta.has(".ssm_out.bias"),
    }


def _lfm2(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta) if meta.count(".expert_count") else {}
    return experts | {
        "layer_types": ["full_attention" if heads else "conv" for heads in _key_heads(meta)],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": meta.size(".shortconv.l_cache"),
        "conv_bias": meta.has(".shortconv.in_proj.bias"),
        "norm_eps": meta.number(".attention.layer_norm_rms_epsilon", 1e-5),
        "num_dense_layers": meta.count(".leading_dense_block_count"),
        "norm_topk_prob": True,
        "use_expert_bias": meta.has(".exp_probs_b.bias"),
        "tie_embedding": "output.weight" not in meta.header.tensors,
    }


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    if not meta.count(".expert_count"):  # of Granite 4 without Mamba
        return {"architectures": ["GraniteForCausalLM"]} | _granite(meta)
    if meta.has(".ffn_gate_shexp.weight"):
        raise meta.refused("an expert that all tokens take (ffn_gate_shexp)")
    return _experts(meta) | _granite(meta)


def _grok(meta: Metadata) -> dict[str, Any]:
    """Files say that frequencies are scaled by YaRN, which they are not in Grok 2. Defaults are Grok 1's."""
    experts = _experts(meta)
    return experts | {
        "rope_parameters": {"rope_type": "default", "rope_theta": meta.positive(".rope.freq_base", 10000.0)},
        "residual_moe": meta.has(".ffn_up.weight"),
        "attn_output_multiplier": meta.positive(".attention.output_scale", 128**-0.5),
        "attn_logit_softcapping": meta.number(".attn_logit_softcapping", 30.0),
        "router_logit_softcapping": meta.number(".router_logit_softcapping", 30.0),
        "final_logit_softcapping": meta.number(".final_logit_softcapping", 0.0),
        "attn_temperature_len": meta.count(".attention.temperature_length") or -1,
        "embedding_multiplier_scale": meta.number(".embedding_scale", 78.38367176906169),
        "output_multiplier_scale": meta.number(".logit_scale", 3**-0.5),
        "gguf_last_norm": "layer_output_norm" if meta.has(".layer_output_norm.weight") else "post_ffw_norm",
    }


def _hunyuan_moe(meta: Metadata) -> dict[str, Any]:
    experts = _experts(meta)
    width = meta.size(".expert_shared_feed_forward_length", experts["moe_intermediate_size"])
    return experts | {"num_shared_expert": width // experts["moe_intermediate_size"]}


def _inner_of_experts(meta: Metadata) -> dict[str, Any]:
    """Of families whose experts alone have an inner width."""
    experts = _experts(meta)
    return experts | {"intermediate_size": experts["moe_intermediate_size"]}


def _internlm2(meta: Metadata) -> dict[str, Any]:
    """Files have the names and the order of Llama's."""
    return {"architectures": ["LlamaForCausalLM"]}


def _kimi_linear(meta: Metadata) -> dict[str, Any]:
    """Delta layers have as many heads as the others."""
    experts = _experts(meta) | {"norm_topk_prob": True}
    return (
        experts
        | latent(meta)
        | {
            "layer_types": ["full_attention" if heads else "linear_attention" for heads in _key_heads(meta)],
            "linear_head_dim": meta.size(".kda.head_dim"),
            "linear_num_heads": meta.size(".attention.head_count"),
            "linear_conv_kernel_dim": meta.size(".ssm.conv_kernel"),
        }
    )


def _sparse_layers(meta: Metadata) -> list[str]:
    """Which layers have experts: files with no number of dense ones."""
    tensors = meta.header.tensors
    return ["sparse" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "dense" for layer in range(meta.block_count)]


def _by_kind(meta: Metadata, key: str, kinds: list[str]) -> dict[str, int]:
    """A size of layers with full attention, and of those with a window; each is alike in all of them."""
    values = meta.layers(key) or [meta.size(key)] * meta.block_count
    found = {kind: {value for value, own in zip(values, kinds, strict=True) if own == kind} for kind in set(kinds)}
    if any(len(own) != 1 or type(next(iter(own))) is not int for own in found.values()):
        raise meta.wrong(key, "one number for layers with full attention, and one for those with a window")
    result = {kind: next(iter(own)) for kind, own in found.items()}
    return {kind: result.get(kind, next(iter(result.values()))) for kind in ("full_attention", "sliding_attention")}


def _ropes(meta: Metadata, parts: Mapping[str, float]) -> dict[str, Any]:
    """Rotation of layers with full attention, and of those with a window. ``parts``: of a head that are rotated."""
    theta = meta.positive(".rope.freq_base", 10000.0)
    bases = {"full_attention": theta, "sliding_attention": meta.positive(".rope.freq_base_swa", theta)}
    return {
        kind: {"rope_type": "default", "rope_theta": bases[kind], "partial_rotary_factor": part}
        for kind, part in parts.items()
    }


def _mimo2(meta: Metadata) -> dict[str, Any]:
    windows = _windows(meta, 0)
    kinds = windows.get("layer_types") or ["full_attention"] * meta.block_count
    heads, dim = _by_kind(meta, ".attention.head_count_kv", kinds), meta.head_dim
    rotated = (meta.size(".rope.dimension_count", dim) + 0.5) / dim
    return (
        _experts(meta)
        | windows
        | {
            "norm_topk_prob": True,
            "mlp_layer_types": _sparse_layers(meta),
            "num_key_value_heads": heads["full_attention"],
            "swa_num_key_value_heads": heads["sliding_attention"],
            "v_head_dim": meta.size(".attention.value_length", dim),
            "attention_value_scale": meta.number(".attention.value_scale", 1.0),
            "rope_parameters": _ropes(meta, dict.fromkeys(("full_attention", "sliding_attention"), rotated)),
        }
    )


def _minimax_m3(meta: Metadata) -> dict[str, Any]:
    """Norms have their offset; limits of gates are those of all models. Early files have no indexer, and so full
    attention in all layers."""
    experts, inner, index = _experts(meta), meta.size(".expert_feed_forward_length"), ".attention.indexer"
    if _scores(meta, 2) != "sigmoid":
        raise meta.wrong(".expert_gating_func", "2, which is sigmoid")
    own = [meta.has(f"blk.{layer}.indexer.q_proj.weight") for layer in range(meta.block_count)]
    result = {key: experts[key] for key in ("num_experts", "num_experts_per_tok", "routed_scaling_factor")} | {
        "whole_norms": True,
        "intermediate_size": inner,
        "dense_intermediate_size": meta.size(".feed_forward_length"),
        "shared_intermediate_size": inner * meta.size(".expert_shared_count", 1),
        "mlp_layer_types": _sparse_layers(meta),
        "layer_types": ["minimax_m3_sparse" if one else "full_attention" for one in own],
    }
    if not any(own):
        return result
    return result | {
        "index_n_heads": meta.size(f"{index}.head_count"),
        "index_head_dim": meta.size(f"{index}.key_length"),
        "index_topk_blocks": meta.size(f"{index}.top_k"),
        "index_block_size": meta.size(f"{index}.block_size"),
        "index_local_blocks": meta.size(f"{index}.local_blocks"),
    }


def _mistral4(meta: Metadata) -> dict[str, Any]:
    return _experts(meta) | latent(meta)


def _step35(meta: Metadata) -> dict[str, Any]:
    """Half of a head is rotated in layers with full attention."""
    windows, experts, dim = _windows(meta, 0), _experts(meta), meta.head_dim
    kinds = windows.get("layer_types") or ["full_attention"] * meta.block_count
    heads = _by_kind(meta, ".attention.head_count", kinds)
    if _scores(meta, 2) != "sigmoid":
        raise meta.wrong(".expert_gating_func", "2, which is sigmoid")
    ropes = _ropes(meta, {"full_attention": 0.5, "sliding_attention": 1.0})
    if "rope_freqs.weight" in meta.header.tensors:
        factors = meta.floats("rope_freqs.weight", dim // 2)
        ropes["full_attention"] |= {"rope_type": "factors", "factors": list(factors[: dim // 4])}
    return (
        experts
        | windows
        | {
            "whole_norms": True,
            "num_attention_heads": heads["full_attention"],
            "num_sliding_attention_heads": heads["sliding_attention"],
            "mlp_layer_types": _sparse_layers(meta),
            "share_expert_dim": meta.size(".expert_shared_feed_forward_length"),
            "moe_router_scaling_factor": experts["routed_scaling_factor"],
            "rope_parameters": ropes,
            "swiglu_limits": meta.numbers(".swiglu_clamp_exp"),
            "swiglu_limits_shared": meta.numbers(".swiglu_clamp_shexp"),
        }
    )


def _minicpm3(meta: Metadata) -> dict[str, Any]:
    """Multipliers are those of all models of the family."""
    return latent(meta)


def _olmo(meta: Metadata) -> dict[str, Any]:
    return {"clip_qkv": meta.number(".attention.clamp_kqv", 0.0) or None}


def _olmo2(meta: Metadata) -> dict[str, Any]:
    if not meta.count(_WINDOW):
        return {}
    local = meta.number(".rope.freq_base_swa", meta.number(".rope.freq_base", 10000.0))
    return {"architectures": ["Olmo3ForCausalLM"], "rope_local_base_freq": local} | _windows(meta, 4)


def _phimoe(meta: Metadata) -> dict[str, Any]:
    """Files leave out the noise of the router, which is the same in all models."""
    result = _experts(meta)
    inner = {"intermediate_size": result["moe_intermediate_size"], "num_local_experts": result["num_experts"]}
    biases = {"attention_bias": meta.has(".attn_q.bias") or meta.has(".attn_qkv.bias")}
    return result | inner | biases | {"lm_head_bias": "output.bias" in meta.header.tensors}


def _delta_nets(meta: Metadata, heads: str) -> dict[str, Any]:
    """Sizes of Qwen's gated delta nets. ``heads``: how the file has value heads."""
    value_heads, recurrent = meta.size(".ssm.time_step_rank"), meta.flags(".attention.recurrent_layers")
    if recurrent is None:
        every = meta.size(".full_attention_interval", 4)
        recurrent = [(layer + 1) % every != 0 for layer in range(meta.block_count)]
    return {
        "whole_norms": True,
        "gguf_value_heads": heads,
        "layer_types": ["linear_attention" if own else "full_attention" for own in recurrent],
        "linear_num_key_heads": meta.size(".ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": meta.size(".ssm.state_size"),
        "linear_value_head_dim": meta.size(".ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": meta.size(".ssm.conv_kernel"),
    }


def _qwen3_next(meta: Metadata) -> dict[str, Any]:
    shared = meta.size(".expert_shared_feed_forward_length", 512)
    experts = _experts(meta) | {"norm_topk_prob": True, "shared_expert_intermediate_size": shared}
    return experts | _delta_nets(meta, "grouped")


def _qwen3_5(meta: Metadata) -> dict[str, Any]:
    return _delta_nets(meta, "tiled")


def _qwen3_5_moe(meta: Metadata) -> dict[str, Any]:
    return _qwen3_next(meta) | _qwen3_5(meta)


def _smollm3(meta: Metadata) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def _stablelm(meta: Metadata) -> dict[str, Any]:
    if meta.has(".attn_q_norm.weight"):
        raise meta.refused("norms of query and key heads (attn_q_norm)")
    return {
        "use_qkv_bias": meta.has(".attn_q.bias"),
        "use_parallel_residual": not meta.has(".ffn_norm.weight"),
    }


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    """Files leave out the window, which all models of the family have."""
    return {
        "use_bias": meta.has(".attn_q.bias"),
        "norm_epsilon": meta.number(".attention.layer_norm_epsilon", 1e-5),
        "sliding_window": meta.size(_WINDOW, 4096),
    }


FAMILIES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "afmoe": _afmoe,
    "apertus": _apertus,
    "arcee": _plain,
    "baichuan": _baichuan,
    "bailingmoe": _bailing,
    "bailingmoe2": _bailing2,
    "chatglm": _plain,
    "cohere2": _cohere2,
    "cohere2moe": _cohere2_moe,
    "command-r": _cohere,
    "dbrx": _dbrx,
    "deepseek32": _indexed,
    "ernie4_5-moe": _ernie,
    "exaone": _plain,
    "exaone4": _exaone4,
    "exaone-moe": _exaone_moe,
    "falcon-h1": _falcon_h1,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm-dsa": _indexed,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite_moe,
    "grok": _grok,
    "hunyuan-moe": _hunyuan_moe,
    "internlm2": _internlm2,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "llama4": _llama4,
    "mimo2": _mimo2,
    "minicpm3": _minicpm3,
    "minimax-m2": _inner_of_experts,
    "minimax-m3": _minimax_m3,
    "mistral3": _plain,
    "mistral4": _mistral4,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _inner_of_experts,
    "phimoe": _phimoe,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen3next": _qwen3_next,
    "seed_oss": _plain,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "step35": _step35,
    "xverse": _plain,
}
"""Keys of config.json by ``general.architecture``. Families that are not here: see ``gguf_description``."""
