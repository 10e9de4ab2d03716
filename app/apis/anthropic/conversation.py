"""A Messages body as the conversation that chat templates expect."""

from __future__ import annotations

from typing import Any

import msgspec

from actors.protocol.requests import LIMITS, Chat
from app.apis.anthropic.requests import AnthropicMessage, AnthropicTool, Block, CountRequest, Part
from app.apis.conversations import NO_TOOLS, Mode, ToolChoice
from app.apis.openai.parameters import SWITCHES, check_schema, check_tool_name, name_calls, template_kwargs
from app.parsers.base import StreamingParser
from app.server.decoding import check_depth, check_size
from app.server.errors import ApiError, invalid

__all__ = ["chat_of", "choice_of"]

_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with a line of its own accounting, which is another in each request. In the
prompt it would make every cached prefix useless."""

_CLEAR_THINKING = "clear_thinking_20251015"
_ELSEWHERE = "runs on Anthropic's servers and not here; give a tool with an input_schema, which your program runs"

Turn = dict[str, Any]


def chat_of(body: CountRequest, form: type[StreamingParser]) -> Chat:
    """The conversation for the chat template. ``form``: the model's format of tool calls. Raises 400."""
    calls = [
        block.input
        for message in body.messages
        if isinstance(message.content, list)
        for block in message.content
        if block.input
    ]
    check_size(calls, "messages[].content[].input", LIMITS.tools_bytes)
    turns = _system(body)
    known: set[str] = set()
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}]", known):
            _append(turns, turn)
    _keep_thoughts(turns, body.context_management)
    goes_on = turns[-1]["role"] == "assistant"
    if goes_on and turns[-1].get("tool_calls"):
        at = f"messages[{len(body.messages) - 1}]"
        raise invalid(f"{at}: ends with a tool_use; add a user turn with its tool_result.", param=at)
    name_calls(turns, form)
    return Chat(
        messages=turns,
        tools=_tools(body) if body.tool_choice is None or body.tool_choice.type != "none" else None,
        template_kwargs=_kwargs(body),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def choice_of(body: CountRequest) -> tuple[ToolChoice, bool]:
    """The choice of tools, and whether several calls are returned. Raises 400."""
    tools = {tool.name: tool for tool in body.tools or ()}
    given = body.tool_choice
    parallel = given is None or not given.disable_parallel_tool_use
    if given is not None and given.type in ("any", "tool") and not tools:
        raise invalid("tool_choice: needs tools beside it.", param="tool_choice")
    if not tools or (given is not None and given.type == "none"):
        return NO_TOOLS, parallel
    names = list(tools)
    if given is not None and given.type == "tool":
        if given.name not in tools:
            raise invalid(
                f"tool_choice.name: must be one of the request's tools, not {(given.name or '')[:64]!r}.",
                param="tool_choice.name",
            )
        names = [given.name]
    modes: dict[str, Mode] = {"any": "required", "tool": "named"}
    mode: Mode = "auto" if given is None else modes.get(given.type, "auto")
    return (
        ToolChoice(
            mode,
            {name: tools[name].input_schema or {} for name in names},
            any(tools[name].strict for name in names),
        ),
        parallel,
    )


def _system(body: CountRequest) -> list[Turn]:
    system = body.system
    if system is None:
        return []
    parts = [system] if isinstance(system, str) else [_part(part, f"system[{i}]") for i, part in enumerate(system)]
    texts = [_without_billing(part) for part in parts]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _append(turns: list[Turn], turn: Turn) -> None:
    """Add a turn, to the last one if that has the same role."""
    last = turns[-1] if turns else None
    if last is None or turn["role"] == "tool" or last["role"] != turn["role"]:
        turns.append(turn)
        return
    separator = "" if turn["role"] == "assistant" else "\n"
    last["content"] = separator.join(text for text in (last["content"], turn["content"]) if text)
    for field in ("reasoning_content", "tool_calls"):
        if field in turn:
            last[field] = last[field] + turn[field] if field in last else turn[field]


def _turns(message: AnthropicMessage, at: str, known: set[str]) -> list[Turn]:
    """A message as turns: results of tools first, each in its own. ``known``: the ids of the calls so far."""
    content = message.content
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    turn: Turn = {"role": message.role, "content": ""}
    results: list[Turn] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        where = f"{at}.content[{index}]"
        match block.type, message.role:
            case "text", _:
                texts.append(_required(block.text, f"{where}.text"))
            case "document", "user":
                texts.append(_document(block, where))
            case "thinking", "assistant":
                thought = _required(block.thinking, f"{where}.thinking")
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "tool_use", "assistant":
                turn.setdefault("tool_calls", []).append(_call(block, where, known))
            case "tool_result", "user":
                results.append(_result(block, where, known))
            case _:
                raise _unsupported(block.type, where, message.role)
    turn["content"] = ("" if message.role == "assistant" else "\n").join(texts)
    return [*results, turn] if texts or not results else results


def _required(text: str | None, where: str) -> str:
    if text is None:
        raise invalid(f"{where}: this field is required.", param=where, code="missing_field")
    return text


def _unsupported(kind: str, where: str, role: str) -> ApiError:
    reason = {
        "image": "this model reads text only; describe the image in a block of type 'text'",
        "redacted_thinking": "only the service that wrote it can read it; leave the block out",
        "search_result": "is not read in this version; send its text in a block of type 'text'",
    }.get(kind)
    if reason is None and kind in ("thinking", "tool_use", "tool_result", "document"):
        reason = f"{kind!r} has no place in a turn of the {role}"
    reason = reason or f"only text, thinking, tool_use, tool_result and document are read, not {kind[:64]!r}"
    return invalid(f"{where}.type: {reason}.", param=f"{where}.type", code="unsupported_content")


def _part(part: Part, where: str) -> str:
    if part.type != "text":
        raise _unsupported(part.type, where, "tool")
    return _required(part.text, f"{where}.text")


def _document(block: Block, where: str) -> str:
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        raise invalid(
            f"{where}.citations: answers cite no documents here; leave it out.",
            param=f"{where}.citations",
            code="unsupported_content",
        )
    source = block.source or {}
    data = source.get("data")
    if source.get("type") != "text" or not isinstance(data, str):
        raise invalid(
            f"{where}.source: only documents of plain text are read: {{'type': 'text', 'data': ...}}.",
            param=f"{where}.source",
            code="unsupported_content",
        )
    return "\n".join(text for text in (block.title, block.context, data) if text)


def _call(block: Block, where: str, known: set[str]) -> dict[str, Any]:
    name, identity = _required(block.name, f"{where}.name"), _required(block.id, f"{where}.id")
    check_tool_name(name, f"{where}.name")
    check_depth(block.input, f"{where}.input")
    known.add(identity)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": block.input or {}}}


def _result(block: Block, where: str, known: set[str]) -> Turn:
    identity = _required(block.tool_use_id, f"{where}.tool_use_id")
    if identity not in known:
        raise invalid(
            f"{where}.tool_use_id: no tool_use before it has the id {identity[:64]!r}. Send the turn that has.",
            param=f"{where}.tool_use_id",
        )
    given = block.content or ""
    parts = [given] if isinstance(given, str) else [_part(p, f"{where}.content[{i}]") for i, p in enumerate(given)]
    text = "\n".join(parts)
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": identity}


def _tools(body: CountRequest) -> list[dict[str, Any]] | None:
    """Tools as templates expect them."""
    if not body.tools:
        return None
    check_size(body.tools, "tools", LIMITS.tools_bytes)
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]


