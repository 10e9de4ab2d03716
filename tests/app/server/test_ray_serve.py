"""Replicas of the application in Ray Serve: one that grows to two, and ends with its processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from actors.options import ArgumentError
from app.cli.arguments import load_arguments
from app.ray_serve import application, deployment
from tests.kits.addresses import hold_port, port_of
from tests.kits.app_requests import MESSAGES, events
from tests.kits.real_server import ROOT
from tests.kits.waiting import PATIENCE, until

OPTIONS = {"device": "cpu", "cpu_threads": 1}
EAGER = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 1,
    "look_back_period_s": 11.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 0.5,
}
SHORT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16}
LONG = {"messages": MESSAGES, "max_tokens": 300, "ignore_eos": True, "stream": True}
CHAT = "/v1/chat/completions"


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of Ray Serve, on a cluster of this machine alone."""
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for what in ("REPLICA", "HANDLE"):
        monkeypatch.setenv(f"RAY_SERVE_{what}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.2")
    with hold_port() as held:
        port = port_of(held)
    ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> dict[psutil.Process, list[psutil.Process]]:
    """The processes of replicas, each with those below it."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ServeReplica" in " ".join(process.cmdline()):
                found[process] = process.children(recursive=True)
    return found


def running() -> int:
    from ray import serve

    states = serve.status().applications["default"].deployments["Troupe"].replica_states
    return int(states.get("RUNNING", 0))


async def keep_busy(client: httpx.AsyncClient) -> None:
    while True:
        async with client.stream("POST", CHAT, json=LONG) as response:
            assert response.status_code == 200
            async for _ in response.aiter_bytes():
                pass


@pytest.mark.long
async def test_replicas_follow_the_load_and_end_with_their_processes(door: str) -> None:
    from ray import serve

    small = deployment(load_arguments([], {}, {**OPTIONS, "max-worker-restarts": 0}))
    eager = small.options(autoscaling_config=EAGER, health_check_period_s=0.5)
    await asyncio.to_thread(serve.run, eager.bind())
    async with httpx.AsyncClient(base_url=door, timeout=PATIENCE) as client:
        whole = await client.post(CHAT, json=SHORT)  # the first: a replica that is still loading answers 503
        assert whole.status_code == 200, whole.text
        streamed = await client.post(CHAT, json={**SHORT, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *parts, end = events(streamed.content)
        assert end == "[DONE]"
        assert len(parts) > 2
        text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
        assert text == whole.json()["choices"][0]["message"]["content"]

        busy = [asyncio.create_task(keep_busy(client)) for _ in range(4)]
        await until(lambda: running() == 2, "there is no second replica")
        before = replicas()
        assert len(before) == 2
        assert all(before.values())
        for task in busy:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await until(lambda: len(replicas()) == 1, "the second replica was left")
        left = replicas()
        gone = [each for owner, below in before.items() if owner not in left for each in (owner, *below)]
        await until(lambda: not any(each.is_running() for each in gone), "a worker of the second replica was left")
        assert (await client.post(CHAT, json=SHORT)).json()["choices"] == whole.json()["choices"]

        for worker in [each for below in left.values() for each in below]:
            worker.kill()
        await until(lambda: left.keys().isdisjoint(replicas()) and running() == 1, "a failed engine was kept")
        assert (await client.post(CHAT, json=SHORT)).json()["choices"] == whole.json()["choices"]
        rest = [each for owner, below in replicas().items() for each in (owner, *below)]
        assert len(rest) > 1
    await asyncio.to_thread(serve.delete, "default")
    await until(lambda: not any(each.is_running() for each in rest), "a worker was left")


@pytest.mark.long
async def test_args_are_options_and_a_missing_model_fails_the_start(door: str) -> None:
    from ray import serve

    await asyncio.to_thread(serve.run, application({**OPTIONS, "served-model-name": "star", "max_replicas": "2"}))
    async with httpx.AsyncClient(base_url=door, timeout=PATIENCE) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "star"
    await asyncio.to_thread(serve.delete, "default")
    with pytest.raises(RuntimeError, match="Deploying application default failed"):
        await asyncio.to_thread(serve.run, application({**OPTIONS, "model-path": "/nowhere/at/all"}))


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"max_replicas": "many"}, "max_replicas: must be a number of replicas, at least 1, not 'many'"),
        ({"min_replicas": 0}, "min_replicas: must be a number"),
        ({"max-replica": 2}, "max-replica: there is no such argument"),
        ({"port": 8000}, "port: .* Ray Serve's http_options"),
        ({"grpc_mode": True}, "grpc_mode: replicas of Ray Serve on one machine cannot share its port"),
        ({"file-storage-path": "files"}, "file_storage_path: replicas of Ray Serve cannot share a folder"),
    ],
)
def test_args_that_replicas_cannot_have_are_named(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        application(args)


def test_without_ray_serve_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArgumentError, match=r"troupe-llm\[cluster\]"):
        application(OPTIONS)
