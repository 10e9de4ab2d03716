"""Responses that are being made: for a client that waits, as a stream, or in the background."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType

import msgspec
from quart.wrappers.response import ResponseBody

from actors.protocol.requests import RequestAborted
from actors.requests.streams import RequestStream
from app.apis.conversations import AcceptedRequest, submit
from app.apis.responses.preparing import PreparedResponse
from app.apis.responses.store import ResponseStore, StoredResponse
from app.apis.responses.writer import ResponseWriter, first_events
from app.server.background import detached_exchange
from app.server.errors import ApiError
from app.server.exchange import Exchange
from app.server.routes import Route
from app.server.service import Service

__all__ = ["BackgroundRun", "EventBody", "ResponseRun"]

_encode = msgspec.json.encode

log = logging.getLogger("troupe.responses")


class ResponseRun:
    """Makes one response of an accepted request, and stores it. ``failure``: set if it could not be made."""

    def __init__(
        self, service: Service, exchange: Exchange, prepared: PreparedResponse, accepted: AcceptedRequest
    ) -> None:
        self.writer = ResponseWriter(prepared.response, accepted.reader(), prepared.options)
        self.failure: ApiError | None = None
        self.cancelled = False
        self._service = service
        self._exchange = exchange
        self._prepared = prepared
        self._stream = accepted.stream

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream. The response is stored before its last event leaves."""
        writer = self.writer
        begun = writer.begin()
        if not self._prepared.response.background:  # there they are made again when they are read
            yield begun
        del begun
        try:
            async for delta in self._stream:
                if piece := writer.chunk(delta):
                    if writer.ended:
                        self._keep()
                    yield piece
        except Exception as error:
            self.failure = self._service.failure(self._exchange, error)
            last = writer.failed(self.failure, cancelled=self.cancelled and isinstance(error, RequestAborted))
            self._keep()
            yield last
        finally:
            self._exchange.tokens = writer.tokens

    def _keep(self) -> None:
        prepared, store = self._prepared, self._service.responses.store
        response = prepared.response
        if store is None or prepared.owner is None:
            return
        try:
            if not response.background:  # a background run stores itself, with its events
                store.put(StoredResponse(prepared.owner, response, prepared.items))
            if response.conversation is not None and response.status in ("completed", "incomplete"):
                items = [*prepared.items, *response.output]
                store.extend(response.conversation["id"], items)
        except sqlite3.Error as error:  # such as a full disk: the client has its answer
            log.error("%s could not be stored: %s", response.id, error)


class BackgroundRun:
    """A response that goes on without its client. ``follow`` gives its events, those of the past as well. ``size``:
    bytes that it takes, about."""

    def __init__(self, prepared: PreparedResponse, owner: str) -> None:
        self.prepared = prepared
        self.size = len(_encode(prepared.response)) + len(_encode(prepared.request.chat))
        self.owner = owner
        self.done = asyncio.Event()
        self.run: ResponseRun | None = None
        self.stream: RequestStream | None = None
        self._events: list[bytes] = []  # after the first ones, which repeat the request
        self._more = asyncio.Event()

    async def make(
        self, service: Service, route: Route, outer: Exchange, accepted: asyncio.Future[None], store: ResponseStore
    ) -> None:
        """Make the response. ``outer``: the client's exchange. ``accepted``: gets the error of a request that is not
        accepted."""
        response = self.prepared.response
        timeline, outer.timeline = outer.timeline, None
        try:
            async with detached_exchange(
                service, route, tenant=outer.tenant, request_id=response.id, timeline=timeline
            ) as exchange:
                exchange.custom_labels = outer.custom_labels
                try:
                    submitted = await submit(service, exchange, self.prepared.request)
                    self._store(store)
                except Exception as error:
                    exchange.error = service.failure(exchange, error)
                    accepted.set_exception(exchange.error)
                    return
                self.stream = submitted.stream
                self.run = ResponseRun(service, exchange, self.prepared, submitted)
                accepted.set_result(None)
                async for piece in self.run.events():
                    self._events += [event + b"\n\n" for event in piece.split(b"\n\n") if event]
                    self._wake()
                try:
                    self._store(store)
                except sqlite3.Error as error:  # the store has it as failed
                    log.error("%s could not be stored: %s", response.id, error)
        finally:
            self.done.set()
            self._wake()
            if not accepted.done():
                accepted.cancel()

    def _store(self, store: ResponseStore) -> None:
        events = b"".join(self._events)
        store.put(StoredResponse(self.owner, self.prepared.response, self.prepared.items, events))

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def cancel(self, service: Service) -> None:
        """End the response, and wait until it has ended."""
        if self.run is not None and self.stream is not None:
            self.run.cancelled = True
            await service.engine.abort(self.stream.request_id)
        await self.done.wait()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events after the one with the sequence number ``after``."""
        first = first_events(self.prepared.response)
        if begun := first[after + 1 :]:
            yield b"".join(begun)
        place = max(0, after + 1 - len(first))
        del first, begun
        while True:
            more, events = self._more, self._events[place:]
            if events:
                place += len(events)
                yield b"".join(events)
            elif self.done.is_set():
                return
            else:
                await more.wait()


class EventBody(ResponseBody):
    """The body of a stream of events, with comments while it is idle."""

    def __init__(self, exchange: Exchange, source: AsyncGenerator[bytes, None]) -> None:
        self._exchange = exchange
        self._source = source

    async def __aenter__(self) -> EventBody:
        return self

    async def __aexit__(self, exc_type: type | None, exc_value: BaseException | None, tb: TracebackType | None) -> None:
        await self._source.aclose()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        exchange = self._exchange
        exchange.waiting()
        try:
            return await self._source.__anext__()
        finally:
            if (comment := exchange.woken()) is not None:
                await comment