def _tool(tool: AnthropicTool, at: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise invalid(f"{at}.type: {tool.type[:64]!r} {_ELSEWHERE}.", param=f"{at}.type")
    if tool.defer_loading:
        raise invalid(f"{at}.defer_loading: this server searches no tools; leave it out.", param=f"{at}.defer_loading")
    if tool.allowed_callers and tool.allowed_callers != ["direct"]:
        raise invalid(f"{at}.allowed_callers: only ['direct'] is available.", param=f"{at}.allowed_callers")
    check_tool_name(tool.name, f"{at}.name")
    check_schema(tool.input_schema, f"{at}.input_schema")
    description = tool.description or ""
    if tool.input_examples:
        check_depth(tool.input_examples, f"{at}.input_examples")
        examples = "\n".join(msgspec.json.encode(example).decode() for example in tool.input_examples)
        description = f"{description}\nExamples of its input:\n{examples}".strip()
    function: dict[str, Any] = {"name": tool.name, "description": description, "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}


def _kwargs(body: CountRequest) -> dict[str, Any]:
    """Variables of the template: the effort, and whether to think."""
    kwargs = template_kwargs(body.chat_template_kwargs)
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs.setdefault("reasoning_effort", body.output_config.effort)
    if body.thinking is not None and not SWITCHES & kwargs.keys():
        kwargs |= dict.fromkeys(SWITCHES, body.thinking.type != "disabled")
    return kwargs


def _keep_thoughts(turns: list[Turn], management: dict[str, Any] | None) -> None:
    """Apply the edits of ``context_management``: only thoughts can be cleared here. Raises 400 for others."""
    edits = (management or {}).get("edits", [])
    for index, edit in enumerate(edits if isinstance(edits, list) else [None]):
        at = f"context_management.edits[{index}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(edit, dict) or kind != _CLEAR_THINKING:
            raise invalid(f"{at}: only {_CLEAR_THINKING} is available; shorten the conversation yourself.", param=at)
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        if keep == "all" or keep == {"type": "all"}:
            continue
        count = keep.get("value") if isinstance(keep, dict) else None
        if not isinstance(count, int) or count < 1:
            raise invalid(f"{at}.keep: must be 'all' or {{'type': 'thinking_turns', 'value': N}}.", param=f"{at}.keep")
        for turn in [turn for turn in turns if "reasoning_content" in turn][:-count]:
            del turn["reasoning_content"]
