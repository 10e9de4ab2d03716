"""Waiting for what a test expects to happen.

Another process, actor or task brings most things about, at a time of its own: a test waits for each of them, and does
not take one for a sign of another. How long is a question of patience alone, so it is long.
"""

import asyncio
import time
from collections.abc import Callable

__all__ = ["PATIENCE", "blocking_until", "until"]

PATIENCE = 300.0
"""Seconds after which something is taken for never to happen, on a machine that is slow and full."""

_NOT = "it did not come true"


async def until(condition: Callable[[], object], what: str = _NOT, seconds: float = PATIENCE) -> None:
    """Return when ``condition`` is true; fail with ``what`` when it is not within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


def blocking_until(condition: Callable[[], object], what: str = _NOT, seconds: float = PATIENCE) -> None:
    """The same where no loop runs: the thread waits."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
