"""Hypercorn around the application: tuned settings, signals, an orderly stop.

Hypercorn's own stop would cut streams after a few seconds and tell the application only when its connections are gone.
Here a signal first lets the application drain; Hypercorn stops afterwards, when nothing is left to cut.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from hypercorn.asyncio.run import worker_serve
from hypercorn.config import Config, Sockets
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app

from actors.arguments import Arguments

__all__ = ["Served", "configuration", "listen", "serve"]

log = logging.getLogger("troupe.server")

WATCH_INTERVAL = 0.5
"""Seconds between two looks at whether the engine has failed."""

CLOSE_TIMEOUT = 10.0
"""Seconds that connections get to close after the application has drained."""

HURRIED_TIMEOUT = 3.0
"""Seconds until the end after a second signal, whatever still runs."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Served(Protocol):
    """What the server asks of the application, beside ASGI."""

    async def drain(self) -> None:
        """Stop admitting; return when all requests have ended, at the latest after ``--shutdown-timeout``."""

    @property
    def failed(self) -> bool:
        """Whether the engine gave up: nothing but a new process helps."""


def configuration(arguments: Arguments) -> Config:
    """Hypercorn's settings for long streams behind proxies."""
    config = Config()
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    config.bind = [f"{host}:{arguments.port}"]
    config.backlog = 2048
    # Longer than the idle time of usual load balancers (60 s), so that never this side closes a connection in use.
    config.keep_alive_timeout = 75
    config.keep_alive_max_requests = 1_000_000
    config.graceful_timeout = CLOSE_TIMEOUT
    config.shutdown_timeout = 60
    config.startup_timeout = 600
    config.h11_max_incomplete_size = 64 * 1024
    config.h2_max_concurrent_streams = 1000
    config.max_app_queue_size = 64
    config.websocket_max_message_size = 1 << 20
    config.include_server_header = False
    config.accesslog = None  # the application writes one line a request itself
    config.errorlog = log
    return config


def listen(config: Config) -> Sockets:
    """Bind the address before anything is loaded. Raises OSError when it is taken or not this machine's."""
    sockets = config.create_sockets()
    for bound in sockets.insecure_sockets:
        bound.set_inheritable(False)  # a worker process must not keep the port when this process is gone
    return sockets


async def serve(app: ASGIFramework, control: Served, config: Config, sockets: Sockets) -> bool:
    """Serve until a signal or the engine's failure; True after an orderly stop, False when the engine failed.

    The first SIGTERM or SIGINT drains, the second one ends the draining at once. ``control`` is the application too.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    stopping = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    async def shutdown_trigger() -> None:
        try:
            while not stop.is_set() and not control.failed:
                await _wait(stop, timeout=WATCH_INTERVAL)
            if stop.is_set() and not control.failed:
                log.info("Stopping: running requests may finish; a second signal ends them now.")
                await _drain(control, hurry)
            if control.failed:
                log.critical("The engine has failed; the server stops with an error status.")
        finally:
            stopping.set()

    with _signals(SIGNALS, on_signal):
        serving = asyncio.create_task(
            worker_serve(
                wrap_app(app, config.wsgi_max_body_size, "asgi"),
                config,
                sockets=sockets,
                shutdown_trigger=shutdown_trigger,
            ),
            name="troupe-server",
        )
        closing = asyncio.create_task(stopping.wait(), name="troupe-server-closing")
        try:
            await asyncio.wait({serving, closing}, return_when=asyncio.FIRST_COMPLETED)
            # From Python 3.12 on Hypercorn waits for open connections without a limit of its own.
            limit = HURRIED_TIMEOUT if hurry.is_set() else config.graceful_timeout + config.shutdown_timeout
            done, _ = await asyncio.wait({serving}, timeout=limit)
            if not done:
                log.warning("Connections did not close in time and are cut.")
        finally:
            closing.cancel()
            serving.cancel()
            outcome = (await asyncio.gather(serving, return_exceptions=True))[0]
        if isinstance(outcome, Exception):
            raise outcome
    return not control.failed


async def _drain(control: Served, hurry: asyncio.Event) -> None:
    draining = asyncio.create_task(control.drain(), name="troupe-drain")
    hurried = asyncio.create_task(hurry.wait(), name="troupe-drain-hurried")
    try:
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        draining.cancel()
        outcome = (await asyncio.gather(draining, return_exceptions=True))[0]
    if isinstance(outcome, Exception):
        log.error("Draining failed: %s", outcome, exc_info=outcome)


async def _wait(event: asyncio.Event, *, timeout: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return


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
