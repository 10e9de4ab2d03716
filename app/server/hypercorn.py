"""Hypercorn around the application: tuned settings, signals, an orderly stop.

On a signal Hypercorn alone would cut streams after a few seconds, and inform the application only when its connections
are closed. Here the application drains first, and Hypercorn stops when no stream is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from hypercorn.asyncio.run import worker_serve
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.config import Config, Sockets
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app

from actors.boards.wake_limiter import WakeLimiter
from actors.options import Arguments
from app.server.http1 import Chunk, Http1, rebound
from app.server.http2 import PIECE, Http2

__all__ = ["ServedApplication", "configuration", "listen", "serve", "serve_until"]

log = logging.getLogger("troupe.server")

CLOSE_TIMEOUT = 10.0
"""Seconds that connections get to close after the application has drained."""

HURRIED_TIMEOUT = 3.0
"""Seconds until the end after a second signal, even if requests still run."""

HEADER_TIMEOUT = 20.0
"""Seconds for the head of the first request on a new connection."""

LINGER_TIMEOUT = 60.0
"""Seconds that a finished connection waits for its client to read the last bytes."""

SPARE_FILES = 256
"""File descriptors reserved for the engine."""

READS_A_TURN = 8
"""Connections read in one turn of the event loop: a new request takes about a millisecond, and thousands may arrive
together."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServedApplication(Protocol):
    """The control interface of the application, in addition to ASGI."""

    @property
    def failed(self) -> asyncio.Event:
        """Set when the engine gave up: only a new process helps."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Stop admitting; return when all requests have ended, at the latest after ``timeout`` seconds.

        The default is ``--shutdown-timeout``. What still runs then ends with an error in its own API's form.
        """


class ConnectionLimit:
    """Counts the open connections of one server; at most ``limit``, so that file descriptors are left for the
    engine."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = 1 << 20 if soft == resource.RLIM_INFINITY else max(64, soft - SPARE_FILES)
        self.open = 0
        self.wake_limiter = WakeLimiter(READS_A_TURN)
        self._warned = -math.inf  # loop seconds

    def full(self, now: float) -> bool:
        """Whether another connection would exceed the limit; logs the remedy once a minute."""
        if self.open < self.limit:
            return False
        if now - self._warned >= 60:
            self._warned = now
            log.error(
                "%d connections are open, as many as the limit on open files allows; new ones are closed. Raise it "
                "(ulimit -n, LimitNOFILE= of systemd), or put fewer clients on this server.",
                self.open,
            )
        return True


class Protocols(ProtocolWrapper):
    """The protocol of a connection: :class:`Http1`, or :class:`Http2` once the client asks for it."""

    __init__ = rebound(ProtocolWrapper.__init__, H11Protocol=Http1)
    handle = rebound(ProtocolWrapper.handle, H2Protocol=Http2)


class Connection(TCPServer):
    """Hypercorn's connection (0.18), without four faults.

    * The socket of a disconnected client stayed open for ``keep_alive_timeout``, which exhausts file descriptors.
    * A client could send the head of its first request byte by byte for as long.
    * Many requests at once blocked the event loop until all were read.
    * A client that does not read could keep its connection for ever.
    """

    def __init__(self, limit: ConnectionLimit, first_request: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._limit = limit
        self._first_request = first_request  # seconds for its head
        self._greeted = False

    async def run(self) -> None:
        if self._limit.full(self.loop.time()):
            self.writer.transport.abort()
            return
        self._limit.open += 1
        try:
            await _run(self)
        except* Exception as group:
            # Hypercorn handles only some protocol errors of HTTP/2 clients; here each ends its connection.
            log.info(
                "A connection was closed after a protocol error of its client: %s", type(group.exceptions[0]).__name__
            )
        finally:
            self._limit.open -= 1

    async def _idle_timeout(self) -> None:
        if self._greeted:
            await super()._idle_timeout()
            return
        stopping = await self._terminated_within(min(HEADER_TIMEOUT, self._first_request))
        if not stopping and isinstance(self.protocol.protocol, Http2):  # a greeting: its first request may come later
            await self._terminated_within(self._first_request - HEADER_TIMEOUT)
        await asyncio.shield(self._initiate_server_close())

    async def _terminated_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.context.terminated.wait()
                return True
        return False

    async def _close(self) -> None:
        abort = self.loop.call_later(LINGER_TIMEOUT, self.writer.transport.abort)
        try:
            await super()._close()
        finally:
            abort.cancel()

    async def _read_data(self) -> None:
        # As in Hypercorn, but without its timeout (a task for each read) and with the wake limiter.
        while not self.reader.at_eof():
            try:
                data = await self.reader.read(MAX_RECV)
            except OSError:
                break
            try:
                for piece in self._pieces(data):
                    await self._limit.wake_limiter.enter()
                    await self.protocol.handle(RawData(piece))
            except ConnectionAbortedError:  # from Http1: the connection ends before a waiting request
                break
        await self.protocol.handle(Closed())
        await self.idle_task.stop()

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        size = PIECE if isinstance(self.protocol.protocol, Http2) else len(data)
        return (data[begin : begin + size] for begin in range(0, len(data), size)) if data else iter((data,))

    async def protocol_send(self, event: Event | Chunk) -> None:
        if isinstance(event, (Chunk, RawData)):
            # As in Hypercorn, but without its lock: a write is atomic, and several may wait for the client together.
            try:
                self.writer.write(event.data)
                await self.writer.drain()
            except (ConnectionError, RuntimeError):
                await self.protocol.handle(Closed())
            return
        if isinstance(event, Updated):
            self._greeted = True
            if self.reader.at_eof():
                return  # nothing to wait for
        await super().protocol_send(event)


_run = rebound(TCPServer.run, ProtocolWrapper=Protocols)


def configuration(arguments: Arguments) -> Config:
    """Hypercorn's settings for long streams behind proxies."""
    config = Config()
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    config.bind = [f"{host}:{arguments.port}"]
    config.backlog = 2048
    # Longer than the idle timeout of common load balancers (60 s), so that the client side closes idle connections.
    config.keep_alive_timeout = 75
    config.keep_alive_max_requests = 10_000  # a client that opens and resets streams endlessly must reconnect
    config.graceful_timeout = CLOSE_TIMEOUT
    config.shutdown_timeout = 60
    config.startup_timeout = 600
    config.h11_max_incomplete_size = 64 * 1024  # a request's head
    config.h2_max_header_list_size = 64 * 1024
    config.h2_max_concurrent_streams = 256
    config.max_app_queue_size = 64
    config.websocket_max_message_size = 1 << 20
    config.include_server_header = False
    config.accesslog = None  # the application logs one line a request
    config.errorlog = log
    return config


