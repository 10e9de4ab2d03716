"""DeepSeek V3.2 (DeepSeek-AI, arXiv 2512.02556): DeepSeek V3's decoder, where an indexer chooses the tokens that latent
attention reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.contract.caches import CacheGroup
from kernels.models.config import ConfigReader, IndexConfig, LatentConfig, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import indexer, mla, sparse
from kernels.models.layers.builder import LayerBuilder, ModelBuilder
from kernels.models.layers.indexer import Indexer
from kernels.models.layers.moe import DEEPSEEK
from kernels.weights.tensors import TensorSpec

__all__ = ["build", "caches", "config", "sizes", "tensors"]


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    experts = raw.deepseek_experts(raw.later_layers(3), "sigmoid", pair_sum=True)
    return raw.indexed_decoder(experts=experts)


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    yield from sparse.tensors(config, DEEPSEEK, mla.tensors)
    latent, index = sizes(config)
    for layer in sorted(index.own):
        module, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        yield from indexer.tensors(index, module, hidden, latent.query_rank, f"blk.{layer}")


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """One vector of each token in every layer, and a key in those with an indexer."""
    latent, index = sizes(config)
    others = tuple(layer for layer in range(config.layers) if layer not in index.own)
    groups = [CacheGroup(latent.spec(), tuple(sorted(index.own)))]
    if others:
        groups.append(CacheGroup(latent.spec(indexed=False), others))
    return tuple(groups)


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank, whose sizes are ``config``."""
    latent, index = sizes(config)
    own = {f"model.layers.{layer}.self_attn" for layer in index.own}
    last: list[Indexer] = []

    def attention(builder: LayerBuilder, config: ModelConfig, module: str, window: int) -> mla.LatentAttention:
        if module in own:
            last.append(Indexer(builder, index, module, latent.rope_dim))
        return mla.attention(builder, config, module, window, last[-1])

    return sparse.build(config, builder, DEEPSEEK, attention)


def sizes(config: ModelConfig) -> tuple[LatentConfig, IndexConfig]:
    """The sizes of attention and of its indexer."""
    latent = config.latent
    assert latent is not None, "the family reads config.json by indexed_decoder"
    assert latent.index is not None, "the same"
    return latent, latent.index
