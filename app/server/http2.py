"""HTTP/2 connections: limits on frames that bring nothing, bodies that arrive after their answer, and a fast path for
pieces of streams.

For each piece of a body Hypercorn wakes its sending task, which asks a tree of priorities, runs h2's state machine and
writes to the socket. Pieces that the client has room for are framed here, and those of one turn of the event loop are
written together.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import h2.errors
import h2.events
from h2.connection import ConnectionState
from h2.settings import SettingCodes
from h2.stream import StreamState
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, Trailers
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BufferCompleteError, H2Protocol, StreamBuffer
from priority.priority import DeadlockError, MissingStreamError

from app.server.http1 import rebound

__all__ = ["PIECE", "Http2"]

PIECE = 2048
"""Bytes handled at a time: 64 KiB of the smallest frames block the event loop for over 0.1 s."""

BURST = 1000
RATE = 100.0
"""Frames without a request or data: the burst and the rate a second that a connection may send."""

UPDATES = 4
"""WINDOW_UPDATE and PING frames that each request and each DATA frame sent to the client allow, beyond that rate.
Simple clients answer each DATA frame with two updates: one for its stream, one for the connection. gRPC's clients add
PINGs, by which they estimate the bandwidth."""

MAX_UPDATES = 10 * BURST
"""WINDOW_UPDATE and PING frames that a connection may save up."""

_PREFACE = 24  # bytes from the client before its first frame
_HEAD = 9  # bytes of a frame before its payload
_DATA, _PING, _GOAWAY, _WINDOW_UPDATE = 0x0, 0x6, 0x7, 0x8
_MAX_UNWRITTEN = 64 << 10  # bytes of frames that wait to be written; further pieces take Hypercorn's way, which waits
_HIGH_WATER, _LOW_WATER = 32 << 10, 16 << 10  # bytes of a stream that wait for the client's window
_CAN_SEND = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)


class _Buffer(StreamBuffer):
    """What a stream has to send. Hypercorn's lets its writer go on whenever it is asked for less than half of the mark,
    also while the client's window is closed; here the writer waits until the client has read."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if len(self.buffer) >= _HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < _LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


_create_stream = rebound(H2Protocol._create_stream, StreamBuffer=_Buffer)


