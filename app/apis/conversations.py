"""A conversation as any API asks it: prompt, parameters, tools and a limit of the thought.

It is submitted to the engine, with the reader of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from actors.protocol.requests import Chat, Grammar, SamplingParams, Thought, ThoughtBudget
from actors.requests.streams import RequestStream
from app.apis.choice_reader import ChoiceReader
from app.apis.tool_grammars import NO_TOOLS, Mode, ToolChoice, tool_constraint
from app.parsers.registry import OutputFormat
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.service import Service

__all__ = ["NO_TOOLS", "AcceptedRequest", "ConversationRequest", "Mode", "ToolChoice", "submit"]


class ConversationRequest(msgspec.Struct, kw_only=True):
    """``names``: the engine's parameter names -> the API's fields, for errors.

    ``parallel``: whether more than one call is returned. ``reasoning_limit``: the field that limits the thought, and
    its tokens. ``separate`` and ``stream_reasoning``: see :class:`app.parsers.base.StreamingParser`. ``prompt``: token
    ids of a session, instead of those of ``chat``.
    """

    chat: Chat
    params: SamplingParams
    names: dict[str, str]
    tool_choice: ToolChoice = NO_TOOLS
    parallel: bool = True
    reasoning_limit: tuple[str, int] | None = None
    separate: bool = True
    stream_reasoning: bool = True
    priority: int | None = None
    cache_salt: str | None = None
    replica: int | None = None
    label: str | None = None
    prompt: list[int] | None = None


class AcceptedRequest(NamedTuple):
    """An accepted request. ``reader``: creates the reader of a choice; None where all of its text is content."""

    stream: RequestStream
    reader: Callable[[], ChoiceReader | None]


async def submit(service: Service, exchange: Exchange, request: ConversationRequest) -> AcceptedRequest:
    """Submit a conversation and wait until it is accepted. Raises what is wrong with it."""
    output_format, tool_choice, params, names = (
        service.output_format,
        request.tool_choice,
        request.params,
        dict(request.names),
    )
    constraint = await tool_constraint(service, tool_choice, params.grammar, names, parallel=request.parallel)
    if constraint is not None:
        if tool_choice.forced or params.grammar is None:
            names["grammar"] = "tool_choice" if tool_choice.forced else "tools"
        grammar = Grammar(constraint.kind, constraint.text, constraint.whitespace)
        params = msgspec.structs.replace(params, grammar=grammar)
    if params.skip_special_tokens and (special_tokens := output_format.special_tokens(tool_choice.mode != "none")):
        params = msgspec.structs.replace(params, shown_special_tokens=special_tokens)
    covers_thought = constraint is not None and constraint.covers_thought
    if params.grammar is not None and not covers_thought and (thought := _thought(output_format)) is not None:
        params = msgspec.structs.replace(params, thought=thought)
    if request.reasoning_limit is not None:
        budget = await _thought_budget(service, *request.reasoning_limit, output_format)
        params = msgspec.structs.replace(params, thought_budget=budget)
    stream = service.submit(
        exchange,
        request.chat if request.prompt is None else request.prompt,
        params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        replica=request.replica,
        label=request.label,
        rename=names,
    )
    await service.accepted([stream], names)
    as_json = tool_choice.forced and constraint is not None and constraint.kind == "json_schema"
    if params.grammar is not None and (reasoning := output_format.reasoning_format) is not None:
        # The grammar begins after the end of the thought: a call before it would be none of the grammar.
        reasoning = msgspec.structs.replace(reasoning, interrupted_by=())
        output_format = msgspec.structs.replace(output_format, reasoning_format=reasoning)
    return AcceptedRequest(stream, await _reader(service, request, output_format, stream.prompt_end, as_json=as_json))


def _thought(output_format: OutputFormat) -> Thought | None:
    """What comes before an answer that a grammar constrains."""
    if output_format.harmony:
        return Thought(begin="<|channel|>analysis<|message|>", end="<|channel|>final<|message|>", always=True)
    reasoning = output_format.reasoning_format
    return None if reasoning is None else Thought(begin=reasoning.begin, end=reasoning.end, always=reasoning.always)


async def _thought_budget(service: Service, name: str, tokens: int, output_format: OutputFormat) -> ThoughtBudget:
    """The limit of thoughts that the field ``name`` asks for. Raises 400 where none can be kept."""
    reasoning = output_format.reasoning_format
    if reasoning is None or output_format.harmony:
        raise invalid(
            f"{name}: this server knows no end tag of this model's reasoning; leave it out, or start the server with "
            "--reasoning-parser.",
            param=name,
            code="unsupported_parameter",
        )
    begin, end = await service.mark_token(reasoning.begin), await service.mark_token(reasoning.end)
    if end is None or (begin is None and not reasoning.always):
        raise invalid(
            f"{name}: the tags of this model's reasoning are several tokens; leave it out.",
            param=name,
            code="unsupported_parameter",
        )
    return ThoughtBudget(tokens, -1 if reasoning.always or begin is None else begin, end)


async def _reader(
    service: Service,
    request: ConversationRequest,
    output_format: OutputFormat,
    prompt_end: Sequence[int],
    *,
    as_json: bool,
) -> Callable[[], ChoiceReader | None]:
    """Creates the reader of a choice. ``prompt_end``: the last tokens of the prompt. ``as_json``: the answer is calls
    as JSON."""
    tool_choice = request.tool_choice
    tools = (
        tool_choice.tools
        if tool_choice.mode != "none" and (output_format.tools is not None or tool_choice.forced)
        else None
    )
    kind = output_format.json_parser() if as_json else output_format.parser(with_tools=tools is not None)
    if kind is None:
        return lambda: None
    thinking, end = None, None
    hidden: tuple[str, ...] = ()
    reasoning = output_format.reasoning_format
    if reasoning is not None and not output_format.harmony:
        thinking = reasoning.in_prompt(await service.engine.detokenize(prompt_end, skip_special_tokens=False))
        end = await service.mark_token(reasoning.end)
        if request.params.skip_special_tokens:  # they were kept for the reader alone
            hidden = tuple([mark for mark in reasoning.marks if await service.is_special(mark)])
    options: dict[str, Any] = {
        "parallel": request.parallel,
        "reasoning_format": reasoning,
        "thinking": thinking,
        "separate": request.separate,
        "stream_reasoning": request.stream_reasoning,
        "hidden": hidden,
    }
    return lambda: ChoiceReader(kind(tools, **options), end)
