"""Probes and information for routers: /live, /ready, /health, /ping, /health_generate, /version, /metrics,
/v1/loads."""

from __future__ import annotations

import asyncio
import time

import msgspec
from prometheus_client.exposition import generate_latest
from quart import Response

from actors.protocol.requests import SamplingParams
from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.version import troupe_version
from app.server.warmup import probe_task

__all__ = ["Readiness", "health", "health_generate", "live", "loads", "metrics", "ready", "version"]

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


async def loads(service: Service, exchange: Exchange, body: None) -> Response:
    """Load for routers: running and waiting requests, and the use of the cache."""
    answer = service.engine.describe()
    load = {key: answer[key] for key in ("requests", "scheduler", "cache")}
    return json_response({"timestamp": time.time(), "loads": [{"dp_rank": 0, **load}]})
