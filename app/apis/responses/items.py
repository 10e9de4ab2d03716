"""Items of a conversation as they are stored and returned, and as messages for the chat template."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from app.apis.events import input_of
from app.apis.openai.requests import ChatMessage, MessageToolCall, ToolCallFunction
from app.apis.responses.requests import Input, InputItem, InputPart
from app.server.decoding import check_depth
from app.server.errors import ApiError, invalid
from app.server.ids import Ids

__all__ = ["PREFIXES", "decode_thought", "encode_thought", "messages_of", "new_items"]

Item = dict[str, Any]

PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "cto_",
    "reasoning": "rs_",
}
"""By the type of an item, how its id begins."""

_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
_THOUGHT = "troupe1."  # before an encoded thought


def new_items(given: Input | None, ids: Ids, at: str = "input") -> list[Item]:
    """Items in their stored form, each with an id. References stay as they are. Raises 400."""
    if given is None:
        return []
    listed = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    items: dict[str, Item] = {}
    for number, one in enumerate(listed):
        item = _item(one, ids, f"{at}[{number}]")
        if item["id"] in items:
            where = f"{at}[{number}].id"
            raise invalid(
                f"{where}: an item before has the id {item['id'][:64]!r} already; leave one of them out, or its id.",
                param=where,
                code="duplicate_item",
            )
        items[item["id"]] = item
    return list(items.values())


def _item(item: InputItem, ids: Ids, at: str) -> Item:
    kind = item.type or ("message" if item.role is not None else "item_reference")
    if kind not in _NEEDED:
        raise invalid(
            f"{at}.type: {kind[:64]!r} is not read here; send {', '.join(_NEEDED)}.",
            param=f"{at}.type",
            code="unsupported_content",
        )
    for field in _NEEDED[kind]:
        if getattr(item, field) is None:
            raise invalid(
                f"{at}.{field}: an item of type {kind!r} needs this field. Add it.",
                param=f"{at}.{field}",
                code="missing_field",
            )
    if kind == "item_reference":
        return {"type": kind, "id": item.id}
    made: Item = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    made |= {"type": kind, "id": item.id or ids.new(PREFIXES[kind])}
    if kind == "message":
        made["content"] = _content(item, f"{at}.content")
        made.setdefault("status", "completed")
    elif kind == "reasoning":
        made.setdefault("summary", [])
        _texts(item.summary, f"{at}.summary")
        _texts(item.content, f"{at}.content")
    elif kind in ("function_call_output", "custom_tool_call_output"):
        _texts(item.output, f"{at}.output")
        made.setdefault("status", "completed")
    elif kind == "function_call":
        made.setdefault("arguments", "")
        made.setdefault("status", "completed")
    else:
        made.setdefault("input", "")
    return made


def _content(item: InputItem, at: str) -> list[dict[str, Any]]:
    """The content of a message as parts of its role's type."""
    kind = "output_text" if item.role == "assistant" else "input_text"
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    if isinstance(item.content, str):
        return [{"type": kind, "text": item.content, **extra}]
    _texts(item.content, at)
    return [
        {"type": "refusal", "refusal": part.refusal}
        if part.type == "refusal"
        else {"type": kind, "text": part.text, **extra}
        for part in item.content or ()
    ]


def _texts(content: str | Sequence[InputPart] | None, at: str) -> None:
    """Raise 400 for parts that are not text."""
    if content is None or isinstance(content, str):
        return
    for number, part in enumerate(content):
        where = f"{at}[{number}]"
        if part.type not in ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"):
            raise invalid(
                f"{where}.type: this model reads text only, not {part.type[:64]!r}; send parts of type 'input_text'.",
                param=f"{where}.type",
                code="unsupported_content",
            )
        field = "refusal" if part.type == "refusal" else "text"
        if getattr(part, field) is None:
            raise invalid(f"{where}.{field}: this field is required.", param=f"{where}.{field}", code="missing_field")


# -- messages


def messages_of(items: Iterable[Item], instructions: str | None) -> list[ChatMessage]:
    """The messages of a conversation. Thought, text and calls of one turn become one message of the assistant, and
    system messages at the beginning become one. Raises 400 if there is none."""
    messages: list[ChatMessage] = []
    if instructions:
        messages.append(ChatMessage(role="system", content=instructions))
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                turn = _turn(messages, lambda last: not last.content and not last.tool_calls)
                turn.content = _text(item["content"])
            case "message":
                _add(messages, item["role"], _text(item["content"]))
            case "reasoning":
                turn = _turn(messages, lambda last: False)
                turn.reasoning_content = _thought(item)
            case "function_call" | "custom_tool_call":
                turn = _turn(messages, lambda last: True)
                turn.tool_calls = [*(turn.tool_calls or ()), _call(item)]
            case "function_call_output" | "custom_tool_call_output":
                messages.append(ChatMessage(role="tool", tool_call_id=item["call_id"], content=_text(item["output"])))
    if not messages:
        raise invalid("input: must not be empty. Send a text or items.", param="input", code="missing_field")
    return messages


def _add(messages: list[ChatMessage], role: Any, text: str) -> None:
    """Append a message; templates take one system message, at the beginning."""
    role = "system" if role == "developer" else role
    last = messages[-1] if messages else None
    if role == "system" and len(messages) == 1 and last is not None and last.role == "system":
        last.content = f"{last.content}\n\n{text}"
    else:
        messages.append(ChatMessage(role=role, content=text))


def _turn(messages: list[ChatMessage], goes_on: Any) -> ChatMessage:
    """The assistant's message that an item belongs to: the last one, or a new one."""
    if not (messages and messages[-1].role == "assistant" and goes_on(messages[-1])):
        messages.append(ChatMessage(role="assistant", content=""))
    return messages[-1]


def _call(item: Item) -> MessageToolCall:
    arguments = _arguments(item.get("arguments", ""))
    if item["type"] == "custom_tool_call":
        arguments = {"input": item.get("input", "")}
    return MessageToolCall(id=item["call_id"], function=ToolCallFunction(name=item["name"], arguments=arguments))


def _arguments(text: str) -> dict[str, Any]:
    """Arguments that a model has not finished, or that are no JSON a chat may have, do not end the conversation."""
    value = input_of(text) if text.strip() else {}
    if isinstance(value, dict):
        return value
    read: dict[str, Any] = msgspec.json.decode(text)
    try:
        check_depth(read, "arguments")
    except ApiError:
        return {"INVALID_JSON": text}
    return read


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in content)


def _thought(item: Item) -> str:
    if text := _text(item.get("content") or []) or _text(item.get("summary") or []):
        return text
    return decode_thought(item.get("encrypted_content") or "")


def encode_thought(text: str) -> str:
    """A thought as ``encrypted_content``, which a client without a store sends back. It is encoded only: the same
    client may read the thought anyhow."""
    return _THOUGHT + base64.urlsafe_b64encode(text.encode()).decode()


def decode_thought(text: str) -> str:
    """Raises 400 for what another server has encrypted."""
    try:
        if text and not text.startswith(_THOUGHT):
            raise ValueError
        return base64.b64decode(text.removeprefix(_THOUGHT), altchars="-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise _foreign() from None


def _foreign() -> ApiError:
    return invalid(
        "input: holds a reasoning item whose encrypted_content this server has not made; leave the item out.",
        param="input",
        code="invalid_encrypted_content",
    )
