"""Embeddings of the last few tokens, added to the residual streams of a layer (Qwen 4, "per-layer embedding").

Each n-gram of 2 to ``size`` tokens that ends with a token is hashed by several heads; each head has a table:

    id[head] = xor over i < n of (token[-i] * multiplier[i])  mod  prime[head]

Tokens before the last end of a text, and before the sequence, are that end's token. The embeddings of all heads make a
value, and for each stream a key, which gates the value; a convolution over the last tokens follows:

    g = norm(key) @ norm(stream) / sqrt(hidden);   v = sigmoid(sqrt(|g|) * sign(g)) * value
    stream = stream + v + silu(convolution(norm(v)))

The state of a sequence is the inputs of the convolution, and the last ``size - 1`` tokens, less the end's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.devices.state_cache import StateCache, advance_states
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.hyper_connections import stream_norm
from kernels.models.layers.recurrent import CausalConvolution, inputs_after
from kernels.weights.tensors import Role, Split, TensorSpec, linear, norm

__all__ = ["NgramConfig", "NgramEmbedding", "tensors"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_STEP = 10007  # from one layer's seed to the next one's


@dataclass(frozen=True)
class NgramConfig:
    """``layers``: which have such embeddings, in order. ``size``: tokens of the longest n-gram; ``heads``: of each
    length. ``dim``: numbers of all heads' embeddings. ``taps``: of the convolution, ``size`` tokens apart. ``base``:
    the least size of a head's table; ``multiple``: of the sum of these sizes, rounded up; ``parts``: that files have
    it in. ``seed``: of the multipliers. ``end``: the id of the token that ends a text. ``vocab``: ids of tokens."""

    layers: tuple[int, ...]
    size: int
    heads: int
    dim: int
    taps: int
    base: int
    multiple: int
    parts: int
    seed: int
    end: int
    vocab: int

    @property
    def head_count(self) -> int:
        """Of all lengths."""
        return (self.size - 1) * self.heads

    @property
    def head_dim(self) -> int:
        """Numbers of a head's embedding."""
        return self.dim // self.head_count

    def state(self, width: int) -> State:
        """What a layer whose streams have ``width`` numbers in all keeps of a sequence."""
        return State((((self.taps - 1) * self.size, width), (self.size - 1,)))

    @cached_property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the heads' tables, of each of ``layers``."""
        found, last = [], self.base - 1
        for _ in self.layers:
            sizes = []
            for _ in range(self.head_count):
                last = _prime_after(last)
                sizes.append(last)
            found.append(tuple(sizes))
        return tuple(found)

    def rows(self, place: int) -> int:
        """Of the table of the ``place``-th of ``layers``."""
        return -(-sum(self.primes[place]) // self.multiple) * self.multiple

    def multipliers(self, place: int) -> list[int]:
        """Of the tokens of an n-gram, the last token's first: odd, so small that products are below 2 ** 63."""
        seed = self.seed + _SEED_STEP * place
        bound = max(1, ((1 << 63) - 1) // self.vocab // 2)
        return [2 * (_mixed(seed + _GOLDEN * (index + 1)) % bound) + 1 for index in range(self.size)]


def tensors(config: NgramConfig, place: int, module: str, hidden: int, streams: int) -> Iterator[TensorSpec]:
    """The table, in its parts, of which each rank has columns; the projections, the norms and the convolution."""
    table, rows, width = f"{module}.ple_embedding.ngram_embedding", config.rows(place), streams * hidden
    each, split = -(-rows // config.parts), Split(1, ((config.head_dim, config.head_dim),))
    unread = tuple(
        f"{module}.ple_embedding.{name}"
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    )
    for part, begin in enumerate(range(0, rows, each)):
        shape = (min(each, rows - begin), config.head_dim)
        name = f"{table}.shard_{part}.weight"
        yield TensorSpec(name, shape, Role.EMBEDDING, split, unread=unread if part == 0 else ())
    yield from linear(f"{module}.key_proj", (width, config.dim))
    yield from linear(f"{module}.value_proj", (hidden, config.dim))
    for name in ("key", "query", "conv"):
        yield norm(f"{module}.norm_{name}", width)
    yield TensorSpec(f"{module}.conv1d.weight", (width, 1, config.taps), Role.WIDE)


class NgramEmbedding:
    """What the ``place``-th of ``config.layers`` adds to its ``streams``."""

    def __init__(
        self, builder: LayerBuilder, config: NgramConfig, place: int, module: str, streams: int, eps: float
    ) -> None:
        mesh, device = builder.mesh, builder.ops.torch_device
        if config.head_dim % mesh.size:
            raise ConfigError(
                f"ple_embed_dim {config.dim} of {config.head_count} heads cannot be divided by --tensor-parallel-size "
                f"{mesh.size}; lower it"
            )
        table, each = f"{module}.ple_embedding.ngram_embedding", -(-config.rows(place) // config.parts)
        parts = -(-config.rows(place) // each)
        names = [f"{table}.shard_{part}.weight" for part in range(parts)]
        self._lookup, self._mesh = builder.ops.linear.make_lookup(builder.source.take(names)), mesh
        self._key, self._value = builder.linear(f"{module}.key_proj"), builder.linear(f"{module}.value_proj")
        self._norms = [stream_norm(builder, f"{module}.norm_{name}", streams, eps) for name in ("key", "query", "conv")]
        weight = builder.source.take([f"{module}.conv1d.weight"])
        self._convolution = CausalConvolution(weight, dilation=config.size)
        self._config, self._streams, self._spec = config, streams, config.state(weight.shape[0])
        sizes = config.primes[place]
        self._multipliers = config.multipliers(place)
        self._sizes = torch.tensor(sizes, device=device).view(-1, config.heads)
        self._offsets = torch.tensor([sum(sizes[:head]) for head in range(len(sizes))], device=device)

    def __call__(self, streams: Tensor, cache: StateCache, batch: ForwardBatch) -> Tensor:
        """``streams`` [tokens, count * hidden] with what is added to them."""
        config, count = self._config, self._streams
        rows = batch.bounded[self._spec]
        ids = rows.run(lambda parts, segments: self._ids(parts[0], cache[1:], segments), batch.token_ids)
        found = self._lookup(ids.flatten())
        if self._mesh.size > 1:
            found = self._mesh.all_gather(found)
        found = found.view(-1, config.dim)
        key, query, conv = self._norms
        value, each = self._value(found), streams.unflatten(1, (count, -1))
        gates = (key(self._key(found).view_as(each)) * query(each)).sum(-1, keepdim=True) / math.sqrt(each.shape[2])
        gates = gates.abs().clamp_min(1e-6).sqrt() * gates.sign()
        gated = torch.sigmoid(gates) * value.unsqueeze(1)
        around = rows.run(
            lambda parts, segments: self._convolved(parts[0], cache[:1], segments), conv(gated).flatten(1)
        )
        return streams + (gated.flatten(1) + around)

    def _ids(self, tokens: Tensor, cache: StateCache, segments: tuple[StateSegments, ...]) -> Tensor:
        """The rows of the table [tokens, heads] that ``tokens`` [tokens] find."""
        config, end = self._config, self._config.end
        out = torch.empty((len(tokens), config.head_count), dtype=torch.int64, device=tokens.device)

        def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
            own = segment.take(tokens).long()
            wide, count = torch.cat((states[0].long() + end, own), 1), own.shape[1]
            mixed, ended, heads = own * self._multipliers[0], torch.zeros_like(own, dtype=torch.bool), []
            for distance in range(1, config.size):
                before = wide[:, config.size - 1 - distance :][:, :count]
                ended = ended | (before == end)
                mixed = mixed ^ (before.masked_fill(ended, end) * self._multipliers[distance])
                heads.append(mixed.unsqueeze(-1) % self._sizes[distance - 1])
            segment.put(out, torch.cat(heads, -1) + self._offsets)
            return [inputs_after(wide - end, config.size - 1, segment.lengths)]

        advance_states(cache, segments, advance)
        return out

    def _convolved(self, x: Tensor, cache: StateCache, segments: tuple[StateSegments, ...]) -> Tensor:
        out = torch.empty_like(x)

        def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
            results, after = self._convolution(segment.take(x), states[0], segment.lengths)
            segment.put(out, results)
            return [after]

        advance_states(cache, segments, advance)
        return out


def _mixed(value: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014) of a state."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _prime_after(value: int) -> int:
    """The least prime above ``value``."""
    value += 1
    while value < 2 or any(value % divisor == 0 for divisor in range(2, math.isqrt(value) + 1)):
        value += 1
    return value
