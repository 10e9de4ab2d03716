"""HTTP/2 connections: frames that ask for nothing, and bodies that come after their answer."""

from __future__ import annotations

import asyncio
from typing import Any

import h2.errors
import h2.events
from hypercorn.events import Closed
from hypercorn.protocol.h2 import H2Protocol

__all__ = ["PIECE", "Http2"]

PIECE = 2048
"""Bytes that are handled in one go: 64 KiB of the smallest frames hold the event loop for over 0.1 s."""

BURST = 1000
RATE = 100.0
"""Frames without a request or data that a connection may send at once, and each second. Clients send a few a second."""

_IDLE = (
    h2.events.PingReceived,
    h2.events.PriorityUpdated,
    h2.events.RemoteSettingsChanged,
    h2.events.UnknownFrameReceived,
)


class Http2(H2Protocol):
    """Hypercorn's protocol without two of its faults: frames that it must acknowledge could flood it (CVE-2019-9512,
    -9515, -9518), and a piece of a body that came after its answer ended all streams of the connection."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._allowance = float(BURST)
        self._counted = asyncio.get_running_loop().time()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        idle = sum(isinstance(event, _IDLE) or _is_empty(event) for event in events)
        if idle and not self._allow(idle):
            self.connection.close_connection(error_code=h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            await self._flush()
            await self.send(Closed())
            return
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                await super()._handle_events([event])
        await self._flush()

    def _allow(self, frames: int) -> bool:
        now = asyncio.get_running_loop().time()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._counted)) - frames
        self._counted = now
        return self._allowance >= 0


def _is_empty(event: h2.events.Event) -> bool:
    return isinstance(event, h2.events.DataReceived) and not event.data and event.stream_ended is None
