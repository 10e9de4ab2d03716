"""Bodies of llama.cpp's own API. Every field may be null: omitted."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS
from app.apis.grammars import Schema
from app.apis.openai.requests import (
    Alternatives,
    ChatMessage,
    Label,
    MinP,
    Name,
    OwnTemplate,
    Penalty,
    Repetition,
    Seed,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    Tool,
    TopK,
    TopP,
)

__all__ = ["InfillRequest", "LlamaCompletionRequest", "SamplingBody", "TemplateRequest"]

Count = Annotated[int, Meta(ge=-1, lt=2**31)]
Bias = Annotated[list[Any], Meta(min_length=2, max_length=2, description="[token id, bias], or false for never.")]


class SamplingBody(msgspec.Struct, kw_only=True):
    """Sampling of completions. ``n_predict`` -1: up to the end of the context. ``seed`` -1: a random one.
    ``repeat_last_n``: penalties see the whole context, which is -1."""

    model: Name | None = None
    n_predict: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=LIMITS.stop_strings)] | None = None
    repeat_penalty: Repetition | None = None
    repeat_last_n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | Annotated[list[Bias], Meta(max_length=LIMITS.logit_bias)] | None = None
    n_probs: Alternatives | None = None
    grammar: Text | None = None
    json_schema: Schema | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    rid: Label | None = None


class LlamaCompletionRequest(SamplingBody, kw_only=True):
    """``POST /completion``. Several prompts give a list of answers."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(max_length=4_194_304)]


class InfillRequest(SamplingBody, kw_only=True):
    """``POST /infill``: the text between ``input_prefix`` and ``input_suffix``. ``prompt``: what it begins with."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[Any], Meta(max_length=1024)] | None = None
    prompt: Text | None = None


class TemplateRequest(msgspec.Struct, kw_only=True):
    """``POST /apply-template``."""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=LIMITS.messages)]
    tools: Annotated[list[Tool], Meta(max_length=LIMITS.tools)] | None = None
    chat_template: OwnTemplate | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
