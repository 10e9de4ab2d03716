"""The scheduler actor and its pure logic: which sequences wait or run, and the batch of the next step.

From the outside in; only the first is an actor, the others are synchronous and know neither loop nor device:

    scheduler.py            Scheduler: receives requests and results, asks the cache, sends steps (``_schedule``)
    planner.py              Planner: takes the results of steps; its state survives between steps
    planning.py             StepPlanning: fills one step: decodes, then chunks of prompts, preemption for lack of pages
    policy.py               Policy: the order in which waiting sequences start; fairness.py: the turn of each API key
    waiting.py, scores.py   the queue of waiting sequences, and tasks that end with their prompt
    sequence_table.py       SequenceTable: every sequence, its state and its moves between waiting, prefill and decode
    sequence.py             Sequence: one of them
    step_builder.py         StepBuilder: a step under construction; InFlightStep: one without a result yet
    growth.py               pages kept free for the tokens that running sequences will sample
    bounded_reservations.py the same for windows and states; adapter_places.py: which adapters may run together
    in_flight_prefixes.py   prompts that wait for a shared prefix which another sequence computes now
    slots.py                free slots of the worker and their generations
    speculation/            how many draft tokens each decode verifies
    lockstep.py             Lockstep: with data-parallel attention, the rounds in which all replicas send a step
    timeline_writer.py      the scheduler's part of the timelines of requests
    config.py               PlannerConfig: limits and policies    testing.py: a runner without a model, for tests

A new order of waiting sequences is a branch of ``policy.py`` and a value of ``--schedule-policy``.
"""

from __future__ import annotations

from actors.scheduling.config import PlannerConfig
from actors.scheduling.planner import CacheMessage, CacheReply, Planner, StepPlan

__all__ = ["CacheMessage", "CacheReply", "Planner", "PlannerConfig", "StepPlan"]
