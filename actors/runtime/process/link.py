"""Link: frames over a connected stream socket between two processes."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from actors.runtime.process.frames import FRAME_LIMIT, Frames, frame

__all__ = ["Link"]


class Link:
    """One end of a socket pair or TCP connection, driven by the event loop.

    ``on_frame(kind, correlation, body)`` must not keep ``body``, a view of the receive buffer. ``on_lost(error)`` is
    called once, with None at the end of the stream.
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
        self.backlog = 0  # bytes not yet written to the socket
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent: deque[memoryview] = deque()
        self._flushed = asyncio.Event()
        self._muted = False
        self._frames = Frames(limit)
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def rebind(
        self, on_frame: Callable[[int, int, memoryview], None], on_lost: Callable[[BaseException | None], None]
    ) -> None:
        """Send further frames to new callbacks. A link that is already lost soon calls the new ``on_lost``."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        if self.closed:
            self._loop.call_soon(on_lost, None)

    def send(self, kind: int, correlation: int, *parts: bytes) -> None:
        """Send a frame now, or as soon as the other end has read enough. The caller has checked the limit."""
        if not self.closed:
            self.write(frame(kind, correlation, *parts))

    def write(self, data: bytes) -> None:
        """Send bytes without a frame, for a child that does not read frames yet."""
        if self._muted:
            return
        if self._unsent:
            self._keep(memoryview(data))
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._mute()
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
                self._mute()
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
        """Read once and handle complete frames. Returns False when no more can be read now."""
        try:
            more = self._frames.receive(self._sock)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            more = False
        if not more:
            self._lose(None)
            return False
        try:
            self._frames.take(self._handle)
        except Exception as error:  # after any error the rest of the stream is meaningless
            self._lose(error)
        return not self.closed

    def _handle(self, kind: int, correlation: int, body: memoryview) -> bool:
        self._on_frame(kind, correlation, body)
        return not self.closed

    def drain(self) -> None:
        """Handle what the other end sent before it closed."""
        while not self.closed and self._receive():
            pass

    async def flush(self) -> None:
        """Wait until everything is sent or the other end has closed."""
        if self._unsent:
            self._flushed = asyncio.Event()
            await self._flushed.wait()

    def _mute(self) -> None:
        """Stop writing, since the other end reads no more. Its remaining data is still read before the link ends."""
        self._muted = True
        self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._flushed.set()
        self.backlog = 0

    def _lose(self, error: BaseException | None) -> None:
        if not self.closed:
            self.close()
            self._on_lost(error)

    def close(self) -> None:
        """Close the socket; ``on_lost`` is not called. May be called again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        self._flushed.set()
        self.backlog = 0
