"""Helpers to await the first of several coroutines, and the end of a task despite cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["finish", "first"]


async def first(*awaitables: Coroutine[Any, Any, object]) -> None:
    """Return when the first one is done, or raise its exception; the others are cancelled."""
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
    """Wait for a task's end even if the waiter is cancelled; the cancellation is raised afterwards."""
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
