"""EAGLE-3's head, which reads low, middle and high layers of the target (Li et al., arXiv 2503.01840).

    feature = fc(low | middle | high)
    state = midlayer(input_layernorm(embedding) | hidden_norm(feature));  logits = lm_head(norm(state))

The captured layers' results are sums of the residual stream, not normed, and so is the state, which takes the feature's
place behind the last token known. The head has a vocabulary of its own: token i is the target's ``i + d2t[i]``. The
public layout: ``fc``, ``midlayer`` (or ``layers.0``), ``norm``, ``lm_head``, ``d2t``, ``t2d``, sometimes
``embed_tokens``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.load_error import LoadError
from kernels.models.config import ConfigError, ModelConfig
from kernels.speculative.checkpoint import DraftCheckpoint, DraftWeights, layer_shapes, need_same_hidden_size
from kernels.speculative.drafter import DrafterContext
from kernels.speculative.heads import HeadDrafter, HeadLayer, HeadModel, open_checkpoint
from kernels.speculative.settings import SpeculativeSettings

__all__ = ["Eagle3Drafter", "Eagle3Model", "default_layers"]


def default_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer of as many: those that public drafts are trained on when they do not say. Their
    results are what the layers 2, n / 2 and n - 3 read."""
    return 1, layers // 2 - 1, layers - 4


def _aux_layers(checkpoint: DraftCheckpoint, layers: int) -> tuple[int, ...]:
    found = checkpoint.layers("eagle_config", "eagle_aux_hidden_state_layer_ids", layers)
    return found or default_layers(layers)


class Eagle3Model(HeadModel):
    """``features``: how many layers of the target are captured. Raises ConfigError or LoadError."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint, features: int) -> None:
        layers = int(checkpoint.raw.get("num_hidden_layers") or 1)
        if layers != 1:
            raise ConfigError(f"{checkpoint.path}: an EAGLE-3 draft has one layer, and this one has {layers}")
        prefix = "layers.0" if checkpoint.has("layers.0.hidden_norm.weight") else "midlayer"
        target, vocab = context.whole, context.whole.vocab_size
        size = checkpoint.raw.get("draft_vocab_size") or vocab
        config = checkpoint.config("LlamaForCausalLM", 1, prefix)
        hidden = config.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, features * target.hidden_size),
            f"{prefix}.hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
            **layer_shapes(config, prefix, 2 * hidden),
        }
        if checkpoint.has("fc.bias"):
            shapes["fc.bias"] = (hidden,)
        if checkpoint.has("embed_tokens.weight"):
            shapes["embed_tokens.weight"] = (vocab, hidden)
        else:
            need_same_hidden_size(checkpoint, config, target)
        if checkpoint.has("lm_head.weight") or size != vocab or hidden != target.hidden_size or checkpoint.dummy:
            shapes["lm_head.weight"] = (size, hidden)
        weights = DraftWeights(context, checkpoint, shapes, config)
        super().__init__(context, weights, token_map=False)
        self.ids = _target_ids(checkpoint, size, vocab, context.platform.device)
        self.features = features * target.hidden_size
        self.fc = context.platform.make_linear(weights.take(["fc.weight"]), weights.optional("fc.bias"))
        self.token_norm = self.norm(f"{prefix}.input_layernorm.weight")
        self.state_norm = self.norm(f"{prefix}.hidden_norm.weight")
        self.layer = HeadLayer(weights, prefix, context)
        self.last_norm = self.norm("norm.weight")

    def start(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        (cache,) = caches
        x, cos, sin = self.platform.enter_both(
            self.ends.embed, self.token_norm, states, self.state_norm, self.rotary, batch
        )
        x, residual = self.layer(x, states, cos, sin, cache, batch)
        return self.platform.sum_of(x, residual)

    def logits(self, states: Tensor) -> Tensor:
        return self.ends.head(self.last_norm(states))


def _target_ids(checkpoint: DraftCheckpoint, size: int, vocab: int, device: torch.device) -> Tensor | None:
    """The target's id of each token of the draft; None where they are the same."""
    if checkpoint.dummy:
        return None if size == vocab else (torch.arange(size) * vocab // size).to(device)
    if not checkpoint.has("d2t"):
        if size == vocab:
            return None
        raise LoadError(
            f"the draft in {checkpoint.path} has {size} tokens of the target's {vocab}, and no d2t that says which; "
            "download it again"
        )
    offsets = checkpoint.read("d2t")
    if offsets.shape != (size,) or offsets.dtype.is_floating_point:
        raise LoadError(
            f"d2t in {checkpoint.path} is {offsets.dtype} of shape {list(offsets.shape)}; draft_vocab_size asks for "
            f"whole numbers of shape [{size}]"
        )
    ids = offsets.to(torch.int64) + torch.arange(size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise LoadError(
            f"d2t in {checkpoint.path} leads to token {int(ids.min())} to {int(ids.max())}; the target has 0 to "
            f"{vocab - 1}: is this the draft of another model?"
        )
    return ids.to(device)


class Eagle3Drafter(HeadDrafter):
    """EAGLE-3."""

    def __init__(self, context: DrafterContext) -> None:
        layers = self.captured_layers(context.settings, context.whole)
        super().__init__(context, Eagle3Model(context, open_checkpoint(context), len(layers)))

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        if settings.capture_layers:
            return settings.capture_layers
        return _aux_layers(DraftCheckpoint(settings.draft_model_path, "dummy"), model.layers)
