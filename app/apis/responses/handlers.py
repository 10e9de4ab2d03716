"""``/v1/responses``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quart import Response

from app.apis.conversations import submit
from app.apis.responses.answers import InputTokens, ItemList, ResponseAnswer, ResponseDeleted
from app.apis.responses.preparing import prepare, see_owner
from app.apis.responses.requests import ResponsesRequest
from app.apis.responses.runs import BackgroundRun, EventBody, ResponseRun
from app.apis.responses.store import ResponseStore, StoredResponse
from app.apis.responses.writer import first_events
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.query import choice, number, page, word
from app.server.service import Service, json_response

__all__ = [
    "MAX_SHOWN",
    "SHOWN",
    "Responses",
    "cancel_response",
    "count_input_tokens",
    "create_response",
    "delete_response",
    "get_response",
    "list_input_items",
    "shown_items",
]

MAX_SHOWN, SHOWN = 100, 20
"""Items of a list at most, and without a limit in the query."""

_MAX_RUNS = 64  # background responses of one key
_MAX_RUN_BYTES = 64 << 20  # that they take together, unless there is only one
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Responses:
    """The store of responses (None: nothing is stored), and those that are made in the background, by id."""

    def __init__(self, store: ResponseStore | None) -> None:
        self.store = store
        self.runs: dict[str, BackgroundRun] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.store is not None:
            self.store.close()


async def create_response(service: Service, exchange: Exchange, body: ResponsesRequest) -> Response:
    """Answer a conversation: as a whole, as a stream, or in the background."""
    prepared = await prepare(service, exchange, body)
    if body.background:
        run = await _in_background(service, exchange, BackgroundRun(prepared, service.owner(exchange)))
        return _stream(exchange, run.follow(-1)) if body.stream else json_response(prepared.response)
    made = ResponseRun(service, exchange, prepared, await submit(service, exchange, prepared.request))
    if body.stream:
        return _stream(exchange, made.events())
    async for _ in made.events():
        pass
    if made.failure is not None:
        raise made.failure
    return json_response(prepared.response)


def _stream(exchange: Exchange, source: AsyncGenerator[bytes, None]) -> Response:
    if exchange.timeline is not None:
        exchange.timeline.request["gen_ai.request.stream"] = True
    return Response(EventBody(exchange, source), headers=dict(_HEADERS))


async def _in_background(service: Service, exchange: Exchange, run: BackgroundRun) -> BackgroundRun:
    """Begin a background response. Raises what is wrong with the request."""
    here, route = service.responses, exchange.route
    if here.store is None or route is None:
        raise RuntimeError("a background response needs a store")
    others = [other.size for other in here.runs.values() if other.owner == run.owner]
    if len(others) >= _MAX_RUNS or (others and sum(others) + run.size > _MAX_RUN_BYTES):
        raise ApiError(
            429,
            f"{len(others)} of your background responses are not finished, and they take at most {_MAX_RUNS} places "
            f"and {_MAX_RUN_BYTES >> 20} MiB; wait for one of them, or cancel it.",
            kind="rate_limit_error",
            code="too_many_background_responses",
            retry_after=5,
        )
    response_id = run.prepared.response.id
    here.runs[response_id] = run
    accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run.make(service, route, exchange, accepted, here.store), name=f"troupe-{response_id}")
    here.tasks.add(task)

    def end(task: asyncio.Task[None]) -> None:
        here.tasks.discard(task)
        here.runs.pop(response_id, None)

    task.add_done_callback(end)
    await asyncio.shield(accepted)
    return run


# -- stored responses


def _store(service: Service) -> ResponseStore:
    if service.responses.store is None:
        raise ApiError(
            400,
            "This server stores no responses; start it with --response-store-mib.",
            code="store_disabled",
        )
    return service.responses.store


def _running(service: Service, exchange: Exchange, response_id: str) -> BackgroundRun | None:
    run = service.responses.runs.get(response_id)
    return run if run is not None and service.sees(exchange, run.owner) else None


def _stored(service: Service, exchange: Exchange, response_id: str) -> StoredResponse:
    stored = _store(service).get(response_id, see_owner(service, exchange))
    if stored is None:
        raise ApiError(404, f"There is no response {response_id[:64]!r}.", param="response_id", code="not_found")
    return stored


async def get_response(service: Service, exchange: Exchange, response_id: str) -> Response:
    """A response, or its events from ``starting_after`` on, if it is made in the background."""
    run = _running(service, exchange, response_id)
    stored = None if run is not None else _stored(service, exchange, response_id)
    if choice("stream", ("false", "true")) == "false":
        return json_response(run.prepared.response if run is not None else stored and stored.response)
    after = number("starting_after", -1, 0, 2**31 - 1)
    if run is not None:
        return _stream(exchange, run.follow(after))
    if stored is None or stored.events is None:
        raise invalid("stream: only responses of the background have a stream later; leave it out.", param="stream")
    return _stream(exchange, _replay(stored.response, stored.events, after))


async def _replay(response: ResponseAnswer, events: bytes, after: int) -> AsyncGenerator[bytes, None]:
    later = [event + b"\n\n" for event in events.split(b"\n\n") if event]
    if result := [*first_events(response), *later][after + 1 :]:
        yield b"".join(result)


async def delete_response(service: Service, exchange: Exchange, response_id: str) -> Response:
    if (run := _running(service, exchange, response_id)) is not None:
        await run.cancel(service)
    if not _store(service).delete(_stored(service, exchange, response_id).response.id, None):
        raise ApiError(404, f"There is no response {response_id[:64]!r}.", param="response_id", code="not_found")
    return json_response(ResponseDeleted(id=response_id))


async def cancel_response(service: Service, exchange: Exchange, response_id: str) -> Response:
    """Cancel a response of the background; one that has ended stays as it is."""
    if (run := _running(service, exchange, response_id)) is not None:
        await run.cancel(service)
        return json_response(run.prepared.response)
    response = _stored(service, exchange, response_id).response
    if not response.background:
        raise invalid("response_id: only responses of the background can be cancelled.", param="response_id")
    return json_response(response)


async def list_input_items(service: Service, exchange: Exchange, response_id: str) -> Response:
    """The items of the request for a response, without those of responses before it."""
    run = _running(service, exchange, response_id)
    items = run.prepared.items if run is not None else _stored(service, exchange, response_id).input
    return json_response(_item_list(items))


def _item_list(items: list[dict[str, object]]) -> ItemList:
    """The page of items that the query asks for; ``items``: oldest first."""
    word("include")
    return shown_items(*page(items[::-1], lambda item: str(item["id"]), maximum=MAX_SHOWN, default=SHOWN))


def shown_items(items: list[dict[str, object]], more: bool) -> ItemList:
    """``more``: whether there are others after these."""
    ends = (str(items[0]["id"]), str(items[-1]["id"])) if items else (None, None)
    return ItemList(data=items, first_id=ends[0], last_id=ends[1], has_more=more)


async def count_input_tokens(service: Service, exchange: Exchange, body: ResponsesRequest) -> Response:
    """The tokens of a request's prompt."""
    prepared = await prepare(service, exchange, body)
    with service.text_request(exchange):
        tokens = await service.engine.tokenize(prepared.request.chat, tenant=exchange.tenant)
    return json_response(InputTokens(input_tokens=len(tokens)))
