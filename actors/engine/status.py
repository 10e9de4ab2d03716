"""The status and health of an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime import ActorStatus

__all__ = ["EngineStatus", "Health", "Phase", "ReplicaLoad"]

Phase = Literal["starting", "ready", "draining", "failed", "stopped"]


class EngineStatus(msgspec.Struct, frozen=True):
    """``progress`` of the start, 0 .. 1; ``stage``: the current stage of the start; ``error``: why it failed;
    ``permanent``: whether a start with the same arguments fails again."""

    phase: Phase
    progress: float
    stage: str
    error: str | None = None
    permanent: bool = False


class Health(msgspec.Struct, frozen=True):
    """Whether work makes progress: ``ok`` is False when work waits and no step ends. ``reason``: what is stuck."""

    ok: bool
    reason: str
    step_age: float  # seconds since the oldest step without a result was sent
    actors: list[ActorStatus]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one replica, under SGLang's names. ``num_total_tokens``: those in the cache and those that wait.
    ``token_usage``: the part of the cache in use. ``utilization``: running sequences of those that may run.
    ``cache_hit_rate``: cached tokens of all prompt tokens since the start. ``paused``: see Engine.pause_generation."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    paused: bool
