"""Small models of families that are another one's decoder under the vendor's names, saved as the vendor does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kits.driver import COMMON

__all__ = ["RENAMED", "save_renamed"]

NAMES = {
    "InternLM2ForCausalLM": [
        (r"^model\.embed_tokens", "model.tok_embeddings"),
        (r"^lm_head", "output"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"self_attn\.o_proj", "attention.wo"),
        (r"self_attn", "attention"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
    ],
    "ExaoneForCausalLM": [
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"mlp\.gate_proj", "mlp.c_fc_0"),
        (r"mlp\.up_proj", "mlp.c_fc_1"),
        (r"mlp\.down_proj", "mlp.c_proj"),
    ],
    "MiMoForCausalLM": [],
}
"""Patterns of transformers' names of tensors, and what stands there in the vendor's."""
KEYS = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation_function"}
RENAMED = {"internlm2": "InternLM2ForCausalLM", "exaone": "ExaoneForCausalLM", "mimo": "MiMoForCausalLM"}
"""Architectures by the names that tests have for them."""


def save_renamed(architecture: str, path: Path, vocab_size: int) -> Any:
    """Save a model of the family to ``path``. -> transformers' model that it equals: Llama's, or of MiMo Qwen2's."""
    import transformers

    torch.manual_seed(6)
    family = "Qwen2" if architecture == "MiMoForCausalLM" else "Llama"
    config = getattr(transformers, f"{family}Config")(**COMMON | {"vocab_size": vocab_size})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(path)
    weights = {}
    for name, weight in load_file(path / "model.safetensors").items():
        for pattern, new in NAMES[architecture]:
            name = re.sub(pattern, new, name)
        weights[name] = weight
    raw = json.loads((path / "config.json").read_text())
    if architecture == "InternLM2ForCausalLM":
        for layer in range(3):
            _join_groups(weights, f"model.layers.{layer}.attention", kv_heads=2)
    elif architecture == "ExaoneForCausalLM":
        raw = {KEYS.get(key, key): value for key, value in raw.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture], "model_type": "own"}))
    return model


def _join_groups(weights: dict[str, Tensor], module: str, kv_heads: int) -> None:
    """Each key head's queries, its key and its value, one after the other."""
    parts = [weights.pop(f"{module}.{part}_proj.weight").chunk(kv_heads) for part in "qkv"]
    weights[f"{module}.wqkv.weight"] = torch.cat([part for group in zip(*parts, strict=True) for part in group])
