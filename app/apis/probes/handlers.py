"""Probes and information for routers: /live, /ready, /health, /ping, /health_generate, /version, /metrics,
/v1/loads, /get_load."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

import msgspec
from prometheus_client.exposition import generate_latest
from quart import Response

from actors.engine.status import ReplicaLoad
from actors.protocol.requests import SamplingParams
from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.query import number
from app.server.service import Service, json_response
from app.server.version import troupe_version
from app.server.warmup import probe_task

__all__ = ["Loads", "Readiness", "health", "health_generate", "live", "load", "loads", "metrics", "ready", "version"]

_PROBE_SECONDS = 20.0


class Readiness(msgspec.Struct, kw_only=True):
    """``status``: starting | ready | draining | failed | stopped. ``progress`` of the start: 0 .. 1."""

    status: str
    progress: float
    stage: str
    error: str | None = None


async def live(service: Service, exchange: Exchange, body: None) -> Response:
    """200 while the event loop runs."""
    return json_response({"status": "live"})


async def ready(service: Service, exchange: Exchange, body: None) -> Response:
    """200 while requests are admitted. Otherwise 503: with the progress while loading, and at shutdown."""
    status = service.status
    answer = Readiness(status=status.phase, progress=round(status.progress, 4), stage=status.stage, error=status.error)
    response = json_response(answer, 200 if status.phase == "ready" else 503)
    if status.phase == "starting":
        response.headers["Retry-After"] = "5"
    return response


async def health(service: Service, exchange: Exchange, body: None) -> Response:
    """200 while the engine makes progress or is idle; 503 with the reason when work waits without progress.

    No request is generated: a busy engine stays healthy, a stuck one does not.
    """
    status = service.engine.status
    if status.phase in ("starting", "failed", "stopped"):
        answer = {"status": status.phase, "reason": status.error or f"the engine is {status.phase}: {status.stage}"}
        return json_response(answer, 503)
    state = service.engine.health()
    if state.ok:
        return json_response({"status": "ok"})
    return json_response({"status": "stuck", "reason": state.reason}, 503)


async def health_generate(service: Service, exchange: Exchange, body: None) -> Response:
    """200 when a token was generated end to end."""
    service.require_ready()
    exchange.timeline = service.engine.timelines.open(
        exchange.request_id, operation="text_completion", model=service.model_name, probe=True
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    stream = service.submit(exchange, [0], params, task=probe_task(service.engine))
    started = time.monotonic()
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            async for _ in stream:
                pass
    except TimeoutError:
        return json_response({"status": "stuck", "reason": f"no token within {_PROBE_SECONDS:g} s"}, 503)
    return json_response({"status": "ok", "seconds": round(time.monotonic() - started, 4)})


async def version(service: Service, exchange: Exchange, body: None) -> Response:
    """The version of Troupe."""
    return json_response({"version": troupe_version()})


async def metrics(service: Service, exchange: Exchange, body: None) -> Response:
    """Metrics in Prometheus's text format, for any ``Accept`` header: prometheus_client's OpenMetrics turns the colons
    of ``--metrics-names`` into underscores, and the boards of those engines would find nothing.

    404 without metrics.
    """
    if not service.arguments.enable_metrics:
        raise ApiError(404, "This server runs with --no-enable-metrics.", code="metrics_disabled")
    text = await asyncio.to_thread(generate_latest, service.engine.registry)
    return Response(text, content_type="text/plain; version=0.0.4; charset=utf-8")


class Loads(msgspec.Struct, kw_only=True):
    """``aggregate``: sums over the replicas, and means of ratios."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[ReplicaLoad]
    aggregate: dict[str, float]


async def loads(service: Service, exchange: Exchange, body: None) -> Response:
    """Load for routers: sequences that run and wait, and the use of the cache, of each replica.

    ``dp_rank`` in the query asks for one replica.
    """
    result = service.engine.loads()
    rank = number("dp_rank", -1, 0, len(result) - 1)
    chosen = result if rank < 0 else [result[rank]]
    total = {
        name: sum(getattr(load, field) for load in chosen)
        for name, field in (
            ("total_running_reqs", "num_running_reqs"),
            ("total_waiting_reqs", "num_waiting_reqs"),
            ("total_reqs", "num_total_reqs"),
            ("total_used_tokens", "num_used_tokens"),
            ("total_tokens", "num_total_tokens"),
        )
    }
    mean = {
        f"avg_{name}": sum(getattr(load, name) for load in chosen) / max(1, len(chosen))
        for name in ("token_usage", "utilization")
    }
    return json_response(
        Loads(
            timestamp=datetime.now(UTC).isoformat(),
            version=troupe_version(),
            dp_rank_count=len(chosen),
            loads=chosen,
            aggregate=total | mean,
        )
    )


async def load(service: Service, exchange: Exchange, body: None) -> Response:
    """Load in SGLang's older form: a list with an object for each replica."""
    return json_response(
        [
            {
                "dp_rank": each.dp_rank,
                "num_reqs": each.num_total_reqs,
                "num_waiting_reqs": each.num_waiting_reqs,
                "num_tokens": each.num_total_tokens,
                "num_pending_tokens": each.num_total_tokens - each.num_used_tokens,
                "ts_tic": time.perf_counter(),
            }
            for each in service.engine.loads()
        ]
    )
