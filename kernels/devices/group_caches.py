"""The caches of a group of layers, by their spec. What a device has no kernels for is kept in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from kernels.contract.caches import GroupPages, Latent, Paged, State
from kernels.contract.errors import UnsupportedError
from kernels.devices.base import Device
from kernels.devices.state_cache import make_states
from kernels.weights.quantization.cache import LayerScales, narrow

__all__ = ["make_group", "token_bytes"]

_log = logging.getLogger("troupe.kernels")


def make_group(
    device: Device,
    pages: GroupPages,
    page_size: int,
    dtype: torch.dtype,
    scales: Sequence[LayerScales] | None = None,
) -> list[Any]:
    """One cache for each layer of the group, zeroed. Raises UnsupportedError.

    dtype: of keys, values and latent vectors. scales: of every layer of the model, for keys and values in 8 bits.
    """
    group = pages.group
    if isinstance(group.spec, State):
        _log_plain("states", device.name)
        return [make_states(group.spec, pages.num_pages, device.torch_device) for _ in group.layers]
    if isinstance(group.spec, Latent):
        _log_plain("latent vectors", device.name)
        given = group.spec, pages.num_pages, page_size, dtype, device.torch_device
        return [device.cache.make_latent(*given) for _ in group.layers]
    paged = group.spec if isinstance(group.spec, Paged) else group.spec.paged
    own = None if scales is None else [scales[layer] for layer in group.layers]
    return device.cache.make(
        len(group.layers), pages.num_pages, page_size, paged.kv_heads, _head_dim(paged), dtype, own
    )


def token_bytes(device: Device, spec: Paged | Latent, dtype: torch.dtype, fixed: bool) -> int:
    """Bytes of one token in one layer, as ``make_group`` keeps it. ``fixed``: whether scales were found before. Raises
    UnsupportedError."""
    if isinstance(spec, Latent):
        kept = device.cache.dtype or dtype
        return spec.token_bytes(kept.itemsize, device.cache.scale_dtype.itemsize if narrow(kept) else 0)
    return device.cache.token_bytes(spec.kv_heads, _head_dim(spec), dtype, fixed)


@cache
def _log_plain(kind: str, device: str) -> None:
    """Once for each kind and device."""
    _log.info("Layers that keep %s run in plain torch: %s has no kernels for them.", kind, device)


def _head_dim(paged: Paged) -> int:
    if paged.k_dim != paged.v_dim:
        raise UnsupportedError(
            f"keys of {paged.k_dim} and values of {paged.v_dim} numbers are not supported: pad the shorter ones"
        )
    return paged.k_dim
