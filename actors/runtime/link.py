"""Frames over a socket pair: what an actor in a child process and its system say to each other.

A frame is a header of 13 bytes, little endian: u32 length of what follows the length, u8 kind, u64 correlation id;
then the body. There is no listening port, and the other end is a process of our own making; a frame that makes no
sense ends the link all the same.
"""

import asyncio
import enum
import socket
import struct
from collections import deque
from collections.abc import Callable

__all__ = ["FRAME_LIMIT", "BrokenLink", "Kind", "Link"]

FRAME_LIMIT = 64 * 1024 * 1024
"""Largest frame in bytes unless told otherwise."""

_HEADER = struct.Struct("<IBQ")
_OVERHEAD = _HEADER.size - 4  # what of the header counts in the length
_BUFFER = 256 * 1024


class Kind(enum.IntEnum):
    """What a frame is. STACKS, MESSAGE and STOP go to the child, the others come from it."""

    MESSAGE = 1
    STOP = 2
    STACKS = 11
    READY = 3
    REPLY = 4
    ERROR = 5
    EVENT = 6
    LOG = 7
    HEARTBEAT = 8
    DIED = 9
    STOPPED = 10


class BrokenLink(Exception):
    """The other end sent something that is not a frame of this protocol."""


class Link:
    """One end of the socket pair, driven by the event loop.

    `on_frame(kind, correlation, body)` must not keep `body`, a view of the receive buffer. `on_lost(error)` is called
    once, with None at the end of the stream.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[int, int, memoryview], None],
        on_lost: Callable[[BaseException | None], None],
        limit: int = FRAME_LIMIT,
    ) -> None:
        self.limit = limit
        self.closed = False
        self.backlog = 0  # bytes that wait for the other end to read
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent: deque[memoryview] = deque()
        self._flushed = asyncio.Event()
        self._view = memoryview(bytearray(_BUFFER))
        self._start = 0
        self._end = 0
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def rebind(
        self, on_frame: Callable[[int, int, memoryview], None], on_lost: Callable[[BaseException | None], None]
    ) -> None:
        """Give what comes from now on to somebody else. A link that was lost before tells its new owner soon."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        if self.closed:
            self._loop.call_soon(on_lost, None)

    def send(self, kind: int, correlation: int, *parts: bytes) -> None:
        """Send a frame now, or as soon as the other end has read enough. The caller has checked the limit."""
        if self.closed:
            return
        length = _OVERHEAD
        for part in parts:
            length += len(part)
        self.write(b"".join((_HEADER.pack(length, kind, correlation), *parts)))

    def write(self, data: bytes) -> None:
        """Send bytes that are no frame: what a child reads before it knows of frames."""
        if self._unsent:
            self._keep(memoryview(data))
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._lose(None)
            return
        if sent < len(data):
            self._keep(memoryview(data)[sent:])
            self._loop.add_writer(self._sock, self._writable)

    def _keep(self, data: memoryview) -> None:
        self._unsent.append(data)
        self.backlog += len(data)

    def _writable(self) -> None:
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._lose(None)
                return
            self.backlog -= sent
            if sent < len(data):
                self._unsent[0] = data[sent:]
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock)
        self._flushed.set()

    def _readable(self) -> None:
        self._receive()

    def _receive(self) -> bool:
        """Read once and handle the whole frames there are. False when nothing more can be read now."""
        try:
            count = self._sock.recv_into(self._view[self._end :])
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        if count == 0:
            self._lose(None)
            return False
        self._end += count
        try:
            self._frames()
        except Exception as error:  # whatever it is, the stream has lost its meaning
            self._lose(error)
        return not self.closed

    def _frames(self) -> None:
        view, start, end = self._view, self._start, self._end
        needed = _HEADER.size
        while end - start >= _HEADER.size:
            length, kind, correlation = _HEADER.unpack_from(view, start)
            if not _OVERHEAD <= length <= self.limit:
                raise BrokenLink(f"a frame of {length} bytes came, the limit is {self.limit}")
            needed = 4 + length
            if end - start < needed:
                break
            body = view[start + _HEADER.size : start + needed]
            start += needed
            needed = _HEADER.size
            self._on_frame(kind, correlation, body)
            if self.closed:
                return
        self._make_room(start, end, needed)

    def _make_room(self, start: int, end: int, needed: int) -> None:
        """Keep the beginning of a frame of `needed` bytes, in a buffer that the whole of it fits into."""
        view, held = self._view, end - start
        if held == 0 and len(view) > _BUFFER:
            self._view = memoryview(bytearray(_BUFFER))
        elif held and start + needed > len(view):
            self._view = memoryview(bytearray(max(_BUFFER, needed)))
            self._view[:held] = view[start:end]
        elif held:
            self._start, self._end = start, end
            return
        self._start, self._end = 0, held

    def drain(self) -> None:
        """Handle what the other end sent before it went."""
        while not self.closed and self._receive():
            pass

    async def flush(self) -> None:
        """Wait until everything is sent, or the other end is gone."""
        if self._unsent:
            self._flushed = asyncio.Event()
            await self._flushed.wait()

    def _lose(self, error: BaseException | None) -> None:
        if not self.closed:
            self.close()
            self._on_lost(error)

    def close(self) -> None:
        """Close the socket; `on_lost` is not called. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        self._flushed.set()
        self.backlog = 0
