"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share, and with layers of experts Mixtral, Qwen2-MoE and Qwen3-MoE.

    h = embed(ids)
    for each layer:  h = h + attention(norm(h));  h = h + mlp(norm(h))
    logits = head(norm(h))

Llama: Touvron et al., arXiv 2302.13971 and 2307.09288; grouped-query attention: Ainslie et al., arXiv 2305.13245;
SwiGLU: Shazeer, arXiv 2002.05202; Mixtral: Jiang et al., arXiv 2401.04088. Qwen2 adds a bias to q, k and v; Qwen3 norms
each query and key head.

On several ranks each has some of the heads, of the inner dimension and of the vocabulary (kernels.parallel.partition):
``config`` and the weights are then those of one rank, ``x`` and the residual are whole on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.layers.biased_norm import BiasedNorm
from kernels.layers.rotary import RotaryEmbedding
from kernels.models.config import ConfigError, ModelConfig
from kernels.models.experts import SparseFeedForward, expert_shapes
from kernels.models.source import ModelSource, TensorSource
from kernels.parallel.group import Group
from kernels.parallel.layers import VocabularyEmbedding, VocabularyHead, row_parallel
from kernels.platforms.base import Platform
from kernels.platforms.heads import ProjectedHeads
from kernels.platforms.operators import Linear, Norm, Unadded
from kernels.platforms.projections import BehindNorm, norm_of_sum

__all__ = ["Decoder", "tensor_shapes"]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold, by its Hugging Face name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", queries, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", keys, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", keys, hidden, config.qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, queries, config.output_bias)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.experts is not None and layer in config.experts.layers:
            shapes.update(expert_shapes(config.experts, prefix, hidden))
            continue
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, config.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, config.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _norm(name: str, source: TensorSource, platform: Platform, config: ModelConfig) -> Norm:
    """Of quantized checkpoints some norms have a bias."""
    norm, bias = platform.make_norm(source.take([f"{name}.weight"]), config.norm_eps), source.biases([name])
    return norm if bias is None else BiasedNorm(platform, norm, bias)


def _embedding(
    config: ModelConfig, source: ModelSource, platform: Platform, group: Group, fp32_head: bool
) -> tuple[VocabularyEmbedding, Linear | None]:
    """With the output layer where its weight is the same. Nothing else holds the table, which a platform may repack."""
    head: Linear | None = None
    if config.tied_embeddings and fp32_head:
        floats = source.take(["model.embed_tokens.weight"])
        return VocabularyEmbedding(group, platform.make_lookup(floats), len(floats)), platform.make_float_head(
            floats, True
        )
    table = source.table("model.embed_tokens")
    if config.tied_embeddings:
        lookup, head = platform.make_tied(table)
    else:
        lookup = platform.make_lookup(table)
    return VocabularyEmbedding(group, lookup, table.shape[0]), head


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, layer: int, source: TensorSource, platform: Platform, group: Group) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        parts = [f"{prefix}.{part}_proj" for part in ("q", "k", "v")]
        self.platform = platform
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        self.qkv = platform.make_projection(
            source.projection(parts),
            source.biases(parts),
        )
        self.output = platform.make_into_stream(
            row_parallel(
                platform,
                group,
                source.projection([f"{prefix}.o_proj"]),
                source.biases([f"{prefix}.o_proj"]),
            )
        )
        self.head_norms: Norm | None = None  # of queries and keys in one go
        if config.qk_norm:
            query_norm = source.take([f"{prefix}.q_norm.weight"]).expand(self.heads, -1)
            key_norm = source.take([f"{prefix}.k_norm.weight"]).expand(self.kv_heads, -1)
            self.head_norms = platform.make_norm(torch.cat((query_norm, key_norm)), config.norm_eps)

    def behind(self, projection: BehindNorm) -> ProjectedHeads:
        """What makes the heads: ``projection``, of ``qkv``, and all that follows up to attention."""
        return self.platform.make_heads(projection, self.heads, self.kv_heads, self.dim, self.head_norms)

    def find(
        self, queries: Tensor, residual: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None = None
    ) -> tuple[Unadded, Tensor]:
        """What the placed ``queries`` [tokens, heads, dim] find, behind the last projection, into the ``residual``
        stream: as ``IntoStream``. ``wanted`` int64 [rows]: of these tokens alone."""
        found = self.platform.attention(queries, cache, batch.plans[self.window], self.scale)
        if wanted is not None:
            found, residual = found.index_select(0, wanted), residual.index_select(0, wanted)
        return self.output(found, residual)


