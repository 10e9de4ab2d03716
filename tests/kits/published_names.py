"""Checkpoints of families under the names that their publishers gave the tensors, where transformers saves others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["PUBLISHED_NAMES"]


def _kimi_linear(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        sparse = re.match(r"model\.layers\.(\d+)\.mlp", name)
        if sparse and config.mlp_layer_types[int(sparse[1])] == "sparse":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        name = name.replace("forget_gate.", "")
        if name.endswith("conv1d.weight"):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                result[name.replace("conv1d", f"{part}_conv1d")] = piece
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                first = name.replace("gate_up_proj", f"{expert}.")
                result[f"{first}w1.weight"], result[f"{first}w3.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                result[name.replace("down_proj", f"{expert}.w2.weight")] = down
        else:
            result[name] = tensor
    return result


def _olmo_hybrid(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and config.layer_types[int(layer[1])] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        if name.endswith("conv1d.weight"):
            for part, piece in zip("qkv", tensor.split((keys, keys, values)), strict=True):
                result[name.replace("conv1d", f"{part}_conv1d")] = piece
        else:
            result[name] = tensor
    return result


def _mistral_large4(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By transformers' names, with experts apart: ``test_wrapped`` reads the published ones."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block, _, part = name.rpartition(".experts.")
        if not block:
            result[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(tensor):
            for own, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                result[f"{block}.experts.{expert}.{own}.weight"] = piece
    return result


def _minimax_m3(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = re.sub(r"\.indexer\.", ".self_attn.index_", name).replace(".self_attn.self_attn.", ".self_attn.")
        name = name.replace("mlp.gate.e_score", "block_sparse_moe.e_score")
        name = re.sub(r"\.mlp\.(experts|gate|shared_experts)\.", r".block_sparse_moe.\1.", name)
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                first = name.replace("gate_up_proj", f"{expert}.")
                result[f"{first}w1.weight"], result[f"{first}w3.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                result[name.replace("down_proj", f"{expert}.w2.weight")] = down
        elif name.endswith("gate_up_proj.weight"):
            for part, piece in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                result[name.replace("gate_up_proj", part)] = piece
        else:
            result[name] = tensor
    return result


PUBLISHED_NAMES: dict[str, Callable[[Any, Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "KimiLinear": _kimi_linear,
    "MiniMaxM3VLText": _minimax_m3,
    "MistralLarge4Text": _mistral_large4,
    "OlmoHybrid": _olmo_hybrid,
}
"""By family: configuration and tensors as transformers has them in memory -> as they are published."""
