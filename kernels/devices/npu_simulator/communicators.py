"""The groups of ranks that operators find by the name of their communicator."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["COMMUNICATORS", "Communicator"]


class Communicator(Protocol):
    """A group that a rank belongs to."""

    generation: str

    def gather_host(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, of the same shape on all. Raises RuntimeError as the device does."""
        ...


COMMUNICATORS: dict[str, Communicator] = {}
"""Of this process, by name."""
