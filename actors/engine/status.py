"""The status and health of an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime import ActorStatus

__all__ = ["EngineStatus", "Health", "Phase"]

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
