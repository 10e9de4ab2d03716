"""What an engine reports of itself: health, server information, live metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from actors.status import Health

if TYPE_CHECKING:
    from actors.engine import Engine

__all__ = ["describe", "health", "readings"]

_STALL_SECONDS = 60.0
"""A device that owes an answer this long is not healthy."""


def health(engine: Engine) -> Health:
    """Whether work makes progress. Asks nobody: a probe must not wait in a mailbox."""
    status, vitals = engine.status, engine.vitals
    age = vitals.step_age(time.monotonic())
    reason = ""
    if status.phase == "failed":
        reason = status.error or "The engine failed."
    elif status.phase in ("starting", "stopped"):
        reason = f"The engine is {status.phase}."
    elif vitals.worker is None:
        reason = "No worker is ready; one is being restarted."
    elif age > _STALL_SECONDS:
        reason = f"The worker has not answered a step for {age:.0f} s."
    return Health(ok=not reason, reason=reason or "ok", step_age=age, actors=engine.actors())


def describe(engine: Engine) -> dict[str, Any]:
    """Everything an operator may want to know, without secrets."""
    load, cache, info = engine.vitals.scheduler, engine.vitals.cache(), engine.model_info
    actors = engine.actors()
    requests = engine.intake
    return {
        "model": engine.model_name,
        "status": msgspec.to_builtins(engine.status),
        "workers": [
            {
                "name": actor.name,
                "pid": actor.pid,
                "device": info.device if info is not None else engine.arguments.device,
                "restarts": actor.incarnation or 0,
                "state": actor.state,
            }
            for actor in actors
            if actor.name.startswith("worker-")
        ],
        "model_info": msgspec.to_builtins(info) if info is not None else None,
        "scheduler": msgspec.to_builtins(load) if load is not None else None,
        "cache": msgspec.to_builtins(cache) if cache is not None else None,
        "requests": {
            "live": len(requests) if requests is not None else 0,
            "sequences": requests.door.sequences if requests is not None else 0,
            "refused": requests.door.refused if requests is not None else 0,
        },
        "actors": msgspec.to_builtins(actors),
        "arguments": engine.arguments.describe(),
    }


def readings(engine: Engine) -> dict[str, float]:
    """The live gauges and counters, by metric name."""
    vitals, requests = engine.vitals, engine.intake
    load, cache = vitals.scheduler, vitals.cache()
    found: dict[str, float] = {
        "troupe_ready": float(engine.status.phase == "ready"),
        "troupe_steps_total": vitals.steps,
        "troupe_step_run_seconds_total": vitals.step_run_seconds,
        "troupe_step_age_seconds": vitals.step_age(time.monotonic()),
        "troupe_admission_rejections_total": requests.door.refused if requests is not None else 0,
    }
    if load is not None:
        found |= {
            "troupe_requests_running": load.running,
            "troupe_requests_waiting": load.waiting,
            "troupe_waiting_tokens": load.waiting_tokens,
            "troupe_steps_in_flight": load.steps_in_flight,
            "troupe_preemptions_total": load.preemptions,
        }
    if cache is not None:
        found |= {
            "troupe_cache_pages": cache.total,
            "troupe_cache_pages_free": cache.free,
            "troupe_cache_pages_evictable": cache.evictable,
            "troupe_cache_pages_used": cache.used,
            "troupe_cache_hit_tokens_total": cache.hit_tokens,
            "troupe_cache_queried_tokens_total": cache.queried_tokens,
        }
    return found
