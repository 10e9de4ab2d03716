"""DFlash's draft, which drafts a whole block in one pass (Chen et al., arXiv 2602.06036).

    context = hidden_norm(fc(features)), of the tokens before the block: keys and values of every layer
    block = the last known token, then mask tokens: each sees the context and all of the block
    logits = the target's head(norm(block)): for the token at the mask's own position

The features are residual streams after the layers ``dflash_config.target_layer_ids``, without a norm. Embeddings and
head are the target's. Public layout: ``fc``, ``hidden_norm``, ``layers.i``, ``norm``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.operators import PendingResidual
from kernels.core.tree import MAX_NODES, Drafts, chain
from kernels.devices.capture import CaptureRequest
from kernels.devices.linear import norm_of_sum
from kernels.devices.prepared import CapturedPasses, VerifyOutputs
from kernels.models.config import ModelConfig
from kernels.models.layers import pre_norm
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.speculation.draft_sampler import DraftPlaces, DraftSampler
from kernels.speculation.drafter import Drafter, DrafterContext, DraftRows, Observation
from kernels.speculation.drafters.heads import open_checkpoint
from kernels.speculation.load import (
    DraftCheckpoint,
    DraftWeights,
    feature_projection,
    layer_tensors,
    need_same_hidden_size,
    plain,
)
from kernels.speculation.native_drafts import BlockModel, NativeBlockDrafts, NativeDrafts
from kernels.state.slots import SlotTable

__all__ = ["DflashDrafter", "DflashModel", "default_layers"]

_OTHER_MODELS = ("conv_kernel_size", "selector_rank", "projector_type", "attention_sink_bias", "attention_value_scale")


def default_layers(layers: int, drafts: int) -> tuple[int, ...]:
    """The layers of a target with ``layers`` layers that a draft with ``drafts`` layers reads by default."""
    if drafts == 1:
        return (layers // 2,)
    return tuple(round(1 + index * (layers - 4) / (drafts - 1)) for index in range(drafts))


def _target_layers(checkpoint: DraftCheckpoint, layers: int) -> tuple[int, ...]:
    result = checkpoint.layers("dflash_config", "target_layer_ids", layers)
    return result or default_layers(layers, int(checkpoint.raw.get("num_hidden_layers") or 1))


class Injection:
    """Projects the context into a layer's keys and values."""

    def __init__(self, config: ModelConfig, weights: DraftWeights, prefix: str, context: DrafterContext) -> None:
        attention = f"{prefix}.self_attn"
        self.device, self.kv_heads, self.dim = context.device, config.kv_heads, config.head_dim
        self.project = context.device.linear.make_dense(
            weights.take([f"{attention}.k_proj.weight", f"{attention}.v_proj.weight"]),
            weights.take([f"{attention}.k_proj.bias", f"{attention}.v_proj.bias"]) if config.qkv_bias else None,
        )
        self.norm = None
        if config.qk_norm:
            weight = weights.take([f"{attention}.k_norm.weight"]).expand(self.kv_heads, -1)
            self.norm = context.device.elementwise.make_norm(weight.contiguous(), config.norm_eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, index: Tensor) -> None:
        both = self.project(x).view(-1, 2 * self.kv_heads, self.dim)
        keys = both[:, : self.kv_heads]
        self.device.attention.rotate(keys if self.norm is None else self.norm(keys), cos, sin, out=keys)
        self.device.cache.write(cache, index, both)


