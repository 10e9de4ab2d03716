"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from quart import Response

from actors.protocol.requests import Grammar, Thought, ThoughtBudget
from app.apis.collecting import Collected, collect
from app.apis.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatMessageAnswer,
    chat_logprobs,
    prompt_logprobs,
    usage_answer,
)
from app.apis.openai.choice_reader import ChoiceReader
from app.apis.openai.chunks import ChatChunks, UsageReport
from app.apis.openai.parameters import chat_names, chat_params, chat_prompt, label_of, salt_of
from app.apis.openai.requests import ChatRequest
from app.apis.openai.tool_choice import ToolChoice, tool_choice_of
from app.parsers.base import CalledFunction, ToolCall
from app.parsers.registry import OutputFormat
from app.parsers.tools.constraints import ToolConstraint, forced_calls, native_calls, strict_calls
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.service import Service, json_response
from app.server.sse import sse_response

__all__ = ["chat_completions"]

_PIECE = 4096  # characters of a whole answer that are parsed at once


async def chat_completions(service: Service, exchange: Exchange, body: ChatRequest) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    model = service.check_model(body.model)
    params = chat_params(body)
    names = chat_names(body)
    form, choice = service.output_format, tool_choice_of(body)
    prompt = chat_prompt(body, service.arguments, form.tools)  # checks the tools, before their schemas are read
    constraint = await _constraint(service, body, form, choice, params.grammar)
    if constraint is not None:
        grammar = Grammar(constraint.kind, constraint.text, constraint.whitespace)
        params = msgspec.structs.replace(params, grammar=grammar)
        names["grammar"] = "tool_choice" if choice.forced else "tools"
    if body.skip_special_tokens is None and (marks := form.special_tokens(choice.mode != "none")):
        params = msgspec.structs.replace(params, shown_special_tokens=marks)
    if params.grammar is not None and (thought := _thought(form)) is not None:
        params = msgspec.structs.replace(params, thought=thought)
    if (budget := await _thought_budget(service, body, form)) is not None:
        params = msgspec.structs.replace(params, thought_budget=budget)
    stream = service.submit(
        exchange,
        prompt,
        params,
        priority=body.priority,
        cache_salt=salt_of(body),
        label=label_of(body),
        rename=names,
    )
    await service.accepted([stream], names)
    as_json = choice.forced and constraint is not None and constraint.kind == "json_schema"
    reader = await _reader(service, body, form, choice, stream.prompt_end, as_json=as_json)
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
    return json_response(await _answer(service, exchange, body, collected, created, reader))


def _thought(form: OutputFormat) -> Thought | None:
    """What comes before an answer that a grammar constrains."""
    if form.harmony:
        return Thought(begin="<|channel|>analysis<|message|>", end="<|channel|>final<|message|>", always=True)
    thoughts = form.thoughts
    return None if thoughts is None else Thought(begin=thoughts.begin, end=thoughts.end, always=thoughts.always)


async def _thought_budget(service: Service, body: ChatRequest, form: OutputFormat) -> ThoughtBudget | None:
    """The limit of thoughts that a body asks for. Raises 400 where none can be kept."""
    given = {name: getattr(body, name) for name in ("thinking_budget", "max_thinking_tokens", "thinking_token_budget")}
    if body.reasoning is not None:
        given["reasoning.max_tokens"] = body.reasoning.max_tokens
    found = [(name, tokens) for name, tokens in given.items() if tokens is not None]
    if not found:
        return None
    name, tokens = found[0]
    thoughts = form.thoughts
    if thoughts is None or form.harmony:
        raise invalid(
            f"{name}: this server knows no end mark of this model's thoughts; leave it out, or start the server with "
            "--reasoning-parser.",
            param=name,
            code="unsupported_parameter",
        )
    begin, end = await service.mark_token(thoughts.begin), await service.mark_token(thoughts.end)
    if end is None or (begin is None and not thoughts.always):
        raise invalid(
            f"{name}: the marks of this model's thoughts are several tokens; leave it out.",
            param=name,
            code="unsupported_parameter",
        )
    return ThoughtBudget(tokens, -1 if thoughts.always or begin is None else begin, end)


