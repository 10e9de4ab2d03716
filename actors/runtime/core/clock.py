"""The clock of a system: the real time, or one that a test moves."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import anyio

__all__ = ["Clock", "SystemClock", "Timer", "within"]


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """A monotonic clock. All times are in seconds."""

    def monotonic(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...
    async def sleep(self, delay: float) -> None: ...


class SystemClock:
    """The real clock, with the timers of the running event loop."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.call_later = asyncio.get_running_loop().call_later

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(delay)


@contextmanager
def within(clock: Clock, seconds: float) -> Iterator[anyio.CancelScope]:
    """Cancel the body after ``seconds`` of ``clock``, without an exception: check ``cancel_called`` of the yielded
    scope."""
    with anyio.CancelScope() as scope:
        timer = clock.call_later(seconds, scope.cancel)
        try:
            yield scope
        finally:
            timer.cancel()
