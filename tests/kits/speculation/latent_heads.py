"""Checkpoints with heads that predict the tokens after the next, behind DeepSeek's layers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["with_head"]

_LING3 = {
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".expert_bias": ".e_score_correction_bias",
    ".final_layernorm.": ".shared_head.norm.",
}
"""Published names, and those of DeepSeek's layers."""


def with_head(model: Any, kind: type[torch.nn.Module], path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """A copy at ``path`` of the checkpoint of ``model`` with a head behind its last layer, a layer of this
    ``kind``. -> the head's tensors and the layer."""
    shutil.copytree(model.path, path)
    config, hidden = model.model.config, model.model.config.hidden_size
    torch.manual_seed(5)
    layer: Any = kind(config, config.num_hidden_layers - 1).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    layer.mlp.gate.e_score_correction_bias.normal_(0.0, 0.3)
    prefix, held = f"model.layers.{config.num_hidden_layers}", load_file(model.path / "model.safetensors")
    own = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    head = {part: torch.randn(shape) * 0.3 + (len(shape) == 1) for part, shape in own.items()}
    held |= {f"{prefix}.{part}.weight": value for part, value in head.items()}
    for part, value in layer.state_dict().items():
        if not part.startswith("mlp.experts."):
            held[f"{prefix}.{part}"] = value
    for expert, (both, down) in enumerate(
        zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
    ):
        gate, up = both.data.chunk(2)
        for part, value in (("gate", gate), ("up", up), ("down", down.data)):
            held[f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"] = value
    if config.model_type == "bailing_hybrid":
        for published, name in _LING3.items():
            held = {key.replace(name, published) if key.startswith(prefix) else key: held[key] for key in held}
    save_file({key: value.clone().contiguous() for key, value in held.items()}, path / "model.safetensors")
    return head, layer
