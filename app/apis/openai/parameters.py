"""Fields of a body as sampling parameters and prompts of the engine."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from actors.options import Arguments
from actors.protocol.requests import LIMITS, Chat, SamplingParams
from app.apis.grammars import grammar_of
from app.apis.openai.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    MessageToolCall,
    Prediction,
    SamplingFields,
    Tool,
    texts_of,
)
from app.apis.openai.tool_schemas import find_schema_error
from app.apis.routing import replica_name
from app.parsers.base import StreamingParser
from app.server.decoding import check_depth, check_size
from app.server.errors import invalid

__all__ = [
    "SWITCHES",
    "chat_names",
    "chat_params",
    "chat_prompt",
    "check_schema",
    "check_tool_name",
    "completion_names",
    "completion_params",
    "label_of",
    "messages",
    "name_calls",
    "own_template",
    "salt_of",
    "template_kwargs",
    "tools",
]

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions."""

_RESERVED_TEMPLATE_KEYS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "padding",
        "truncation",
        "max_length",
        "return_dict",
        "return_tensors",
        "raise_exception",
        "strftime_now",
    }
)


SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Templates that know no effort have a switch for thoughts by one of these names."""

_TOOL_NAME = re.compile(f"[a-zA-Z0-9_-]{{1,{LIMITS.tool_name_chars}}}")


def _params(body: SamplingFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The parameters that both APIs share. ``None`` stays None where the model has its own default. Raises 400."""
    wanted = {"prompt_logprobs": body.prompt_logprobs is not None, "return_hidden_states": body.return_hidden_states}
    for name, given in wanted.items():
        if given and body.stream:
            raise invalid(f"{name}: not in a stream; ask with stream false.", param=name)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        n=1 if body.n is None else body.n,
        stop=texts_of(body.stop),
        stop_regex=texts_of(body.stop_regex),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        hidden_states=bool(body.return_hidden_states),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        speculative=body.speculative is not False,
        speculative_num_draft_tokens=body.speculative_num_draft_tokens,
        grammar=grammar_of(body)[0],
    )


def completion_params(body: CompletionRequest) -> SamplingParams:
    """``max_tokens`` 0 (only with echo: score the prompt) generates one token, which the answer omits."""
    max_tokens = body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise invalid("max_tokens: 0 makes sense only with echo; ask for at least 1.", param="max_tokens")
        max_tokens = 1
    params = _params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    if max_tokens is None:
        params = msgspec.structs.replace(params, default_max_tokens=_COMPLETION_TOKENS)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    if body.best_of is not None and body.best_of != params.n:
        if body.stream:
            raise invalid("best_of: not in a stream; ask with stream false.", param="best_of")
        if body.best_of < params.n:
            raise invalid(f"best_of: {body.best_of} is less than n {params.n}. Raise it.", param="best_of")
        params = msgspec.structs.replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    return params


