"""Bodies of Ollama's API. Every field may be null: omitted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.protocol.requests import LIMITS
from app.apis.openai.requests import (
    Alternatives,
    Label,
    MinP,
    Name,
    Penalty,
    Repetition,
    Seed,
    Temperature,
    Text,
    Tool,
    ToolName,
    TopK,
    TopP,
)

__all__ = [
    "EmbedRequest",
    "OllamaChatRequest",
    "OllamaEmbeddingsRequest",
    "OllamaGenerateRequest",
    "OllamaMessage",
    "Options",
    "OwnFields",
    "ShowRequest",
]

KeepAlive = Annotated[
    float | Annotated[str, Meta(max_length=64)],
    Meta(description="Taken: the one model stays loaded. 0 without a prompt, which unloads a model, is refused."),
]
Think = bool | Literal["low", "medium", "high", "max"]
Count = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class Options(msgspec.Struct, kw_only=True):
    """Sampling of a request. ``num_predict`` -1 and -2: up to the end of the context. ``num_ctx``: at most the server's
    context. ``repeat_last_n``: penalties see the whole context, which is -1. ``num_keep``: nothing is cut off."""

    num_predict: Count | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=LIMITS.stop_strings)] | None = None
    repeat_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Count | None = None
    num_ctx: Count | None = None
    num_keep: Count | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: ToolName
    arguments: dict[str, Any] = {}


class MessageCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: Name | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[MessageCall], Meta(max_length=LIMITS.tools)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None
    images: Annotated[list[Any], Meta(max_length=64)] | None = None


class OwnFields(msgspec.Struct, kw_only=True):
    """Fields of both ways to generate. Streams are the default."""

    model: Annotated[Name, Meta(min_length=1)]
    stream: bool | None = None
    format: Text | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    rid: Label | None = None


class OllamaChatRequest(OwnFields, kw_only=True):
    """``POST /api/chat``. Without messages it says that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=LIMITS.messages)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=LIMITS.tools)] | None = None


class OllamaGenerateRequest(OwnFields, kw_only=True):
    """``POST /api/generate``: one turn, or with ``raw`` or ``suffix`` a text that is continued or filled in."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    template: Text | None = None
    context: Annotated[list[int], Meta(max_length=4_194_304)] | None = None
    images: Annotated[list[Any], Meta(max_length=64)] | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """``POST /api/show``. ``name`` is an older name of ``model``."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """``POST /api/embed``. ``truncate``: whether a text that is too long is cut; else it is an error."""

    model: Annotated[Name, Meta(min_length=1)]
    input: Text | Annotated[list[Text], Meta(max_length=LIMITS.prompts)]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=65536)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """``POST /api/embeddings``, the older form."""

    model: Annotated[Name, Meta(min_length=1)]
    prompt: Text
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None
