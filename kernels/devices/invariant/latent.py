"""Attention over latent vectors in the latent space, for each query over blocks of vectors as
``kernels.devices.invariant.attention`` says. The products that lead into the latent space and out of it are in tiles of
one size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.invariant.attention import InvariantPlan, attend
from kernels.devices.invariant.matmul import TILE, rows_alike
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import Vectors, read_latent

__all__ = ["attend_latent"]

_alike: dict[tuple[object, ...], bool] = {}
"""Whether ``rows_alike`` found so, by device, dtype and shape."""


def attend_latent(queries: Tensor, cache: Vectors, plan: InvariantPlan, heads: LatentHeads, scale: float) -> Tensor:
    """As ``Attention.attend_latent``."""
    dim = heads.keys.shape[1]
    absorbed = torch.cat((_by_head(queries[..., :dim], heads.keys), queries[..., dim:]), 2)

    def read(places: Tensor) -> Tensor:
        return read_latent(cache, places).view(-1, 1, 1, absorbed.shape[2]).expand(-1, 2, -1, -1)

    found = attend(absorbed, 1, read, plan, scale).view(absorbed.shape)
    return _by_head(found[..., : heads.rank], heads.values)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [tokens, heads, k] times ``weight`` [heads, k, n] -> [tokens, heads, n]."""
    shape = len(weight), TILE, weight.shape[1]
    key = weight.device, weight.dtype, weight.shape, torch.get_num_threads()
    if key not in _alike:
        _alike[key] = rows_alike(lambda part: torch.bmm(part, weight), shape, weight)
    tile, tokens = TILE if _alike[key] else 1, len(x)
    held = x.new_zeros((len(weight), -(-tokens // tile) * tile, weight.shape[1]))
    held[:, :tokens] = x.transpose(0, 1)
    parts = [torch.bmm(part.contiguous(), weight) for part in held.split(tile, 1)]
    return torch.cat(parts, 1)[:, :tokens].transpose(0, 1)
