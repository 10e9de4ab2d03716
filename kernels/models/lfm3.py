"""LFM3 (Liquid AI, https://huggingface.co/LiquidAI): LFM2's gated short convolutions over more tokens. Of the layers
with attention some have a window and rotate whole heads, the others rotate a part of each. Each head's result has a
gate. Norms stand before and after both halves of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.contract.errors import ConfigError
from kernels.models import lfm2
from kernels.models.config import ConfigReader, ModelConfig, RopeConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, short_convolution, vocabulary
from kernels.models.layers.block import AttentionLayer, Block, Norms, attention
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.gated_attention import apart_gated
from kernels.models.layers.short_convolution import ConvolutionConfig, ShortConvolution
from kernels.weights.tensors import TensorSpec, by_outputs, linear, norm

__all__ = ["Lfm3Config", "build", "caches", "config", "tensors"]

caches = lfm2.caches


@dataclass(frozen=True)
class Lfm3Config(ModelConfig):
    """``gated``: whether results of attention have gates. ``norms_after``: whether norms stand after both halves of a
    layer, too."""

    gated: bool = True
    norms_after: bool = True


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    kinds = raw.layer_types("conv", "sliding_attention", "full_attention") or tuple(map(_usual_kind, range(raw.layers)))
    sliding = "sliding_attention" in kinds
    if sliding and raw.raw.get("sliding_window", 256) is None:
        raise ConfigError("config.json: sliding_window must not be null, as layer_types has sliding_attention")
    window = raw.size("sliding_window", 256) if sliding else 0
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    bias, dim, eps = raw.flag("attention_bias"), raw.size("head_dim", 128), raw.number("norm_eps", 1e-5)
    own = {**raw.raw, "rope_parameters": None, "rope_theta": None, "rms_norm_eps": eps}
    plain = ConfigReader(own, raw.architecture).decoder(
        qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, head_dim=dim, tied=True
    )
    full = raw.proportional_rope(dim, 0.5)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return Lfm3Config(
        **fields
        | {
            "rope": _local_rope(raw, dim, kinds),
            "ropes": {layer: full for layer, kind in enumerate(kinds) if kind == "full_attention"},
            "recurrence": ConvolutionConfig(plain.hidden_size, raw.size("conv_L_cache", 7), raw.flag("conv_bias")),
            "recurrent": frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        },
        gated=raw.flag("use_attention_gate", True),
        norms_after=raw.flag("use_sandwich_norm", True),
    )


def _local_rope(raw: ConfigReader, head_dim: int, kinds: tuple[str, ...]) -> RopeConfig:
    """The rotation of layers with a window, of whole heads whatever ``partial_rotary_factor`` says. ``kinds``: of all
    layers."""
    given, needed = raw.raw.get("rope_parameters"), sorted({*kinds} - {"conv"})
    if given is None:
        return raw.local_rope(head_dim, 10000.0)
    if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in needed):
        raise ConfigError(f"config.json: rope_parameters must have an object for each of {' and '.join(needed)}")
    local = {**(given.get("sliding_attention") or {}), "partial_rotary_factor": None}
    own = {**raw.raw, "partial_rotary_factor": None, "rope_parameters": {"sliding_attention": local}}
    return ConfigReader(own, raw.architecture).local_rope(head_dim, 1000000.0)


def _usual_kind(layer: int) -> str:
    """Of a layer, where config.json has no ``layer_types``."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % 4 == 0 else "conv"


def _norms(config: ModelConfig) -> tuple[str, ...]:
    """Of a layer, as ``Norms`` has them; "": none."""
    assert isinstance(config, Lfm3Config)
    after = ("post_operator_norm", "post_ffn_norm") if config.norms_after else ("", "")
    return "operator_norm", after[0], "ffn_norm", after[1]


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, Lfm3Config)
    hidden, heads = config.hidden_size, config.heads
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        layer = f"model.layers.{index}"
        for name in filter(None, _norms(config)):
            yield norm(f"{layer}.{name}", hidden)
        if index in config.recurrent:
            yield from short_convolution.tensors(config, f"{layer}.conv", "")
        else:
            yield from gqa.tensors(config, f"{layer}.self_attn", "")
            if config.gated:
                (gate,) = linear(f"{layer}.self_attn.gate_proj", (heads, hidden), by_outputs((heads, heads)))
                yield dataclasses.replace(gate, aliases=(f"{layer}.self_attn.g_proj.weight",))  # of transformers
        yield from lfm2.feed_forward_tensors(config, f"{layer}.feed_forward", "")
    yield norm("model.embedding_norm", hidden)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    assert isinstance(config, Lfm3Config)
    vocab = vocabulary.vocabulary(builder, config)
    layers = [_layer(config, builder, index) for index in range(config.layers)]
    return Decoder(builder, config, vocab, layers, builder.norm("model.embedding_norm", config.norm_eps))


def _layer(config: Lfm3Config, builder: LayerBuilder, index: int) -> Block:
    name, window = f"model.layers.{index}", config.windows[index]
    norms = Norms(*(builder.norm(f"{name}.{part}", config.norm_eps) if part else None for part in _norms(config)))
    mixer: AttentionLayer
    if index in config.recurrent:
        mixer = ShortConvolution(builder, config, f"{name}.conv")
    elif config.gated:
        mixer = apart_gated(builder, config, f"{name}.self_attn", window, "gate_proj")
    else:
        mixer = attention(builder, config, f"{name}.self_attn", window)
    return Block(builder, config, mixer, lfm2.feed_forward(builder, f"{name}.feed_forward"), norms)
