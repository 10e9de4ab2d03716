"""The whole house over HTTP, with the included model and with a tiny model of random weights."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.kits.real_server import RealServer, running, serving
from tests.kits.waiting import PATIENCE, blocking_until
from tests.understudy.lessons.world import COUNTRIES

QUESTION = [{"role": "user", "content": "List 3 countries and their capitals."}]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """The included model, as `hypercorn app:asgi` serves it."""
    log = tmp_path_factory.mktemp("box") / "log"
    hypercorn = Path(sys.executable).with_name("hypercorn")
    server = RealServer(
        lambda port: [str(hypercorn), "app:asgi", "--bind", f"127.0.0.1:{port}"], log, {"TROUPE_ARGS": ""}
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("tiny") / "log"
    options = ["--dtype", "float32", "--cpu-threads", "2", "--max-total-tokens", "32768"]
    with running(log, str(tiny_model), *options, "--max-running-requests", "64") as server:
        yield server


def right_pairs(text: str) -> int:
    """How many of the lines name a country with its capital."""
    found = 0
    for country in COUNTRIES:
        capitals = "|".join(re.escape(capital) for capital in country.capitals)
        if re.search(rf"\b{re.escape(country.title)}\b.{{0,30}}\b({capitals})\b", text):
            found += 1
    return found


def test_the_first_question_is_answered(box: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{box.url}/v1", api_key="none", _strict_response_validation=True)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    text = answer.choices[0].message.content or ""
    assert right_pairs(text) >= 3, text
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == text
    assert len(chunks) > 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens  # type: ignore[union-attr]


def test_a_tool_is_called_and_its_answer_used(box: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{box.url}/v1", api_key="none", _strict_response_validation=True)
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Current weather of a city", "parameters": city}
    reported: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    request: Any = {"model": client.models.list().data[0].id, "tools": [{"type": "function", "function": function}]}
    [choice] = client.chat.completions.create(**request, messages=reported, temperature=0).choices
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 4, "condition": "rainy"}'}
    reported += [choice.message.model_dump(exclude_none=True), result]
    [choice] = client.chat.completions.create(**request, messages=reported, temperature=0).choices
    assert choice.finish_reason == "stop"
    assert "4" in (choice.message.content or "")


def test_probes_and_information(box: RealServer) -> None:
    for path in ("/live", "/ready", "/health", "/health_generate", "/model_info", "/metrics", "/openapi.json", "/docs"):
        assert httpx.get(box.url + path, timeout=PATIENCE).status_code == 200, path
    [worker] = httpx.get(f"{box.url}/server_info", timeout=PATIENCE).json()["workers"]
    assert os.path.exists(f"/proc/{worker['pid']}")
    assert worker["device"] == "cpu"


async def test_256_streams_with_random_hang_ups(tiny: RealServer) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, 380) for _ in range(rng.randrange(4, 60))] for _ in range(256)]
    leavers = {i: rng.randrange(0, 12) for i in range(256) if rng.random() < 0.4}

    def body(i: int) -> dict[str, object]:
        return {"model": "", "prompt": prompts[i], "max_tokens": 24, "temperature": 0, "ignore_eos": True}

    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(base_url=tiny.url, timeout=PATIENCE, limits=limits) as client:

        async def stream(i: int) -> str | None:
            text = []
            seen = 0
            async with client.stream("POST", "/v1/completions", json={**body(i), "stream": True}) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return "".join(text)
                    record = json.loads(line[6:])
                    assert "error" not in record, record
                    text.append(record["choices"][0]["text"])
                    seen += 1
                    if leavers.get(i, 99) <= seen:
                        return None
            raise AssertionError("the stream ended without [DONE]")

        results = await asyncio.gather(*(stream(i) for i in range(256)))
        stayed = [i for i in range(256) if i not in leavers]
        assert len(stayed) > 100
        expected = await asyncio.gather(
            *(client.post("/v1/completions", json=body(i)) for i in stayed[:40]),
        )
        for i, response in zip(stayed, expected, strict=False):
            assert results[i] == response.json()["choices"][0]["text"]
        assert all(results[i] is not None for i in stayed)

        async with asyncio.timeout(PATIENCE):
            while True:
                info = (await client.get("/server_info")).json()
                cache, load = info["cache"], info["scheduler"]
                if cache["used"] == load["running"] == load["waiting"] == info["requests"]["live"] == 0:
                    break
                await asyncio.sleep(0.05)
        assert cache["free"] + cache["evictable"] == cache["total"]


async def until_a_step_is_owed(client: httpx.AsyncClient) -> None:
    age = re.compile(r"^troupe_step_age_seconds\S* (\S+)$", re.MULTILINE)
    async with asyncio.timeout(PATIENCE):
        while not [found for found in age.findall((await client.get("/metrics")).text) if float(found) > 0.3]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_killed_worker_pauses_the_streams_and_they_go_on(tiny: RealServer) -> None:
    """And its death is a line of the log."""
    body = {"model": "", "prompt": [5, 6, 7, 8], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=tiny.url, timeout=PATIENCE) as client:
        expected = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        info = (await client.get("/server_info")).json()
        killed = False
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if not killed:
                        os.kill(info["workers"][0]["pid"], signal.SIGSTOP)  # so that it dies with a step in hand
                        await until_a_step_is_owed(client)
                        os.kill(info["workers"][0]["pid"], signal.SIGKILL)
                        killed = True
        assert killed
        assert text == expected
        assert (await client.get("/server_info")).json()["workers"][0]["restarts"] == 1
    (death,) = [line for line in tiny.log.read_text().splitlines() if " died" in line]
    assert re.search(r"ERROR   troupe.engine: Actor worker-0 died: killed by SIGKILL .*device=\w+ batch=\w+", death)


def test_a_record_is_a_line_and_probes_are_none(tiny: RealServer) -> None:
    record = re.compile(
        r"[-\d]{10} [:\d]{8},\d{3} (INFO|WARNING|ERROR) +troupe[\w.]*: |    \| |\[.*\] \[INFO\] Running"
    )
    for path in ("/ready", "/metrics"):
        httpx.get(tiny.url + path, timeout=PATIENCE)
    httpx.post(f"{tiny.url}/v1/completions", json={"prompt": [5], "max_tokens": 1}, timeout=PATIENCE)
    blocking_until(lambda: "POST /v1/" in tiny.log.read_text())
    lines = tiny.log.read_text().splitlines()
    assert all(record.match(line) for line in lines), lines
    assert not any("/ready" in line or "/metrics" in line for line in lines)


def test_sigterm_lets_a_stream_finish_and_exits_zero(tmp_path: Path, tiny_model: Path) -> None:
    options = ["--dtype", "float32", "--cpu-threads", "1", "--max-total-tokens", "4096"]
    with running(tmp_path / "log", str(tiny_model), *options) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2 if rest[-1] == "" else -1] == "data: [DONE]"
        assert not any('"error"' in line for line in rest)
        assert server.process.wait(PATIENCE) == 0


def test_a_model_that_is_not_there_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    server = serving(tmp_path / "log", str(tmp_path / "nothing"))
    blocking_until(lambda: server.process.poll() is not None)
    assert server.stop() not in (0, None)
    assert "does not exist" in server.log.read_text()
