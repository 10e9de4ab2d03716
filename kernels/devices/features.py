"""What a kind of device does for every model: facts that hold before a device is opened."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceFeatures"]


@dataclass(frozen=True)
class DeviceFeatures:
    """``collectives``: torch.distributed's library for several ranks; "": it runs one rank alone. ``cache_dtypes``:
    what keys and values can be kept in, by the names of ``CACHE_DTYPES``. ``captures``: whether decodes are
    captured, ``captures_states``: also where layers keep states. ``plans_latent``, ``plans``: as those of
    ``Attention``."""

    collectives: str
    cache_dtypes: frozenset[str]
    captures: bool
    plans_latent: bool = False
    plans: frozenset[str] = frozenset()
    captures_states: bool = False