class FeedForward:
    """``down(silu(gate(x)) * up(x))`` of what ``norm`` gives."""

    def __init__(
        self, norm: Norm, config: ModelConfig, layer: int, source: TensorSource, platform: Platform, group: Group
    ) -> None:
        prefix = f"model.layers.{layer}.mlp"
        parts = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        gate_up = platform.make_gated_projection(
            source.projection(parts),
            source.biases(parts),
        )
        self.gate_up = platform.make_behind_norm(norm, gate_up)
        self.down = platform.make_into_stream(
            row_parallel(
                platform,
                group,
                source.projection([f"{prefix}.down_proj"]),
                source.biases([f"{prefix}.down_proj"]),
            )
        )

    def add(self, x: Unadded, residual: Tensor) -> tuple[Unadded, Tensor]:
        """As ``IntoStream``, of the sum of both."""
        return self.down(*self.gate_up.add(x, residual))


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, each added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, source: TensorSource, platform: Platform, group: Group) -> None:
        prefix = f"model.layers.{layer}"
        norm = _norm(f"{prefix}.input_layernorm", source, platform, config)
        self.attention = made = Attention(config, layer, source, platform, group)
        self.heads = made.behind(platform.make_behind_norm(norm, made.qkv))
        norm = _norm(f"{prefix}.post_attention_layernorm", source, platform, config)
        self.mlp: FeedForward | BehindNorm
        if config.experts is not None and layer in config.experts.layers:
            self.mlp = BehindNorm(norm, SparseFeedForward(config.experts, prefix, source, platform, group))
        else:
            self.mlp = FeedForward(norm, config, layer, source, platform, group)
        made.output.following = norm

    def lead_to(self, norm: Norm) -> None:
        """``norm``: what reads the residual stream next."""
        if isinstance(self.mlp, FeedForward):
            self.mlp.down.following = norm

    def __call__(
        self,
        x: Unadded,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        batch: ForwardBatch,
        wanted: Tensor | None = None,
    ) -> tuple[Unadded, Tensor]:
        """``x``: what the layer before has not yet added to ``residual``. ``wanted``: as ``Attention.find``."""
        queries, residual = self.heads(x, residual, cos, sin, cache, batch.cache_index)
        return self.mlp.add(*self.attention.find(queries, residual, cache, batch, wanted))


class Decoder:
    """The whole model. Weights are taken layer by layer, so that no second copy of the model ever exists.

    ``captures``: layers whose results are wanted beside the last one's, for drafts that are made from them; 0 is the
    first layer. ``fp32_head``: logits are computed in float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ModelSource,
        platform: Platform,
        dtype: torch.dtype,
        group: Group,
        captures: Sequence[int] = (),
        fp32_head: bool = False,
    ) -> None:
        wrong = [layer for layer in captures if not 0 <= layer < config.layers]
        if wrong or len(set(captures)) != len(captures):
            raise ConfigError(
                f"the layers to capture, {list(captures)}, must be different ones of this model's 0 to "
                f"{config.layers - 1}"
            )
        self.platform = platform
        self.captures = tuple(captures)
        self.hidden_size = config.hidden_size
        self.embeddings, head = _embedding(config, source, platform, group, fp32_head)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype, platform)
        self.layers = [DecoderLayer(config, layer, source, platform, group) for layer in range(config.layers)]
        self.norm = _norm("model.norm", source, platform, config)
        for layer, after in pairwise(self.layers):
            layer.lead_to(after.heads.projection.norm)
        self.layers[-1].lead_to(self.norm)
        if head is None:
            weight = source.projection(["lm_head"])
            head = platform.make_float_head(weight, False) if fp32_head else platform.make_projection(weight, None)
        self.head = VocabularyHead(group, head)

    def forward(
        self, batch: ForwardBatch, caches: Sequence[Any], capture: bool = True, wanted: Tensor | None = None
    ) -> Tensor:
        """Run a step's tokens; their keys and values go to ``caches`` (one a layer). -> [tokens, hidden], normed.

        With captures [tokens, hidden * (1 + captures)], for ``split``: one tensor, so that a captured graph or a
        program gives it as it gives the other. ``capture``: whether they are wanted at all.

        ``wanted`` int64 [rows]: nothing is captured, and the result is that of these tokens, [rows, hidden]: behind the
        last layer's keys and values the others are of no more use.
        """
        cos, sin = self.rotary(batch.positions)
        residual = self.embeddings(batch.token_ids)
        captures = self.captures if capture and wanted is None else ()
        hidden, platform, last_layer = self.hidden_size, self.platform, self.layers[-1]
        wide: Tensor | None = None
        if captures:
            wide = platform.empty_rows(len(residual), hidden * (1 + len(captures)), residual.dtype)
        x: Unadded = None
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x, residual = layer(x, residual, cos, sin, cache, batch, wanted if layer is last_layer else None)
            if wide is not None and index in captures:
                begin = hidden * (1 + captures.index(index))
                platform.add_unadded(x, residual, wide[:, begin : begin + hidden])
        last, _ = norm_of_sum(self.norm, x, residual)
        if wide is None:
            return last
        platform.add_rows(last, None, wide[:, :hidden])
        return wide

    def split(self, result: Tensor) -> tuple[Tensor, Tensor]:
        """What ``forward`` returned -> the last hidden state [tokens, hidden], and what drafts are made from [tokens,
        captures * hidden]: of each captured layer, in their order, the sum of the residual stream after it, not normed;
        without captures the last hidden state itself.
        """
        if not self.captures:
            return result, result
        return result[:, : self.hidden_size], result[:, self.hidden_size :]

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> [rows, vocab] in the model's dtype, or in float32."""
        return self.head(hidden)
