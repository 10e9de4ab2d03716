"""The routes of responses and conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.apis.responses.answers import (
    ConversationAnswer,
    ConversationDeleted,
    InputTokens,
    ItemList,
    ResponseAnswer,
    ResponseDeleted,
)
from app.apis.responses.conversations import (
    add_items,
    create_conversation,
    delete_conversation,
    delete_item,
    get_conversation,
    get_item,
    list_items,
    update_conversation,
)
from app.apis.responses.dialect import RESPONSES
from app.apis.responses.handlers import (
    cancel_response,
    count_input_tokens,
    create_response,
    delete_response,
    get_response,
    list_input_items,
)
from app.apis.responses.requests import ConversationRequest, ConversationUpdate, ItemsRequest, ResponsesRequest
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

_SPELLING = (
    ("messages", "input"),
    ("prompt", "input"),
    ("max_tokens", "max_output_tokens"),
    ("logprobs", "top_logprobs"),
    ("response_format", "text"),
    ("reasoning_effort", "reasoning"),
)
_EFFECTS = ("store", "include")
_PAGES = {
    "query": (("limit", "Items of one page.", 1, 100),),
    "words": (
        ("after", "The id after which the list begins."),
        ("order", "desc (newest first) or asc."),
        ("include", "Taken, and without effect."),
    ),
}

_route: Callable[..., Route] = partial(Route, level=AccessLevel.USER, tag="responses")
_RESPONSE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
_ITEM = f"{_CONVERSATION}/items/{{item_id}}"

ROUTES: tuple[Route, ...] = (
    _route(
        path="/v1/responses",
        methods=("POST",),
        handler=create_response,
        summary="Answer a conversation, which may be stored",
        body=ResponsesRequest,
        media=("application/json", "text/event-stream"),
        answer=ResponseAnswer,
        id_prefix="resp_",
        operation="chat",
        spelling=_SPELLING,
        effects=_EFFECTS,
        dialect=RESPONSES,
        needs_engine=True,
    ),
    _route(
        path="/v1/responses/input_tokens",
        methods=("POST",),
        handler=count_input_tokens,
        summary="The tokens of a request's prompt",
        body=ResponsesRequest,
        answer=InputTokens,
        effects=_EFFECTS,
        needs_engine=True,
    ),
    _route(
        path=_RESPONSE,
        methods=("GET",),
        handler=get_response,
        summary="A stored response",
        query=(("starting_after", "With stream: the sequence number after which the events begin.", 0, 2**31 - 1),),
        words=(("stream", "true: the events of a background response."), ("include", "Taken, and without effect.")),
        media=("application/json", "text/event-stream"),
        answer=ResponseAnswer,
        dialect=RESPONSES,
    ),
    _route(
        path=_RESPONSE,
        methods=("DELETE",),
        handler=delete_response,
        summary="Delete a response",
        answer=ResponseDeleted,
    ),
    _route(
        path=f"{_RESPONSE}/cancel",
        methods=("POST",),
        handler=cancel_response,
        summary="Cancel a background response",
        answer=ResponseAnswer,
    ),
    _route(
        path=f"{_RESPONSE}/input_items",
        methods=("GET",),
        handler=list_input_items,
        summary="The input of a stored response",
        answer=ItemList,
        **_PAGES,
    ),
    _route(
        path="/v1/conversations",
        methods=("POST",),
        handler=create_conversation,
        summary="Begin a conversation",
        body=ConversationRequest,
        optional_body=True,
        answer=ConversationAnswer,
    ),
    _route(
        path=_CONVERSATION,
        methods=("GET",),
        handler=get_conversation,
        summary="A conversation",
        answer=ConversationAnswer,
    ),
    _route(
        path=_CONVERSATION,
        methods=("POST",),
        handler=update_conversation,
        summary="Replace a conversation's metadata",
        body=ConversationUpdate,
        answer=ConversationAnswer,
    ),
    _route(
        path=_CONVERSATION,
        methods=("DELETE",),
        handler=delete_conversation,
        summary="Delete a conversation",
        answer=ConversationDeleted,
    ),
    _route(
        path=f"{_CONVERSATION}/items",
        methods=("GET",),
        handler=list_items,
        summary="The items of a conversation",
        answer=ItemList,
        **_PAGES,
    ),
    _route(
        path=f"{_CONVERSATION}/items",
        methods=("POST",),
        handler=add_items,
        summary="Append items to a conversation",
        body=ItemsRequest,
        answer=ItemList,
    ),
    _route(path=_ITEM, methods=("GET",), handler=get_item, summary="An item of a conversation"),
    _route(
        path=_ITEM,
        methods=("DELETE",),
        handler=delete_item,
        summary="Delete an item of a conversation",
        answer=ConversationAnswer,
    ),
)
