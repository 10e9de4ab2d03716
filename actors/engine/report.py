"""Health, server information and live metrics of an engine."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from actors.boards.expert_recorder import balancedness
from actors.engine.status import Health, ReplicaLoad
from telemetry.metrics.options import ADAPTER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.engine.engine import Engine
    from actors.protocol import CacheUsage
    from actors.runtime import ActorStatus
    from telemetry.metrics.exposition import Samples
    from telemetry.timeline import Timelines

__all__ = [
    "adapter_requests",
    "describe",
    "health",
    "loads",
    "processes",
    "readings",
    "version",
    "worker_process",
]


def health(engine: Engine) -> Health:
    """The health of an engine. Sends no message: a probe must not wait in a mailbox."""
    status, board, actors = engine.status, engine.board, engine.actors()
    now, limit = time.monotonic(), engine.arguments.stall_seconds
    idle, load = board.progress_age(now), board.scheduler
    slowest = max(actors, key=lambda actor: actor.message_age or 0.0, default=None)
    reason = ""
    if status.phase == "failed":
        reason = status.error or "The engine failed."
    elif engine.hub is not None and engine.hub.missing and (status.phase == "starting" or board.worker is None):
        reason = f"Node {engine.hub.missing[0]} is not connected; its workers start when it connects."
    elif status.phase in ("starting", "stopped"):
        reason = f"The engine is {status.phase}."
    elif board.worker is None:
        reason = "No worker is ready; one is being restarted."
    elif slowest is not None and (slowest.message_age or 0.0) > limit:
        reason = f"Actor {slowest.name} has been busy with {slowest.message} for {slowest.message_age:.0f} s."
    elif load is not None and idle > limit:
        reason = f"{load.running} sequences run and {load.waiting} wait, but no step has ended for {idle:.0f} s."
    return Health(ok=not reason, reason=reason or "ok", step_age=board.step_age(now), actors=actors)


def describe(engine: Engine) -> dict[str, Any]:
    """State, load and arguments, without secrets."""
    load, cache, info = engine.board.scheduler, engine.board.cache(), engine.model_info
    actors, worker_ids = engine.actors(), engine.worker_ids
    requests = engine.intake
    return {
        "model": engine.model_name,
        "status": msgspec.to_builtins(engine.status),
        "workers": [
            {
                "name": actor.name,
                "pid": actor.pid,
                "node": engine.arguments.node_of(worker_ids[actor.name].number),
                "device": info.device if info is not None else engine.arguments.device,
                "restarts": actor.incarnation or 0,
                "state": actor.state,
                "role": worker_ids[actor.name].role,
                "rank": msgspec.to_builtins(worker_ids[actor.name].rank),
            }
            for actor in sorted(
                (actor for actor in actors if actor.name in worker_ids), key=lambda each: worker_ids[each.name].number
            )
        ],
        "model_info": msgspec.to_builtins(info) if info is not None else None,
        "scheduler": msgspec.to_builtins(load) if load is not None else None,
        "cache": msgspec.to_builtins(cache) if cache is not None else None,
        "requests": {
            "live": len(requests) if requests is not None else 0,
            "sequences": requests.admission.sequences if requests is not None else 0,
            "refused": requests.admission.refused if requests is not None else 0,
        },
        "actors": msgspec.to_builtins(actors),
        "arguments": engine.arguments.describe(),
    }


def loads(engine: Engine) -> list[ReplicaLoad]:
    """The load of each replica. Sends no message."""
    result = []
    for number, board in enumerate(engine.board.all):
        load, cache = board.scheduler, board.cache()
        running, waiting = (0, 0) if load is None else (load.running, load.waiting)
        size = 0 if cache is None else cache.page_size
        used, total = (0, 0) if cache is None else (cache.used * size, cache.total * size)
        queried = 0 if cache is None else cache.queried_tokens
        result.append(
            ReplicaLoad(
                dp_rank=number,
                num_running_reqs=running,
                num_waiting_reqs=waiting,
                num_total_reqs=running + waiting,
                num_used_tokens=used,
                num_total_tokens=used + (0 if load is None else load.waiting_tokens),
                max_total_num_tokens=total,
                token_usage=used / total if total else 0.0,
                cache_hit_rate=cache.hit_tokens / queried if cache is not None and queried else 0.0,
                utilization=running / engine.arguments.max_running_requests,
                max_running_requests=engine.arguments.max_running_requests,
                paused=load is not None and load.paused,
            )
        )
    return result


def worker_process(engine: Engine) -> int | None:
    """The process id of the first worker, or None without a process."""
    names = engine.worker_ids
    return next((actor.pid for actor in engine.actors() if actor.name in names), None)


def processes(engine: Engine) -> dict[str, int]:
    """Process ids of this host by name: that of the server, and those of actors in child processes."""
    remote = {name for name, worker in engine.worker_ids.items() if engine.arguments.node_of(worker.number)}
    return {"server": os.getpid()} | {
        actor.name: actor.pid for actor in engine.actors() if actor.pid is not None and actor.name not in remote
    }


def readings(engine: Engine) -> Mapping[str, Samples]:
    """Values of gauges that are read at each scrape, by metric name. Callable from any thread."""
    return {
        "troupe_ready": float(engine.status.phase == "ready"),
        "troupe_step_age_seconds": engine.board.step_age(time.monotonic()),
        "troupe_max_running_requests": engine.arguments.max_running_requests,
        **_admission(engine),
        **_load(engine),
        **_cache(engine),
        **_actors(engine.actors()),
        **_model(engine),
        **_traces(engine),
        **_experts(engine),
        **_rebalances(engine),
        **_adapters(engine),
        **engine.processes.readings(),
    }


def _admission(engine: Engine) -> dict[str, Samples]:
    if engine.intake is None:
        return {}
    admission = engine.intake.admission
    return {
        "troupe_requests_live": len(engine.intake),
        "troupe_admitted_sequences": admission.sequences,
        "troupe_admitted_tokens": admission.tokens,
        "troupe_admission_rejections_total": {(reason,): count for reason, count in admission.refusals.items()},
        "troupe_admission_retry_after_seconds": admission.retry_after_seconds,
    }


def _traces(engine: Engine) -> dict[str, Samples]:
    tracing = engine.tracing
    if tracing is None:
        return {}
    return {"troupe_trace_spans_total": {("exported",): tracing.exported, ("dropped",): tracing.dropped}}


def _experts(engine: Engine) -> dict[str, Samples]:
    record = engine.expert_recorder.record
    if record is None or record.counts is None or not engine.arguments.enable_expert_distribution_metrics:
        return {}
    layers = balancedness(record.counts).items()
    return {
        "troupe_expert_balancedness": {(str(layer),): value for layer, value in layers},
        "troupe_expert_recorded_steps": record.passes,
    }


def adapter_requests(timelines: Timelines) -> dict[str, tuple[int, int]]:
    """Running and waiting requests by the name of their adapter. A request runs while one of its choices does."""
    counts: dict[str, tuple[int, int]] = {}
    for timeline in timelines.live():
        name = timeline.request.get(ADAPTER)
        if not isinstance(name, str):
            continue
        queues = [hop for hop in timeline.hops if hop.name == "queue"]
        runs = bool({hop.choice for hop in queues} - {hop.choice for hop in queues if hop.end is None})
        running, waiting = counts.get(name, (0, 0))
        counts[name] = (running + runs, waiting + (not runs))
    return counts


def _adapters(engine: Engine) -> dict[str, Samples]:
    """``adapter_states``, which has no metric: the places of a replica, and the names that run and that wait."""
    if not engine.adapters.enabled:
        return {}
    live = adapter_requests(engine.timelines)
    by_label: Counter[tuple[str, ...]] = Counter()
    for name in {*live, *(adapter.name for adapter in engine.adapters)}:
        label = engine.metrics.requests.adapter_label(name)
        for state, count in zip(("running", "waiting"), live.get(name, (0, 0)), strict=True):
            by_label[label, state] += count
    running, waiting = (
        sorted({label for (label, at), count in by_label.items() if at == state and count})
        for state in ("running", "waiting")
    )
    places = engine.arguments.max_loras_per_batch
    return {
        "troupe_adapters_loaded": len(engine.adapters),
        "troupe_adapter_slots": places * len(engine.board.all),
        "troupe_adapter_slots_used": len(engine.board.resident_adapters),
        "troupe_adapter_requests": by_label,
        "adapter_states": {(str(places), ",".join(running), ",".join(waiting)): 1.0},
    }


def _rebalances(engine: Engine) -> dict[str, Samples]:
    if not engine.arguments.enable_eplb:
        return {}
    boards = {(str(board.replica),): board for board in engine.board.all}
    last = {labels: board.rebalanced for labels, board in boards.items() if board.rebalanced is not None}
    return {
        "troupe_expert_rebalances_total": {labels: board.rebalances for labels, board in boards.items()},
        "troupe_expert_moves_total": {labels: board.moved_experts for labels, board in boards.items()},
        "troupe_expert_rank_utilization": {labels: each.utilization for labels, each in last.items()},
        "troupe_expert_move_seconds": {labels: each.seconds for labels, each in last.items()},
    }


def _load(engine: Engine) -> dict[str, Samples]:
    load = engine.board.scheduler
    if load is None:
        return {}
    return {
        "troupe_requests_running": load.running,
        "troupe_requests_waiting": load.waiting,
        "troupe_waiting_tokens": load.waiting_tokens,
        "troupe_steps_in_flight": load.steps_in_flight,
        "troupe_preemptions_total": load.preemptions,
    }


def _cache(engine: Engine) -> dict[str, Samples]:
    cache = engine.board.cache()
    if cache is None:
        return {}
    return {
        "troupe_cache_pages": cache.total,
        "troupe_cache_pages_free": cache.free,
        "troupe_cache_pages_evictable": cache.evictable,
        "troupe_cache_pages_used": cache.used,
        "troupe_cache_page_tokens": cache.page_size,
        "troupe_cache_hit_tokens_total": cache.hit_tokens,
        "troupe_cache_queried_tokens_total": cache.queried_tokens,
        "troupe_cache_evicted_pages_total": cache.evicted_pages,
        **_cache_groups(cache),
    }


def _cache_groups(cache: CacheUsage) -> dict[str, Samples]:
    groups = cache.groups() or {"main": cache.main()}
    states = ("free", "evictable", "used")
    return {
        "troupe_cache_group_pages": {
            (name, state): getattr(group, state) for name, group in groups.items() for state in states
        },
        "troupe_cache_group_evicted_pages_total": {(name,): group.evicted for name, group in groups.items()},
    }


def _actors(actors: list[ActorStatus]) -> dict[str, Samples]:
    depths = {(actor.name, lane): depth for actor in actors for lane, depth in actor.mailbox.items()}
    ages = {
        (actor.name,): actor.message_age or 0.0 if actor.heartbeat_age is None else actor.heartbeat_age
        for actor in actors
    }
    return {
        "troupe_mailbox_depth": depths,
        "troupe_actor_up": {(actor.name,): float(actor.state == "running") for actor in actors},
        "troupe_heartbeat_age_seconds": ages,
    }


def _model(engine: Engine) -> dict[str, Samples]:
    info = engine.model_info
    if info is None:
        return {}
    phases = {(phase,): seconds for phase, seconds in info.load_seconds.items()}
    if engine.start_seconds is not None:
        phases["total",] = engine.start_seconds
    labels = (engine.model_name, info.architecture, info.dtype, info.cache_dtype, info.device, version())
    return {
        "troupe_start_seconds": phases,
        "troupe_model_info": {labels: 1.0},
        "troupe_context_tokens": info.context_length,
        "troupe_weight_bytes": info.weight_bytes,
        "troupe_cache_bytes": info.cache_bytes,
    }


@functools.cache
def version() -> str:
    """The version of the installed distribution; "unknown" without an installation."""
    try:
        return importlib.metadata.version("troupe-llm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
