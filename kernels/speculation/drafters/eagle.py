"""EAGLE and EAGLE-3: a decoder layer that continues the target's hidden states.

EAGLE predicts the target's last hidden state (Li et al., arXiv 2401.15077; its trees: 2406.16858):

    state = layers(fc(embedding | feature));  logits = the target's head(state)

The feature is the target's last hidden state after its final norm. Public layout: ``fc``, ``layers.i`` (the first
without ``input_layernorm``), sometimes ``embed_tokens``.

EAGLE-3 reads low, middle and high layers of the target (Li et al., arXiv 2503.01840):

    feature = fc(low | middle | high)
    state = midlayer(input_layernorm(embedding) | hidden_norm(feature));  logits = lm_head(norm(state))

The captured features are residual streams without a norm, and so is the state, which replaces the feature after the
last known token. The head has a vocabulary of its own: token i is the target's ``i + d2t[i]``. Public
layout: ``fc``, ``midlayer`` (or ``layers.0``), ``norm``, ``lm_head``, ``d2t``, ``t2d``, sometimes ``embed_tokens``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.batch import ForwardBatch
from kernels.core.operators import PendingResidual
from kernels.devices.linear import norm_of_sum
from kernels.models.config import ModelConfig
from kernels.speculation.drafter import DrafterContext
from kernels.speculation.drafters.heads import HeadDrafter, HeadLayer, HeadModel, open_checkpoint
from kernels.speculation.load import (
    DraftCheckpoint,
    DraftWeights,
    feature_projection,
    head,
    layer_tensors,
    need_same_hidden_size,
    plain,
    table,
)

__all__ = ["Eagle3Drafter", "Eagle3Model", "EagleDrafter", "EagleModel", "default_layers"]


class EagleModel(HeadModel):
    """EAGLE's draft model. Raises ConfigError or LoadError, naming what the checkpoint lacks."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint) -> None:
        layers = int(checkpoint.raw.get("num_hidden_layers") or 1)
        config = checkpoint.config("LlamaForCausalLM", layers, "layers.0")
        need_same_hidden_size(checkpoint, config, context.full_config)
        hidden, vocab = config.hidden_size, context.full_config.vocab_size
        tensors = dict(feature_projection(hidden, 2 * hidden, checkpoint.has("fc.bias")))
        for layer in range(layers):
            tensors |= layer_tensors(config, f"layers.{layer}")
        first_norm = "layers.0.input_layernorm.weight"
        if not checkpoint.has(first_norm):
            del tensors[first_norm]
        if checkpoint.has("embed_tokens.weight"):
            tensors |= table(vocab, hidden)
        if checkpoint.has("lm_head.weight"):
            tensors |= head(vocab, hidden)
        weights = DraftWeights(context, checkpoint, tensors, config)
        super().__init__(context, weights)
        self.fc = context.device.linear.make_dense(weights.take(["fc.weight"]), weights.optional("fc.bias"))
        names = [f"layers.{layer}.input_layernorm.weight" for layer in range(layers)]
        self.norms = [self.norm(name) if name in tensors else None for name in names]
        self.layers = [HeadLayer(weights, f"layers.{layer}", context) for layer in range(layers)]

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        cos, sin = self.rotary(batch.positions)
        residual = self.fc(self.join(self.ends.embed(batch.token_ids), states))
        x: PendingResidual = None
        for norm, layer, cache in zip(self.norms, self.layers, caches, strict=True):
            normed = residual  # the first layer may have no norm
            if norm is not None:
                normed, residual = norm_of_sum(norm, x, residual)
            x, residual = layer(normed, residual, cos, sin, cache, batch)
        return self.device.elementwise.add_pending(x, residual)


class EagleDrafter(HeadDrafter):
    """EAGLE and EAGLE-2."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context, EagleModel(context, open_checkpoint(context)))


def default_layers(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high one of ``layers`` layers: the inputs of the layers 2, n / 2 and n - 3. Public drafts
    that name no layers are trained on these."""
    return 1, layers // 2 - 1, layers - 4


def _aux_layers(checkpoint: DraftCheckpoint, layers: int) -> tuple[int, ...]:
    result = checkpoint.layers("eagle_config", "eagle_aux_hidden_state_layer_ids", layers)
    return result or default_layers(layers)


class Eagle3Model(HeadModel):
    """EAGLE-3's draft model. ``features``: the number of captured layers of the target. Raises ConfigError or
    LoadError."""

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint, features: int) -> None:
        layers = int(checkpoint.raw.get("num_hidden_layers") or 1)
        if layers != 1:
            raise ConfigError(f"{checkpoint.path}: an EAGLE-3 draft has one layer, and this one has {layers}")
        prefix = "layers.0" if checkpoint.has("layers.0.hidden_norm.weight") else "midlayer"
        target, vocab = context.full_config, context.full_config.vocab_size
        size = checkpoint.raw.get("draft_vocab_size") or vocab
        config = checkpoint.config("LlamaForCausalLM", 1, prefix)
        hidden = config.hidden_size
        tensors = {
            **feature_projection(hidden, features * target.hidden_size, checkpoint.has("fc.bias")),
            **plain(f"{prefix}.hidden_norm.weight", hidden),
            **plain("norm.weight", hidden),
            **layer_tensors(config, prefix, 2 * hidden),
        }
        if checkpoint.has("embed_tokens.weight"):
            tensors |= table(vocab, hidden)
        else:
            need_same_hidden_size(checkpoint, config, target)
        if checkpoint.has("lm_head.weight") or size != vocab or hidden != target.hidden_size or checkpoint.dummy:
            tensors |= head(size, hidden)
        weights = DraftWeights(context, checkpoint, tensors, config)
        super().__init__(context, weights, token_map=False)
        self.ids = _target_ids(checkpoint, size, vocab, context.device.torch_device)
        self.features = features * target.hidden_size
        self.fc = context.device.linear.make_dense(weights.take(["fc.weight"]), weights.optional("fc.bias"))
        self.token_norm = self.norm(f"{prefix}.input_layernorm.weight")
        self.state_norm = self.norm(f"{prefix}.hidden_norm.weight")
        self.layer = HeadLayer(weights, prefix, context)
        self.last_norm = self.norm("norm.weight")

    def start(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor:
        (cache,) = caches
        x, cos, sin = self.device.elementwise.norm_embeddings_and_states(
            self.ends.embed, self.token_norm, states, self.state_norm, self.rotary, batch
        )
        pending, residual = self.layer(x, states, cos, sin, cache, batch)
        return self.device.elementwise.add_pending(pending, residual)

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
            f"d2t in {checkpoint.path} is {offsets.dtype} of shape {list(offsets.shape)}; draft_vocab_size requires "
            f"integers of shape [{size}]"
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
        layers = self.captured_layers(context.settings, context.full_config)
        super().__init__(context, Eagle3Model(context, open_checkpoint(context), len(layers)))

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        if settings.capture_layers:
            return settings.capture_layers
        return _aux_layers(DraftCheckpoint(settings.draft_model_path, "dummy"), model.layers)
