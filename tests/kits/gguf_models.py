"""Sizes of small models for which a GGUF file says all of config.json: where the converter leaves a number out, they
have the one that all models of the family have."""

from __future__ import annotations

from typing import Any

from tests.kits.driver import (
    DELTA,
    DENSE,
    EQUAL_YARN,
    FALCON,
    GPT_OSS,
    GRANITE_HYBRID,
    GROWING_YARN,
    HYBRID,
    INDEXED,
    KIMI_LINEAR,
    LATENT,
    LLAMA4,
    NEMOTRON,
    ROUTED,
    SHARED,
)

__all__ = ["GGUF_MODELS"]

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
}
_FACTORS = {"short_factor": [1.0, 1.0, 1.125, 1.125, 1.25, 1.25], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 4.5]}
_SCALES = _FACTORS | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
_PHIMOE = ROUTED["phimoe"][1] | {"router_jitter_noise": 0.01}
_DELTA = DELTA | {"linear_num_value_heads": 6}  # two by two heads are in the same order when they are turned back
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax-m3": ("MiniMaxM3VLText", ROUTED["minimax-m3"][1] | {"swiglu_limit": 7.0, "shared_intermediate_size": 32}),
    "afmoe": ("Afmoe", ROUTED["afmoe"][1] | {"global_attn_every_n_layers": 4, "num_hidden_layers": 5}),
    "cohere2": ("Cohere2", DENSE["cohere2"][1] | {"head_dim": 12, "sliding_window_pattern": 4}),
    "gemma2": ("Gemma2", DENSE["gemma2"][1] | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3Text",
        DENSE["gemma3"][1]
        | {"query_pre_attn_scalar": 16, "num_hidden_layers": 6}
        | {"layer_types": [*5 * ["sliding_attention"], "full_attention"]},
    ),
    "granite-4-dense": ("GraniteMoeHybrid", GRANITE_HYBRID | {"num_local_experts": 0}),
    "gpt-oss-wide": ("GptOss", GPT_OSS | {"hidden_size": 64, "intermediate_size": 96}),
    "llama4": (
        "Llama4Text",
        LLAMA4
        | {
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "lfm2-moe": ("Lfm2Moe", HYBRID["lfm2-moe"][1] | {"routed_scaling_factor": 1.0}),
    "falcon-h1": ("FalconH1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "deepseek-v3.2": ("DeepseekV32", INDEXED | {"rope_parameters": EQUAL_YARN, "norm_topk_prob": True}),
    "kimi-linear": ("KimiLinear", KIMI_LINEAR | {"linear_num_heads": 4}),
    "mistral4": (
        "Mistral4",
        LATENT["mistral4"][1] | {"rope_parameters": GROWING_YARN | {"llama_4_scaling_beta": 0.1}},
    ),
    "minicpm3": (
        "MiniCPM3",
        LATENT["minicpm3"][1] | {"v_head_dim": 12, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "nemotron-dense": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "glm": ("Glm", DENSE["glm"][1] | {"head_dim": 12, "rms_norm_eps": 1e-5}),
    "qwen3.5-wide": (
        "Qwen3_5Text",
        _DELTA | {"linear_value_head_dim": 32, "linear_key_head_dim": 32, "hidden_size": 64, "intermediate_size": 96},
    ),
    "qwen3.5": ("Qwen3_5Text", _DELTA | {"tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5MoeText", SHARED | _DELTA | {"layer_types": 2 * ["linear_attention", "full_attention"]}),
    "phi3-long": (
        "Phi3",
        {"pad_token_id": 0, "partial_rotary_factor": 0.5, "rope_parameters": _LONG, "sliding_window": None},
    ),
    "phimoe": ("Phimoe", _PHIMOE),
    "phimoe-long": (
        "Phimoe",
        _PHIMOE
        | {"rope_parameters": _LONG | _SCALES, "max_position_embeddings": 128, "attention_bias": False}
        | {"lm_head_bias": False},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 4096}),
}

GGUF_MODELS: dict[str, tuple[str, dict[str, Any]]] = {f"gguf-{name}": model for name, model in _OWN.items()}
