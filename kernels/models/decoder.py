"""A whole decoder, of layers that a family has made.

    h = embed(ids)
    for each layer:  h = layer(h)
    logits = head(norm(h))

As a stage of a pipeline it has some of the layers, and neither embeddings nor a head unless it is the first or the last
one. The results of layers that are captured for a draft in the last stage travel beside the residual stream.

On several ranks each has some of the heads, of the inner dimension and of the vocabulary; the residual stream is whole
on each, or with context parallelism each has that of its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.contract.caches import Paged, Window
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.devices.linear import norm_of_sum
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.classification import classifier
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.models.layers.routes import count_tokens
from kernels.models.layers.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = ["Decoder", "DecoderLayer"]


class DecoderLayer(Protocol):
    """A layer of a decoder."""

    @property
    def first_norm(self) -> Norm | None:
        """The norm that reads the residual stream first; None: the stream itself is read."""
        ...

    def set_next_norm(self, norm: Norm) -> None:
        """``norm``: the one that reads the residual stream after this layer."""
        ...

    def __call__(
        self,
        x: PendingResidual,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        batch: ForwardBatch,
        wanted: Tensor | None = None,
    ) -> tuple[PendingResidual, Tensor]:
        """``x``: what the layer before has not yet added to ``residual`` [tokens, hidden]. -> the same of this layer.

        ``wanted`` int64 [rows]: the result is that of these tokens alone, as the head reads no others (the logits'
        indices). Before it chooses them a layer calls ``builder.rows.select(wanted)``, where ``rows`` is not None:
        adapters know their tokens by place.
        """
        ...


class Decoder:
    """``layers`` between ``embeddings`` and ``head``; ``norm`` is the last one.

    ``classifier``: [rows, hidden] -> [rows, labels] of a model that has such a head. ``reads_rows``: whether a layer
    reads ``ForwardBatch.rows``, so that no pass is captured. ``received``
    [0, width]: without tokens, what a stage receives.
    """

    def __init__(
        self,
        builder: ModelBuilder,
        config: ModelConfig,
        vocab: tuple[VocabularyEmbedding, VocabularyHead],
        layers: Sequence[DecoderLayer],
        norm: Norm,
    ) -> None:
        self.device, self.rows, self.stage = builder.ops, builder.rows, builder.stage
        self.context = builder.context_parallel
        first, end = builder.first_layer, builder.first_layer + config.layers
        # The layers whose results are known after this stage, and those of them that it receives.
        self.captures = tuple(layer for layer in builder.captures if layer < end)
        self._received = tuple(layer for layer in self.captures if layer < first)
        self._first, self.hidden_size, self._stream = first, config.hidden_size, config.stream_size
        width = self._stream * (1 + len(self._received))
        self.received = torch.empty((0, width), dtype=builder.dtype, device=builder.ops.torch_device)
        self.reads_rows = bool(config.eager_with(builder.ops.attention.plans)) or config.indexed
        self._routes = builder.routes
        self._sparse = sorted(config.experts.layers) if config.experts is not None else []
        self._experts = config.experts.count + config.experts.identities if config.experts is not None else 0
        self.embeddings, self.head = vocab
        self.pooling = pooling = config.pooling
        self.classifier = classifier(builder, config) if pooling is not None and pooling.task == "classify" else None
        context = builder.context or config.max_positions
        ropes = [config.ropes.get(layer, config.rope) for layer in range(config.layers)]
        kinds = list(dict.fromkeys(ropes))
        self.rotaries = [
            RotaryEmbedding(rope, rope.head_dim or config.head_dim, builder.dtype, builder.ops, context)
            for rope in kinds
        ]
        self.layers, self.norm = list(layers), norm
        self._rotary_of = {id(layer): kinds.index(rope) for layer, rope in zip(layers, ropes, strict=True)}
        paged = Paged(config.kv_heads, config.head_dim, config.head_dim)
        self._group_of = {
            id(layer): Window(paged, abs(window), window < 0)
            for layer, window in zip(layers, config.windows, strict=True)
            if window
        }
        for layer, after in pairwise(self.layers):
            if after.first_norm is not None:
                layer.set_next_norm(after.first_norm)
        self.layers[-1].set_next_norm(norm)

    def forward_routed(self, batch: ForwardBatch, caches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """``forward`` of a model with experts, and those that each token takes, int32 [tokens, layers, chosen]."""
        self._routes.open()
        result = self.forward(batch, caches)
        return result, self._routes.close(len(self.layers), self._sparse)

    def count_experts(self, experts: Tensor) -> Tensor:
        """The tokens that each expert took, int32 [layers, experts], of ``forward_routed``'s experts."""
        return count_tokens(experts, self._sparse, self._experts)

    def forward(
        self, batch: ForwardBatch, caches: Sequence[Any], capture: bool = True, wanted: Tensor | None = None
    ) -> Tensor:
        """Run a step's tokens; their keys and values go to ``caches`` (one per layer). -> [tokens, hidden], normed.

        With captures [tokens, hidden + captures * stream], for ``split``: one tensor, so that a captured graph or a
        program gives it as it gives the other. ``capture``: whether they are wanted at all.

        ``wanted`` int64 [rows]: nothing is captured, and the result is that of these tokens, [rows, hidden]: behind the
        last layer's keys and values the others are of no more use.

        Of a stage that is not the last, the result is the residual stream with the captures so far, which goes to the
        next one; of one that is not the first, the batch's ``states`` are those that it has received, or receives now.
        """
        result = self.run(self.receive(batch), caches, capture, wanted)
        if not self.stage.is_last:
            self.stage.send_stream(result)
        return result

    def receive(self, batch: ForwardBatch, into: Tensor | None = None) -> ForwardBatch:
        """The batch with the residual stream of the stage before, if there is one and it has not been received.
        ``into`` [any, width]: where it goes, if it fits."""
        if self.stage.is_first or batch.states is not None:
            return batch
        tokens = len(batch.token_ids)
        if into is None or tokens > len(into):
            into = self.received.new_empty((tokens, self.received.shape[1]))
        stream = into[:tokens]
        self.stage.receive_stream(stream)
        return replace(batch, states=stream)

    def run(
        self, batch: ForwardBatch, caches: Sequence[Any], capture: bool = True, wanted: Tensor | None = None
    ) -> Tensor:
        """``forward`` without messages between stages, as it is captured."""
        if self.rows is not None:
            self.rows.enter(batch.cache_index)
        token_ids, context = batch.token_ids, self.context
        if context is not None:
            batch = context.enter(batch)
        angles = [rotary(batch.positions) for rotary in self.rotaries]
        batches = {spec: batch.in_window(spec) for spec in batch.bounded if isinstance(spec, Window)}
        captures = self.captures if capture and wanted is None else ()
        hidden, size, device, last_layer = self.hidden_size, self._stream, self.device, self.layers[-1]
        stream = self.embeddings(token_ids) if self.stage.is_first else batch.states
        assert stream is not None, "a stage receives before it runs"
        residual = stream[:, :size]
        if not residual.is_contiguous():
            residual = device.elementwise.empty_rows(len(stream), size, stream.dtype)
            device.elementwise.add_rows(stream[:, :size], None, residual)
        if context is not None:
            residual = context.select(residual)
            if self.rows is not None and context.own is not None:
                self.rows.divide(context.own)
        wide: Tensor | None = None
        before = hidden if self.stage.is_last else size
        if captures:
            wide = device.elementwise.empty_rows(len(residual), before + size * len(captures), residual.dtype)
            for number, part in zip(self._received, stream.split(size, dim=1)[1:], strict=True):
                begin = before + size * captures.index(number)
                device.elementwise.add_rows(part, None, wide[:, begin : begin + size])
        x: PendingResidual = None
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True), self._first):
            cos, sin = angles[self._rotary_of[id(layer)]]
            window = self._group_of.get(id(layer))
            seen = batch if window is None else batches.get(window, batch)
            chosen = wanted if layer is last_layer and self.stage.is_last else None
            x, residual = layer(x, residual, cos, sin, cache, seen, chosen)
            if wide is not None and index in captures:
                begin = before + size * captures.index(index)
                device.elementwise.write_stream(x, residual, wide[:, begin : begin + size])
        if not self.stage.is_last:
            stream = device.elementwise.empty_rows(len(residual), size, residual.dtype) if wide is None else wide
            device.elementwise.write_stream(x, residual, stream[:, :size])
            return stream
        last, _ = norm_of_sum(self.norm, x, residual)
        if context is not None:
            last = context.gather(last)
        if wide is None:
            return last
        device.elementwise.add_rows(last, None, wide[:, :hidden])
        return wide

    def split(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """What ``forward`` returned -> the last hidden state [tokens, hidden], and what drafts are made from [tokens,
        captures * stream]: of each captured layer, in their order, the sum of the residual stream after it, not normed;
        without captures the last hidden state itself.
        """
        if not self.captures:
            return result, result
        return result[:, : self.hidden_size], result[:, self.hidden_size :]

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> [rows, vocab] in the model's dtype, or in float32."""
        return self.head(hidden)
