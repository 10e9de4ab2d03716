"""Clients that keep a server busy: streams with a common prefix, some of which hang up, and bursts that are refused."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from tests.kits.waiting import PATIENCE


class Load:
    """``streams`` clients with this API key ask ``models`` of ``url`` again and again; :meth:`run` goes on until
    :meth:`stop`."""

    def __init__(self, url: str, streams: int, key: str, models: Sequence[str]) -> None:
        self._url, self._streams, self._key, self._models = url, streams, key, models
        self._rng = random.Random(7)
        self._prefix = [self._rng.randrange(3, 380) for _ in range(96)]
        self._stop = threading.Event()
        self.statuses: dict[int, int] = {}

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"}
        limits = httpx.Limits(max_connections=self._streams + 40)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, limits=limits, headers=headers) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._streams):
                tasks.create_task(self._client(client))
            tasks.create_task(self._bursts(client))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            await self._ask(client, leaves=self._rng.random() < 0.2)

    async def _bursts(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            await asyncio.gather(*(self._ask(client, leaves=False) for _ in range(40)))
            await asyncio.sleep(2)

    async def _ask(self, client: httpx.AsyncClient, *, leaves: bool) -> None:
        prompt = self._prefix[: self._rng.randrange(48, 96)] + [
            self._rng.randrange(3, 380) for _ in range(self._rng.randrange(1, 40))
        ]
        text = " ".join(map(str, prompt[:40]))
        body = {
            "model": self._rng.choice(self._models),
            "prompt": self._rng.choice((prompt, prompt, text)),
            "max_tokens": self._rng.randrange(8, 48),
            "stream": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self.statuses[response.status_code] = self.statuses.get(response.status_code, 0) + 1
            async for line in response.aiter_lines():
                if leaves and line.startswith("data: {"):
                    return


@contextmanager
def under_load(url: str, key: str, streams: int = 12, models: Sequence[str] = ("",)) -> Iterator[Load]:
    load = Load(url, streams, key, models)
    thread = threading.Thread(target=load.run, name="load")
    thread.start()
    try:
        yield load
    finally:
        load.stop()
        thread.join(PATIENCE)
