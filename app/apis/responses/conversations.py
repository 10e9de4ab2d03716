"""``/v1/conversations``."""

from __future__ import annotations

import time

import msgspec
from quart import Response

from app.apis.responses.answers import ConversationAnswer, ConversationDeleted
from app.apis.responses.handlers import MAX_SHOWN, SHOWN, shown_items
from app.apis.responses.items import Item, new_items
from app.apis.responses.preparing import repeated, see_owner, too_long
from app.apis.responses.requests import ConversationRequest, ConversationUpdate, InputItem, ItemsRequest
from app.apis.responses.store import ResponseStore
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.query import choice, number, word
from app.server.service import Service, json_response

__all__ = [
    "add_items",
    "create_conversation",
    "delete_conversation",
    "delete_item",
    "get_conversation",
    "get_item",
    "list_items",
    "update_conversation",
]


def _store(service: Service) -> ResponseStore:
    if service.responses.store is None:
        raise ApiError(
            400, "This server stores no conversations; start it with --response-store-mib.", code="store_disabled"
        )
    return service.responses.store


def _found(service: Service, exchange: Exchange, conversation_id: str) -> ConversationAnswer:
    data = _store(service).conversation(conversation_id, see_owner(service, exchange))
    if data is None:
        message = f"There is no conversation {conversation_id[:64]!r}."
        raise ApiError(404, message, param="conversation_id", code="not_found")
    return msgspec.json.decode(data, type=ConversationAnswer)


async def create_conversation(service: Service, exchange: Exchange, body: ConversationRequest) -> Response:
    store, owner = _store(service), service.owner(exchange)
    items = _items(body.items or [], service)
    answer = ConversationAnswer(id=service.ids.new("conv_"), created_at=int(time.time()), metadata=body.metadata or {})
    store.put_conversation(answer.id, owner, msgspec.json.encode(answer))
    if items:
        store.extend(answer.id, items)
    return json_response(answer)


def _items(given: list[InputItem], service: Service) -> list[Item]:
    items = new_items(given, service.ids, "items")
    for place, item in enumerate(items):
        if item["type"] == "item_reference":
            at = f"items[{place}].type"
            raise invalid(f"{at}: a conversation keeps items, not references; send the item itself.", param=at)
    return items


async def get_conversation(service: Service, exchange: Exchange, conversation_id: str) -> Response:
    return json_response(_found(service, exchange, conversation_id))


async def update_conversation(service: Service, exchange: Exchange, body: ConversationUpdate) -> Response:
    answer = _found(service, exchange, exchange.parts["conversation_id"])
    answer.metadata = body.metadata
    _store(service).update_conversation(answer.id, msgspec.json.encode(answer))
    return json_response(answer)


async def delete_conversation(service: Service, exchange: Exchange, conversation_id: str) -> Response:
    answer = _found(service, exchange, conversation_id)
    _store(service).delete(answer.id, None)
    return json_response(ConversationDeleted(id=answer.id))


async def list_items(service: Service, exchange: Exchange, conversation_id: str) -> Response:
    answer = _found(service, exchange, conversation_id)
    word("include")
    after, limit = word("after"), number("limit", SHOWN, 1, MAX_SHOWN)
    page = _store(service).page(answer.id, after, limit, oldest_first=choice("order", ("desc", "asc")) == "asc")
    if page is None:
        raise invalid(f"after: there is no {(after or '')[:64]!r} in this list.", param="after")
    return json_response(shown_items(page.items, page.more))


async def add_items(service: Service, exchange: Exchange, body: ItemsRequest) -> Response:
    answer = _found(service, exchange, exchange.parts["conversation_id"])
    items = _items(body.items, service)
    if _store(service).is_full(answer.id):
        raise too_long("items")
    if (known := _store(service).repeated(answer.id, items)) is not None:
        raise repeated("items", known)
    _store(service).extend(answer.id, items)
    return json_response(shown_items(items, False))


async def get_item(service: Service, exchange: Exchange, item_id: str) -> Response:
    answer = _found(service, exchange, exchange.parts["conversation_id"])
    item = _store(service).item_of(answer.id, item_id)
    if item is None:
        raise _no_item(item_id)
    return json_response(item)


async def delete_item(service: Service, exchange: Exchange, item_id: str) -> Response:
    """Returns the conversation, as OpenAI's API does."""
    answer = _found(service, exchange, exchange.parts["conversation_id"])
    if not _store(service).delete_item(answer.id, item_id):
        raise _no_item(item_id)
    return json_response(answer)


def _no_item(item_id: str) -> ApiError:
    return ApiError(404, f"There is no item {item_id[:64]!r}.", param="item_id", code="not_found")
