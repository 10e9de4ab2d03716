"""The body of a request that is answered before it has all arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["MAX_BODY", "Receive", "RequestBody"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_BODY = 8 << 20
"""Bytes of a request's body. A prompt of a million tokens is about 5 MiB of text or ids; media are not read yet."""

MOST_BYTES = 2 * MAX_BODY  # of a body that is dropped, in all
_PERIOD = 1.0
_LEAST = 16 << 10  # bytes in each period: a client that drips is not waited for
_SECONDS = 10.0


class RequestBody:
    """Watches a body arrive: the application is given :meth:`receive` in place of the ASGI server's.

    Over HTTP/1 a connection that is closed while bytes of the client wait unread is reset, and the reset may overtake
    the answer: the client then sees a broken connection and not why it was refused. So what is left of a body is read
    and dropped before the connection closes, for as long and as far as is reasonable.
    """

    def __init__(self, receive: Receive, headers: list[tuple[bytes, bytes]], http_version: str) -> None:
        self._receive = receive
        self._over = asyncio.Event()
        self._bytes = 0
        if http_version >= "2" or not _announced(headers):
            self._over.set()

    @property
    def over(self) -> bool:
        """Nothing more comes that the answer has to wait for."""
        return self._over.is_set()

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        if whole or self._bytes >= MOST_BYTES:
            self._over.set()
        return message

    async def drop(self) -> None:
        """Read on until the body is over, little comes in a second, or it has been enough. Others may read as well."""
        reader = asyncio.create_task(self._read(), name="troupe-drop-body")
        loop = asyncio.get_running_loop()
        deadline, seen = loop.time() + _SECONDS, self._bytes - _LEAST
        try:
            while not self.over and self._bytes >= seen + _LEAST and loop.time() < deadline:
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
