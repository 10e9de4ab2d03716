"""What each probe says of an engine that generates nothing."""

from __future__ import annotations

import asyncio

import msgspec
import pytest


async def test_health_generate_gives_up(application, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs, requests are admitted, nobody knows of a stall: only the end-to-end probe finds it."""
    monkeypatch.setattr("app.apis.probes.handlers._PROBE_SECONDS", 0.05)
    engine.gate = asyncio.Event()
    client = application.test_client()
    response = await client.get("/health_generate")
    assert response.status_code == 503
    assert msgspec.json.decode(await response.get_data())["status"] == "stuck"
    for path in ("/live", "/ready", "/health"):
        assert (await client.get(path)).status_code == 200
    assert not engine.open


async def test_a_draining_server_lives_and_is_healthy_but_not_ready(application, engine) -> None:
    engine.begin_drain()
    client = application.test_client()
    codes = {path: (await client.get(path)).status_code for path in ("/live", "/ready", "/health", "/health_generate")}
    assert codes == {"/live": 200, "/ready": 503, "/health": 200, "/health_generate": 503}
