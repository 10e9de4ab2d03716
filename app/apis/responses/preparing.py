"""A request for a response, as a conversation for the engine and a response that is still empty."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from actors.protocol.requests import LIMITS, Chat
from app.apis.conversations import ConversationRequest
from app.apis.openai.parameters import chat_params, chat_prompt
from app.apis.openai.requests import ChatMessage, ChatRequest, Tool, ToolFunction
from app.apis.openai.tool_choice import tool_choice_of
from app.apis.responses.answers import ResponseAnswer
from app.apis.responses.items import messages_of, new_items
from app.apis.responses.requests import ConversationReference, ResponsesRequest, ResponsesTool
from app.apis.responses.store import History, ResponseStore, TooLong
from app.apis.responses.writer import WriterOptions
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.service import Service

__all__ = ["PreparedResponse", "prepare", "repeated", "see_owner", "too_long"]

Item = dict[str, Any]

_INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools and inputs that are refused: there is nothing to include.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_LARGE = 1 << 20
"""Bytes of a history that is decoded in a thread, turn by turn, so that streams go on."""

_LOGPROBS, _ENCRYPTED = _INCLUDABLE[:2]
_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "prompt": "input", "grammar": "text.format"}
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a custom tool as the model sees them."""


class PreparedResponse(msgspec.Struct, kw_only=True):
    """``items``: the request's own. ``owner``: of what is stored; None if nothing is."""

    request: ConversationRequest
    response: ResponseAnswer
    options: WriterOptions
    items: list[Item]
    owner: str | None


def see_owner(service: Service, exchange: Exchange) -> str | None:
    """Whose stored things this exchange sees; None for the admin key, which sees all."""
    return None if service.keyring.is_admin(exchange.tenant) else service.owner(exchange)


