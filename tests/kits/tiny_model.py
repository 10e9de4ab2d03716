"""A tiny model directory for tests: a trained tokenizer, a chat template, and a Qwen3 of random weights.

The weights are large enough for attention to matter: a wrong page or position changes the tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = [
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a king.",
    "What is the capital of France? The capital of France is Paris. Grüße, naïve café, 東京, 🎭🎬.",
    "one two three four five six seven eight nine ten, again and again and again",
]


def make_tiny_model(directory: Path, *, seed: int = 1, **overrides: Any) -> Path:
    """Write configuration, tokenizer and weights into ``directory``; returns it. With ``num_experts`` and the other
    settings of Qwen3-MoE in ``overrides``, all its layers have experts."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 384,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 0,
        **overrides,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE})
    )
    save_file(_weights(config, seed), directory / "model.safetensors")
    return directory


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, vocab = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((vocab, hidden)).astype(np.float32),
        "model.norm.weight": np.ones(hidden, dtype=np.float32),
        "lm_head.weight": matrix(vocab, hidden, 4.0),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": np.ones(hidden, dtype=np.float32),
            name + "post_attention_layernorm.weight": np.ones(hidden, dtype=np.float32),
            name + "self_attn.q_norm.weight": np.full(head, 2.0, dtype=np.float32),
            name + "self_attn.k_norm.weight": np.full(head, 2.0, dtype=np.float32),
            name + "self_attn.q_proj.weight": matrix(heads * head, hidden),
            name + "self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            name + "self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            name + "self_attn.o_proj.weight": matrix(hidden, heads * head, 4.0),
        }
        blocks = [f"{name}mlp."]
        if "num_experts" in config:
            blocks = [f"{name}mlp.experts.{expert}." for expert in range(config["num_experts"])]
            tensors[f"{name}mlp.gate.weight"] = matrix(len(blocks), hidden)
            inner = config["moe_intermediate_size"]
        for block in blocks:
            tensors[block + "gate_proj.weight"] = matrix(inner, hidden)
            tensors[block + "up_proj.weight"] = matrix(inner, hidden)
            tensors[block + "down_proj.weight"] = matrix(hidden, inner, 2.0)
    return tensors
