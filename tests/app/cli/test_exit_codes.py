"""How the server's process ends tells its manager what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.kits.real_server import RealServer, running, serving
from tests.kits.waiting import PATIENCE


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/no/such/model"], "--model-path /no/such/model does not exist"),
        (["--dtype", "float16"], "dtype 'float16' is not supported on cpu"),  # a worker says so
        (["--tp-size", "3"], "cannot be divided by --tensor-parallel-size 3"),  # and so do several
    ],
)
def test_what_no_restart_heals_exits_with_two_and_no_traceback(
    tmp_path: Path, arguments: list[str], reason: str
) -> None:
    server = serving(tmp_path / "log", *arguments, "--device", "cpu")
    try:
        assert server.process.wait(PATIENCE) == 2
    finally:
        server.stop()
    lines = server.log.read_text().splitlines()
    assert lines[-2].startswith("troupe: ")
    assert reason in lines[-2]
    assert not any("Traceback" in line or " died: " in line for line in lines)


@pytest.mark.long
async def test_a_worker_that_keeps_dying_ends_the_process_with_an_error(tmp_path: Path, tiny_model: Path) -> None:
    """The live stream goes on over some deaths, then it ends with an error, and the process says why it has failed."""
    options = ["--dtype", "float32", "--cpu-threads", "1", "--max-total-tokens", "4096"]
    with running(tmp_path / "log", str(tiny_model), *options) as server:
        killing = asyncio.create_task(kill_workers(server))
        body = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}
        ends: list[list[str]] = []

        async def ask(client: httpx.AsyncClient) -> None:
            while not killing.done():
                try:
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        ends.append([line async for line in response.aiter_lines() if line.startswith("data: ")])
                except httpx.TransportError:
                    return

        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            await asyncio.gather(*(ask(client) for _ in range(3)))  # so that one is live whenever the engine gives up
        await killing
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 3
        lines = server.log.read_text()
    assert "worker-0 failed too often: killed by SIGKILL" in lines
    answer = [json.loads(end[-2].removeprefix("data: ")) for end in ends if len(end) > 1 and '"error"' in end[-2]]
    assert answer, "no stream got an event"
    assert all(end[-1] == "data: [DONE]" for end in ends if end and '"error"' not in end[-1])


async def kill_workers(server: RealServer) -> None:
    """Each as soon as it runs steps, until the server ends."""
    killed: set[int] = set()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        while server.process.poll() is None:
            try:
                answer = (await client.get("/server_info")).json()
            except (httpx.TransportError, ValueError):
                return
            pid = (answer.get("workers") or [{}])[0].get("pid")
            if pid and pid not in killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)


@pytest.mark.long
def test_sigterm_ends_a_stream_that_stands_still_at_the_deadline(tmp_path: Path, tiny_model: Path) -> None:
    """Its worker is stopped and does not hear of the end; the client gets an error, and the exit is orderly."""
    options = ["--dtype", "float32", "--cpu-threads", "1", "--max-total-tokens", "4096", "--shutdown-timeout", "1"]
    with running(tmp_path / "log", str(tiny_model), *options) as server:
        worker = httpx.get(f"{server.url}/server_info", timeout=PATIENCE).json()["workers"][0]["pid"]
        os.kill(worker, signal.SIGSTOP)
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            server.process.send_signal(signal.SIGTERM)
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_draining"
        assert lines[-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
