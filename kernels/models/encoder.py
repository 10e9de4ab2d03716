"""A whole encoder, of layers that a family has made. Tokens attend to all tokens of their input, or to those before
them.

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

__all__ = ["Encoder", "EncoderBatch", "EncoderLayer", "attend"]


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


def attend(qkv: Tensor, heads: int, lengths: Sequence[int], causal: bool = False) -> Tensor:
    """Attention of all tokens of an input to one another (Vaswani et al., arXiv 1706.03762, section 3.2.1).

    ``qkv`` [tokens, 3 * heads * dim]: queries, then keys, then values -> [tokens, heads * dim]. Neighbors of one length
    run in one call. ``causal``: to itself and those before it alone.
    """
    tokens = qkv.unflatten(1, (3, heads, -1))
    result, begin, first = [], 0, 0
    while first < len(lengths):
        length, last = lengths[first], first
        while last < len(lengths) and lengths[last] == length:
            last += 1
        end = begin + length * (last - first)
        parts = tokens[begin:end].unflatten(0, (-1, length)).permute(2, 0, 3, 1, 4)  # [3, inputs, heads, length, dim]
        values = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=causal)
        result.append(values.transpose(1, 2).reshape(end - begin, -1))
        begin, first = end, last
    return torch.cat(result)
