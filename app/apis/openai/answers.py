"""Answers of OpenAI's API, and log-probabilities in its form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from actors.protocol.requests import TokenLogprob, Usage

__all__ = [
    "CalledFunction",
    "ChatAnswer",
    "ChatChoice",
    "ChatLogprobs",
    "ChatMessageAnswer",
    "ChatTokenLogprob",
    "Choice",
    "CompletionAnswer",
    "CompletionLogprobs",
    "CompletionTokensDetails",
    "PromptTokensDetails",
    "ToolCall",
    "UsageAnswer",
    "characters",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
    "stop_reason",
    "usage_answer",
]

_FLOOR = -9999.0  # OpenAI's value for an impossible token; JSON has no minus infinity


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of thoughts, and verified draft tokens that were accepted or rejected."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageAnswer(msgspec.Struct):
    """Tokens of a request: the prompt once, the completions of all choices. The details are present if the model
    thought, or draft tokens were verified."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    """Aligned lists. The first prompt token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: UsageAnswer
    metadata: dict[str, str]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[dict[str, Any]]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessageAnswer(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessageAnswer
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    hidden_states: list[float] | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    metadata: dict[str, str]
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


def stop_reason(matched: str | int | None, stop_token_ids: Sequence[int] | None) -> str | int | None:
    """``stop_reason`` as in vLLM: the stop string, the regular expression, or the token of the request's
    ``stop_token_ids`` that ended a choice; None for the end token. ``matched``: as ``Delta.matched_stop``."""
    return matched if isinstance(matched, str) or matched in (stop_token_ids or ()) else None


def usage_answer(
    usages: Iterable[Iterable[Usage]],
    *,
    cache_report: bool,
    count_completions: bool = True,
    reasoning_tokens: int = 0,
) -> UsageAnswer:
    """``usages``: per prompt, per choice. ``count_completions`` is False if the one generated token is omitted."""
    prompt = completion = cached = drafted = accepted = 0
    for choices in usages:
        counted = list(choices)
        prompt += max((usage.prompt_tokens for usage in counted), default=0)
        cached += max((usage.cached_tokens for usage in counted), default=0)
        if count_completions:
            completion += sum(usage.completion_tokens for usage in counted)
        draft_tokens = [usage.acceptance for usage in counted if usage.acceptance is not None]
        drafted += sum(each.drafted for each in draft_tokens)
        accepted += sum(each.accepted for each in draft_tokens)
    return UsageAnswer(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached) if cache_report else None,
        completion_tokens_details=(
            CompletionTokensDetails(reasoning_tokens, accepted, drafted - accepted)
            if drafted or reasoning_tokens
            else msgspec.UNSET
        ),
    )


def _finite(logprob: float | None) -> float:
    return _FLOOR if logprob is None else max(logprob, _FLOOR)


def _name(entry: TokenLogprob, as_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_ids else entry.token


def characters(entry: TokenLogprob) -> int:
    """Characters that begin in this token: a character of several tokens counts once."""
    return sum(byte & 0xC0 != 0x80 for byte in entry.bytes_)


def completion_logprobs(
    entries: Sequence[TokenLogprob], *, top: int, offset: int, as_ids: bool = False
) -> CompletionLogprobs:
    """``offset``: characters of text before the first entry. ``top``: requested alternatives; 0 for none."""
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        name = _name(entry, as_ids)
        tokens.append(name)
        offsets.append(offset)
        offset += characters(entry)
        if entry.logprob is None:
            token_logprobs.append(None)
            tops.append(None)
            continue
        token_logprobs.append(_finite(entry.logprob))
        alternatives = {_name(other, as_ids): _finite(other.logprob) for other in entry.top}
        alternatives.setdefault(name, _finite(entry.logprob))
        tops.append(alternatives)
    return CompletionLogprobs(tokens, token_logprobs, tops if top else None, offsets)


def chat_logprobs(entries: Sequence[TokenLogprob], *, as_ids: bool = False) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                _name(entry, as_ids),
                _finite(entry.logprob),
                list(entry.bytes_),
                [
                    {
                        "token": _name(other, as_ids),
                        "logprob": _finite(other.logprob),
                        "bytes": list(other.bytes_),
                    }
                    for other in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: Sequence[TokenLogprob] | None) -> list[dict[str, Any] | None] | None:
    """Per prompt token, by token id: ``{"123": {"logprob", "rank", "decoded_token"}}``; null for the first.

    The rank is known for the requested top tokens, otherwise null.
    """
    if entries is None:
        return None
    scored: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry.logprob is None:
            scored.append(None)
            continue
        ranked = {
            str(other.token_id): {"logprob": _finite(other.logprob), "rank": rank, "decoded_token": other.token}
            for rank, other in enumerate(entry.top, 1)
        }
        ranked.setdefault(
            str(entry.token_id), {"logprob": _finite(entry.logprob), "rank": None, "decoded_token": entry.token}
        )
        scored.append(ranked)
    return scored
