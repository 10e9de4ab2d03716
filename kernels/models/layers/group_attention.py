"""Grouped-query attention in which each group of heads reads the blocks of tokens that an index head chooses for it
(MiniMax M3).

    q = rotate(norm(index_q(x)));   k = rotate(norm(index_k(x)))
    output(attention(heads, tokens of the blocks with the highest scores, and of the last ones))

The index keys of tokens are cached as they are rotated. A rank has the index heads of its key heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.core.batch import ForwardBatch
from kernels.devices.block_sparse_attention import choose_blocks_of_groups
from kernels.devices.latent_cache import write_latent
from kernels.models.config import ModelConfig
from kernels.models.layers import gqa
from kernels.models.layers.block_attention import attend_blocks
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.weights.tensors import TensorSpec, by_outputs, linear, norm

__all__ = ["GroupAttention", "GroupIndexConfig", "tensors"]


@dataclass(frozen=True)
class GroupIndexConfig:
    """Index heads of ``dim`` numbers, one for each key head, score blocks of ``size`` tokens. A query attends to
    ``chosen`` of them, the last ``local`` among these."""

    dim: int
    size: int
    chosen: int
    local: int

    def spec(self) -> Latent:
        """The index keys of all tokens."""
        return Latent(self.dim, 0)


def tensors(config: ModelConfig, index: GroupIndexConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The indexer's projections and norms, beside ``gqa.tensors``. ``gguf``: what their names begin with there."""
    heads, hidden = config.kv_heads, config.hidden_size
    split = by_outputs((heads * index.dim, heads))
    own = [
        *linear(f"{module}.index_q_proj", (heads * index.dim, hidden), split, f"{gguf}.q_proj"),
        *linear(f"{module}.index_k_proj", (index.dim, hidden), None, f"{gguf}.k_proj"),
        norm(f"{module}.index_q_norm", index.dim, f"{gguf}.q_norm"),
        norm(f"{module}.index_k_norm", index.dim, f"{gguf}.k_norm"),
    ]
    for spec in own:
        yield dataclasses.replace(spec, aliases=(spec.name.replace(".index_", ".indexer."),))


class GroupAttention:
    """The layer of ``gqa.tensors`` and ``tensors``. Its caches are one of index keys, and one of keys and values."""

    def __init__(self, builder: ModelBuilder, config: ModelConfig, index: GroupIndexConfig, module: str) -> None:
        self._index, self._attention, self._rows = index, builder.ops.attention, builder.rows
        self._heads, self._shape = config.heads, (config.heads + 2 * config.kv_heads, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._qkv = gqa.projection(builder, config, *(f"{module}.{part}_proj" for part in "qkv"))
        names, counts, eps, offset = (
            (f"{module}.q_norm", f"{module}.k_norm"),
            (config.heads, config.kv_heads),
            config.norm_eps,
            config.norm_offset,
        )
        self._norm = builder.head_norms(*names, *counts, eps, order=gqa.head_order(config), offset=offset)
        self._projections = [builder.linear(f"{module}.index_{part}_proj") for part in "qk"]
        self._norms = [builder.norm(f"{module}.index_{part}_norm", eps, offset) for part in "qk"]
        context = builder.context or config.max_positions
        self._rotary = RotaryEmbedding(config.rope, config.rotary_dim, builder.dtype, builder.ops, context)
        self._output = builder.row_parallel(f"{module}.o_proj")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        rows = batch.rows
        assert rows is not None, "such attention is part of no captured pass"
        (index_keys, pages), attention, index = cache, self._attention, self._index
        heads = self._qkv(x).view(-1, *self._shape)
        queries = attention.norm_rope_cache(heads, self._heads, self._norm, cos, sin, pages, batch.cache_index)
        index_queries, keys = self._indexed(x, batch.positions)
        write_latent(index_keys, batch.cache_index, keys.squeeze(1))
        chosen = choose_blocks_of_groups(index_queries, index_keys, rows, index.size, index.chosen, index.local)
        result = attend_blocks(attention, queries, pages, batch, self._scale, chosen)
        if wanted is not None:
            if self._rows is not None:
                self._rows.select(wanted)
            result = result.index_select(0, wanted)
        return self._output(result)

    def _indexed(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's queries [tokens, heads, dim] and keys [tokens, 1, dim], rotated by ``positions``."""
        cos, sin = self._rotary(positions)
        made = []
        for projection, normed in zip(self._projections, self._norms, strict=True):
            heads = normed(projection(x).view(len(x), -1, self._index.dim))
            turned = heads[..., : cos.shape[2]].contiguous()
            rotated = torch.empty_like(turned)
            self._attention.rotate(turned, cos, sin, out=rotated)
            made.append(torch.cat((rotated, heads[..., cos.shape[2] :]), 2))
        return made[0], made[1]
