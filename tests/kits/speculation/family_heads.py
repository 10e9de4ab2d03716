"""Checkpoints with heads for later tokens that have a layer of their family, and the same in plain torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.kits.published import ling_layer, ling_stream

__all__ = ["LAYOUTS", "Heads"]

DEEPSEEK = {"token": "{head}.enorm", "state": "{head}.hnorm", "both": "{head}.eh_proj"}
EXAONE = {"token": "mtp.pre_fc_norm_embedding", "state": "mtp.pre_fc_norm_hidden", "both": "mtp.fc", "last": "mtp.norm"}
LAYOUTS: dict[str, tuple[str, dict[str, str]]] = {
    "exaone4": ("mtp.layers.0", EXAONE),
    "ling-v2": ("model.layers.3", DEEPSEEK | {"last": "{head}.final_layernorm"}),
    "longcat-flash": (
        "model.mtp.layers.0",
        DEEPSEEK | {"token": "{head}.enorm.m", "state": "{head}.hnorm.m", "last": "model.mtp.norm"},
    ),
    "mimo": (
        "model.mtp_layers.0",
        {"token": "{head}.token_layernorm", "state": "{head}.hidden_layernorm", "both": "{head}.input_proj"}
        | {"last": "{head}.final_layernorm"},
    ),
    "mimo-v2-flash": ("model.mtp.layers.0", DEEPSEEK | {"last": "{head}.final_layernorm"}),
    "nemotron-3": ("mtp.layers.0", DEEPSEEK | {"last": "mtp.layers.1.final_layernorm"}),
}
"""The first head in the published files of a family, and the names of its parts."""


def _kind(module: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)


def _longcat(config: Any) -> nn.Module:
    """A layer of one half, without experts."""
    attention, mlp, norm = (_kind("longcat_flash", f"LongcatFlash{part}") for part in ("MLA", "MLP", "RMSNorm"))
    norms = ("input_layernorm", "post_attention_layernorm")
    return nn.ModuleDict(
        {"self_attn": attention(config, 0), "mlp": mlp(config)}
        | {name: norm(config.hidden_size, config.rms_norm_eps) for name in norms}
    )


def _layer(name: str, config: Any, seed: int) -> nn.Module:
    """The layer of transformers that a head has, with seeded weights."""
    config = deepcopy(config)
    torch.manual_seed(seed)
    result: nn.Module
    if name == "exaone4":
        result = _kind("exaone4", "Exaone4DecoderLayer")(config, 0)
    elif name == "longcat-flash":
        result = _longcat(config)
    elif name == "mimo":
        result = _kind("qwen2", "Qwen2DecoderLayer")(config, 0)
    elif name == "mimo-v2-flash":
        config.mlp_layer_types = ["dense"] * len(config.layer_types)
        result = _kind("mimo_v2_flash", "MiMoV2FlashDecoderLayer")(config, 1)
    else:
        config.layers_block_type = config.layer_types = ["full_attention", "moe"]
        result = nn.ModuleList(_kind("nemotron_h", "NemotronHBlock")(config, index) for index in range(2))
    for parameter in result.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    for part, buffer in result.named_buffers():
        if part.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    return result.eval()


def _published(family: str, head: str, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The layer's tensors under the names of published files."""
    for part, tensor in state.items():
        name = f"mtp.layers.{part}" if family == "nemotron-3" else f"{head}.{part}"
        if family == "longcat-flash":
            name = name.replace(".mlp.", ".transformer_layer.mlp.")
        elif family == "mimo-v2-flash":
            name = name.replace("post_attention_layernorm", "pre_mlp_layernorm").replace("sinks", "attention_sink_bias")
        if match := re.fullmatch(r"(.*\.experts)\.(up|down)_proj", name):
            for expert, weight in enumerate(tensor):
                yield f"{match[1]}.{expert}.{match[2]}_proj.weight", weight
        else:
            yield name, tensor


