"""gRPC over HTTP/2 as an ASGI application: messages with a length before them, and a status in the trailers.

By gRPC's "gRPC over HTTP2" (PROTOCOL-HTTP2.md). Messages are not compressed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError, Message

from app.server.errors import ApiError, invalid
from app.server.request_body import MAX_BODY, Receive

__all__ = ["Call", "CallEnded", "Method", "ended_by", "grpc_application"]

log = logging.getLogger("troupe.grpc")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PREFIX = 5  # bytes before a message: whether it is compressed, and its length
_WAITING = 4  # messages of a call that wait for their reader
_LONGEST = 86_400.0  # seconds of a deadline
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_HEADERS = [(b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity")]
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_KIND = re.compile(rb"application/grpc(\+proto)?\s*(;.*)?")
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class CallEnded(Exception):
    """Ends a call with a status that is not OK. ``trailing``: more trailers."""

    def __init__(self, code: Any, message: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.trailing = code, message, trailing


def ended_by(error: ApiError) -> CallEnded:
    """The end of a call by an error. Where waiting helps, ``retry-after`` says how many seconds."""
    trailing = [("error-code", error.code or str(error.status))]
    if (retry := error.headers().get("Retry-After")) is not None:
        trailing.append(("retry-after", retry))
    return CallEnded(_CODES.get(error.status, grpc.StatusCode.UNKNOWN), error.message, tuple(trailing))


class Call:
    """A call: its metadata as HTTP's headers, its deadline and its messages."""

    def __init__(self, headers: list[tuple[bytes, bytes]], max_bytes: int = MAX_BODY) -> None:
        """``max_bytes``: of a message."""
        self.headers = headers
        self._max_bytes = max_bytes
        self._deadline: float | None = None
        self._messages: asyncio.Queue[bytes | ApiError | None] = asyncio.Queue(_WAITING)
        self._read = bytearray()
        self._complete = False  # what comes is dropped
        given = dict(headers).get(b"grpc-timeout")
        if given is not None:
            matched = re.fullmatch(r"([0-9]{1,8})([HMSmun])", given.decode("latin-1"))
            if matched is None:
                raise CallEnded(grpc.StatusCode.INTERNAL, "grpc-timeout: is a number of at most 8 digits and a unit.")
            seconds = min(int(matched[1]) * _UNITS[matched[2]], _LONGEST)
            self._deadline = asyncio.get_running_loop().time() + seconds

    def seconds_left(self) -> float | None:
        """Until the client's deadline; None without one."""
        if self._deadline is None:
            return None
        return max(self._deadline - asyncio.get_running_loop().time(), 1e-3)

    async def messages(self, kind: type[Any]) -> AsyncIterator[Any]:
        """The client's messages as they come. Raises ApiError where one cannot be read."""
        while (data := await self._messages.get()) is not None:
            if isinstance(data, ApiError):
                raise data
            try:
                yield kind.FromString(data)
            except DecodeError:
                raise invalid(f"the request: is not a message {kind.DESCRIPTOR.full_name}.") from None

    async def request(self, kind: type[Any]) -> Any:
        """The client's only message."""
        async for only in self.messages(kind):
            self._complete = True
            self._read.clear()
            while not self._messages.empty():  # what waits to be put there is let go
                self._messages.get_nowait()
            return only
        raise invalid("the request: has no message.")

    async def feed(self, data: bytes, *, whole: bool) -> None:
        """Add what has arrived; ``whole``: the client sends no more. Waits while messages wait to be read."""
        if not self._complete:
            self._read += data
        while not self._complete and len(self._read) >= _PREFIX:
            size = int.from_bytes(self._read[1:_PREFIX])
            if self._read[0]:
                await self._refuse(501, "Compressed messages are not read; compress none.")
            elif size > self._max_bytes:
                await self._refuse(413, f"A message has {size} bytes; at most {self._max_bytes} are read.")
            elif len(self._read) < _PREFIX + size:
                break
            else:
                message = bytes(self._read[_PREFIX : _PREFIX + size])
                del self._read[: _PREFIX + size]
                await self._messages.put(message)
        if whole and not self._complete:
            await self._messages.put(None)

    async def _refuse(self, status: int, message: str) -> None:
        self._read.clear()
        await self._messages.put(ApiError(status, message))


class Method(NamedTuple):
    """``answer``: of a call without a stream an awaitable of its response, else an iterator of responses.
    ``max_bytes``: of a message."""

    answer: Callable[[Call], Any]
    streams: bool
    max_bytes: int = MAX_BODY


class _Answer:
    """Writes the response of a call."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def write(self, response: Message) -> None:
        await self._begin()
        data = response.SerializeToString()
        framed = b"\0" + len(data).to_bytes(4) + data
        await self._send({"type": "http.response.body", "body": framed, "more_body": True})

    async def end(self, code: Any, message: str = "", trailing: tuple[tuple[str, str], ...] = ()) -> None:
        await self._begin()
        trailers = [(b"grpc-status", b"%d" % code.value[0])]
        if message:
            trailers.append((b"grpc-message", quote(message, safe=_PRINTABLE).encode()))
        trailers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in trailing]
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        await self._send({"type": "http.response.trailers", "headers": trailers, "more_trailers": False})

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS, "trailers": True})


def grpc_application(methods: dict[str, Method]) -> Callable[[Any, Receive, Send], Awaitable[None]]:
    """The application that serves ``methods``, by their paths."""

    async def application(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        kind = dict(scope["headers"]).get(b"content-type", b"") if scope["type"] == "http" else b""
        if scope["type"] != "http" or scope["http_version"] < "2" or not _KIND.fullmatch(kind):
            await _refuse_http(scope, send)
            return
        answer = _Answer(send)
        method = methods.get(scope["path"])
        if method is None:
            await answer.end(grpc.StatusCode.UNIMPLEMENTED, f"There is no method {scope['path'][:200]}.")
            return
        try:
            call = Call(scope["headers"], method.max_bytes)
        except CallEnded as ended:
            await answer.end(ended.code, ended.message)
            return
        answering = asyncio.create_task(_answer(method, call, answer), name="troupe-grpc-call")
        reading = asyncio.create_task(_read(call, receive), name="troupe-grpc-read")
        try:  # reading ends when the client has left
            await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            reading.cancel()
            await asyncio.gather(answering, reading, return_exceptions=True)

    return application


async def _read(call: Call, receive: Receive) -> None:
    while (message := await receive())["type"] == "http.request":
        await call.feed(message.get("body", b""), whole=not message.get("more_body", False))


async def _answer(method: Method, call: Call, answer: _Answer) -> None:
    try:
        async with asyncio.timeout(call.seconds_left()):
            if method.streams:
                async with contextlib.aclosing(method.answer(call)) as responses:
                    async for response in responses:
                        await answer.write(response)
            else:
                await answer.write(await method.answer(call))
    except CallEnded as ended:
        await answer.end(ended.code, ended.message, ended.trailing)
    except TimeoutError:
        await answer.end(grpc.StatusCode.DEADLINE_EXCEEDED, "The deadline of the call has passed.")
    except ApiError as error:
        end = ended_by(error)
        await answer.end(end.code, end.message, end.trailing)
    except Exception:
        log.exception("A call of gRPC failed.")
        await answer.end(grpc.StatusCode.INTERNAL, "The server failed; its log says why.")
    else:
        await answer.end(grpc.StatusCode.OK)


async def _refuse_http(scope: Any, send: Send) -> None:
    """Answer what is not gRPC."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1002})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 415, "headers": headers})
    await send({"type": "http.response.body", "body": b"This port speaks gRPC; HTTP has the port of --port.\n"})
