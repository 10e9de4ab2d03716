"""How the ranks of a model exchange tensors of a device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Communication"]


@dataclass(frozen=True)
class Communication:
    """``backend``: torch.distributed's name of the library for collectives over this device's tensors."""

    backend: str
