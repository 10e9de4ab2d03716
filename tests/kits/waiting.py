"""Waits for conditions in tests.

Other processes, actors and tasks act at unknown times: a test waits for each condition separately and never infers one
from another. Timeouts only bound failures, so they are long.
"""

import asyncio
import time
from collections.abc import Callable

__all__ = ["PATIENCE", "blocking_until", "until"]

PATIENCE = 300.0
"""Seconds after which a condition counts as failed, on a slow and busy machine."""

_NOT = "it did not come true"


async def until(
    condition: Callable[[], object], what: str | Callable[[], str] = _NOT, seconds: float = PATIENCE
) -> None:
    """Wait until ``condition`` is true; fail with ``what`` after ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what() if callable(what) else what) from None


def blocking_until(condition: Callable[[], object], what: str = _NOT, seconds: float = PATIENCE) -> None:
    """The same without an event loop: blocks the thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
