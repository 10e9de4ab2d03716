"""LFM2's mixtures of experts (Liquid AI, arXiv 2511.23404, section 2): its decoder with experts in all but the first
layers, which a sigmoid scores and a bias balances.
"""

from __future__ import annotations

from kernels.contract.errors import ConfigError
from kernels.models import lfm2
from kernels.models.config import ConfigReader, ExpertsConfig, ModelConfig

__all__ = ["build", "caches", "config", "tensors"]

build, caches, tensors = lfm2.build, lfm2.caches, lfm2.tensors


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    first, (count, chosen) = raw.raw.get("num_dense_layers", 2), raw.expert_counts()
    if type(first) is not int or first < 0:
        raise ConfigError(f"config.json: num_dense_layers must be a whole number, and is {first!r}")
    experts = ExpertsConfig(
        frozenset(range(first, raw.layers)),
        count,
        chosen,
        raw.size("moe_intermediate_size"),
        raw.flag("norm_topk_prob", True),
        scores="sigmoid",
        scale=raw.number("routed_scaling_factor", 1.0),
        corrected=raw.flag("use_expert_bias", True),
    )
    return lfm2.decoder(raw, experts)
