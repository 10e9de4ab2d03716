"""An exchange by itself: what a cancellation means while a comment is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from app.server.dialect import OPENAI
from app.server.exchange import Exchange
from app.server.request_body import RequestBody
from app.server.upload_budget import UploadBudget
from tests.kits.waiting import PATIENCE


async def test_a_cancellation_is_not_lost_in_a_comment_that_is_being_written(engine):
    """A client that stops reading during a comment, and then hangs up, ends the handler that waits for the comment."""
    writing, never = asyncio.Event(), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body") == OPENAI.keep_alive:
            writing.set()
            await never.wait()

    async def receive() -> Any:
        await never.wait()

    exchange = Exchange(
        send,
        request_id="r",
        route=None,
        method="GET",
        path="/",
        label=None,
        http_version="1.1",
        send_deadline=0.0,
        keep_alive=0.01,
        metrics=engine.metrics.streams,
        body=RequestBody(receive, [], "1.1", UploadBudget()),
    )
    news, waits = asyncio.Event(), asyncio.Event()

    async def handle() -> None:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
        exchange.waiting()
        await news.wait()
        comment = exchange.woken()
        assert comment is not None
        waits.set()
        await comment

    handler = asyncio.create_task(handle())
    async with asyncio.timeout(PATIENCE):
        await writing.wait()
        news.set()
        await waits.wait()
        handler.cancel()
        await asyncio.wait({handler})
    assert handler.cancelled()
    await exchange.close()
