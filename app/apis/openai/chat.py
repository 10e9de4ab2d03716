"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from quart import Response

from app.apis.collecting import Collected, collect
from app.apis.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatMessageAnswer,
    chat_logprobs,
    prompt_logprobs,
    usage_answer,
)
from app.apis.openai.chunks import ChatChunks, UsageReport
from app.apis.openai.parameters import chat_names, chat_params, chat_prompt, label_of, salt_of
from app.apis.openai.requests import ChatRequest
from app.parsers.base import StreamingParser
from app.parsers.reasoning.think import ends_in_thought
from app.parsers.registry import tool_parser
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["chat_completions"]


async def chat_completions(service: Service, exchange: Exchange, body: ChatRequest) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    model = service.check_model(body.model)
    params = chat_params(body)
    names = chat_names(body)
    parser = _parser(service, body)
    if parser is not None and body.skip_special_tokens is None:
        params = msgspec.structs.replace(params, shown_special_tokens=parser.MARKS)
    stream = service.submit(
        exchange,
        chat_prompt(body, service.arguments),
        params,
        priority=body.priority,
        cache_salt=salt_of(body),
        label=label_of(body),
        rename=names,
    )
    await service.accepted([stream], names)
    reader = None if parser is None else await _reader(service, body, parser, stream.prompt_end)
    created = int(time.time())
    if body.stream:
        usage = UsageReport(
            exchange, body.stream_options, choices=params.n, cache_report=service.arguments.enable_cache_report
        )
        writer = ChatChunks(
            body,
            usage,
            identity=exchange.request_id,
            created=created,
            model=model,
            fingerprint=service.fingerprint,
            reader=reader,
        )
        return sse_response(service, exchange, stream, writer)
    collected = await collect(stream, params.n)
    return json_response(_answer(service, exchange, body, collected, created, reader))


def _parser(service: Service, body: ChatRequest) -> type[StreamingParser] | None:
    """The format of the tool calls that the answer may have; None for none."""
    if not body.tools or body.tool_choice == "none":
        return None
    return tool_parser(service.arguments.tool_call_parser)


async def _reader(
    service: Service, body: ChatRequest, parser: type[StreamingParser], prompt_end: Sequence[int]
) -> Callable[[], StreamingParser]:
    """Creates the parser of a choice. ``prompt_end``: the last tokens of the prompt."""
    names = {tool.function.name for tool in body.tools or ()}
    parallel = body.parallel_tool_calls is not False
    thinking = ends_in_thought(await service.engine.detokenize(prompt_end, skip_special_tokens=False))
    return lambda: parser(names, parallel=parallel, thinking=thinking)


def _answer(
    service: Service,
    exchange: Exchange,
    body: ChatRequest,
    collected: list[Collected],
    created: int,
    reader: Callable[[], StreamingParser] | None,
) -> ChatAnswer:
    usage = usage_answer([[choice.usage for choice in collected]], cache_report=service.arguments.enable_cache_report)
    exchange.tokens = (usage.prompt_tokens, usage.completion_tokens)
    as_ids = bool(body.return_tokens_as_token_ids)
    first = collected[0]
    return ChatAnswer(
        id=exchange.request_id,
        created=created,
        model=service.check_model(body.model),
        system_fingerprint=service.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=(message := _message("".join(choice.text), reader)),
                finish_reason=_finish_reason(choice, message),
                logprobs=chat_logprobs(choice.logprobs, as_ids=as_ids) if body.logprobs else None,
                stop_reason=choice.matched_stop,
                matched_stop=choice.matched_stop,
                token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(collected)
        ],
        usage=usage,
        metadata={"weight_version": service.arguments.weight_version},
        prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if body.prompt_logprobs is not None else msgspec.UNSET,
        prompt_token_ids=(
            list(first.prompt_token_ids)
            if body.return_token_ids and first.prompt_token_ids is not None
            else msgspec.UNSET
        ),
    )


def _message(text: str, reader: Callable[[], StreamingParser] | None) -> ChatMessageAnswer:
    if reader is None:
        return ChatMessageAnswer(content=text)
    reading = reader()
    (content, calls), (rest, last) = reading.read(text), reading.end()
    if not (calls := calls + last):
        return ChatMessageAnswer(content=text)
    for call in calls:
        call.index = msgspec.UNSET
    return ChatMessageAnswer(content=(content + rest) or None, tool_calls=calls)


def _finish_reason(choice: Collected, message: ChatMessageAnswer) -> Literal["stop", "length", "tool_calls"]:
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