class Heads:
    """A copy of the checkpoint of ``model`` at ``path`` with ``count`` heads, in float32."""

    def __init__(self, name: str, model: Any, path: Path, count: int = 1) -> None:
        shutil.copytree(model.path, path)
        self.name, self.model = name, model
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.config["num_nextn_predict_layers"] = count
        (path / "config.json").write_text(json.dumps(self.config))
        self.weights = load_file(path / "model.safetensors")
        self.first, self.parts = LAYOUTS[name]
        hidden, self.layers = self.config["hidden_size"], list[Callable[[Tensor], Tensor]]()
        generator = torch.Generator().manual_seed(7)
        for index in range(count):
            head = self.head(index)
            shapes = {"token": (hidden,), "state": (hidden,), "both": (hidden, 2 * hidden), "last": (hidden,)}
            for part, shape in shapes.items():
                value = torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
                self.weights[f"{self.parts[part].format(head=head)}.weight"] = value
            self.layers.append(self._make(head, generator))
        save_file(
            {part: value.clone().contiguous() for part, value in self.weights.items()}, path / "model.safetensors"
        )

    def head(self, index: int) -> str:
        """The name of a head."""
        module, _, number = self.first.rpartition(".")
        return f"{module}.{int(number) + index}"

    def _make(self, head: str, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """The layer of a head: residual stream [tokens, hidden] -> the same after it."""
        if self.name == "ling-v2":  # transformers has none
            for part, value in list(self.weights.items()):
                if part.startswith("model.layers.2."):
                    mean = float(value.ndim == 1)
                    own = torch.randn(value.shape, generator=generator) * 0.3 + mean
                    self.weights[part.replace("model.layers.2", head)] = own
            return lambda x: ling_layer(self.config, self.weights, x, int(head.rpartition(".")[2]))
        config = self.model.model.config
        layer = _layer(self.name, config, len(self.layers))
        self.weights |= dict(_published(self.name, head, layer.state_dict()))
        return lambda x: self._run(layer, x)

    def _run(self, layer: Any, x: Tensor) -> Tensor:
        config, inner, count = self.model.model.config, self.model.model.model, len(x)
        kind = config.layer_types[{"mimo-v2-flash": 1}.get(self.name, 0)] if hasattr(config, "layer_types") else ""
        window = config.sliding_window if kind == "sliding_attention" else 10**6
        away = torch.arange(count)[:, None] - torch.arange(count)
        mask = torch.zeros(count, count).masked_fill((away < 0) | (away >= window), -torch.inf)[None, None]
        x, places = x.unsqueeze(0), torch.arange(count).unsqueeze(0)
        if self.name == "nemotron-3":
            return layer[1](layer[0](x, attention_mask=mask, position_ids=places))[0]
        turned = inner.rotary_emb(x, places, *([kind] if self.name == "mimo-v2-flash" else []))
        if self.name == "longcat-flash":
            given = {"attention_mask": mask, "position_embeddings": turned}
            x = x + layer["self_attn"](layer["input_layernorm"](x), **given)[0]
            return (x + layer["mlp"](layer["post_attention_layernorm"](x)))[0]
        out = layer(x, attention_mask=mask, position_embeddings=turned)
        return (out[0] if isinstance(out, tuple) else out).view(count, -1)

    def normed(self, x: Tensor, part: str, index: int = 0) -> Tensor:
        """A norm of a head."""
        eps = self.config.get("rms_norm_eps") or self.config.get("layernorm_epsilon", 1e-5)
        weight = self.weights[f"{self.parts[part].format(head=self.head(index))}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def states(self, tokens: Tensor) -> Tensor:
        """The model's last hidden states [tokens, hidden], of MiMo-V2 before the last norm."""
        if self.name == "ling-v2":
            return ling_stream(self.config, self.weights, tokens)
        inner, before = self.model.model.model, []
        norm = inner.norm_f if self.name == "nemotron-3" else inner.norm
        hook = norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
        result = inner(tokens[None]).last_hidden_state
        hook.remove()
        return (before[0] if self.name == "mimo-v2-flash" else result)[0]

    def run(self, tokens: Tensor, states: Tensor, index: int = 0) -> Tensor:
        """``states`` [tokens, hidden] and the ``tokens`` [tokens] after them -> states of a head."""
        table = next(part for part in self.weights if part.endswith(("embed_tokens.weight", "embeddings.weight")))
        both = self.normed(self.weights[table][tokens], "token", index), self.normed(states, "state", index)
        both = both[::-1] if self.name == "mimo" else both
        x = torch.cat(both, -1) @ self.weights[f"{self.parts['both'].format(head=self.head(index))}.weight"].T
        x = self.layers[index](x)
        return x if self.name == "mimo-v2-flash" else self.normed(x, "last", index)

    def best(self, state: Tensor, index: int = 0) -> int:
        """The token that a head drafts from its state."""
        state = self.normed(state, "last", index) if self.name == "mimo-v2-flash" else state
        head = self.weights.get("lm_head.weight")
        if head is None:
            head = self.weights["model.embed_tokens.weight"]
        return int((head @ state).argmax())
