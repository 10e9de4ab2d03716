"""Pure decisions of the scheduler: what waits, what runs, and what the next step is."""

from __future__ import annotations

from actors.scheduling.config import PlannerConfig
from actors.scheduling.planner import CacheMessage, CacheReply, Planner, StepPlan

__all__ = ["CacheMessage", "CacheReply", "Planner", "PlannerConfig", "StepPlan"]
