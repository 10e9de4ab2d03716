"""Very many at once, on a real server: each is served or refused with a time to come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from tests.bench.crowd import Crowd, one, quantile
from tests.kits.real_server import running
from tests.kits.waiting import PATIENCE

SMALL = ("--dtype", "float32", "--cpu-threads", "1", "--max-total-tokens", "16384")


async def test_many_requests_at_once_are_admitted_or_refused_and_none_is_dropped(
    tmp_path: Path, tiny_model: Path
) -> None:
    limits = ("--max-running-requests", "32", "--max-queued-requests", "68")
    with running(tmp_path / "log", str(tiny_model), *SMALL, *limits) as server:
        host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
        crowd = Crowd()
        body = {"max_tokens": 16, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        bodies = [msgspec.json.encode({**body, "prompt": [5, 6, 3 + number]}) for number in range(300)]
        await asyncio.gather(*(one(host, port, body, 16, crowd) for body in bodies))
        assert crowd.failed == []
        assert crowd.admitted >= 100
        assert crowd.refused == {429: 300 - crowd.admitted}
        assert all(1 <= wait <= 120 for wait in crowd.retry_after)
        async with httpx.AsyncClient(timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
            while (answer := (await client.get(f"{server.url}/server_info")).json())["requests"]["live"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert answer["requests"] == {"live": 0, "sequences": 0, "refused": 300 - crowd.admitted}


def test_the_quantile_of_a_histogram_is_a_bound() -> None:
    samples = {0.001: 90.0, 0.01: 8.0, 0.1: 2.0, float("inf"): 0.0}
    assert (quantile(samples, 0.5), quantile(samples, 0.98), quantile(samples, 0.99)) == (0.001, 0.01, 0.1)
