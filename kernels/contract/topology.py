"""Where a worker stands among the others: its rank in each kind of parallelism, its role, its id."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Rank", "Role", "WorkerId"]


class Role(enum.StrEnum):
    """Which part of a request a worker runs. Every worker of today is BOTH; the others are reserved."""

    PREFILL = "prefill"  # prompts only; the pages go to a decode worker
    DECODE = "decode"  # tokens after the first
    BOTH = "both"
    ENCODE = "encode"  # images and sounds, into embeddings


class Rank(msgspec.Struct, frozen=True):
    """A worker's rank in each kind of parallelism, counted from 0. ``dp``: the replica; ``pp``: the stage of layers;
    ``tp``: the part of each layer; ``ep``: the part of each layer's experts."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0


class WorkerId(msgspec.Struct, frozen=True):
    """One worker of an engine. ``number`` counts all of its workers, and thereby their devices, from 0."""

    number: int
    rank: Rank = Rank()
    role: Role = Role.BOTH

    @property
    def name(self) -> str:
        """The worker's name in logs, metrics and traces."""
        return f"worker-{self.number}"

    @property
    def replica(self) -> int:
        return self.rank.dp
