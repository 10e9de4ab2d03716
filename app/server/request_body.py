"""The body of a request, which may be answered before all of it has arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from app.server.upload_budget import FREE, UploadBudget

__all__ = ["MAX_BODY", "Receive", "RequestBody"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_BODY = 8 << 20
"""Bytes of a request's body. A prompt of a million tokens is about 5 MiB of text or ids; media are not read yet."""

MAX_BYTES = 2 * MAX_BODY  # of a dropped body, in total
_PERIOD = 1.0
_MIN_BYTES = 16 << 10  # bytes in each period: a slower client is not waited for
_SECONDS = 10.0
_WAITING = 4  # pieces of an upload that wait for its reader
_UPLOAD_SECONDS = 60.0  # of waiting for an upload, in which it must bring ``_MIN_BYTES`` bytes for each second


class RequestBody:
    """Observes a body: the application uses :meth:`receive` instead of the ASGI server's.

    An HTTP/1 connection that is closed with unread bytes is reset, and the reset may overtake the answer. The client
    then sees a broken connection instead of the reason. So the rest of a body is read and dropped before the connection
    closes, within limits.

    ``is_read``: whether the route takes a body; without it the application sees an empty one. ``owner``: whose share of
    ``budget`` the body counts in while it is unfinished. ``refused``: the body exceeded that share, and the
    application saw only its first part. ``upload``: the application sees an empty body, and the handler reads the real
    one piece by piece (:meth:`pieces`); the client waits while it does not.
    """

    def __init__(
        self,
        receive: Receive,
        headers: list[tuple[bytes, bytes]],
        http_version: str,
        budget: UploadBudget,
        *,
        is_read: bool = True,
        upload: bool = False,
    ) -> None:
        self.owner = ""
        self.refused = False
        self._budget = budget
        self._is_read = is_read
        self._pieces: asyncio.Queue[bytes | None] | None = asyncio.Queue(_WAITING) if upload else None
        self._counted = 0
        self._receive = receive
        self._over = asyncio.Event()
        self._bytes = 0
        if http_version >= "2" or not _announced(headers):
            self._over.set()

    @property
    def over(self) -> bool:
        """Whether no more body is expected."""
        return self._over.is_set()

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._pieces is not None:
            return await self._hand_over(message, whole)
        if whole or self._bytes >= MAX_BYTES:
            self._over.set()
        if whole:
            self.release()
        elif self.refused or not self._is_read:
            return {**message, "body": b""}
        elif not self._count():
            self.refused = True
            self.release()
            return {**message, "body": b"", "more_body": False}
        return message

    async def _hand_over(self, message: MutableMapping[str, Any], whole: bool) -> MutableMapping[str, Any]:
        """Pass a message's bytes to the reader of an upload, if it still reads."""
        pieces = self._pieces
        if whole or (pieces is None and self._bytes >= MAX_BYTES):
            self._over.set()
        if pieces is not None and message["type"] == "http.request":
            if message.get("body"):
                await pieces.put(message["body"])
            if whole:
                await pieces.put(None)
        return {**message, "body": b""}

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes of an upload as they arrive. Raises TimeoutError when the client sends too few for a while."""
        pieces = self._pieces
        if pieces is None:
            raise RuntimeError("this route declares no upload")
        loop = asyncio.get_running_loop()
        seconds, missing = _UPLOAD_SECONDS, _UPLOAD_SECONDS * _MIN_BYTES
        try:
            while True:
                began = loop.time()
                async with asyncio.timeout(seconds):
                    piece = await pieces.get()
                if piece is None:
                    return
                seconds, missing = seconds - (loop.time() - began), missing - len(piece)
                if missing <= 0:
                    seconds, missing = _UPLOAD_SECONDS, _UPLOAD_SECONDS * _MIN_BYTES
                yield piece
        finally:
            self._end_upload()

    def _end_upload(self) -> None:
        """Drop what is left of an upload, so that no message waits to be read."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            self._bytes = 0
            while not pieces.empty():
                pieces.get_nowait()

    def _count(self) -> bool:
        """Count what has arrived. False: it is more than the share of its owner."""
        more = self._bytes - FREE - self._counted
        if more <= 0:
            return True
        if not self._budget.take(self.owner, more):
            return False
        self._counted += more
        return True

    def release(self) -> None:
        """Give this body's bytes back to the budget: the body is complete, or its exchange has ended."""
        if self._counted:
            self._budget.give_back(self.owner, self._counted)
            self._counted = 0

    async def drop(self) -> None:
        """Read and drop the rest, until it is over, too slow, or too much. Others may read at the same time."""
        self._end_upload()
        reader = asyncio.create_task(self._read(), name="troupe-drop-body")
        loop = asyncio.get_running_loop()
        deadline, seen = loop.time() + _SECONDS, self._bytes - _MIN_BYTES
        try:
            while not self.over and self._bytes >= seen + _MIN_BYTES and loop.time() < deadline:
                seen = self._bytes
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD):
                        await self._over.wait()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        while not self.over:
            await self.receive()


def _announced(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        (name.lower() == b"content-length" and value.strip() != b"0") or name.lower() == b"transfer-encoding"
        for name, value in headers
    )
