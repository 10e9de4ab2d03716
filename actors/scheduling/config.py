"""Limits and policies of the planner."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["PlannerConfig"]


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and policies of a planner. ``Planner.worker_ready`` receives those of the device (pages, context).

    Raises ValueError for limits under which some sequence could never run.
    """

    max_running: int
    max_slots: int  # slots are 1 .. max_slots - 1
    step_tokens: int  # token budget of a step, at least max_running: a decode of every sequence fits
    tail_tokens: int = 0  # a step may exceed its budget by this many tokens to finish a prompt: see StepBuilder.chunk
    max_prefill_tokens: int = 16384  # prefill tokens a step, within step_tokens
    prefill_max_requests: int | None = None  # prefill rows a step
    chunked: bool = True  # False: prompts are not split; a long one waits for a step of its own
    overlap: bool = True  # two steps in flight
    stages: int = 1  # of a pipeline: so many steps in flight, each with other sequences (micro-batches) ...
    stages_ahead: int = 0  # ... and so many more, which wait for the first stage
    micro_batch: int | None = None  # rows of such a step; None: an equal part of the running sequences
    use_cache: bool = True  # share prefixes
    policy: Literal["fcfs", "lpm"] = "fcfs"
    conservativeness: float = 1.0  # scales the pages kept for the growth of running sequences
    priority_scheduling: bool = False
    low_priority_values_first: bool = False
    preemption_threshold: int = 10  # a waiting sequence preempts when its priority exceeds by more than this
    max_adapters: int = 0  # different adapters of running sequences; 0: any number
    adaptive: str | None = None  # settings of AdaptiveConfig, JSON: fewer draft tokens where they do not pay; None: all
    ageing_seconds: float = 10.0  # waiting this long raises the effective priority by 1

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_slots < 2:
            raise ValueError("nothing can run: raise --max-running-requests to 1 or more")
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"a step of {self.step_tokens} tokens cannot hold {self.max_running} decodes: "
                "raise --chunked-prefill-size or lower --max-running-requests"
            )
        if self.max_prefill_tokens < 1:
            raise ValueError("no prompt can run: raise --max-prefill-tokens to 1 or more")
        if self.prefill_max_requests is not None and self.prefill_max_requests < 1:
            raise ValueError("no prompt can run: raise --prefill-max-requests to 1 or more")
        if self.conservativeness < 0:
            raise ValueError("--schedule-conservativeness is 0 or more")
        if self.ageing_seconds <= 0:
            raise ValueError("the seconds after which a waiting sequence ages must be more than 0")
