"""Cache specs: what the layers of a model keep of past tokens, and how many bytes that takes.

Layers that keep the same form one :class:`CacheGroup`. There are four kinds:

- :class:`Paged`: keys and values of every token, in pages;
- :class:`Latent`: one compressed vector of every token, in pages (MLA, DeepSeek-AI, arXiv 2405.04434, section 2.1);
- :class:`Window`: keys and values of the last ``tokens`` tokens, in pages; a page outside of the window is given back;
- :class:`State`: one state a sequence, whatever its length (linear attention, state-space models). Snapshots of it are
  kept at page borders, so that sequences can share prefixes.

``Paged`` and ``Latent`` groups keep all tokens: they share the main page table, whose pages have the same ids in all of
their layers. ``Window`` and ``State`` groups are *bounded*: a sequence holds a limited number of their pages, whatever
its length. Each has a page table of its own. Its column ``i`` stands for the tokens ``i * page_tokens ..``; a page of a
state holds the state after the last of them. To go on at position ``n``, a step reads the columns of the ``lookback``
tokens before ``n`` and writes those of its own tokens.

This module imports no torch: both sides of the process boundary use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import msgspec

__all__ = [
    "CacheGroup",
    "CacheSpec",
    "GroupPages",
    "Latent",
    "PageGrants",
    "PageRun",
    "Paged",
    "State",
    "Window",
    "follows_chains",
    "has_states",
    "is_plain",
    "keep_all",
]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Paged(msgspec.Struct, frozen=True, tag="paged"):
    """Keys [kv_heads, k_dim] and values [kv_heads, v_dim] of every token, in each layer."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def lookback(self) -> int | None:
        """Tokens before the next one that a step reads; None: all."""
        return None

    def token_bytes(self, number_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of one token in one layer. ``scale_bytes``: of each head's scale, for keys and for values."""
        return self.kv_heads * ((self.k_dim + self.v_dim) * number_bytes + 2 * scale_bytes)


class Latent(msgspec.Struct, frozen=True, tag="latent"):
    """One vector [dim + rope_dim] of every token, in each layer: what all heads' keys and values are made from, and the
    part of the key that carries the position. ``index_dim``: numbers of one more key, by which an indexer chooses the
    tokens that are attended to (DeepSeek-AI, arXiv 2512.02556, section 2.1); 0: all are."""

    dim: int
    rope_dim: int
    index_dim: int = 0

    @property
    def lookback(self) -> int | None:
        """Tokens before the next one that a step reads; None: all."""
        return None

    def token_bytes(self, number_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of one token in one layer. ``scale_bytes``: of the scale of each of these parts."""
        parts = [size for size in (self.dim, self.rope_dim, self.index_dim) if size]
        return sum(parts) * number_bytes + len(parts) * scale_bytes


class Window(msgspec.Struct, frozen=True, tag="window"):
    """What ``paged`` keeps, of the last ``tokens`` tokens: a query sees itself and the ``tokens - 1`` before it.
    ``chunks``: it sees only those of them from the last multiple of ``tokens`` on."""

    paged: Paged
    tokens: int
    chunks: bool = False

    @property
    def length(self) -> int:
        """As ``ModelConfig.windows`` has it."""
        return -self.tokens if self.chunks else self.tokens

    @property
    def lookback(self) -> int | None:
        """Tokens before the next one that a step reads; None: all."""
        return self.tokens - 1

    def token_bytes(self, number_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of one token in one layer, while it is inside of the window."""
        return self.paged.token_bytes(number_bytes, scale_bytes)


class State(msgspec.Struct, frozen=True, tag="state"):
    """One state a sequence in each layer: tensors of ``shapes``, of ``dtype`` (float32 | bfloat16 | float16)."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    @property
    def lookback(self) -> int | None:
        """Tokens before the next one that a step reads; None: all."""
        return 1

    def sequence_bytes(self) -> int:
        """Bytes of one state in one layer. Raises ValueError for an unknown dtype."""
        size = _DTYPE_BYTES.get(self.dtype)
        if size is None:
            raise ValueError(f"a state of dtype {self.dtype!r} is not supported; use one of {', '.join(_DTYPE_BYTES)}")
        return size * sum(prod(shape) for shape in self.shapes)


CacheSpec: TypeAlias = Paged | Latent | Window | State


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers with the same spec. ``layers``: their indices in the model, in order."""

    spec: CacheSpec
    layers: tuple[int, ...]


def keep_all(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups of layers that keep all tokens where they need only a window of them."""
    layers: dict[CacheSpec, list[int]] = {}
    for group in groups:
        spec = group.spec.paged if isinstance(group.spec, Window) else group.spec
        layers.setdefault(spec, []).extend(group.layers)
    return tuple(CacheGroup(spec, tuple(sorted(result))) for spec, result in layers.items())


def is_plain(groups: Sequence[CacheGroup]) -> bool:
    """Whether every layer keeps keys and values of all tokens: one page table serves the whole model."""
    return all(isinstance(group.spec, Paged) for group in groups)


def has_states(groups: Sequence[CacheGroup]) -> bool:
    """Whether some layers keep states."""
    return any(isinstance(group.spec, State) for group in groups)


def follows_chains(groups: Sequence[CacheGroup]) -> bool:
    """Whether draft tokens must be chains: bounded groups have a place for each position, not for each draft token."""
    return any(group.spec.lookback is not None for group in groups)


class GroupPages(msgspec.Struct, frozen=True):
    """The pages that a group has on a device. Usable ids are ``1 .. num_pages - 1``; page 0 is the null page.

    ``page_tokens``: tokens that a page stands for; of a state, from one snapshot to the next: a multiple of the main
    table's. ``page_bytes``: of one page over the group's layers. ``draft_tokens``: most that a step verifies of a
    sequence.
    """

    group: CacheGroup
    num_pages: int
    page_tokens: int
    page_bytes: int = 0
    draft_tokens: int = 0

    @property
    def bounded(self) -> bool:
        """Whether a sequence holds a limited number of pages, in a page table of the group's own."""
        return self.group.spec.lookback is not None

    @property
    def lookback(self) -> int:
        """As the spec's, of a bounded group. Raises ValueError for one that keeps all tokens."""
        lookback = self.group.spec.lookback
        if lookback is None:
            raise ValueError("a group that keeps all tokens reads all of them")
        return lookback

    def sequence_pages(self, page_size: int) -> int:
        """Most pages that a sequence holds between steps, its chunks of prompt left out.

        ``page_size``: tokens of a main page. A sequence may have two tokens in flight, each with draft tokens, and a
        page that is not committed yet, and its capacity is rounded up to a page. Both ends of what it holds may lie
        inside of a page.
        """
        return -(-(self.lookback + 2 * (page_size + self.draft_tokens)) // self.page_tokens) + 2

    def columns(self, tokens: int, page_size: int) -> int:
        """Columns of a page table for sequences that end after so many ``tokens``, with what steps in flight may take
        beyond."""
        return -(-(tokens + 2 + 2 * self.draft_tokens + page_size) // self.page_tokens)

    def step_pages(self, step_tokens: int) -> int:
        """Pages that the prompt chunks of two steps in flight take, together."""
        return -(-2 * step_tokens // self.page_tokens)


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive columns of a bounded group's page table: ``first ..``, with their ``pages`` int32."""

    first: int
    pages: bytes = b""


class PageGrants(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one bounded group: ``slots`` int32 [grants], each with the page int32 that is appended to its table."""

    slots: bytes = b""
    pages: bytes = b""