def listen(config: Config) -> Sockets:
    """Bind the address before anything is loaded. Raises OSError when it is in use or not on this machine."""
    sockets = config.create_sockets()
    for bound in sockets.insecure_sockets:
        bound.listen(config.backlog)  # bind alone does not detect another process that is about to listen
        bound.set_inheritable(False)  # a worker process must not keep the port after this process
    return sockets


async def serve_until(
    stop: Callable[[], Awaitable[object]],
    app: ASGIFramework,
    config: Config,
    sockets: Sockets,
    *,
    first_request: float | None = None,
) -> None:
    """Serve until ``stop`` returns. ``first_request``: seconds for the head of the first request on a connection."""
    seconds = HEADER_TIMEOUT if first_request is None else first_request
    serve_connections = rebound(worker_serve, TCPServer=partial(Connection, ConnectionLimit(), seconds))
    application = wrap_app(app, config.wsgi_max_body_size, "asgi")
    await serve_connections(application, config, sockets=sockets, shutdown_trigger=stop)


async def serve(
    app: ASGIFramework,
    control: ServedApplication,
    config: Config,
    sockets: Sockets,
    signals: Sequence[signal.Signals] = SIGNALS,
) -> bool:
    """Serve until a signal or the engine's failure. Return True after an orderly stop, False when the engine failed.

    The first of ``signals`` drains; a second one ends the drain at once. An event loop has one handler for each signal:
    several servers in one loop need separate signals, or none. ``control`` is the application.
    """
    stop, hurry, stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    async def shutdown_trigger() -> None:
        try:
            await _first(stop.wait(), control.failed.wait())
            if not control.failed.is_set():
                log.info("Stopping: running requests may finish; a second signal ends them at once.")
                await _first(_drain(control), hurry.wait())
            if hurry.is_set():
                await _first(_drain(control, 0), asyncio.sleep(HURRIED_TIMEOUT))
            if control.failed.is_set():
                log.critical("The engine has failed; the server stops with an error status.")
        finally:
            stopping.set()

    with _signals(signals, on_signal):
        serving = asyncio.create_task(
            serve_until(shutdown_trigger, app, config, sockets),
            name="troupe-server",
        )
        try:
            await _first(asyncio.wait({serving}), stopping.wait())
            # From Python 3.12 on Hypercorn waits for open connections without a limit.
            limit = HURRIED_TIMEOUT if hurry.is_set() else config.graceful_timeout + config.shutdown_timeout
            done, _ = await asyncio.wait({serving}, timeout=limit)
            if not done:
                log.warning("Connections did not close in time and are aborted.")
        finally:
            serving.cancel()
            outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
        if isinstance(outcome, Exception):
            raise outcome
    return not control.failed.is_set()


async def _drain(control: ServedApplication, timeout: float | None = None) -> None:
    try:
        await control.drain(timeout)
    except Exception:
        log.exception("Draining failed; the server stops without it.")


async def _first(*awaitables: Coroutine[object, object, object]) -> None:
    """Return when the first one is done, and cancel the others."""
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _signals(numbers: Sequence[signal.Signals], handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
