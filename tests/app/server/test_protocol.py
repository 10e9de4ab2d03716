"""What only a real server shows: hang-ups, silence, stalled readers, early refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from tests.kits.waiting import PATIENCE

BODY = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_its_request(application, engine, serve, stream, until):
    engine.gate = asyncio.Event()
    url = await serve(application)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        task = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}))
        await until(lambda: engine.streams)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not engine.open and not application.service.live)
    assert engine.streams[0].aborted.is_set()


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_hang_up_right_behind_the_request_is_seen(application, engine, serve, stream, until, caplog):
    """The body and the end of the connection come in together, before the handler runs."""
    caplog.set_level(logging.INFO, logger="troupe.http")
    engine.gate = asyncio.Event()
    host, port = (await serve(application)).removeprefix("http://").split(":")
    for body in (b'{"prompt":"x","stream":' + stream + b"}", b'{"text":["x","y"],"stream":' + stream + b"}"):
        _, writer = await asyncio.open_connection(host, int(port))
        path = b"/generate" if b"text" in body else b"/v1/completions"
        writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()
    await until(lambda: sum(" disconnect " in record.getMessage() for record in caplog.records) == 2)
    assert not engine.open
    assert not application.service.live


async def test_a_hang_up_in_the_middle_of_a_stream(application, engine, serve, until):
    engine.gate, engine.gate_at = asyncio.Event(), 2
    url = await serve(application)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        async with client.stream(
            "POST", f"{url}/v1/completions", json={"prompt": ["a", "b"], "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                if "Paris" in line:
                    break
        await until(lambda: not engine.open)
    assert all(stream.aborted.is_set() for stream in engine.streams)


async def test_silence_is_filled_with_comments(make_application, serve):
    application = make_application(sse_keep_alive_interval=0.05)
    engine = application.engine
    engine.gate = asyncio.Event()
    url = await serve(application)
    lines = []
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if lines.count(": keep-alive") == 2:
                engine.gate.set()
    assert lines[0] == ": keep-alive"
    assert lines[-2] == "data: [DONE]"
    text = "".join(
        msgspec.json.decode(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in lines
        if line.startswith("data: {")
    )
    assert text == "Paris is the capital of France."
    assert engine.registry.get_sample_value("troupe_sse_keepalives_total") == lines.count(": keep-alive") >= 2


async def test_no_comments_when_turned_off(make_application, serve):
    application = make_application(sse_keep_alive_interval=0.0)
    url = await serve(application)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True})
    assert ": keep-alive" not in answer.text


@asynccontextmanager
async def stalled(url: str) -> AsyncIterator[None]:
    """A client that asks for a long stream and stops reading near its beginning."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
    body = msgspec.json.encode({**BODY, "stream": True})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()
    try:
        await reader.readexactly(100_000)
        yield
    finally:
        writer.transport.abort()


async def test_a_reader_that_stalls_loses_its_response(application, engine, serve, until):
    application.service.send_deadline = PATIENCE
    engine.answer = ["x" * 1_000_000] * 50
    async with stalled(await serve(application)):
        (exchange,) = application.service.live
        assert exchange._send_deadline == PATIENCE
        exchange._send_deadline = 0.2  # only now, so that a busy machine does not end it before
        await until(lambda: not engine.open and not application.service.live)
        assert engine.streams[0].aborted.is_set()
        await until(lambda: engine.registry.get_sample_value("troupe_slow_reader_seconds_count"))
        assert engine.registry.get_sample_value("troupe_slow_reader_seconds_sum") > 0.1


async def test_a_reader_that_stalls_is_reported_once_at_a_stop(application, engine, serve, monkeypatch, caplog):
    monkeypatch.setattr("app.application._LAST_CHUNK_SECONDS", 0.05)
    engine.answer = ["x" * 50_000_000]
    async with stalled(await serve(application)):
        for _ in range(2):  # the second one as after a second signal, or when the server has stopped listening
            await application.drain(0)
            assert any(exchange.stream_ids for exchange in application.service.live)
    reported = [record.getMessage() for record in caplog.records if "stops before" in record.getMessage()]
    assert reported == ["The server stops before 1 of its requests have ended; their clients receive an error."]


async def test_a_stream_outlives_every_response_timeout(application, engine):
    response = await application.test_client().post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.timeout is Ellipsis or response.timeout is None
    assert application.config["RESPONSE_TIMEOUT"] is None


async def test_a_refusal_before_the_body_is_read_closes_cleanly(make_application, serve):
    application = make_application(api_key="key")
    url = await serve(application)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json={"messages": "x" * 3_000_000})
        assert answer.status_code == 401
        assert (await client.get(f"{url}/live")).status_code == 200


async def test_many_streams_with_hang_ups_leave_nothing(application, engine, serve, until):
    engine.step_seconds = 0.002
    url = await serve(application)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        text = ""
        async with client.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += msgspec.json.decode(line.removeprefix("data: "))["choices"][0]["text"]
                    if number % 3 == 0:
                        return ""
        return text

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=60), timeout=PATIENCE) as client:
        texts = await asyncio.gather(*(one(client, number) for number in range(60)))
    assert texts == ["" if number % 3 == 0 else "Paris is the capital of France." for number in range(60)]
    await until(lambda: not engine.open and not application.service.live)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_stops_without_draining_cuts_no_stream(application, engine, serve, stream, until):
    engine.gate, engine.gate_at = asyncio.Event(), 2
    url, stop = await serve(application), serve.stop
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        running = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "x", "stream": stream}))
        await until(lambda: engine.streams)
        stop()
        answer = await running
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
        error = msgspec.json.decode(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["code"] == "engine_draining"
    await until(lambda: not engine.open and not application.service.live)


async def test_a_hang_up_while_the_prompt_is_encoded(application, engine, serve, until):
    engine.tokenizing = asyncio.Event()
    url = await serve(application)
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        task = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": ["a", "b"]}))
        await until(lambda: len(engine.streams) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not engine.open and not application.service.live)


async def test_a_body_that_does_not_arrive(application, serve):
    application.config["BODY_TIMEOUT"] = 0.1
    url = await serve(application)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    async with asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    writer.close()