async def prepare(service: Service, exchange: Exchange, body: ResponsesRequest) -> PreparedResponse:
    """Check a request and build what answers it. Raises 400."""
    model = service.check_model(body.model, exchange)
    store = service.responses.store
    stored = body.store is not False and store is not None
    _check(body, store)
    history = _history(service, exchange, body, store)
    context = history.read() if history.size < _LARGE else await asyncio.to_thread(history.read)
    items = [_resolved(item, store, see_owner(service, exchange)) for item in new_items(body.input, service.ids)]
    conversation = conversation_id(body)
    if store is not None and conversation is not None and (known := store.repeated(conversation, items)) is not None:
        raise repeated("input", known)
    scored = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    try:
        chat = _chat_request(body, messages_of([*context, *items], body.instructions), scored)
        request = ConversationRequest(
            tool_choice=tool_choice_of(chat),
            chat=chat_prompt(chat, service.arguments, service.output_format.tools),
            params=chat_params(chat),
            names=_NAMES,
            parallel=body.parallel_tool_calls is not False,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
    except ApiError as error:
        raise _renamed(error) from None
    if body.truncation == "auto":
        await _truncate(service, exchange, request, body.max_output_tokens or 1)
    reasoning = body.reasoning
    summary = reasoning is not None and bool(reasoning.summary or reasoning.generate_summary)
    options = WriterOptions(
        custom=frozenset(tool.name or "" for tool in body.tools or () if tool.type == "custom"),
        logprobs=scored,
        summary=summary,
        encrypted=_ENCRYPTED in (body.include or ()),
        cache_report=service.arguments.enable_cache_report,
        new_id=service.ids.new,
    )
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        exchange.ignored = ", ".join(filter(None, [exchange.ignored, "text.verbosity"]))
    return PreparedResponse(
        request=request,
        response=_empty(exchange.request_id, model, body, stored=stored),
        options=options,
        items=items,
        owner=service.owner(exchange) if stored else None,
    )


def _check(body: ResponsesRequest, store: ResponseStore | None) -> None:
    for number, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise invalid(
                f"include[{number}]: must be one of {', '.join(_INCLUDABLE)}, not {name[:64]!r}.",
                param=f"include[{number}]",
            )
    if body.previous_response_id is not None and body.conversation is not None:
        raise invalid("conversation: contradicts previous_response_id; send only one of them.", param="conversation")
    needs = [
        name
        for name in ("background", "previous_response_id", "conversation")
        if getattr(body, name) not in (None, False)
    ]
    if needs and store is None:
        raise invalid(
            f"{needs[0]}: this server stores no responses; send the whole conversation as input, or start the server "
            "with --response-store-mib.",
            param=needs[0],
            code="unsupported_parameter",
        )
    if body.background and body.store is False:
        raise invalid("background: needs store; leave store out, or set it to true.", param="background")


def _history(service: Service, exchange: Exchange, body: ResponsesRequest, store: ResponseStore | None) -> History:
    """The items before those of the request."""
    owner = see_owner(service, exchange)
    if store is not None and (previous := body.previous_response_id) is not None:
        run = service.responses.runs.get(previous)
        if run is not None and service.sees(exchange, run.owner):
            raise invalid(
                f"previous_response_id: {previous[:64]} is not finished; wait until it is.",
                param="previous_response_id",
                code="response_not_finished",
            )
        try:
            result = store.turns(previous, owner)
        except TooLong:
            raise too_long("previous_response_id") from None
        if result is None:
            raise ApiError(
                404,
                f"previous_response_id: there is no response {previous[:64]!r}, or one before it was deleted or has "
                "expired; send the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return result
    if store is not None and (conversation := conversation_id(body)) is not None:
        if store.conversation(conversation, owner) is None:
            raise ApiError(
                404, f"conversation: there is no {conversation[:64]!r}.", param="conversation", code="not_found"
            )
        if store.is_full(conversation):
            raise too_long("conversation")
        return store.items(conversation)
    return History()


def too_long(param: str) -> ApiError:
    """The error for a conversation that cannot go on."""
    return invalid(
        f"{param}: this conversation is too long to go on; begin a new one, with a summary.",
        param=param,
        code="conversation_too_long",
    )


def repeated(param: str, item_id: str) -> ApiError:
    """The error for an item that a conversation has already."""
    return invalid(
        f"{param}: the conversation has an item {item_id[:64]!r} already; leave the item out, or give it another id.",
        param=param,
        code="duplicate_item",
    )


def conversation_id(body: ResponsesRequest) -> str | None:
    given = body.conversation
    return given.id if isinstance(given, ConversationReference) else given


def _resolved(item: Item, store: ResponseStore | None, owner: str | None) -> Item:
    if item["type"] != "item_reference":
        return item
    result = None if store is None else store.item(item["id"], owner)
    if result is None:
        raise ApiError(
            404,
            f"input: there is no item {item['id'][:64]!r} here; send the item itself.",
            param="input",
            code="item_not_found",
        )
    return result


def _chat_request(body: ResponsesRequest, messages: list[ChatMessage], scored: bool) -> ChatRequest:
    if len(messages) > LIMITS.messages:
        raise invalid(
            f"input: the conversation has {len(messages)} messages; at most {LIMITS.messages} are read.", param="input"
        )
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {**choice, "type": "function"}
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        response_format=_form(body.text.format) if body.text is not None else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        logprobs=scored,
        top_logprobs=body.top_logprobs,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _form(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as the ``response_format`` of a chat, which has the parts of a schema in an object."""
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(given.get("name"), str):
        at = "text.format.name"
        raise invalid(f"{at}: this field is required, a text. Add it.", param=at, code="missing_field")
    return {"type": "json_schema", "json_schema": {name: part for name, part in given.items() if name != "type"}}


def _tool(tool: ResponsesTool, at: str) -> Tool:
    if tool.type not in ("function", "custom"):
        raise invalid(
            f"{at}.type: {tool.type[:64]!r} runs at OpenAI; this server runs no tools. Send functions that you run.",
            param=f"{at}.type",
            code="unsupported_tool",
        )
    if tool.name is None:
        raise invalid(f"{at}.name: this field is required. Add it.", param=f"{at}.name", code="missing_field")
    if tool.type == "function":
        return Tool(type="function", function=ToolFunction(
            name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        ))  # fmt: skip
    if tool.format is not None and tool.format.get("type") != "text":
        raise invalid(
            f"{at}.format: inputs of custom tools are text without a grammar; use a function with a schema.",
            param=f"{at}.format",
            code="unsupported_parameter",
        )
    return Tool(type="function", function=ToolFunction(name=tool.name, description=tool.description, parameters=_INPUT))


def _renamed(error: ApiError) -> ApiError:
    """The same error under the field's name in this API."""
    if error.param is None:
        return error
    head = "messages" if error.param.startswith("messages") else error.param
    name = {"messages": "input", "reasoning_effort": "reasoning.effort"}.get(head, error.param)
    if name.startswith("response_format"):
        name = "text.format" + name.removeprefix("response_format").removeprefix(".json_schema")
    name = name.replace(".function.", ".") if name.startswith(("tools[", "tool_choice")) else name
    message = error.message
    if message.startswith(error.param):
        message = name + message[len(error.param) :]
    return invalid(message, param=name, code=error.code or "invalid_value")


async def _truncate(service: Service, exchange: Exchange, request: ConversationRequest, room: int) -> None:
    """Leave out the oldest messages, but not those of the system and the last, until the prompt and ``room`` tokens
    fit into the context."""
    chat = request.chat
    first = 1 if chat.messages[0]["role"] == "system" else 0
    starts = [
        start
        for start in range(first, len(chat.messages))
        if start == first or chat.messages[start]["role"] not in ("tool", "assistant")
    ]
    low, high = 0, len(starts) - 1
    with service.text_request(exchange):
        while low < high:  # the first start that fits
            middle = (low + high) // 2
            shorter = _from(chat, first, starts[middle])
            tokens = len(await service.engine.tokenize(shorter, tenant=exchange.tenant))
            if tokens + room <= service.engine.context_length:
                high = middle
            else:
                low = middle + 1
    request.chat = _from(chat, first, starts[low])


def _from(chat: Chat, first: int, start: int) -> Chat:
    return msgspec.structs.replace(chat, messages=[*chat.messages[:first], *chat.messages[start:]])


def _empty(request_id: str, model: str, body: ResponsesRequest, *, stored: bool) -> ResponseAnswer:
    """The response before its first token."""
    text, reasoning, conversation = body.text, body.reasoning, conversation_id(body)
    return ResponseAnswer(
        id=request_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        conversation={"id": conversation} if conversation is not None else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        safety_identifier=body.safety_identifier,
        store=stored,
        temperature=body.temperature,
        text={
            "format": (text.format if text is not None else None) or {"type": "text"},
            "verbosity": (text.verbosity if text is not None else None) or "medium",
        },
        # OpenAI's types have no "any", a synonym of other servers.
        tool_choice="required" if body.tool_choice == "any" else body.tool_choice or "auto",
        tools=[_shown_tool(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _shown_tool(tool: ResponsesTool) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(tool)
    if tool.type == "function":
        shown = {"description": None, "parameters": None, "strict": None, **shown}
    return shown