class DflashModel:
    """DFlash's draft model. ``features``: the number of captured layers of the target. ``window``: positions that a
    token sees, 0 for all. Raises ConfigError or LoadError.
    """

    def __init__(self, context: DrafterContext, checkpoint: DraftCheckpoint, features: int, window: int) -> None:
        _refuse_others(checkpoint)
        device, target = context.device, context.target
        layers = int(checkpoint.raw.get("num_hidden_layers") or 1)
        whole = checkpoint.config("Qwen3ForCausalLM", layers, "layers.0", layer_types=None, use_sliding_window=False)
        need_same_hidden_size(checkpoint, whole, context.full_config)
        hidden = whole.hidden_size
        tensors = {
            **feature_projection(hidden, features * context.full_config.hidden_size),
            **plain("hidden_norm.weight", hidden),
            **plain("norm.weight", hidden),
        }
        for layer in range(layers):
            tensors |= layer_tensors(whole, f"layers.{layer}")
        weights = DraftWeights(context, checkpoint, tensors, whole)
        self.config = config = dataclasses.replace(weights.local, windows=(window,) * layers)
        self.parameters = sum(math.prod(spec.shape) for spec in tensors.values())
        self.embed, self.head = target.embeddings.plain, target.head.plain
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, context.dtype, device)
        self.fc = device.linear.make_dense(weights.take(["fc.weight"]), None)
        self.context_norm = device.elementwise.make_norm(weights.take(["hidden_norm.weight"]), config.norm_eps)
        prefixes = [f"layers.{layer}" for layer in range(layers)]
        self.injections = [Injection(config, weights, prefix, context) for prefix in prefixes]
        self.layers = [pre_norm.layer(weights.builder, config, prefix, window) for prefix in prefixes]
        self.last_norm = device.elementwise.make_norm(weights.take(["norm.weight"]), config.norm_eps)
        self.weight_bytes = weights.weight_bytes

    def observe(self, features: Tensor, positions: Tensor, index: Tensor, caches: list[Any]) -> None:
        """Write the context of ``features`` [tokens, n] to ``index`` of the caches."""
        context = self.context_norm(self.fc(features))
        cos, sin = self.rotary(positions)
        for injection, cache in zip(self.injections, caches, strict=True):
            injection(context, cos, sin, cache, index)

    def forward(self, batch: ForwardBatch, caches: list[Any]) -> Tensor:
        """-> the last hidden states [tokens, hidden], normed"""
        cos, sin = self.rotary(batch.positions)
        residual = self.embed(batch.token_ids)
        x: PendingResidual = None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, cos, sin, cache, batch)
        return norm_of_sum(self.last_norm, x, residual)[0]


