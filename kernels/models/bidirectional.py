"""Decoders that were trained to embed with attention in both directions: EmbeddingGemma (Schechter Vera et al., arXiv
2509.20354), gte-Qwen2 and those of LLM2Vec (BehnamGhader et al., arXiv 2404.05961).

The layers are the family's; each token attends to all tokens of its input, or to those near it. An input runs whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.operators import Norm
from kernels.models.config import ModelConfig
from kernels.models.encoder import Angles, Encoder, EncoderBatch, EncoderLayer, rotated
from kernels.models.layers import gqa, vocabulary
from kernels.models.layers.block import gated_mlp
from kernels.models.layers.builder import ModelBuilder
from kernels.models.registry import base_architecture

__all__ = ["build"]


def build(config: ModelConfig, builder: ModelBuilder) -> Encoder:
    """The encoder of a decoder's sizes, on one device. Raises ConfigError for what its attention lacks."""
    if config.attention_softcap or config.sinks or config.experts is not None:
        raise ConfigError(
            "attention in both directions is run without caps, sinks and experts; use a model without them"
        )
    embeddings, _ = vocabulary.vocabulary(builder, config)
    ropes = [config.ropes.get(layer, config.rope) for layer in range(config.layers)]
    context = builder.context or config.max_positions
    angles = {rope: Angles(rope, config.head_dim, builder, context) for rope in dict.fromkeys(ropes)}
    layers = [_layer(config, builder, layer, angles[rope]) for layer, rope in enumerate(ropes)]
    last = builder.norm("model.norm", config.norm_eps, config.norm_offset)
    *others, final = layers
    return Encoder(lambda batch: embeddings(batch.ids), [*others, lambda hidden, batch: last(final(hidden, batch))])


def _layer(config: ModelConfig, builder: ModelBuilder, index: int, angles: Angles) -> EncoderLayer:
    name = f"model.layers.{index}"
    attention = _attention(config, builder, index, angles)
    mlp = gated_mlp(builder, config, f"{name}.mlp")

    def norm(module: str) -> Norm:
        return builder.norm(f"{name}.{module}", config.norm_eps, config.norm_offset)

    before, after = norm("input_layernorm"), norm("post_attention_layernorm")
    if not _is_gemma(config):

        def plain(hidden: Tensor, batch: EncoderBatch) -> Tensor:
            hidden = hidden + attention(before(hidden), batch)
            return hidden + mlp(after(hidden))

        return plain
    before_mlp, after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")

    def layer(hidden: Tensor, batch: EncoderBatch) -> Tensor:
        hidden = hidden + after(attention(before(hidden), batch))
        return hidden + after_mlp(mlp(before_mlp(hidden)))

    return layer


def _attention(config: ModelConfig, builder: ModelBuilder, index: int, angles: Angles) -> EncoderLayer:
    module, heads, kv_heads, dim = f"model.layers.{index}.self_attn", config.heads, config.kv_heads, config.head_dim
    qkv = gqa.projection(builder, config, *(f"{module}.{part}_proj" for part in "qkv"))
    output = builder.row_parallel(f"{module}.o_proj")
    norms = None
    if config.qk_norm:
        norms = [builder.norm(f"{module}.{part}_norm", config.norm_eps, config.norm_offset) for part in "qk"]
    window, scale = config.windows[index], config.attention_scale or dim**-0.5
    # Gemma's window counts the tokens before and behind, those of other families are as wide on each side.
    reach = window // 2 if _is_gemma(config) else window

    def attend(hidden: Tensor, batch: EncoderBatch) -> Tensor:
        queries, keys, values = qkv(hidden).unflatten(1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        if norms is not None:
            queries, keys = (
                norm(x.reshape(-1, dim)).view(x.shape) for norm, x in zip(norms, (queries, keys), strict=True)
            )
        cos, sin = angles(batch)
        parts = rotated(queries, cos, sin), rotated(keys, cos, sin), values
        found, begin = [], 0
        for length in batch.lengths:
            end = begin + length
            one = [part[begin:end].transpose(0, 1)[None] for part in parts]  # [1, heads, length, dim]
            result = F.scaled_dot_product_attention(
                one[0], one[1], one[2], attn_mask=_near(length, reach, hidden), scale=scale, enable_gqa=True
            )
            found.append(result[0].transpose(0, 1).reshape(length, -1))
            begin = end
        return output(torch.cat(found))

    return attend


def _near(length: int, reach: int, like: Tensor) -> Tensor | None:
    """Which tokens each one sees, bool [length, length]; None: all."""
    if not reach or length <= reach + 1:
        return None
    places = torch.arange(length, device=like.device)
    return (places[:, None] - places).abs() <= reach


def _is_gemma(config: ModelConfig) -> bool:
    return base_architecture(config.architecture) == "Gemma3ForCausalLM"
