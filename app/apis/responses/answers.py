"""Responses as clients see them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors.protocol.requests import TokenLogprob, Usage
from app.apis.openai.answers import chat_logprobs

__all__ = [
    "ConversationAnswer",
    "ItemList",
    "ResponseAnswer",
    "ResponseDeleted",
    "logprobs_of",
    "usage_of",
]

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response. Fields of the request are repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    conversation: dict[str, str] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None = None
    truncation: str
    usage: dict[str, Any] | None = None
    user: str | None = None


class ResponseDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ConversationAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


def usage_of(usage: Usage, reasoning_tokens: int, *, cache_report: bool) -> dict[str, Any]:
    """``cache_report``: whether cached tokens are reported."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens if cache_report else 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def logprobs_of(tokens: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """Log-probabilities of tokens in the form of an ``output_text``."""
    content: list[dict[str, Any]] = msgspec.to_builtins(chat_logprobs(tokens, as_ids=False))["content"]
    return content
