"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response

from actors.protocol.requests import Grammar, SamplingParams
from app.apis.anthropic.answers import MessageChunks, message_of
from app.apis.anthropic.conversation import chat_of, choice_of
from app.apis.anthropic.requests import CountRequest, MessagesRequest
from app.apis.collecting import collect
from app.apis.conversations import ConversationRequest, submit
from app.apis.events import read_whole
from app.apis.grammars import schema_text
from app.parsers.base import StreamingParser
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["TokenCount", "count_tokens", "create_message"]

_NAMES = {"prompt": "messages", "stop": "stop_sequences"}


class TokenCount(msgspec.Struct):
    input_tokens: int


async def create_message(service: Service, exchange: Exchange, body: MessagesRequest) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    model = service.check_model(body.model, exchange)
    choice, parallel = choice_of(body)
    grammar, field = _grammar(body)
    request = ConversationRequest(
        chat=chat_of(body, service.output_format.tools or StreamingParser),
        params=_params(body, grammar),
        names={**_NAMES, "grammar": field},
        tool_choice=choice,
        parallel=parallel,
        reasoning_limit=_thought_limit(service, body),
        priority=body.priority,
        cache_salt=body.cache_salt or None,
    )
    stream, reader = await submit(service, exchange, request)
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": body.max_tokens,
        "shows_thought": body.thinking is None or body.thinking.display != "omitted",
    }
    if body.stream:
        writer = MessageChunks(exchange, reader(), **options)
        return sse_response(service, exchange, stream, writer, first=writer.start(stream.prompt_tokens))
    [collected] = await collect(stream, 1)
    exchange.tokens = (collected.usage.prompt_tokens, collected.usage.completion_tokens)
    answer = await read_whole(collected, reader())
    return json_response(message_of(answer, identity=exchange.request_id, **options))


async def count_tokens(service: Service, exchange: Exchange, body: CountRequest) -> Response:
    """The tokens of a conversation with its tools, as a message would have them."""
    service.check_model(body.model, exchange)
    choice_of(body)
    chat = chat_of(body, service.output_format.tools or StreamingParser)
    with service.text_request(exchange):
        ids = await service.engine.tokenize(chat, add_special_tokens=False, tenant=exchange.tenant)
    return json_response(TokenCount(len(ids)))


def _params(body: MessagesRequest, grammar: Grammar | None) -> SamplingParams:
    if not 1 <= body.max_tokens < 2**31:
        raise invalid("max_tokens: must be from 1 to 2147483647.", param="max_tokens")
    return SamplingParams(
        default_max_tokens=body.max_tokens,  # as Anthropic's: less where the context ends before
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
        grammar=grammar,
    )


def _grammar(body: MessagesRequest) -> tuple[Grammar | None, str]:
    """The form of the answer, and the field that asks for it."""
    config = None if body.output_config is None else body.output_config.format
    name, form = ("output_config.format", config) if config else ("output_format", body.output_format)
    if not form:
        return None, name
    if form.get("type") != "json_schema":
        raise invalid(f"{name}.type: must be json_schema.", param=f"{name}.type")
    return Grammar("json_schema", schema_text(form.get("schema"), f"{name}.schema")), name


def _thought_limit(service: Service, body: MessagesRequest) -> tuple[str, int] | None:
    """The budget of the thought; a model without thoughts keeps every budget."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens: this field is required.", param="thinking.budget_tokens")
    if service.output_format.reasoning_format is None or thinking.budget_tokens >= body.max_tokens:
        return None
    return "thinking.budget_tokens", thinking.budget_tokens
