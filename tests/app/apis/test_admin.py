"""Pauses, as administrators ask for them."""

from __future__ import annotations

import pytest

from actors.protocol.requests import WaitedTooLong


@pytest.mark.parametrize(("body", "mode"), [(None, "abort"), ({}, "abort"), ({"mode": "retract"}, "retract")])
async def test_generation_is_paused_and_continued(application, engine, body, mode):
    client = application.test_client()
    response = await client.post("/pause_generation", **({} if body is None else {"json": body}))
    assert (response.status_code, (await response.get_json())["status"], engine.paused) == (200, "ok", mode)
    response = await client.post("/continue_generation", json={})
    assert (response.status_code, (await response.get_json())["status"], engine.paused) == (200, "ok", "")


async def test_an_unknown_mode_of_a_pause_is_refused(application, engine):
    response = await application.test_client().post("/pause_generation", json={"mode": "stop"})
    assert (response.status_code, engine.paused) == (400, "")
    assert "mode" in (await response.get_json())["error"]["message"]


async def test_a_request_that_waited_too_long_may_be_sent_again(application, engine):
    engine.ready_error = WaitedTooLong("too long")
    response = await application.test_client().post("/generate", json={"text": "ab"})
    answer = (await response.get_json())["error"]
    assert (response.status_code, answer["code"]) == (503, "waited_too_long")
    assert response.headers["Retry-After"] == "5"
