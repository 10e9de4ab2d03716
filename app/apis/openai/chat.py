"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import msgspec
from quart import Response

from actors.protocol.requests import Delta
from app.apis.choice_reader import ChoiceReader
from app.apis.collecting import CollectedChoice, collect
from app.apis.conversations import ConversationRequest, submit
from app.apis.events import Answer, read_whole
from app.apis.openai.answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatMessageAnswer,
    ToolCall,
    chat_logprobs,
    prompt_logprobs,
    stop_reason,
    usage_answer,
)
from app.apis.openai.chunks import ChatChunks, UsageReport
from app.apis.openai.parameters import chat_names, chat_params, chat_prompt, label_of, salt_of
from app.apis.openai.requests import ChatRequest
from app.apis.openai.tool_choice import tool_choice_of
from app.apis.routing import replica_of
from app.apis.sessions import begin_session_request
from app.apis.token_values import last_state
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["chat_completions"]


async def chat_completions(service: Service, exchange: Exchange, body: ChatRequest) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    model = service.check_model(body.model, exchange)
    params, names = chat_params(body), chat_names(body)
    chat = chat_prompt(body, service.arguments, service.output_format.tools)
    session_request = None
    if body.session_params is not None:
        session_request = await begin_session_request(
            service, exchange, body.session_params, [chat], choices=params.n, rid=exchange.request_id, names=names
        )
    request = ConversationRequest(
        tool_choice=tool_choice_of(body),
        chat=chat,
        prompt=None if session_request is None else session_request.prompt,
        params=params,
        names=names,
        parallel=body.parallel_tool_calls is not False,
        reasoning_limit=_thought_limit(body),
        separate=body.separate_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        priority=body.priority,
        cache_salt=salt_of(body),
        label=label_of(body),
        replica=replica_of(body),
    )
    stream, reader = await submit(service, exchange, request)
    source: AsyncIterator[Delta] = stream if session_request is None else session_request.follow(stream)
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
        return sse_response(service, exchange, source, writer)
    collected = await collect(source, params.n)
    return json_response(await _answer(service, exchange, body, collected, created, reader, model=model))


def _thought_limit(body: ChatRequest) -> tuple[str, int] | None:
    """The field that limits the thought, and its tokens."""
    given = {name: getattr(body, name) for name in ("thinking_budget", "max_thinking_tokens", "thinking_token_budget")}
    if body.reasoning is not None:
        given["reasoning.max_tokens"] = body.reasoning.max_tokens
    return next(((name, tokens) for name, tokens in given.items() if tokens is not None), None)


async def _answer(
    service: Service,
    exchange: Exchange,
    body: ChatRequest,
    collected: list[CollectedChoice],
    created: int,
    reader: Callable[[], ChoiceReader | None],
    *,
    model: str,
) -> ChatAnswer:
    answers = [await read_whole(choice, reader()) for choice in collected]
    usage = usage_answer(
        [[choice.usage for choice in collected]],
        cache_report=service.arguments.enable_cache_report,
        reasoning_tokens=sum(answer.end.reasoning_tokens for answer in answers),
    )
    exchange.tokens = (usage.prompt_tokens, usage.completion_tokens)
    as_ids = bool(body.return_tokens_as_token_ids)
    first = collected[0]
    return ChatAnswer(
        id=exchange.request_id,
        created=created,
        model=model,
        system_fingerprint=service.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=_message(answer, shown=body.include_reasoning is not False),
                finish_reason=answer.end.reason,
                logprobs=chat_logprobs(choice.logprobs, as_ids=as_ids) if body.logprobs else None,
                stop_reason=stop_reason(choice.matched_stop, body.stop_token_ids),
                matched_stop=choice.matched_stop,
                token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
                hidden_states=last_state(choice) if body.return_hidden_states else msgspec.UNSET,
            )
            for index, (choice, answer) in enumerate(zip(collected, answers, strict=True))
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


def _message(answer: Answer, *, shown: bool) -> ChatMessageAnswer:
    """The message of a choice. ``shown``: whether its thought is returned."""
    calls = [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in answer.calls]
    message = ChatMessageAnswer(content=(answer.text or None) if calls else answer.text)
    if shown and (reasoning := answer.reasoning):
        message.reasoning_content = message.reasoning = reasoning
    if calls:
        message.tool_calls = calls
    return message
