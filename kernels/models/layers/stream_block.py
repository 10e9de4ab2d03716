"""A decoder layer between several residual streams, whose halves read and write them through hyper-connections.

streams = connect(streams, attention(norm(x)));  streams = connect(streams, feed_forward(norm(x)))
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Linear, Norm, PendingResidual
from kernels.distributed.turns import PassValue
from kernels.models.layers.block import AttentionLayer

__all__ = ["Connection", "StreamBlock", "StreamHalf"]

Weights: TypeAlias = tuple[Tensor, ...]


class Connection(Protocol):
    """The streams [tokens, count, hidden] around one half of a layer."""

    def read(self, streams: Tensor) -> tuple[Tensor, Weights]:
        """What the half reads [tokens, hidden], and the weights of ``write``, each [tokens, ...]."""
        ...

    def write(self, streams: Tensor, result: Tensor, weights: Weights) -> Tensor:
        """The streams after the half's ``result`` [tokens, hidden]."""
        ...


class StreamHalf:
    """One half of a layer: the ``connection`` around it, and the ``norm`` of what it reads."""

    def __init__(self, connection: Connection, norm: Norm) -> None:
        self.connection, self.norm = connection, norm

    def read(self, streams: Tensor) -> tuple[Tensor, Weights]:
        """As ``Connection.read``, normed."""
        mixed, weights = self.connection.read(streams)
        return self.norm(mixed), weights


class StreamBlock:
    """A layer between ``count`` streams [tokens, count * hidden]. ``is_first``: it reads embeddings [tokens, hidden].
    ``tokens``: gets the ids of the feed-forward layer's rows, for experts that are chosen by them."""

    def __init__(
        self,
        attention: tuple[StreamHalf, AttentionLayer],
        feed_forward: tuple[StreamHalf, Linear],
        count: int,
        *,
        is_first: bool,
        tokens: PassValue | None = None,
    ) -> None:
        self.around_attention, self.attention = attention
        self.around_feed_forward, self.feed_forward = feed_forward
        self.count, self.is_first, self.tokens = count, is_first, tokens

    @property
    def first_norm(self) -> Norm | None:
        """None: streams are mixed before they are normed."""
        return None

    def set_next_norm(self, norm: Norm) -> None:
        """Nothing: no product of this layer is fused with the norm after it."""

    def __call__(
        self,
        x: PendingResidual,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        batch: ForwardBatch,
        wanted: Tensor | None = None,
    ) -> tuple[PendingResidual, Tensor]:
        """As ``DecoderLayer``, but for the streams."""
        count = self.count
        streams = residual.unsqueeze(1).expand(-1, count, -1) if self.is_first else residual.unflatten(1, (count, -1))
        mixed, weights = self.around_attention.read(streams)
        result = self.attention(mixed, cos, sin, cache, batch, wanted)
        if wanted is not None:
            streams = streams.index_select(0, wanted)
            weights = tuple(one.index_select(0, wanted) for one in weights)
        streams = self.around_attention.connection.write(streams, result, weights)
        if self.tokens is not None:
            self.tokens.value = batch.token_ids if wanted is None else batch.token_ids.index_select(0, wanted)
        mixed, weights = self.around_feed_forward.read(streams)
        streams = self.around_feed_forward.connection.write(streams, self.feed_forward(mixed), weights)
        return None, streams.flatten(1)
