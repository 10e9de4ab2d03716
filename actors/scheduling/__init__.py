"""The scheduler actor and its pure logic: which sequences wait or run, and the batch of the next step."""

from __future__ import annotations

from actors.scheduling.config import PlannerConfig
from actors.scheduling.planner import CacheMessage, CacheReply, Planner, StepPlan

__all__ = ["CacheMessage", "CacheReply", "Planner", "PlannerConfig", "StepPlan"]
