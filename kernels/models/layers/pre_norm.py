"""The decoder layer of Llama and its descendants: attention and feed-forward, each behind a norm, each added to the
residual stream.

    h = h + attention(norm(h));  h = h + mlp(norm(h))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm, PendingResidual
from kernels.devices.linear import NormThenLinear
from kernels.models.config import ModelConfig
from kernels.models.layers import gqa, mlp
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.gqa import Attention
from kernels.models.layers.mlp import FeedForward
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["PreNormLayer", "layer", "norm_tensors", "stream_norm", "tensors"]


def tensors(
    config: ModelConfig, module: str, gguf: str = "", interleaved: bool = False, second: str = "ffn_norm"
) -> Iterator[TensorSpec]:
    """A layer of grouped-query attention and a plain feed-forward layer. ``module``, ``gguf``: the layer's names.
    ``interleaved``: as ``gqa.tensors``; ``second``: as ``norm_tensors``."""
    yield from norm_tensors(config, module, gguf, second)
    yield from gqa.tensors(config, f"{module}.self_attn", f"{gguf}.attn", interleaved)
    yield from mlp.tensors(config, f"{module}.mlp", f"{gguf}.ffn")


def norm_tensors(config: ModelConfig, module: str, gguf: str, second: str = "ffn_norm") -> Iterator[TensorSpec]:
    """The norms before attention and before the feed-forward layer, which is the same one where both are parallel.
    ``second``: the latter's name in GGUF files."""
    yield from stream_norm(config, f"{module}.input_layernorm", f"{gguf}.attn_norm")
    if not config.parallel_residual:
        yield from stream_norm(config, f"{module}.post_attention_layernorm", f"{gguf}.{second}")


def stream_norm(config: ModelConfig, module: str, gguf: str = "") -> Iterator[TensorSpec]:
    """A norm of the residual stream."""
    weight = norm(module, config.hidden_size, gguf)
    yield weight
    if config.norm_bias:
        yield weight.bias()


def layer(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> PreNormLayer:
    """The layer of ``tensors``. ``window``: tokens that a query sees, 0 for all."""
    first = builder.norm(f"{module}.input_layernorm", config.norm_eps)
    attention = gqa.attention(builder, config, f"{module}.self_attn", window)
    second = builder.norm(f"{module}.post_attention_layernorm", config.norm_eps)
    return PreNormLayer(builder, first, attention, second, mlp.feed_forward(builder, second, f"{module}.mlp"))


class PreNormLayer:
    """``feed_forward``: what has the form of a feed-forward layer behind the norm ``second``."""

    def __init__(
        self,
        builder: LayerBuilder,
        first: Norm,
        attention: Attention,
        second: Norm,
        feed_forward: FeedForward | NormThenLinear,
    ) -> None:
        self.attention = attention
        self.heads = attention.after_norm(builder.ops.linear.make_norm_then_linear(first, attention.qkv))
        self.mlp = feed_forward
        attention.output.next_norm = second

    @property
    def first_norm(self) -> Norm:
        """The norm that reads the residual stream first."""
        return self.heads.projection.norm

    def set_next_norm(self, norm: Norm) -> None:
        """``norm``: the one that reads the residual stream after this layer."""
        if isinstance(self.mlp, FeedForward):
            self.mlp.down.next_norm = norm

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
        """``x``: what the layer before has not yet added to ``residual``. ``wanted``: as ``DecoderLayer``."""
        queries, residual = self.heads(x, residual, cos, sin, cache, batch.cache_index)
        return self.mlp.add(*self.attention.forward(queries, residual, cache, batch, wanted))
