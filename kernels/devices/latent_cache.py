"""Caches of latent vectors in plain torch, in the model's dtype or in fewer bits, with the keys of an indexer where the
spec has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.weights.quantization.cache import SCALE, narrow, round_tokens

__all__ = [
    "IndexedLatent",
    "LatentCache",
    "NarrowLatent",
    "SplitLatent",
    "Vectors",
    "clear_latent",
    "latent_tensors",
    "make_latent",
    "make_latent_cache",
    "move_latent",
    "page_size_of",
    "read_latent",
    "write_latent",
]


@dataclass(frozen=True, eq=False)
class NarrowLatent:
    """Vectors that are kept in other bits than the model's. A vector consists of ``parts``, of so many numbers each,
    which differ in size: what keys and values are made from is normed, the rotated part of a key is not.

    ``values`` [pages, page_size, width]: numbers of ``kept``, or the bytes of it if it has 8 bits. ``scales`` [pages,
    page_size, parts]: of each token, with 8 bits. ``dtype``: of the vectors that are read.
    """

    values: Tensor
    scales: Tensor | None
    parts: tuple[int, ...]
    kept: torch.dtype
    dtype: torch.dtype

    def write(self, index: Tensor, vectors: Tensor) -> None:
        """As ``write_latent``."""
        values = self.values.view(-1, self.values.shape[-1])
        if self.scales is None:
            values.index_copy_(0, index, vectors.to(self.kept))
            return
        rounded = [round_tokens(part, self.kept, self.scales.dtype) for part in vectors.split(self.parts, 1)]
        values.index_copy_(0, index, torch.cat([part.view(torch.int8) for part, _ in rounded], 1))
        scales = torch.stack([scale for _, scale in rounded], 1)
        self.scales.view(-1, len(self.parts)).index_copy_(0, index, scales)

    def read(self, places: Tensor) -> Tensor:
        """As ``read_latent``."""
        values = self.values.view(-1, self.values.shape[-1]).index_select(0, places)
        if self.scales is None:
            return values.to(self.dtype)
        scales = self.scales.view(-1, len(self.parts)).index_select(0, places).float()
        sizes = torch.tensor(self.parts, device=values.device)
        wide = values.view(self.kept).float()
        return wide.mul_(scales.repeat_interleave(sizes, 1, output_size=sum(self.parts))).to(self.dtype)


@dataclass(frozen=True, eq=False)
class SplitLatent:
    """Vectors in two tensors: ``latent`` [pages, page_size, dim] and ``rotated`` [pages, page_size, rope_dim]."""

    latent: Tensor
    rotated: Tensor


Vectors: TypeAlias = Tensor | NarrowLatent | SplitLatent
"""One vector of each token: [pages, page_size, width]."""


@dataclass(frozen=True, eq=False)
class IndexedLatent:
    """One layer's cache with an indexer's ``keys``, of ``index_dim`` numbers; ``vectors`` as without an indexer."""

    vectors: Vectors
    keys: Vectors


LatentCache: TypeAlias = Vectors | IndexedLatent | tuple[Vectors | IndexedLatent, Vectors]
"""One layer's; in a tuple the cache of another layer that it reads, and the index keys of its own."""


def make_latent(pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One layer's cache [pages, page_size, width], zeroed."""
    return torch.zeros(pages, page_size, width, dtype=dtype, device=device)


def make_latent_cache(
    spec: Latent,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kept: torch.dtype | None = None,
    scale_dtype: torch.dtype = SCALE,
) -> LatentCache:
    """One layer's cache, zeroed. ``dtype``: of vectors that are written and read. ``kept``: what they are kept in;
    None: the same. ``scale_dtype``: of their scales, if they are kept in 8 bits."""

    def make(*parts: int) -> Vectors:
        if kept is None:
            return make_latent(pages, page_size, sum(parts), dtype, device)
        held = torch.int8 if narrow(kept) else kept
        scales = make_latent(pages, page_size, len(parts), scale_dtype, device) if narrow(kept) else None
        return NarrowLatent(make_latent(pages, page_size, sum(parts), held, device), scales, parts, kept, dtype)

    vectors = make(*(part for part in (spec.dim, spec.rope_dim) if part))
    return IndexedLatent(vectors, make(spec.index_dim)) if spec.index_dim else vectors


def page_size_of(cache: Vectors) -> int:
    """Tokens of a page."""
    return next(_tensors(cache)).shape[1]


def write_latent(cache: Vectors, index: Tensor, vectors: Tensor) -> None:
    """Write ``vectors`` [tokens, width] to ``index`` int64 [tokens] (page * page_size + offset)."""
    if isinstance(cache, NarrowLatent):
        return cache.write(index, vectors)
    if isinstance(cache, SplitLatent):
        width = cache.latent.shape[2]
        write_latent(cache.latent, index, vectors[:, :width])
        return write_latent(cache.rotated, index, vectors[:, width:])
    cache.view(-1, cache.shape[-1]).index_copy_(0, index, vectors)


def read_latent(cache: Vectors, places: Tensor) -> Tensor:
    """The vectors [n, width] of ``places`` int64 [n] (page * page_size + offset)."""
    if isinstance(cache, NarrowLatent):
        return cache.read(places)
    if isinstance(cache, SplitLatent):
        return torch.cat((read_latent(cache.latent, places), read_latent(cache.rotated, places)), 1)
    return cache.view(-1, cache.shape[-1]).index_select(0, places)


def clear_latent(caches: Sequence[LatentCache], pages: Sequence[int]) -> None:
    """Zero these pages of ``caches``."""
    for part in _parts(caches):
        part[list(pages)] = 0


def move_latent(caches: Sequence[LatentCache], source: Tensor, target: Tensor) -> None:
    """As ``KvCaches.move``."""
    for part in _parts(caches):
        tokens = part.view(-1, part.shape[-1])
        tokens.index_copy_(0, target, tokens.index_select(0, source))


def latent_tensors(cache: LatentCache) -> Iterator[Tensor]:
    """The tensors of a ``cache``, each [pages, page_size, n]."""
    if isinstance(cache, tuple):
        for part in cache:
            yield from latent_tensors(part)
        return
    for vectors in (cache.vectors, cache.keys) if isinstance(cache, IndexedLatent) else (cache,):
        yield from _tensors(vectors)


def _parts(caches: Sequence[LatentCache]) -> Iterator[Tensor]:
    """The tensors of ``caches``, each once: layers may share one."""
    found = [part for cache in caches for part in latent_tensors(cache)]
    yield from {id(part): part for part in found}.values()


def _tensors(vectors: Vectors) -> Iterator[Tensor]:
    if isinstance(vectors, Tensor):
        yield vectors
    elif isinstance(vectors, SplitLatent):
        yield from (vectors.latent, vectors.rotated)
    else:
        yield vectors.values
        if vectors.scales is not None:
            yield vectors.scales
