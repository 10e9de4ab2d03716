"""EAGLE's head, which guesses the target's last hidden state (Li et al., arXiv 2401.15077; its trees: 2406.16858).

    state = layers(fc(embedding | feature));  logits = the target's head(state)

The feature is the target's last hidden state after its final norm, and the state is a guess at the next one. The public
layout: ``fc``, ``layers.i`` (the first without ``input_layernorm``), and sometimes ``embed_tokens``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.platforms.operators import Unadded
from kernels.platforms.projections import norm_of_sum
from kernels.speculative.checkpoint import DraftCheckpoint, DraftWeights, layer_shapes, need_same_hidden_size
from kernels.speculative.drafter import DrafterContext
from kernels.speculative.heads import HeadDrafter, HeadLayer, HeadModel, open_checkpoint

__all__ = ["EagleDrafter", "EagleModel"]


class EagleModel(HeadModel):
    """Raises ConfigError or LoadError, naming what the checkpoint lacks."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint) -> None:
        layers = int(checkpoint.raw.get("num_hidden_layers") or 1)
        config = checkpoint.config("LlamaForCausalLM", layers, "layers.0")
        need_same_hidden_size(checkpoint, config, context.whole)
        hidden, vocab = config.hidden_size, context.whole.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
        if checkpoint.has("fc.bias"):
            shapes["fc.bias"] = (hidden,)
        for layer in range(layers):
            shapes |= layer_shapes(config, f"layers.{layer}")
        first_norm = "layers.0.input_layernorm.weight"
        if not checkpoint.has(first_norm):
            del shapes[first_norm]
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if checkpoint.has(name):
                shapes[name] = (vocab, hidden)
        weights = DraftWeights(context, checkpoint, shapes, config)
        super().__init__(context, weights)
        self.fc = context.platform.make_linear(weights.take(["fc.weight"]), weights.optional("fc.bias"))
        names = [f"layers.{layer}.input_layernorm.weight" for layer in range(layers)]
        self.norms = [self.norm(name) if name in shapes else None for name in names]
        self.layers = [HeadLayer(weights, f"layers.{layer}", context) for layer in range(layers)]

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        cos, sin = self.rotary(batch.positions)
        residual = self.fc(self.join(self.ends.embed(batch.token_ids), states))
        x: Unadded = None
        for norm, layer, cache in zip(self.norms, self.layers, caches, strict=True):
            normed = residual  # the first layer may have no norm
            if norm is not None:
                normed, residual = norm_of_sum(norm, x, residual)
            x, residual = layer(normed, residual, cos, sin, cache, batch)
        return self.platform.sum_of(x, residual)


class EagleDrafter(HeadDrafter):
    """EAGLE and EAGLE-2."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context, EagleModel(context, open_checkpoint(context)))