class Http2(H2Protocol):
    """Hypercorn's protocol without four faults: a flood of frames that cost their sender less than the server
    (CVE-2019-9512, -9515, -9518), body data after the answer, which ended all streams of the connection, as did one
    request more than a connection may have, and answers that grew in memory while their client did not read.

    All frames count but the useful ones: h2 reports nothing of a frame to a closed stream, though it reads it and may
    reply. Useful are a request and its trailers, body data, the end of a stream, and a WINDOW_UPDATE that answers data.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._received = _Frames(_PREFACE)
        self._sent = _Frames()
        self._idle = 0  # frames received and not yet counted, less the WINDOW_UPDATE frames that answer data
        self._updates = 0  # WINDOW_UPDATE frames that may come
        self._allowance = float(BURST)
        self._counted = asyncio.get_running_loop().time()
        self._frames: list[bytes] = []  # to write, before what h2 has to send
        self._unwritten = 0  # bytes of these

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            kinds = self._received.kinds(event.data)
            answers = min(self._updates, kinds.count(_WINDOW_UPDATE) + kinds.count(_PING))
            self._updates -= answers
            self._idle += len(kinds) - answers
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()  # the sending task has ended: a writer would wait for ever

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        await _create_stream(self, request)
        if self.keep_alive_requests > self.config.keep_alive_max_requests:
            # The client opens another connection, and this one's streams go on.
            self.keep_alive_requests = 0
            self._frames.append(b"\0\0\x08%c\0\0\0\0\0%b\0\0\0\0" % (_GOAWAY, request.stream_id.to_bytes(4)))
            await self.has_data.set()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        requests = sum(isinstance(event, h2.events.RequestReceived) for event in events)
        self._allow_updates(requests)
        idle, self._idle = self._idle - requests - sum(map(_is_useful, events)), 0
        if idle and not self._allow(idle):
            self.connection.close_connection(error_code=h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            await self._flush()
            await self.send(Closed())
            return
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.RequestReceived) and self.context.terminated.is_set():
                # So a client knows that it may send the request to another server.
                self.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
                self.connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})
            else:
                await super()._handle_events([event])
        await self._flush()

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Trailers):
            await super().stream_send(event)
            self._forget(event.stream_id)
        elif not isinstance(event, Body) or not self._frame(event.stream_id, event.data):
            await super().stream_send(event)
        elif len(self._frames) == 1:
            await self.has_data.set()

    def _forget(self, stream_id: int) -> None:
        """Trailers have ended a stream. Hypercorn would end it once more, and for h2 a stream that is ended twice is
        closed to what its client still sends."""
        if self.stream_buffers.pop(stream_id, None) is not None:
            with suppress(MissingStreamError):
                self.priority.remove_stream(stream_id)

    def _frame(self, stream_id: int, data: bytes) -> bool:
        """Frame a piece of a body (RFC 9113, section 6.1). False, and nothing is done: it has to wait for the client,
        or for earlier pieces of its stream."""
        stream, buffer = self.connection.streams.get(stream_id), self.stream_buffers.get(stream_id)
        size = len(data)
        if (
            stream is None
            or buffer is None
            or buffer.buffer
            or self.closed
            or self.connection.state_machine.state is ConnectionState.CLOSED
            or stream_id not in self.streams
            or self._unwritten > _MAX_UNWRITTEN
            or size > stream.outbound_flow_control_window
            or size > self.connection.outbound_flow_control_window
            or size > self.connection.max_outbound_frame_size
            or stream.state_machine.state not in _CAN_SEND
        ):
            return False
        stream.outbound_flow_control_window -= size
        self.connection.outbound_flow_control_window -= size
        self._frames.append(b"%b\0\0%b%b" % (size.to_bytes(3), stream_id.to_bytes(4), data))
        self._unwritten += _HEAD + size
        return True

    async def send_task(self) -> None:
        # As in Hypercorn, and it writes the frames of a turn of the loop.
        while not self.closed:
            if self._frames:
                await self._flush()
            try:
                stream_id = next(self.priority)
            except DeadlockError:
                if not self._frames:
                    await self.has_data.wait()
                await self.has_data.clear()
            else:
                await self._send_data(stream_id)

    async def _flush(self) -> None:
        data = self.connection.data_to_send()
        if self._frames:
            data = b"".join([*self._frames, data])
            self._frames.clear()
            self._unwritten = 0
        if data:
            self._allow_updates(self._sent.kinds(data).count(_DATA))
            await self.send(RawData(data=data))

    def _allow_updates(self, frames: int) -> None:
        self._updates = min(MAX_UPDATES, self._updates + UPDATES * frames)

    def _allow(self, frames: int) -> bool:
        """Whether so many more frames are within the rate. Negative: frames that were counted at their head and are
        useful."""
        now = asyncio.get_running_loop().time()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._counted) - frames)
        self._counted = now
        return self._allowance >= 0


class _Frames:
    """The frames of one direction of a connection, as its bytes pass by; ``skip`` bytes come before the first one."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip  # bytes before the next head
        self._rest = b""  # the begin of a head

    def kinds(self, data: bytes) -> list[int]:
        """The types of the frames whose heads end in ``data``."""
        data = self._rest + data if self._rest else data
        begin, kinds = self._skip, []
        while begin + _HEAD <= len(data):
            kinds.append(data[begin + 3])
            begin += _HEAD + int.from_bytes(data[begin : begin + 3])
        self._rest = data[begin:]
        self._skip = max(0, begin - len(data))
        return kinds


def _is_useful(event: h2.events.Event) -> bool:
    """Whether a frame did something for its sender that is bounded elsewhere; requests are counted apart."""
    if isinstance(event, h2.events.DataReceived):
        return bool(event.data) or event.stream_ended is not None
    return isinstance(event, (h2.events.TrailersReceived, h2.events.StreamReset))
