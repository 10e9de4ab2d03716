"""Bodies of OpenAI's Responses API. Every field may be null: omitted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS
from app.apis.openai.requests import (
    Alternatives,
    Count,
    Effort,
    Metadata,
    Name,
    Salt,
    Seed,
    ServiceTier,
    Temperature,
    Text,
    TopK,
    TopP,
)

__all__ = [
    "ConversationRequest",
    "ConversationUpdate",
    "Input",
    "InputItem",
    "InputPart",
    "ItemsRequest",
    "ResponsesRequest",
    "ResponsesTool",
]

MAX_NEW_ITEMS = 20  # of one request to a conversation, as OpenAI has it


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item's content; only text is supported."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[InputPart], Meta(max_length=4096)]


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation: a message (the default), ``function_call``, ``function_call_output``,
    ``custom_tool_call``, ``custom_tool_call_output``, ``reasoning`` or ``item_reference``."""

    type: Name | None = None
    id: Name | None = None
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: Text | Parts | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: Text | Parts | None = None
    summary: Parts | None = None
    encrypted_content: Text | None = None
    phase: Name | None = None


Input = Text | Annotated[list[InputItem], Meta(max_length=LIMITS.messages)]


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function or a custom tool, which the client runs. Tools that run at OpenAI are refused by name."""

    type: Name
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class ResponsesReasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``summary``: reasoning is returned as the summary of its item, else as its content."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``format``: text, json_object, or json_schema with its name and schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ConversationReference(msgspec.Struct, kw_only=True):
    id: Name


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/responses``.

    ``store`` (default true) keeps the response for ``previous_response_id``, ``conversation`` and GET. ``background``:
    the answer comes at once and the response is made after other requests.
    """

    input: Input | None = None
    model: Name | None = None
    background: bool | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None
    conversation: Name | ConversationReference | None = None
    include: Annotated[list[Name], Meta(max_length=32)] | None = None
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Name | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    reasoning: ResponsesReasoning | None = None
    safety_identifier: Name | None = None
    seed: Seed | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Temperature | None = None
    text: TextConfig | None = None
    tool_choice: Name | dict[str, Any] | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=LIMITS.tools)] | None = None
    top_k: TopK | None = None
    top_logprobs: Alternatives | None = None
    top_p: TopP | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Name | None = None


class ConversationRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/conversations``."""

    items: Annotated[list[InputItem], Meta(max_length=MAX_NEW_ITEMS)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """``POST /v1/conversations/{conversation_id}``."""

    metadata: Metadata


class ItemsRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/conversations/{conversation_id}/items``."""

    items: Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_NEW_ITEMS)]
