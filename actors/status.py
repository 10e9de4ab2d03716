"""What an engine says of itself."""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime import ActorStatus

__all__ = ["EngineStatus", "Health", "Phase"]

Phase = Literal["starting", "ready", "draining", "failed", "stopped"]


class EngineStatus(msgspec.Struct, frozen=True):
    """``progress`` of the start is 0 .. 1; ``stage`` names what it is busy with; ``error`` says why it failed, and
    ``permanent`` that a start with the same arguments fails again."""

    phase: Phase
    progress: float
    stage: str
    error: str | None = None
    permanent: bool = False


class Health(msgspec.Struct, frozen=True):
    """Progress, not existence: ``ok`` is False when work waits and nothing moves. ``reason`` says what is stuck."""

    ok: bool
    reason: str
    step_age: float  # seconds the device has owed an answer
    actors: list[ActorStatus]
