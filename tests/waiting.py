"""Waiting for what a test expects to happen."""

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], object], what: str = "it did not come true", seconds: float = 180.0) -> None:
    """Return when ``condition`` is true; fail with ``what`` when it is not within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None
