"""Hunyuan-A13B (Tencent, https://github.com/Tencent-Hunyuan/Hunyuan-A13B): the attention of Hunyuan's dense models, and
in every layer experts beside one that all tokens take.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.errors import ConfigError
from kernels.models import hunyuan
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import sparse
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.moe import ExpertNames
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "tensors"]

_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_mlp", router="gate.wg")

caches = hunyuan.caches


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    chosen = {"num_experts_per_tok": raw.raw.get("num_experts_per_tok", _alike(raw, "moe_topk", 1))}
    count, taken = ConfigReader({**raw.raw, **chosen}, raw.architecture).expert_counts()
    inner, alike = (
        _alike(raw, "moe_intermediate_size", raw.size("intermediate_size")),
        _alike(raw, "num_shared_expert", 1),
    )
    experts = ExpertsConfig(
        frozenset(range(raw.layers)), count, taken, inner, normalized=True, shared=inner * alike, weighted=False
    )
    return hunyuan.decoder(raw, experts)


def _alike(raw: ConfigReader, key: str, default: int) -> int:
    """A size of every layer, which config.json may list."""
    given = raw.raw.get(key)
    if isinstance(given, list):
        if len(set(map(repr, given))) != 1:
            raise ConfigError(f"config.json: {key} must be the same in all layers, and is {given!r}")
        given = given[0]
    return ConfigReader({key: given}, raw.architecture).size(key, default)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    return sparse.tensors(config, _NAMES, hunyuan.attention_tensors)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    return sparse.build(config, builder, _NAMES, hunyuan.attention)
