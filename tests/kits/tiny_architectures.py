"""Small models of every architecture that transformers builds as a causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["VOCAB", "architectures", "save_config", "save_tiny", "tiny_config"]

VOCAB = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "dim": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "model_dim": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": 9,
    "rotary_dim": 8,
    "attention_chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "is_decoder": True,
}
_OWN: dict[str, dict[str, Any]] = {  # sizes that only one type has, or that must fit one another
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "dory": {"initializer_range": 1.0},  # which scales queries
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "global_head_dim": 32},
    "gemma4_unified_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 9},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_LARGEST = 3_000_000


def architectures() -> dict[str, str]:
    """The class of every type of model that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found.items()}


def tiny_config(kind: str, more: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a small model of type ``kind``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrink(CONFIG_MAPPING[kind], {**_OWN.get(kind, {}), **(more or {})})


def _shrink(made: type[Any], more: Mapping[str, Any]) -> Any:
    default = made()
    known = {**default.__dict__, **{name: getattr(default, name, None) for name in default.attribute_map}}
    parameters = set(inspect.signature(made.__init__).parameters) | set(getattr(made, "__dataclass_fields__", ()))
    sizes = {name: value for name, value in _SIZES.items() if name in parameters or name in known}
    for name in ("sliding_window", "q_lora_rank", "num_key_value_heads"):
        if known.get(name) is None and name != "num_key_value_heads":
            sizes.pop(name, None)
    if "qk_rope_head_dim" in sizes:  # latent attention
        sizes.pop("head_dim", None)
        sizes.pop("num_key_value_heads", None)
        sizes = sizes | {name: 4 for name in ("num_key_value_heads",) if name in known}
    for name, sub in getattr(made, "sub_configs", {}).items():
        if getattr(default, name, None) is not None and hasattr(sub, "model_type") and sub.model_type:
            sizes[name] = _shrink(sub, {}).to_dict()
    kinds = sorted(set(known.get("layer_types") or ()), reverse=True)  # sliding before full attention
    if len(kinds) > 1:
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(_SIZES["num_hidden_layers"])]
    for alias, name in made.attribute_map.items():
        if name in sizes:
            sizes.pop(alias, None)
    return made(**{**sizes, **more})


def save_config(kind: str, directory: Path, more: Mapping[str, Any] | None = None) -> Any:
    """Save the configuration of a small model to ``directory``. -> it. Raises what transformers raises where the sizes
    do not fit."""
    config = tiny_config(kind, more)
    config.architectures = [architectures()[kind]]
    config.save_pretrained(directory)
    return config


def save_tiny(kind: str, directory: Path, more: Mapping[str, Any] | None = None) -> Any:
    """Save a seeded small model to ``directory``. -> the model that transformers loads from there, which computes
    eagerly. Raises ValueError, or what transformers raises, where the sizes do not fit."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sum(kind.encode()))
    config = tiny_config(kind, more)
    with torch.device("meta"):
        size = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size} parameters are not small: the sizes of {kind} have other names")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():  # far from uniform predictions, biases and norms that count
        noise = torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.ndim == 1 else 0.2)
        parameter.data.copy_(noise + (1.0 if parameter.ndim == 1 and parameter.numel() > 1 else 0.0))
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