def chat_params(body: ChatRequest) -> SamplingParams:
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs is not None and not body.logprobs and body.top_logprobs > 0:
        raise invalid("top_logprobs: needs logprobs true beside it.", param="top_logprobs")
    params = _params(body, max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    return (
        params if body.prediction is None else msgspec.structs.replace(params, prediction=_predicted(body.prediction))
    )


def _predicted(prediction: Prediction) -> str:
    content = prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def completion_names(body: CompletionRequest) -> dict[str, str]:
    """The engine's parameter names -> the fields of this body."""
    return {
        "grammar": grammar_of(body)[1],
        "n": "n" if body.best_of is None else "best_of",
        "hidden_states": "return_hidden_states",
        **replica_name(body),
    }


def chat_names(body: ChatRequest) -> dict[str, str]:
    """The engine's parameter names -> the fields of this body."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", "grammar": grammar_of(body)[1]}
    names |= {"hidden_states": "return_hidden_states"} | replica_name(body)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def salt_of(body: SamplingFields) -> str | None:
    """The salt that separates this request's cached prefixes from others'."""
    if body.cache_salt and body.extra_key:
        return f"{body.cache_salt}\n{body.extra_key}"
    return body.cache_salt or body.extra_key or None


def label_of(body: SamplingFields) -> str | None:
    """The client's own id of the request."""
    return body.rid or body.request_id or None


def own_template(given: str | None, arguments: Arguments) -> str | None:
    """The request's own chat template; 400 where the server does not accept any."""
    if given and not arguments.trust_request_chat_template:
        raise invalid(
            "chat_template: templates from requests are not rendered here; start the server with --chat-template, or "
            "with --trust-request-chat-template.",
            param="chat_template",
            code="unsupported_parameter",
        )
    return given or None


def chat_prompt(body: ChatRequest, arguments: Arguments, form: type[StreamingParser] | None = None) -> Chat:
    """The conversation for the chat template. ``form``: the model's format of tool calls. Raises 400 if it cannot be
    rendered."""
    kwargs = template_kwargs(body.chat_template_kwargs)
    effort = body.reasoning_effort
    if effort is None and body.reasoning is not None:
        effort = body.reasoning.effort
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if effort not in (None, "minimal") and not SWITCHES & kwargs.keys():
        kwargs |= dict.fromkeys(SWITCHES, effort != "none")
    add = body.add_generation_prompt
    go_on = bool(body.continue_final_message)
    if go_on and add:
        raise invalid(
            "continue_final_message: contradicts add_generation_prompt; set only one of them.",
            param="continue_final_message",
        )
    return Chat(
        messages=messages(body.messages, form),
        tools=_tools(body),
        template_kwargs=kwargs,
        add_generation_prompt=not go_on if add is None else add,
        continue_final_message=go_on,
        template=own_template(body.chat_template, arguments),
    )


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the template. Reserved names are refused."""
    kwargs = dict(given or {})
    for key, value in kwargs.items():
        param = f"chat_template_kwargs.{key[:64]}"
        if key in _RESERVED_TEMPLATE_KEYS:
            raise invalid(f"{param}: this name is the server's; use the field of the request instead.", param=param)
        if not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise invalid(f"{param}: a name is a letter and then letters, digits or underscores.", param=param)
        check_depth(value, param, limit=8)
    check_size(kwargs, "chat_template_kwargs", LIMITS.template_kwargs_bytes)
    return kwargs


def _tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    rendered = tools(body.tools)
    return None if body.tool_choice == "none" else rendered


def tools(given: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them."""
    if not given:
        return None
    check_size(given, "tools", LIMITS.tools_bytes)  # before each is checked, which takes longer
    return [_tool(tool, index) for index, tool in enumerate(given)]


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        param = f"tools[{index}].type"
        raise invalid(f"{param}: only 'function' is available, not {tool.type!r}.", param=param)
    check_tool_name(tool.function.name, f"tools[{index}].function.name")
    check_schema(tool.function.parameters, f"tools[{index}].function.parameters")
    return {"type": "function", "function": msgspec.to_builtins(tool.function)}


def check_schema(schema: dict[str, Any] | None, where: str) -> None:
    """Raise 400 for a tool's schema that is too large or no JSON Schema. ``where``: the field."""
    check_depth(schema, where)
    check_size(schema, where, LIMITS.schema_bytes)
    mistake = find_schema_error(schema) if schema is not None else None
    if mistake is not None:
        path, shape = mistake
        raise invalid(
            f"{where}{path[:256]}: {shape}.", param=f"{where}{path[:256]}", code="invalid_function_parameters"
        )


def check_tool_name(name: str, param: str) -> None:
    """Raise 400 for a name that no call could have."""
    if _TOOL_NAME.fullmatch(name) is None:
        raise invalid(
            f"{param}: must be 1 to {LIMITS.tool_name_chars} letters, digits, underscores or dashes. Rename it.",
            param=param,
        )


def messages(given: list[ChatMessage], form: type[StreamingParser] | None = None) -> list[dict[str, Any]]:
    """Messages as templates expect them. ``form``: the model's format of tool calls, which decides the ids of calls."""
    check_size(
        [message.tool_calls for message in given if message.tool_calls], "messages[].tool_calls", LIMITS.tools_bytes
    )
    rendered = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    name_calls(rendered, form or StreamingParser)
    return rendered


def name_calls(rendered: list[dict[str, Any]], form: type[StreamingParser]) -> None:
    """Give calls the ids that the model knows, and their answers the same ids and the tools' names."""
    names: dict[str | None, tuple[str | None, str]] = {}
    number = 0
    for message in rendered:
        for call in message.get("tool_calls", ()):
            given, name = call["id"], call["function"]["name"]
            call["id"] = form.history_id(given, name, number)
            names[given] = (call["id"], name)
            number += 1
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["tool_call_id"], name = names[message["tool_call_id"]]
            message.setdefault("name", name)


def _message(message: ChatMessage, at: str) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    rendered: dict[str, Any] = {"role": role, "content": _content(message, at)}
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(
            f"{at}.tool_call_id: a message of a tool needs the id of the call that it answers. Add it.",
            param=f"{at}.tool_call_id",
            code="missing_field",
        )
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(
                f"{at}.tool_calls: only the assistant calls tools, not the role {message.role!r}. Leave it out.",
                param=f"{at}.tool_calls",
            )
        rendered["tool_calls"] = [
            _call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return rendered


def _call(call: MessageToolCall, at: str) -> dict[str, Any]:
    """A tool call of an earlier turn as templates expect it."""
    if call.type != "function":
        raise invalid(f"{at}.type: only 'function' is available, not {call.type[:64]!r}.", param=f"{at}.type")
    check_tool_name(call.function.name, f"{at}.function.name")
    arguments = _arguments(call.function.arguments, f"{at}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _content(message: ChatMessage, at: str) -> str:
    content = message.content
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise invalid(f"{at}.content: this field is required.", param=f"{at}.content", code="missing_field")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{at}.content[{index}]"
        if isinstance(part, str):
            texts.append(part)
        elif part.type in ("text", "input_text", "output_text") and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in ("text", "input_text", "output_text", "refusal"):
            field = "refusal" if part.type == "refusal" else "text"
            raise invalid(f"{where}.{field}: this field is required.", param=f"{where}.{field}", code="missing_field")
        else:
            raise invalid(
                f"{where}.type: this model reads text only, not {part.type!r}; send parts of type 'text'.",
                param=f"{where}.type",
                code="unsupported_content",
            )
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any], at: str) -> dict[str, Any]:
    """Templates print arguments as JSON: a string of JSON becomes the object that it contains."""
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            value = arguments
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise invalid(f"{at}: must be a JSON object, as text or as it is. Send what the model's call had.", param=at)
    check_depth(value, at)
    return value
