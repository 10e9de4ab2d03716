"""Waiting for one of several things, and for a task's end whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["finish", "first"]


async def first(*awaitables: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done, and raise what it raised; the others are cancelled."""
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def finish(task: asyncio.Task[None]) -> None:
    """Wait for a task to its end, also when the waiter is cancelled meanwhile; the cancellation comes after."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                break
            cancelled = error
    if cancelled is not None:
        raise cancelled
