"""From loading to the last chunk: readiness, failure, drain, warm-up, progress, siblings."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from actors.engine.status import EngineStatus
from app.server.progress import ProgressReport
from app.server.single_process import requested_workers
from tests.kits.waiting import PATIENCE

BODY = {"messages": [{"role": "user", "content": "x"}]}


async def get(application, path):
    response = await application.test_client().get(path)
    return response, msgspec.json.decode(await response.get_data())


async def test_ready_reports_how_far_loading_is(application, engine):
    engine.status = EngineStatus(phase="starting", progress=0.4, stage="weights")
    response, reported = await get(application, "/ready")
    assert response.status_code == 503
    assert reported == {"status": "starting", "progress": 0.4, "stage": "weights", "error": None}
    assert (await get(application, "/live"))[0].status_code == 200
    assert (await get(application, "/health"))[0].status_code == 503


async def test_requests_while_loading_are_asked_to_retry(application, engine):
    engine.status = EngineStatus(phase="starting", progress=0.4, stage="weights")
    response = await application.test_client().post("/v1/chat/completions", json=BODY)
    error = msgspec.json.decode(await response.get_data())["error"]
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "5"
    assert error["code"] == "engine_starting"
    assert "40%" in error["message"]


async def test_the_lifespan_does_not_wait_for_loading(application, engine):
    engine.status = EngineStatus(phase="starting", progress=0.0, stage="weights")
    async with asyncio.timeout(PATIENCE), application.test_app() as running:
        response = await running.test_client().get("/ready")
        assert response.status_code == 503
        engine.status = EngineStatus(phase="ready", progress=1.0, stage="ready")
        assert (await running.test_client().get("/ready")).status_code == 200
    assert engine.closed


@pytest.mark.parametrize(("permanent", "exit_code"), [(True, 2), (False, 3)])
async def test_a_failed_start_is_reported_everywhere(application, engine, permanent, exit_code):
    engine.start_error, engine.permanent = "weights are missing", permanent
    async with application.test_app():
        await asyncio.wait_for(application.failed.wait(), PATIENCE)
        assert application.exit_code == exit_code
        response, reported = await get(application, "/ready")
        assert (response.status_code, reported["error"]) == (503, "weights are missing")
        response, reported = await get(application, "/health")
        assert (response.status_code, reported["reason"]) == (503, "weights are missing")
        response = await application.test_client().post("/v1/chat/completions", json=BODY)
        assert response.status_code == 503
        assert response.headers["x-should-retry"] == "false"


async def test_health_is_progress(application, engine):
    assert (await get(application, "/health"))[0].status_code == 200
    engine.healthy = False
    response, reported = await get(application, "/health")
    assert response.status_code == 503
    assert "worker-0" in reported["reason"]
    assert not engine.requests


async def test_health_generate_runs_one_token(application, engine):
    assert (await get(application, "/health_generate"))[0].status_code == 200
    assert engine.requests[0]["params"].max_tokens == 1
    assert not engine.open


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_ends_what_still_runs_with_an_error(application, engine, serve, stream, until):
    engine.gate, engine.gate_at = asyncio.Event(), 2
    url = await serve(application)
    async with httpx.AsyncClient(timeout=60) as client:
        running = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}))
        await until(lambda: engine.streams)
        draining = asyncio.create_task(application.drain(0.2))
        await until(lambda: engine.status.phase == "draining")
        refused = await client.post(f"{url}/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_draining"
        assert refused.headers["Retry-After"]
        assert (await client.get(f"{url}/ready")).status_code == 503
        assert await draining is False
        answer = await running
    if stream:
        blocks = answer.text.strip().split("\n\n")
        assert blocks[-1] == "data: [DONE]"
        error = msgspec.json.decode(blocks[-2].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["code"] == "engine_draining"


async def test_drain_lets_requests_finish(application, engine, serve, until):
    engine.gate = asyncio.Event()
    url = await serve(application)
    async with httpx.AsyncClient(timeout=60) as client:
        running = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}))
        await until(lambda: engine.streams)
        draining = asyncio.create_task(application.drain(PATIENCE))
        await until(lambda: engine.status.phase == "draining")
        engine.gate.set()
        assert await draining is True
        assert "error" not in (await running).text


async def test_the_warm_up_comes_before_ready(make_application, until):
    application = make_application(
        skip_server_warmup=False, warmups=("generate", "long-prompt", "batch"), max_running_requests=3
    )
    engine = application.engine
    engine.gate = asyncio.Event()
    async with application.test_app():
        await until(lambda: engine.streams)
        response, reported = await get(application, "/ready")
        assert (response.status_code, reported["stage"]) == (503, "warm-up requests")
        refused = await application.test_client().post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503
        engine.gate.set()
        await until(lambda: application.service.warm)
        assert (await get(application, "/ready"))[0].status_code == 200
    assert [len(request["prompt"]) for request in engine.requests] == [8, 512, 8, 9, 10]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal():
    screen = Terminal()
    with ProgressReport(screen) as report:
        report.show(0.5, "weights")
        before = screen.getvalue()
        report.show(0.5, "weights")
        assert screen.getvalue() == before
    assert "50% weights" in before
    assert screen.getvalue().endswith("\r\x1b[K")


def test_progress_is_a_line_a_stage_elsewhere(caplog):
    screen = io.StringIO()
    with caplog.at_level(logging.INFO, logger="troupe"), ProgressReport(screen) as report:
        for progress in (0.1, 0.2, 0.3):
            report.show(progress, "weights")
        report.show(0.9, "cache")
    assert screen.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == ["loading: weights (10%)", "loading: cache (90%)"]


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["app:asgi"], None),
        (["-w", "4", "app:asgi"], 4),
        (["--workers=2"], 2),
        (["--workers", "1"], 1),
        (["-w3"], 3),
        (["-w"], None),
    ],
)
def test_workers_on_a_command_line(words, number):
    assert requested_workers(words) == number


def test_importing_app_loads_nothing():
    code = "import sys, app; print([name for name in ('quart', 'torch', 'msgspec', 'actors') if name in sys.modules])"
    root = Path(__file__).parents[3]
    reported = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "[]"


def test_the_application_needs_neither_torch_nor_transformers():
    code = "import sys, app.application; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    root = Path(__file__).parents[3]
    reported = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "[]"
