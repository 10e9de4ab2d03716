"""Qwen3.5, its language model (https://huggingface.co/Qwen/Qwen3.5-27B), dense and with experts: Qwen3-Next's decoder,
whose delta nets have a projection for each of their inputs.

Checkpoints that also read images keep it under ``model.language_model``; the rest of them is not run. Text turns all
parts of a head by the same position, whatever ``mrope_section`` says.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models import qwen3_next
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

caches = qwen3_next.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    inner, experts = _text(raw), None
    if raw.architecture.startswith("Qwen3_5Moe"):
        shared = inner.size("shared_expert_intermediate_size", 512)
        count, chosen = inner.expert_counts()
        width = inner.size("moe_intermediate_size", 512)
        experts = ExpertsConfig(frozenset(range(inner.layers)), count, chosen, width, True, shared)
        inner = ConfigReader({"intermediate_size": shared, **inner.raw}, raw.architecture)
    return qwen3_next.decoder(inner, experts, grouped=False)


def _text(raw: ConfigReader) -> ConfigReader:
    text = raw.raw.get("text_config", raw.raw)
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: text_config must be an object, and is {text!r}")
    outer = {key: raw.raw[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in raw.raw}
    return ConfigReader(outer | text, raw.architecture)


def _root(config: ModelConfig) -> str:
    return "model.language_model" if config.architecture.endswith("ForConditionalGeneration") else "model"


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    root = _root(config)
    return sparse.mixed_tensors(
        config, lambda config, index: qwen3_next.mixer_tensors(config, f"{root}.layers.{index}", index), root=root
    )


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    root = _root(config)
    return sparse.build_mixed(
        config,
        builder,
        lambda builder, config, index: qwen3_next.mixer(builder, config, f"{root}.layers.{index}", index),
        root=root,
    )