class DflashDrafter(Drafter):
    """DFlash."""

    features = True

    def __init__(self, context: DrafterContext) -> None:
        settings, config = context.settings, context.config
        checkpoint = open_checkpoint(context)
        layers = self.captured_layers(settings, context.full_config)
        block = settings.block_size or settings.num_draft_tokens
        if not 2 <= block <= MAX_NODES:
            raise ConfigError(f"--speculative-dflash-block-size must be 2 to {MAX_NODES}, not {block}")
        self._context, self._block = context, block
        self._features = len(layers) * context.full_config.hidden_size
        self._mask = checkpoint.setting("dflash_config", "mask_token_id")
        if type(self._mask) is not int or not 0 <= self._mask < context.full_config.vocab_size:
            raise ConfigError(
                f"{checkpoint.path}: dflash_config.mask_token_id must be a token of the target, 0 to "
                f"{context.full_config.vocab_size - 1}, and is {self._mask!r}"
            )
        self._model = DflashModel(context, checkpoint, len(layers), settings.draft_window)
        self._sampler = DraftSampler(None, context.device.sampling.greedy)
        self._places = DraftPlaces(context.device, config, block)
        self._caches: list[Any] = []
        self._blocks: CapturedPasses | None = None  # prepared passes over blocks
        device = context.device.torch_device
        self._ahead = torch.arange(block, device=device)
        self._everything = torch.full((1, block), (1 << block) - 1 if block < MAX_NODES else -1, device=device)
        self.parameters, self.weight_bytes = self._model.parameters, self._model.weight_bytes
        model = self._model.config
        layer_bytes = context.device.cache.token_bytes(model.kv_heads, model.head_dim, context.dtype)
        self.cache_bytes = model.layers * layer_bytes
        self.spare_bytes = self._places.spare_tokens * self.cache_bytes
        self.max_nodes = min(block, settings.num_draft_tokens)
        self.depth = self.max_nodes - 1

    @classmethod
    def captured_layers(cls, settings: SpeculativeSettings, model: ModelConfig) -> tuple[int, ...]:
        return _target_layers(DraftCheckpoint(settings.draft_model_path, "dummy"), model.layers)

    def make_caches(self, pages: int) -> list[Any]:
        model, context = self._model.config, self._context
        pages, page_size = self._places.cache_pages(pages), context.config.page_size
        self._caches = context.device.cache.make(
            model.layers, pages, page_size, model.kv_heads, model.head_dim, context.dtype
        )
        return self._caches

    def capture(self, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs] | None) -> None:
        context, block = self._context, self._block
        columns = -(-(context.context + block) // context.config.page_size) + 1
        self._blocks = context.device.capture.decodes(
            CaptureRequest(
                forward=lambda batch: self._model.forward(batch, self._caches),
                windows=[self._model.config.windows[0]],
                max_rows=context.config.max_slots - 1,
                columns=columns,
                agree=agree,
                tokens=block,
                tree=True,
            )
        )

    def native_drafts(self, state: SlotTable, rows: int) -> NativeDrafts | None:
        context = self._context
        blocks = BlockModel(
            model=self._model,
            caches=self._caches,
            dtype=context.dtype,
            features=self._features,
            block=self._block,
            nodes=self.max_nodes,
            mask=self._mask,
            rows=rows,
        )
        return NativeBlockDrafts.make(context.device, state, self._places, blocks)

    def observe(self, observation: Observation) -> None:
        assert observation.features is not None, "made from features"
        self._model.observe(observation.features, observation.positions, observation.cache_index, self._caches)

    def draft(self, rows: DraftRows) -> Drafts:
        count, block, device = len(rows.slots), self._block, self._context.device
        places = rows.roots[:, None] + np.arange(block)
        table = self._places.table(rows.slots, rows.roots, rows.pages, rows.capacity, block)
        counts = np.full(count, block, dtype=np.int64)
        attended = AttentionRows(rows.roots, counts, table, 0, count, self._everything.expand(count, block))
        tokens = torch.full((count, block), self._mask, dtype=torch.int64, device=device.torch_device)
        tokens[:, 0] = rows.root_tokens
        positions, index = self._places.put(places.reshape(1, -1), places.reshape(1, -1), table)
        window = self._model.config.windows[0]
        batch = ForwardBatch(
            tokens.view(-1),
            positions[0],
            index[0],
            {window: device.attention.plan(attended, window)},
        )
        hidden = None if self._blocks is None else self._blocks.run(batch)
        hidden = self._model.forward(batch, self._caches) if hidden is None else hidden
        wanted = self.max_nodes
        logits = self._model.head(hidden.view(count, block, -1)[:, 1:wanted].flatten(0, 1))
        drafted = self._sampler.best(logits, rows.noise, rows.root_positions, self._ahead[1:wanted])
        tokens = torch.cat((tokens[:, :1], drafted.view(count, -1)), 1)
        return Drafts(chain(tokens), np.minimum(rows.limits + 1, wanted))


def _refuse_others(checkpoint: DraftCheckpoint) -> None:
    """Refuse models of the same name with another computation. Raises ConfigError."""
    for key in _OTHER_MODELS:
        if found := checkpoint.setting("dflash_config", key):
            raise ConfigError(f"{checkpoint.path}: a DFlash draft with {key} {found!r} is not supported")
    scale = checkpoint.setting("dflash_config", "input_embedding_scale", 1.0)
    kinds = set(checkpoint.raw.get("layer_types") or ()) - {"full_attention"}
    if scale != 1.0 or kinds or checkpoint.raw.get("is_causal"):
        raise ConfigError(
            f"{checkpoint.path}: a DFlash draft whose embeddings are scaled, or with causal or sliding attention, is "
            "not supported; use one with full attention"
        )
