"""Every family at sizes that the kernels of a GPU take: heads of 64 and 128 numbers, widths that are multiples of 64.
config.json is written as it stands in ``driver.py`` and ``published.py``, without transformers' classes, so that any
version of transformers will do; keys that it leaves out have the family's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.models.config import ModelConfig
from kernels.models.config_loader import parse_config
from kernels.models.registry import tensors
from kernels.weights.tensors import Role, TensorSpec
from tests.kits.driver import COMMON, DENSE, FAMILIES, HYBRID, LATENT, ROUTED, SPARSE
from tests.kits.families import architecture
from tests.kits.published import PUBLISHED

__all__ = ["WIDE_VOCAB", "save_wide"]

WIDE_VOCAB = 256

_BUILT = FAMILIES | DENSE | ROUTED | HYBRID | LATENT | SPARSE

_SIZES: Mapping[str, int] = {
    "attention_chunk_size": 128,
    "expert_ffn_hidden_size": 128,
    "ffn_hidden_size": 512,
    "global_head_dim": 256,
    "hc_lowrank": 64,
    "head_dim": 128,
    "hidden_size": 512,
    "d_model": 512,
    "hidden_size_per_layer_input": 64,
    "index_head_dim": 128,
    "index_topk": 64,
    "indexer_budget": 64,
    "indexer_head_dim": 128,
    "intermediate_size": 512,
    "intermediate_size_mlp": 512,
    "kv_channels": 128,
    "kv_lora_rank": 512,
    "linear_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_d_ssm": 512,
    "mamba_d_state": 128,
    "mamba_head_dim": 64,
    "max_position_embeddings": 1024,
    "max_seq_len": 1024,
    "model_max_length": 1024,
    "moe_intermediate_size": 128,
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "o_lora_rank": 64,
    "padded_vocab_size": WIDE_VOCAB,
    "ple_embed_dim": 128,
    "prefix_dense_intermediate_size": 256,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rotary_dim": 64,
    "seq_length": 1024,
    "share_expert_dim": 128,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "sliding_window": 100,
    "ssm_state_size": 128,
    "v_head_dim": 128,
    "vocab_size": WIDE_VOCAB,
    "vocab_size_per_layer_input": WIDE_VOCAB,
}
"""What stands in place of a small size of this name."""

_SIX_HEADS = {"hidden_size": 384}  # of 64 numbers each
_OTHER: Mapping[str, dict[str, Any]] = {
    "baichuan-alibi": _SIX_HEADS,
    "olmo2": _SIX_HEADS,
    "phi3": _SIX_HEADS,
    "phimoe": {"num_experts_per_tok": 2},  # transformers' default
    "mimo-v2-flash": {"head_dim": 192},  # the published one, of keys; values have 128
}

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Where scores have no factor, these have it, as in checkpoints. Scores of 16 would pick one token each, and layers
would multiply the error of a sum's order by 1e5."""

_DEVIATION = 0.1
"""Of embeddings, and of the output: logits differ by about 2."""


def save_wide(name: str, directory: Path) -> None:
    """Save a wide model of the family that tests call ``name``, in bfloat16, so that a device in any dtype has the same
    weights."""
    raw = PUBLISHED[name] if name in PUBLISHED else COMMON | (_BUILT[name][1] if name in _BUILT else {})
    raw = _widened(raw) | _OTHER.get(name, {}) | {"architectures": [architecture(name)], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(raw))
    config = parse_config(raw)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    weights = {tensor: _weight(spec, config, generator) for tensor, spec in tensors(config).items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def _widened(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _widened(value) if isinstance(value, dict) else value if value is None else _SIZES.get(key, value)
        for key, value in raw.items()
    }


def _weight(spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Far from uniform predictions, with norms, biases and corrections that count, and with states that remember some
    tens of tokens."""
    if spec.role is Role.INDICES:
        assert config.experts is not None, "they are of experts"
        order = torch.rand(spec.shape[0], config.experts.count, generator=generator).argsort(1)
        return order[:, : spec.shape[1]].contiguous()
    found = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("A_log"):
        found = found * 0.3 - 3.0
    elif spec.role is Role.NORM:
        found = found * 0.2 + (0.5 if config.norm_offset else 1.0)
        if config.attention_scale == 1.0 and spec.name.endswith(_HEAD_NORMS):
            found *= spec.shape[0] ** -0.25
    elif len(spec.shape) == 1:
        found *= 0.3
    elif spec.role in (Role.EMBEDDING, Role.OUTPUT):
        found *= _DEVIATION
    else:
        found *= spec.shape[-1] ** -0.5
    return found.bfloat16()
