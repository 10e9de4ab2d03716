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

    ``parallel``: whether more than one call is returned. ``thought_limit``: the field that limits the thought, and its
    tokens. ``separate`` and ``stream_thought``: see :class:`app.parsers.base.StreamingParser`. ``prompt``: token
    ids of a session, instead of those of ``chat``.
    """

    chat: Chat
    params: SamplingParams
    names: dict[str, str]
    choice: ToolChoice = NO_TOOLS
    parallel: bool = True
    thought_limit: tuple[str, int] | None = None
    separate: bool = True
    stream_thought: bool = True
    priority: int | None = None
    cache_salt: str | None = None
    label: str | None = None
    prompt: list[int] | None = None


class AcceptedRequest(NamedTuple):
    """An accepted request. ``reader``: creates the reader of a choice; None where all of its text is content."""

    stream: RequestStream
    reader: Callable[[], ChoiceReader | None]


async def submit(service: Service, exchange: Exchange, request: ConversationRequest) -> AcceptedRequest:
    """Submit a conversation and wait until it is accepted. Raises what is wrong with it."""
    form, choice, params, names = service.output_format, request.choice, request.params, dict(request.names)
    constraint = await tool_constraint(service, choice, params.grammar, names, parallel=request.parallel)
    if constraint is not None:
        if choice.forced or params.grammar is None:
            names["grammar"] = "tool_choice" if choice.forced else "tools"
        grammar = Grammar(constraint.kind, constraint.text, constraint.whitespace)
        params = msgspec.structs.replace(params, grammar=grammar)
    if params.skip_special_tokens and (marks := form.special_tokens(choice.mode != "none")):
        params = msgspec.structs.replace(params, shown_special_tokens=marks)
    covered = constraint is not None and constraint.covers_thought
    if params.grammar is not None and not covered and (thought := _thought(form)) is not None:
        params = msgspec.structs.replace(params, thought=thought)
    if request.thought_limit is not None:
        budget = await _thought_budget(service, *request.thought_limit, form)
        params = msgspec.structs.replace(params, thought_budget=budget)
    stream = service.submit(
        exchange,
        request.chat if request.prompt is None else request.prompt,
        params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        label=request.label,
        rename=names,
    )
    await service.accepted([stream], names)
    as_json = choice.forced and constraint is not None and constraint.kind == "json_schema"
    return AcceptedRequest(stream, await _reader(service, request, form, stream.prompt_end, as_json=as_json))


def _thought(form: OutputFormat) -> Thought | None:
    """What comes before an answer that a grammar constrains."""
    if form.harmony:
        return Thought(begin="<|channel|>analysis<|message|>", end="<|channel|>final<|message|>", always=True)
    thoughts = form.thoughts
    return None if thoughts is None else Thought(begin=thoughts.begin, end=thoughts.end, always=thoughts.always)


async def _thought_budget(service: Service, name: str, tokens: int, form: OutputFormat) -> ThoughtBudget:
    """The limit of thoughts that the field ``name`` asks for. Raises 400 where none can be kept."""
    thoughts = form.thoughts
    if thoughts is None or form.harmony:
        raise invalid(
            f"{name}: this server knows no end tag of this model's reasoning; leave it out, or start the server with "
            "--reasoning-parser.",
            param=name,
            code="unsupported_parameter",
        )
    begin, end = await service.mark_token(thoughts.begin), await service.mark_token(thoughts.end)
    if end is None or (begin is None and not thoughts.always):
        raise invalid(
            f"{name}: the tags of this model's reasoning are several tokens; leave it out.",
            param=name,
            code="unsupported_parameter",
        )
    return ThoughtBudget(tokens, -1 if thoughts.always or begin is None else begin, end)


async def _reader(
    service: Service, request: ConversationRequest, form: OutputFormat, prompt_end: Sequence[int], *, as_json: bool
) -> Callable[[], ChoiceReader | None]:
    """Creates the reader of a choice. ``prompt_end``: the last tokens of the prompt. ``as_json``: the answer is calls
    as JSON."""
    choice = request.choice
    tools = choice.tools if choice.mode != "none" and (form.tools is not None or choice.forced) else None
    kind = form.json_parser() if as_json else form.parser(with_tools=tools is not None)
    if kind is None:
        return lambda: None
    thinking, end = None, None
    hidden: tuple[str, ...] = ()
    thoughts = form.thoughts
    if thoughts is not None and not form.harmony:
        thinking = thoughts.in_prompt(await service.engine.detokenize(prompt_end, skip_special_tokens=False))
        end = await service.mark_token(thoughts.end)
        if request.params.skip_special_tokens:  # they were kept for the reader alone
            hidden = tuple([mark for mark in thoughts.marks if await service.is_special(mark)])
    options: dict[str, Any] = {
        "parallel": request.parallel,
        "thoughts": thoughts,
        "thinking": thinking,
        "separate": request.separate,
        "stream_thought": request.stream_thought,
        "hidden": hidden,
    }
    return lambda: ChoiceReader(kind(tools, **options), end)
