"""Bodies of Anthropic's Messages API. Every field may be null: omitted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS
from app.apis.openai.requests import Effort, Least, Name, Salt, Seed, Temperature, Text, ToolName, TopK, TopP

__all__ = [
    "AnthropicMessage",
    "AnthropicTool",
    "Block",
    "CountRequest",
    "MessagesRequest",
    "OutputConfig",
    "Part",
    "Thinking",
    "ToolChoiceField",
]

_BLOCKS = Meta(max_length=4096)
CacheControl = Annotated[
    dict[str, Any], Meta(max_length=8, description="Taken, and without effect: prefixes are found by their tokens.")
]


class Part(msgspec.Struct, kw_only=True):
    """A block of a system prompt or of a tool's result; only text is supported."""

    type: Name
    text: Text | None = None
    cache_control: CacheControl | None = None


class Block(msgspec.Struct, kw_only=True):
    """A block of a message: ``text``, ``thinking``, ``tool_use``, ``tool_result`` or a ``document`` of plain text."""

    type: Name
    text: Text | None = None
    thinking: Text | None = None
    signature: Text | None = None
    id: Name | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: Text | Annotated[list[Part], _BLOCKS] | None = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: Text | None = None
    context: Text | None = None
    citations: dict[str, Any] | list[Any] | None = None
    cache_control: CacheControl | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn. Neighbouring turns of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], _BLOCKS]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client. ``strict``: calls match ``input_schema``."""

    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    type: Name | None = None
    strict: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Name], Meta(max_length=16)] | None = None
    eager_input_streaming: Annotated[bool, Meta(description="Input is streamed as it is made, in any case.")] | None = (
        None
    )
    cache_control: CacheControl | None = None


class ToolChoiceField(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """``enabled`` needs ``budget_tokens``, after which reasoning is ended. ``display`` ``omitted`` leaves its text
    out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Least | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """``format``: ``{"type": "json_schema", "schema": {...}}``."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: Annotated[str, Meta(max_length=4096, description="No answer depends on it.")] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=LIMITS.messages)]
    system: Text | Annotated[list[Part], _BLOCKS] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=LIMITS.tools)] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. ``output_format``: an older name of ``output_config.format``."""

    max_tokens: Least
    stream: bool | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=LIMITS.stop_strings)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    output_format: dict[str, Any] | None = None
    metadata: Metadata | None = None
    service_tier: (
        Annotated[Literal["auto", "standard_only"], Meta(description="All requests have the same tier.")] | None
    ) = None
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None
