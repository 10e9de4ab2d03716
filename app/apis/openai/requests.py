"""Bodies of OpenAI's API, with the extra fields that clients of other engines send. Every field may be null: omitted.

Types and lengths are checked here. Values (the range of a temperature, the existence of a token id) are checked by the
engine, whose messages have more detail. :func:`documented` adds their bounds to the API's description.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS
from app.apis.grammars import GrammarFields
from app.apis.routing import Replica
from app.apis.sessions import SessionParams

__all__ = [
    "Alternatives",
    "ChatMessage",
    "ChatRequest",
    "Choices",
    "CompletionRequest",
    "ContentPart",
    "Count",
    "DraftTokens",
    "Label",
    "Least",
    "Metadata",
    "MinP",
    "Name",
    "OwnTemplate",
    "Patterns",
    "Penalty",
    "Repetition",
    "Salt",
    "SamplingFields",
    "Seed",
    "StreamOptions",
    "Temperature",
    "Text",
    "TokenId",
    "TokenIds",
    "TopK",
    "TopP",
    "documented",
    "texts_of",
]


def documented(low: float | None = None, high: float | None = None, *, above: bool = False) -> Meta:
    """Bounds for the API's description; the engine checks them. ``above``: ``low`` itself is too small."""
    bounds = {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
    return Meta(extra_json_schema={name: bound for name, bound in bounds.items() if bound is not None})


Temperature = Annotated[float, documented(0, LIMITS.temperature)]
Penalty = Annotated[float, documented(-LIMITS.penalty, LIMITS.penalty)]
Repetition = Annotated[float, documented(0.01, 100)]
TopP = Annotated[float, documented(0, 1, above=True)]
TopK = Annotated[int, documented(-1, 2**31 - 1)]
MinP = Annotated[float, documented(0, 1)]
Choices = Annotated[int, documented(1, LIMITS.n)]
Count = Annotated[int, documented(1, 2**31 - 1)]
Least = Annotated[int, documented(0, 2**31 - 1)]
Seed = Annotated[int, documented(-(2**63), 2**64 - 1)]
DraftTokens = Annotated[int, documented(1, LIMITS.draft_tokens)]
Alternatives = Annotated[int, documented(0, LIMITS.logprobs)]

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=4_194_304)]
Text = str
"""Bounded by the size of the body and by the model's context."""
Name = Annotated[str, Meta(max_length=512)]
ToolName = Annotated[Name, Meta(extra_json_schema={"pattern": rf"^[a-zA-Z0-9_-]{{1,{LIMITS.tool_name_chars}}}$"})]
Patterns = Text | Annotated[list[Text], Meta(max_length=LIMITS.stop_patterns)]
Label = Annotated[str, Meta(max_length=LIMITS.request_id_chars)]
Salt = Annotated[str, Meta(max_length=LIMITS.cache_salt_chars)]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=LIMITS.metadata_key_chars)],
        Annotated[str, Meta(max_length=LIMITS.metadata_value_chars)],
    ],
    Meta(max_length=LIMITS.metadata_pairs),
]
OwnTemplate = Annotated[str, Meta(max_length=LIMITS.template_chars)]


def texts_of(given: str | list[str] | None) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given or ())


Role = Literal["developer", "system", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """``include_usage``: a last chunk with the usage. ``continuous_usage_stats``: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _no_effect(what: str) -> Meta:
    return Meta(description=f"Checked, and without effect here: {what}.")


class Labels(GrammarFields, kw_only=True):
    """Fields that change no token of an answer, beside those that constrain it."""

    user: Annotated[Name, _no_effect("no answer depends on it")] | None = None
    metadata: Annotated[Metadata, _no_effect("nothing is stored with it")] | None = None
    safety_identifier: Annotated[Name, _no_effect("no answer depends on it")] | None = None
    prompt_cache_key: Annotated[Name, _no_effect("prefixes are found by their tokens")] | None = None
    prompt_cache_retention: Annotated[Name, _no_effect("prefixes stay while there is room")] | None = None
    store: Annotated[bool, _no_effect("no answer is stored")] | None = None
    service_tier: Annotated[ServiceTier, _no_effect("all requests have the same tier")] | None = None
    verbosity: Annotated[Literal["low", "medium", "high"], _no_effect("ask for it in the conversation")] | None = None


class SamplingFields(Labels, kw_only=True):
    """Fields of completions and chat completions."""

    model: Name | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=LIMITS.logit_bias)] | None = None
    max_tokens: Least | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=LIMITS.stop_strings)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    min_tokens: Least | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=LIMITS.stop_token_ids)] | None = None
    stop_regex: Patterns | None = None  # SGLang's name
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Text], Meta(max_length=LIMITS.bad_words)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=LIMITS.allowed_token_ids)] | None = None
    prompt_logprobs: Alternatives | None = None
    speculative: bool | None = None
    speculative_num_draft_tokens: DraftTokens | None = None
    return_token_ids: bool | None = None
    return_hidden_states: bool | None = None  # SGLang's name
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None  # SGLang's name
    rid: Label | None = None
    request_id: Label | None = None
    session_params: SessionParams | None = None  # SGLang's
    data_parallel_rank: Replica | None = None  # SGLang's name of the replica that runs it
    routed_dp_rank: Replica | None = None  # its newer name


class CompletionRequest(SamplingFields, kw_only=True):
    """``POST /v1/completions``.

    ``best_of``: the choices that are generated; the ``n`` with the highest mean log-probability are returned.
    """

    prompt: (
        Text
        | Annotated[
            list[Text | TokenId | TokenIds],
            Meta(max_length=4_194_304),
        ]
    )
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None
    suffix: Text | None = None
    add_special_tokens: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


class ToolCallFunction(msgspec.Struct, kw_only=True):
    name: ToolName
    arguments: Text | dict[str, Any] = ""


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call of the assistant in an earlier turn."""

    id: Name | None = None
    type: Name = "function"
    function: ToolCallFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Role
    content: Text | Annotated[list[ContentPart | Text], Meta(max_length=4096)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=LIMITS.tools)] | None = None
    tool_call_id: Name | None = None


class ToolFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call: the prompt describes it, and calls of it are returned as ``tool_calls``."""

    type: Name
    function: ToolFunction


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Another spelling of ``reasoning_effort`` and ``thinking_budget``."""

    effort: Effort | None = None
    max_tokens: Least | None = None


class PredictionPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text


class Prediction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text that the answer is expected to repeat in large parts: draft tokens come from it."""

    type: Literal["content"]
    content: Text | Annotated[list[PredictionPart], Meta(max_length=4096)]


class ChatRequest(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``.

    ``separate_reasoning`` false leaves reasoning in the content, ``stream_reasoning`` false sends it as a whole when
    it ends, ``include_reasoning`` false leaves it out of the answer. ``thinking_budget`` (also
    ``max_thinking_tokens``, ``thinking_token_budget``): tokens after which reasoning is ended.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIMITS.messages)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Meta(max_length=LIMITS.tools)] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking_budget: Least | None = None
    max_thinking_tokens: Least | None = None
    thinking_token_budget: Least | None = None
    chat_template: OwnTemplate | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
