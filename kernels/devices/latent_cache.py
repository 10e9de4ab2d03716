"""Caches of latent vectors in plain torch, with the keys of an indexer where the spec has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.contract.caches import Latent
from kernels.devices.latent_attention import make_latent

__all__ = ["IndexedLatent", "LatentCache", "clear_latent", "make_latent_cache", "move_latent"]


@dataclass(frozen=True, eq=False)
class IndexedLatent:
    """One layer's cache with an indexer's keys: ``vectors`` [pages, page_size, dim + rope_dim], as without an indexer,
    and ``keys`` [pages, page_size, index_dim]."""

    vectors: Tensor
    keys: Tensor


LatentCache: TypeAlias = Tensor | IndexedLatent
"""One layer's."""


def make_latent_cache(
    spec: Latent, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> LatentCache:
    """One layer's cache, zeroed."""
    vectors = make_latent(pages, page_size, spec.dim + spec.rope_dim, dtype, device)
    if not spec.index_dim:
        return vectors
    return IndexedLatent(vectors, make_latent(pages, page_size, spec.index_dim, dtype, device))


def clear_latent(caches: Sequence[LatentCache], pages: Sequence[int]) -> None:
    """Zero these pages of ``caches``."""
    for part in _parts(caches):
        part[list(pages)] = 0


def move_latent(caches: Sequence[LatentCache], source: Tensor, target: Tensor) -> None:
    """As ``KvCaches.move``."""
    for part in _parts(caches):
        tokens = part.view(-1, part.shape[-1])
        tokens.index_copy_(0, target, tokens.index_select(0, source))


def _parts(caches: Sequence[LatentCache]) -> Iterator[Tensor]:
    for cache in caches:
        yield from (cache.vectors, cache.keys) if isinstance(cache, IndexedLatent) else (cache,)
