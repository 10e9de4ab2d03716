"""Grouped-query attention to the blocks of tokens that an indexer chooses, whose results gates weight (Qwen 4).

    q = rotate(norm(index_q(x)));   k[block] = rotate(norm(mean over the block of  index_k(x)))
    output(sigmoid(gate) * attention(heads, tokens of the blocks with the highest scores))

A key is rotated by the position of its block's first token. The index keys of tokens are cached as they are projected.
All ranks have the whole indexer, and choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.attention import Attention
from kernels.devices.block_sparse_attention import attend_chosen_heads, choose_blocks
from kernels.devices.latent_cache import write_latent
from kernels.devices.sparse_attention import Chosen
from kernels.models.config import ModelConfig
from kernels.models.layers import gated_attention
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.gated_attention import GatedHeads
from kernels.models.layers.rotary import RotaryEmbedding
from kernels.weights.tensors import TensorSpec, linear, norm

__all__ = ["BlockAttention", "BlockIndexConfig", "attend_blocks", "tensors"]


@dataclass(frozen=True)
class BlockIndexConfig:
    """``heads`` of ``dim`` numbers score blocks of ``size`` tokens; a query attends to ``chosen`` of them."""

    heads: int
    dim: int
    size: int
    chosen: int

    def spec(self) -> Latent:
        """The index keys of all tokens."""
        return Latent(self.dim, 0)


def tensors(config: ModelConfig, index: BlockIndexConfig, module: str) -> Iterator[TensorSpec]:
    """Those of ``gated_attention.tensors``, and the indexer's projection and norms."""
    yield from gated_attention.tensors(config, module, "")
    yield from linear(f"{module}.indexer.index_qk_proj", ((index.heads + 1) * index.dim, config.hidden_size))
    for part in "qk":
        yield norm(f"{module}.indexer.{part}_layernorm", index.dim)


def attend_blocks(
    attention: Attention[Any, Any],
    queries: Tensor,
    pages: Any,
    batch: ForwardBatch,
    scale: float,
    chosen: Chosen | None,
) -> Tensor:
    """Attention of ``queries`` [tokens, heads, dim] to the ``chosen`` tokens of their rows -> [tokens, heads * dim];
    None: to all."""
    rows = batch.rows
    if chosen is None or rows is None:
        return attention.attend(queries, pages, batch.plans[0], scale)
    return attend_chosen_heads(
        queries,
        partial(attention.caches.gather, pages),
        rows,
        attention.caches.page_size,
        scale,
        chosen,
        lambda some, alone: attention.attend_rows(some, pages, alone, 0, scale, 0.0),
    )


class BlockAttention:
    """The layer of ``tensors``. Its caches are one of index keys, and one of keys and values."""

    def __init__(self, builder: ModelBuilder, config: ModelConfig, index: BlockIndexConfig, module: str) -> None:
        self._index, self._attention, self._rows = index, builder.ops.attention, builder.rows
        self._scale, self._dim = config.head_dim**-0.5, config.head_dim
        self._heads = GatedHeads(builder, config, module)
        own, eps = f"{module}.indexer", config.norm_eps
        self._projection = builder.linear(f"{own}.index_qk_proj")
        self._query_norm = builder.norm(f"{own}.q_layernorm", eps, config.norm_offset)
        self._key_norm = builder.norm(f"{own}.k_layernorm", eps, config.norm_offset)
        context = builder.context or config.max_positions
        self._rotary = RotaryEmbedding(config.rope, config.rotary_dim, builder.dtype, builder.ops, context)
        self._output = builder.row_parallel(f"{module}.o_proj")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        rows = batch.rows
        assert rows is not None, "such attention is part of no captured pass"
        (index_keys, pages), attention, heads = cache, self._attention, self._heads
        found, gates = heads(x)
        queries = attention.norm_rope_cache(found, heads.count, heads.norm, cos, sin, pages, batch.cache_index)
        chosen = self._choose(x, index_keys, batch, rows)
        result = attend_blocks(attention, queries, pages, batch, self._scale, chosen)
        if wanted is not None:
            if self._rows is not None:
                self._rows.select(wanted)
            result, gates = result.index_select(0, wanted), gates.index_select(0, wanted)
        return self._output(result * torch.sigmoid(gates))

    def _choose(self, x: Tensor, keys: Any, batch: ForwardBatch, rows: AttentionRows) -> Chosen | None:
        index = self._index
        projected = self._projection(x).view(len(x), -1, index.dim)
        write_latent(keys, batch.cache_index, projected[:, -1])
        if int((rows.starts + rows.counts).max()) // index.size <= index.chosen:
            return None
        queries = self._rotated(self._query_norm(projected[:, :-1].contiguous()), batch.positions)
        return choose_blocks(queries, keys, rows, index.size, index.chosen, self._compressed)

    def _compressed(self, keys: Tensor) -> Tensor:
        """One key [blocks, dim] of each block of ``keys`` [blocks, size, dim], from the sequence's first on."""
        means = self._key_norm(keys.float().mean(1).to(keys.dtype))
        positions = torch.arange(len(keys), device=keys.device) * self._index.size
        return self._rotated(means.unsqueeze(1), positions).squeeze(1)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """``heads`` [tokens, heads, dim], whose first numbers are rotated by ``positions`` int64 [tokens]."""
        cos, sin = self._rotary(positions)
        turned = heads[..., : cos.shape[2]].contiguous()
        rotated = torch.empty_like(turned)
        self._attention.rotate(turned, cos, sin, out=rotated)
        return torch.cat((rotated, heads[..., cos.shape[2] :]), 2)
