"""Several streams of deltas merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from actors.protocol.requests import Delta
from actors.requests.streams import RequestStream

__all__ = ["MergedStreams"]


class MergedStreams(AsyncIterator[Delta]):
    """Several streams as one, in order of arrival. Choice ``i`` of stream ``s`` is choice ``s * choices + i``.

    At most one delta of each stream waits here; further deltas merge inside the engine. After ``stop`` nothing is read;
    the owner closes the streams.
    """

    def __init__(self, streams: Sequence[RequestStream], choices: int) -> None:
        self._ready: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=1)
        self._open = len(streams)
        self._pumps = [
            asyncio.create_task(self._pump(stream, number * choices), name="troupe-merge")
            for number, stream in enumerate(streams)
        ]

    async def _pump(self, stream: RequestStream, first: int) -> None:
        try:
            async for delta in stream:
                moved = msgspec.structs.replace(delta, index=first + delta.index) if first else delta
                await self._ready.put(moved)
        except Exception as error:
            await self._ready.put(error)
        else:
            await self._ready.put(None)

    async def __anext__(self) -> Delta:
        while self._open:
            item = await self._ready.get()
            if item is None:
                self._open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                return item
        raise StopAsyncIteration

    async def stop(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
