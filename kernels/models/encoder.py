"""A whole encoder, of layers that a family has made. Tokens attend to all tokens of their input, to those near them or
to those before them.

    h = embed(ids, positions, segments)
    for each layer:  h = layer(h)

Inputs of different lengths run one after the other in one batch, without padding; nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.operators import Linear
from kernels.models.config import RopeConfig
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.rotary import inverse_frequencies

__all__ = ["Angles", "Encoder", "EncoderBatch", "EncoderLayer", "attend", "rotated"]

_BLOCK = 256
"""Queries that attend together to the tokens near them. Fewer need more calls, more have more masked pairs."""


@dataclass(frozen=True)
class EncoderBatch:
    """Inputs of ``lengths`` tokens, one after the other. ``ids``, ``positions``, ``segments`` int64 [tokens]: a token's
    id, its place in its input from 0 on, and which text of a pair it belongs to."""

    ids: Tensor
    positions: Tensor
    segments: Tensor
    lengths: Sequence[int]


EncoderLayer = Callable[[Tensor, EncoderBatch], Tensor]
"""``[tokens, hidden]`` of these inputs -> the same."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """``head``: of each input's first hidden state [inputs, hidden] -> [inputs, labels]; None without a head.
    ``projection``: of each input's pooled state [inputs, hidden] -> [inputs, numbers]; None without one."""

    embed: Callable[[EncoderBatch], Tensor]
    layers: Sequence[EncoderLayer]
    head: Linear | None = None
    projection: Linear | None = None

    def forward(self, batch: EncoderBatch) -> Tensor:
        """The last hidden states [tokens, hidden]."""
        hidden = self.embed(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden


class Angles:
    """Cosines and sines of a batch's positions, each [tokens, 1, head_dim / 2] in float32, computed once a batch."""

    def __init__(self, rope: RopeConfig, head_dim: int, builder: ModelBuilder, context: int) -> None:
        frequencies, self._scale = inverse_frequencies(rope, head_dim, context)
        self._frequencies = frequencies.to(builder.ops.torch_device)
        self._batch: EncoderBatch | None = None

    def __call__(self, batch: EncoderBatch) -> tuple[Tensor, Tensor]:
        if self._batch is not batch:
            angles = batch.positions[:, None, None].float() * self._frequencies
            self._batch, self._found = batch, (angles.cos() * self._scale, angles.sin() * self._scale)
        return self._found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [tokens, heads, dim], the halves of each head rotated against one another."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attend(qkv: Tensor, heads: int, lengths: Sequence[int], causal: bool = False, reach: int = 0) -> Tensor:
    """Attention of all tokens of an input to one another (Vaswani et al., arXiv 1706.03762, section 3.2.1).

    ``qkv`` [tokens, 3 * heads * dim]: queries, then keys, then values -> [tokens, heads * dim]. Neighbors of one length
    run in one call. ``causal``: to itself and those before it alone. ``reach``: to itself and so many tokens on each
    side alone; 0: to all.
    """
    tokens = qkv.unflatten(1, (3, heads, -1))
    result, begin, first = [], 0, 0
    while first < len(lengths):
        length, last = lengths[first], first
        while last < len(lengths) and lengths[last] == length:
            last += 1
        end = begin + length * (last - first)
        parts = tokens[begin:end].unflatten(0, (-1, length)).permute(2, 0, 3, 1, 4)  # [3, inputs, heads, length, dim]
        if reach and length > reach + 1:
            values = _attend_near(parts[0], parts[1], parts[2], reach)
        else:
            values = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=causal)
        result.append(values.transpose(1, 2).reshape(end - begin, -1))
        begin, first = end, last
    return torch.cat(result)


def _attend_near(queries: Tensor, keys: Tensor, values: Tensor, reach: int) -> Tensor:
    """``attend`` with a reach, of [inputs, heads, length, dim]. Blocks of queries read only the keys near them, so that
    time and memory grow with the length and not with its square."""
    length, result = queries.shape[2], []
    places = torch.arange(length, device=queries.device)
    for begin in range(0, length, _BLOCK):
        end = min(begin + _BLOCK, length)
        near = slice(max(begin - reach, 0), min(end + reach, length))
        seen = (places[begin:end, None] - places[near]).abs() <= reach
        result.append(
            F.scaled_dot_product_attention(
                queries[:, :, begin:end], keys[:, :, near], values[:, :, near], attn_mask=seen
            )
        )
    return torch.cat(result, 2)
