"""Checkpoints of DeepSeek V4 with its head for the token after the next, under the published names, and the same head
in plain torch."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["StreamHead", "follow_last_tokens"]

_PUBLISHED = {
    r"^self_attn\.(q|o)_(a|b)_proj": r"attn.w\1_\2",
    r"^self_attn\.kv_proj": "attn.wkv",
    r"^self_attn\.q_a_norm": "attn.q_norm",
    r"^self_attn\.sinks": "attn.attn_sink",
    r"^self_attn\.": "attn.",
    r"^(attn|ffn)_hc\.": r"hc_\1_",
    r"^input_layernorm": "attn_norm",
    r"^post_attention_layernorm": "ffn_norm",
    r"^mlp\.gate\.e_score_correction_bias": "ffn.gate.bias",
    r"^mlp\.shared_experts\.gate_proj": "ffn.shared_experts.w1",
    r"^mlp\.shared_experts\.down_proj": "ffn.shared_experts.w2",
    r"^mlp\.shared_experts\.up_proj": "ffn.shared_experts.w3",
    r"^mlp\.": "ffn.",
}


class StreamHead:
    """A copy of the checkpoint of ``model`` at ``path`` with a head ``mtp.0``, in float32."""

    def __init__(self, model: Any, path: Path) -> None:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4HyperHead

        shutil.copytree(model.path, path)
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
        config = deepcopy(model.model.config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        self.model, self.config = model, config
        torch.manual_seed(11)
        self.layer: Any = DeepseekV4DecoderLayer(config, 0).eval()
        self.mixture: Any = DeepseekV4HyperHead(config).eval()
        for module in (self.layer, self.mixture):
            for parameter in module.parameters():
                parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
        self.layer.mlp.gate.e_score_correction_bias.normal_(0.0, 0.3)
        hidden = config.hidden_size
        self.own = {part: torch.randn(hidden) * 0.3 + 1 for part in ("enorm", "hnorm", "norm")}
        self.own |= {part: torch.randn(hidden, hidden) * 0.3 for part in ("e_proj", "h_proj")}
        held = load_file(path / "model.safetensors")
        held |= {f"mtp.0.{part}.weight": value for part, value in self.own.items()}
        held |= {f"mtp.0.hc_head_{part}": getattr(self.mixture, f"hc_{part}").data for part in ("fn", "base", "scale")}
        held |= {f"mtp.0.{name}": value for name, value in self._layer_tensors().items()}
        save_file({name: value.clone().contiguous() for name, value in held.items()}, path / "model.safetensors")

    def _layer_tensors(self) -> dict[str, Tensor]:
        """The layer's, by the names in published files."""
        result: dict[str, Tensor] = {}
        for name, value in self.layer.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for expert, both in enumerate(value):
                    gate, up = both.chunk(2)
                    result |= {f"ffn.experts.{expert}.w1.weight": gate, f"ffn.experts.{expert}.w3.weight": up}
            elif name == "mlp.experts.down_proj":
                result |= {f"ffn.experts.{expert}.w2.weight": down for expert, down in enumerate(value)}
            else:
                pattern = next(pattern for pattern in _PUBLISHED if re.match(pattern, name))
                result[re.sub(pattern, _PUBLISHED[pattern], name)] = value
        return result

    def states(self, tokens: Tensor) -> Tensor:
        """The model's streams [tokens, count, hidden] before their mixture for the logits."""
        inner, before = self.model.model.model, list[Tensor]()
        hook = inner.hc_head.register_forward_pre_hook(lambda _, given: before.append(given[0]))
        inner(tokens[None])
        hook.remove()
        return before[0][0]

    def run(self, tokens: Tensor, streams: Tensor) -> Tensor:
        """``streams`` [tokens, count, hidden] and the ``tokens`` [tokens] after them -> the head's streams."""
        inner, count, own = self.model.model.model, len(tokens), self.own
        token = self.normed(inner.embed_tokens.weight[tokens], "enorm") @ own["e_proj"].T
        x = (self.normed(streams, "hnorm") @ own["h_proj"].T + token.unsqueeze(1)).unsqueeze(0)
        away, places = torch.arange(count)[:, None] - torch.arange(count), torch.arange(count).unsqueeze(0)
        hidden = (away < 0) | (away >= self.config.sliding_window)
        mask = torch.zeros(count, count).masked_fill(hidden, -torch.inf)[None, None]
        turned = {"main": inner.rotary_emb(x, position_ids=places, layer_type="main")}
        out: Tensor = self.layer(x, position_embeddings=turned, position_ids=places, attention_mask=mask)
        return out[0]

    def normed(self, x: Tensor, part: str) -> Tensor:
        """A norm of the head."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.own[part]

    def best(self, streams: Tensor) -> int:
        """The token that the head drafts from its ``streams`` [count, hidden]."""
        mixed = self.mixture(streams[None, None])[0, 0]
        return int((self.model.model.lm_head.weight @ self.normed(mixed, "norm")).argmax())

    def path(self, known: list[int], steps: int) -> list[int]:
        """The tokens that the head drafts after the ``known`` ones."""
        tokens, result = torch.tensor(known), list[int]()
        with torch.inference_mode():
            streams, read = self.states(tokens[:-1]), tokens[1:]
            for _ in range(steps):
                made = self.run(read, streams)
                result.append(self.best(made[-1]))
                streams, read = torch.cat((streams, made[-1:])), torch.cat((read, torch.tensor(result[-1:])))
        return result


def follow_last_tokens(path: Path) -> None:
    """Change the model and the head at ``path`` so that the next token follows from the last one alone, and that the
    head drafts what the model samples: no half of a layer adds anything."""
    held = load_file(path / "model.safetensors")
    for name, value in held.items():
        if name.endswith((".wo_b.weight", ".w2.weight", "mtp.0.h_proj.weight")):
            value.zero_()
        elif name == "mtp.0.e_proj.weight":
            value.copy_(torch.eye(len(value)))
        elif name == "mtp.0.enorm.weight":
            value.fill_(1.0)
        elif name == "mtp.0.norm.weight":
            value.copy_(held["model.norm.weight"])
        elif name.startswith("mtp.0.hc_head_"):
            value.copy_(held[name.replace("mtp.0.hc_head_", "model.hc_head.hc_")])
    save_file(held, path / "model.safetensors")
