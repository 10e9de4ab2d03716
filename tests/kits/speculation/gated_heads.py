"""Checkpoints of Qwen3-Next and Qwen3.5 with a head that predicts the token after the next (``mtp``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

__all__ = ["LAYERS", "GatedHead", "nested", "with_head"]

LAYERS: dict[str, type[torch.nn.Module]] = {
    "qwen3-next": Qwen3NextDecoderLayer,
    "qwen3.5": Qwen3_5DecoderLayer,
    "qwen3.5-moe": Qwen3_5MoeDecoderLayer,
}
"""The layer of each family."""


class GatedHead:
    """The head in float32: ``norm(layer(fc(norm(embedding) | norm(state))))`` with transformers' layer."""

    def __init__(self, model: Any, layer: Any, parts: dict[str, torch.Tensor]) -> None:
        self._model, self._layer, self._parts = model, layer, parts

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """``states`` [tokens, hidden] of the target and the ``tokens`` [tokens] after them -> states [tokens,
        hidden]."""
        inner, count = self._model.model.model, len(tokens)
        first = self._normed(inner.embed_tokens(tokens), "pre_fc_norm_embedding")
        both = torch.cat((first, self._normed(states, "pre_fc_norm_hidden")), -1)
        x = (both @ self._parts["fc"].t()).unsqueeze(0)
        places = inner.rotary_emb(x, torch.arange(count).unsqueeze(0))
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = self._layer(x, attention_mask=mask, position_embeddings=places)
        return self._normed((out[0] if isinstance(out, tuple) else out).view(count, -1), "norm")

    def _normed(self, x: torch.Tensor, part: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._model.model.config.rms_norm_eps)
        return x * scale * (1.0 + self._parts[part])


def with_head(model: Any, name: str, path: Path) -> GatedHead:
    """A copy at ``path`` of the checkpoint of ``model`` with such a head. Experts of Qwen3.5 are stacked."""
    shutil.copytree(model.path, path)
    config, hidden = model.model.config, model.model.config.hidden_size
    torch.manual_seed(5)
    layer: Any = LAYERS[name](config, config.layer_types.index("full_attention")).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3)
    shapes = {"pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,), "norm": (hidden,)}
    parts = {part: torch.randn(shape) * 0.3 for part, shape in (shapes | {"fc": (hidden, 2 * hidden)}).items()}
    held = load_file(model.path / "model.safetensors") | {f"mtp.{part}.weight": x for part, x in parts.items()}
    for part, value in layer.state_dict().items():
        if not part.startswith("mlp.experts.") or name != "qwen3-next":
            held[f"mtp.layers.0.{part}"] = value
            continue
        for expert, weight in enumerate(value):
            halves = zip(("gate", "up"), weight.chunk(2), strict=True) if "gate_up" in part else (("down", weight),)
            for half, own in halves:
                held[f"mtp.layers.0.mlp.experts.{expert}.{half}_proj.weight"] = own
    save_file({key: value.clone().contiguous() for key, value in held.items()}, path / "model.safetensors")
    return GatedHead(model, layer, parts)


def nested(path: Path) -> Path:
    """Turn the checkpoint into one that also reads images: its sizes and names are one level down."""
    raw = json.loads((path / "config.json").read_text())
    (architecture,) = raw.pop("architectures")
    outer = {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "tie_word_embeddings": raw.pop("tie_word_embeddings"),
        "text_config": raw,
    }
    (path / "config.json").write_text(json.dumps(outer))
    held = load_file(path / "model.safetensors")
    held = {name.replace("model.", "model.language_model."): tensor for name, tensor in held.items()}
    save_file(held, path / "model.safetensors")
    return path
