"""SmolLM 3 (https://huggingface.co/blog/smollm3): Llama's decoder, of which every fourth layer has no positions (Yang
et al., arXiv 2501.18795).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.contract.errors import ConfigError
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import gqa, pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import TensorSpec, norm

__all__ = ["build", "caches", "config", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    bias = raw.flag("attention_bias")
    unrotated = _unrotated(raw)
    windows = _windows(raw, unrotated)
    plain = raw.decoder(qkv_bias=bias, output_bias=bias, windows=windows, theta=2000000.0, tied=True)
    nothing = dataclasses.replace(plain.rope, kind="none")
    return dataclasses.replace(plain, ropes=dict.fromkeys(unrotated, nothing))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from vocabulary.tensors(config)
    for index in range(config.layers):
        yield from pre_norm.tensors(config, f"model.layers.{index}", f"blk.{index}", interleaved=True)
    yield norm("model.norm", config.hidden_size, "output_norm")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The caches of the layers."""
    return gqa.caches(config)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    vocab = vocabulary.vocabulary(builder, config)
    layers = [
        pre_norm.layer(builder, config, f"model.layers.{index}", window) for index, window in enumerate(config.windows)
    ]
    return Decoder(builder, config, vocab, layers, builder.norm("model.norm", config.norm_eps))


def _unrotated(raw: ConfigReader) -> list[int]:
    """The layers without positions: where ``no_rope_layers`` is 0, or every ``no_rope_layer_interval``-th."""
    layers, given = raw.layers, raw.raw.get("no_rope_layers")
    if given is None:
        every = raw.size("no_rope_layer_interval", 4)
        return [layer for layer in range(layers) if (layer + 1) % every == 0]
    if not isinstance(given, list) or len(given) < layers:
        raise ConfigError(f"config.json: no_rope_layers must have 0 or 1 for each layer, and is {given!r}")
    return [layer for layer in range(layers) if not given[layer]]


def _windows(raw: ConfigReader, unrotated: list[int]) -> tuple[int, ...]:
    if not raw.flag("use_sliding_window"):
        return ()
    if raw.raw.get("layer_types") is not None or raw.raw.get("sliding_window") is None:
        return raw.windows()
    window = raw.size("sliding_window")
    return tuple(window if layer in unrotated else 0 for layer in range(raw.layers))
