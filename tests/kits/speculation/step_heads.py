"""Checkpoints of Step 3.5 with heads for later tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.models.config_loader import parse_config
from kernels.models.step3p5 import head_config, head_tensors
from tests.kits.published import step3p5_stream

__all__ = ["Heads"]

LISTS = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")


class Heads:
    """Two heads behind a model of four layers, in float32."""

    def __init__(self, model: Any, path: Path) -> None:
        shutil.copytree(model.path, path)
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
        self.config |= {"tie_word_embeddings": False, "model_type": "step3p5"}
        for key in LISTS:
            self.config[key] = [*self.config[key][:4], *2 * self.config[key][4:5]]
        (path / "config.json").write_text(json.dumps(self.config))
        self.weights, hidden = load_file(path / "model.safetensors"), self.config["hidden_size"]
        generator = torch.Generator().manual_seed(3)
        sizes = parse_config(self.config)
        for index in (4, 5):
            name = f"model.layers.{index}"
            shapes = {spec.name: spec.shape for spec in head_tensors(head_config(self.config, sizes, name), name)}
            shapes |= {
                f"{name}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "transformer.shared_head.norm")
            }
            shapes[f"{name}.eh_proj.weight"] = (hidden, 2 * hidden)
            shapes[f"{name}.transformer.shared_head.output.weight"] = (self.config["vocab_size"], hidden)
            self.weights |= {one: torch.randn(shape, generator=generator) * 0.3 for one, shape in shapes.items()}
        save_file(self.weights, path / "model.safetensors", {"format": "pt"})

    def normed(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def stream(self, tokens: Tensor) -> Tensor:
        """The model's last hidden states, not normed."""
        return step3p5_stream(self.config, self.weights, self.weights["model.embed_tokens.weight"][tokens], range(4))

    def run(self, index: int, tokens: Tensor, states: Tensor) -> Tensor:
        name = f"model.layers.{index}"
        token = self.normed(self.weights["model.embed_tokens.weight"][tokens], f"{name}.enorm")
        both = torch.cat((token, self.normed(states, f"{name}.hnorm")), -1)
        x = both @ self.weights[f"{name}.eh_proj.weight"].T
        return step3p5_stream(self.config, self.weights, x, range(index, index + 1))

    def logits(self, index: int, states: Tensor) -> Tensor:
        name = f"model.layers.{index}.transformer.shared_head"
        return self.normed(states, f"{name}.norm") @ self.weights[f"{name}.output.weight"].T
