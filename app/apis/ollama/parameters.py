"""Fields of Ollama's bodies as parameters and conversations of the engine."""

from __future__ import annotations

from typing import Any

from actors.protocol.requests import LIMITS, Chat, Grammar, SamplingParams
from app.apis.grammars import schema_text
from app.apis.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, Options, OwnFields
from app.apis.openai.parameters import SWITCHES, check_tool_name, name_calls, tools
from app.parsers.base import StreamingParser
from app.server.decoding import check_depth, check_size
from app.server.errors import invalid
from app.server.exchange import Exchange
from app.server.service import Service

__all__ = ["NAMES", "chat_of", "model_of", "params_of", "turn_of"]

NAMES = {
    "prompt": "messages",
    "grammar": "format",
    "logprobs": "top_logprobs",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
    },
}
"""The engine's parameter names -> the fields of these bodies."""

_LATEST = ":latest"


def model_of(service: Service, name: str | None, exchange: Exchange | None = None) -> str:
    """The name to answer under, which is the requested one; it may end in ``:latest``. Raises 404."""
    if name and name.endswith(_LATEST) and name not in service.model_names:
        service.check_model(name.removesuffix(_LATEST), exchange)
        return name
    return service.check_model(name, exchange)


def params_of(service: Service, body: OwnFields) -> SamplingParams:
    """Raises 400 for what this server does otherwise than Ollama."""
    options = body.options or Options()
    _check_context(service, options)
    max_tokens = options.num_predict
    if max_tokens in (-1, -2):
        max_tokens = None
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs true beside it.", param="top_logprobs")
    stop = options.stop if options.stop is not None else []
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body),
    )


def _check_context(service: Service, options: Options) -> None:
    context = service.engine.context_length
    if options.num_ctx is not None and options.num_ctx > context:
        raise invalid(
            f"options.num_ctx: this server's context has {context} tokens; ask for no more, or start it with "
            "--context-length.",
            param="options.num_ctx",
        )
    penalized = (options.repeat_penalty not in (None, 1)) or options.presence_penalty or options.frequency_penalty
    if penalized and options.repeat_last_n not in (None, -1, options.num_ctx or context):
        raise invalid(
            "options.repeat_last_n: penalties see the whole context here, which is -1; leave it out.",
            param="options.repeat_last_n",
        )


def _grammar(body: OwnFields) -> Grammar | None:
    form = body.format
    if form is None or form == "":
        return None
    if form == "json":
        return Grammar("json_object")
    if isinstance(form, str):
        raise invalid("format: must be 'json' or a JSON schema.", param="format")
    return Grammar("json_schema", schema_text(form, "format"))


def chat_of(service: Service, body: OllamaChatRequest) -> Chat:
    """The conversation for the chat template. Raises 400."""
    form = service.output_format.tools or StreamingParser
    given = body.messages or []
    calls = [message.tool_calls for message in given if message.tool_calls]
    check_size(calls, "messages[].tool_calls", LIMITS.tools_bytes)
    waiting: list[tuple[str, str]] = []  # names and ids of calls without a result
    turns = [_turn(message, f"messages[{index}]", waiting) for index, message in enumerate(given)]
    name_calls(turns, form)
    goes_on = turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls")
    return Chat(
        messages=turns,
        tools=tools(body.tools),
        template_kwargs=_kwargs(service, body),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def turn_of(service: Service, body: OllamaGenerateRequest) -> Chat:
    """The one turn of a ``/api/generate``."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    user = {"role": "user", "content": body.prompt or ""}
    return Chat(messages=[*system, user], template_kwargs=_kwargs(service, body))


def _kwargs(service: Service, body: OwnFields) -> dict[str, Any]:
    think = body.think
    if think is None:
        return {}
    if think is not False and service.output_format.reasoning_format is None:
        raise invalid("think: this model has no reasoning; leave it out.", param="think")
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {**effort, **dict.fromkeys(SWITCHES, think is not False)}


def _turn(message: OllamaMessage, at: str, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    if message.images:
        raise invalid(
            f"{at}.images: this model reads text only; leave them out.",
            param=f"{at}.images",
            code="unsupported_content",
        )
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking is not None:
        turn["reasoning_content"] = message.thinking
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{at}.tool_calls: only the assistant calls tools. Leave it out.", param=f"{at}.tool_calls")
        turn["tool_calls"] = [
            _call(call.id, call.function.name, call.function.arguments, f"{at}.tool_calls[{index}]", waiting)
            for index, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id or _answered(message.tool_name, waiting)
        if message.tool_name:
            turn["name"] = message.tool_name
    return turn


def _call(
    identity: str | None, name: str, arguments: dict[str, Any], at: str, waiting: list[tuple[str, str]]
) -> dict[str, Any]:
    check_tool_name(name, f"{at}.function.name")
    check_depth(arguments, f"{at}.function.arguments")
    identity = identity or f"call_{at}"
    waiting.append((name, identity))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answered(name: str | None, waiting: list[tuple[str, str]]) -> str:
    """The id of the first call without a result, of this tool if there is one: results of Ollama have no ids."""
    for place, (called, identity) in enumerate(waiting):
        if name in (None, called):
            del waiting[place]
            return identity
    return "call"