async def _constraint(
    service: Service, body: ChatRequest, form: OutputFormat, choice: ToolChoice, given: Grammar | None
) -> ToolConstraint | None:
    """What the choice of tools adds. A forced call replaces the ``given`` form, which is the content's."""
    if not choice.forced and not (choice.strict and given is None and form.tools is not None):
        return None
    backend = service.arguments.grammar_backend
    if backend == "none" and not choice.forced:
        return None
    named, parallel = choice.mode == "named", body.parallel_tool_calls is not False
    found = None
    if backend != "xgrammar" and form.tools is not None:
        tokens = {mark: await service.mark_token(mark) for mark in (*form.tools.OPEN, *form.tools.MARKS)}
        single = choice.forced and (named or not parallel)
        found = native_calls(form.tools, choice.tools, tokens, forced=choice.forced, single=single)
    if found is not None:
        return found
    if choice.forced:
        calls = forced_calls(choice.tools, named=named, parallel=parallel)
        # xgrammar takes no pattern of white space.
        return msgspec.structs.replace(calls, whitespace=None) if backend == "xgrammar" else calls
    return None if form.tools is None else strict_calls(form.tools, choice.tools)


async def _reader(
    service: Service,
    body: ChatRequest,
    form: OutputFormat,
    choice: ToolChoice,
    prompt_end: Sequence[int],
    *,
    as_json: bool,
) -> Callable[[], ChoiceReader] | None:
    """Creates the reader of a choice; None if all text is content. ``prompt_end``: the last tokens of the prompt.
    ``as_json``: the answer is calls as JSON."""
    tools = choice.tools if choice.mode != "none" and (form.tools is not None or choice.forced) else None
    kind = form.json_parser() if as_json else form.parser(with_tools=tools is not None)
    if kind is None:
        return None
    thinking, end = None, None
    thoughts = form.thoughts
    if thoughts is not None and not form.harmony:
        thinking = thoughts.in_prompt(await service.engine.detokenize(prompt_end, skip_special_tokens=False))
        if thinking is False and tools is None:
            return None
        end = await service.mark_token(thoughts.end)
    options: dict[str, Any] = {
        "parallel": body.parallel_tool_calls is not False,
        "thoughts": thoughts,
        "thinking": thinking,
        "separate": body.separate_reasoning is not False,
        "stream_thought": body.stream_reasoning is not False,
    }
    return lambda: ChoiceReader(kind(tools, **options), end)


async def _answer(
    service: Service,
    exchange: Exchange,
    body: ChatRequest,
    collected: list[Collected],
    created: int,
    reader: Callable[[], ChoiceReader] | None,
) -> ChatAnswer:
    messages: list[ChatMessageAnswer] = []
    reasoning_tokens = 0
    for choice in collected:
        message, tokens = await _message(choice, reader, shown=body.include_reasoning is not False)
        messages.append(message)
        reasoning_tokens += tokens
    usage = usage_answer(
        [[choice.usage for choice in collected]],
        cache_report=service.arguments.enable_cache_report,
        reasoning_tokens=reasoning_tokens,
    )
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
                message=message,
                finish_reason=_finish_reason(choice, message),
                logprobs=chat_logprobs(choice.logprobs, as_ids=as_ids) if body.logprobs else None,
                stop_reason=choice.matched_stop,
                matched_stop=choice.matched_stop,
                token_ids=choice.token_ids if body.return_token_ids else msgspec.UNSET,
            )
            for index, (choice, message) in enumerate(zip(collected, messages, strict=True))
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


async def _message(
    choice: Collected, reader: Callable[[], ChoiceReader] | None, *, shown: bool
) -> tuple[ChatMessageAnswer, int]:
    """The message of a choice, and the tokens of its thought. ``shown``: whether the thought is returned."""
    text = "".join(choice.text)
    if reader is None:
        return ChatMessageAnswer(content=text), 0
    reading = reader()
    parts = [reading.read("", choice.token_ids)]
    for start in range(0, len(text), _PIECE):
        parts.append(reading.read(text[start : start + _PIECE], ()))
        await asyncio.sleep(0)  # a long answer takes seconds, in which other streams go on
    parts.append(reading.end())
    content, reasoning = "".join(part.content for part in parts), "".join(part.reasoning for part in parts)
    message = ChatMessageAnswer(content=content)
    if reasoning and shown:
        message.reasoning_content = message.reasoning = reasoning
    for delta in (delta for part in parts for delta in part.calls):
        if message.tool_calls is msgspec.UNSET:
            message.tool_calls = []
            message.content = content or None
        if delta.id is not msgspec.UNSET and delta.function.name is not msgspec.UNSET:
            called = CalledFunction(delta.function.name, delta.function.arguments)
            message.tool_calls.append(ToolCall(delta.id, called))
        else:
            message.tool_calls[-1].function.arguments += delta.function.arguments
    return message, reading.reasoning_tokens


def _finish_reason(choice: Collected, message: ChatMessageAnswer) -> Literal["stop", "length", "tool_calls"]:
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if message.tool_calls else "stop"
