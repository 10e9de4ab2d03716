"""Every field of the SDKs of OpenAI, Anthropic and Ollama is declared, a label, or refused by name: none is dropped."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
from anthropic.resources.messages import Messages
from ollama import _types as ollama
from openai.resources import Completions, Embeddings
from openai.resources.chat.completions import Completions as Chat
from openai.resources.responses import Responses

from actors.protocol.requests import QueueFull
from app.apis.anthropic.requests import CountRequest, MessagesRequest
from app.apis.embeddings.handlers import EmbeddingsRequest
from app.apis.ollama.requests import (
    EmbedRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaGenerateRequest,
)
from app.apis.openai.requests import ChatRequest, CompletionRequest
from app.apis.responses.requests import ResponsesRequest
from app.server.field_screen import known_fields
from app.server.known_fields import KNOWN, LABELS, NO_EFFECT

TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
TEXT = {"role": "user", "content": "hi"}
APIS: dict[str, tuple[Any, type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (Chat.create, ChatRequest, {"messages": [TEXT]}),
    "/v1/completions": (Completions.create, CompletionRequest, {"prompt": "hi"}),
    "/v1/responses": (Responses.create, ResponsesRequest, {"input": "hi"}),
    "/v1/embeddings": (Embeddings.create, EmbeddingsRequest, {"input": "hi"}),
    "/v1/messages": (Messages.create, MessagesRequest, {"model": "fake", "max_tokens": 9, "messages": [TEXT]}),
    "/v1/messages/count_tokens": (Messages.count_tokens, CountRequest, {"model": "fake", "messages": [TEXT]}),
    "/api/chat": (ollama.ChatRequest, OllamaChatRequest, {"model": "fake", "messages": [TEXT]}),
    "/api/generate": (ollama.GenerateRequest, OllamaGenerateRequest, {"model": "fake", "prompt": "hi"}),
    "/api/embed": (ollama.EmbedRequest, EmbedRequest, {"model": "fake", "input": "hi"}),
    "/api/embeddings": (ollama.EmbeddingsRequest, OllamaEmbeddingsRequest, {"model": "fake", "prompt": "hi"}),
}
REFUSED: dict[str, Any] = {
    "access_programs": [{"type": "cyber"}],
    "audio": {"voice": "alloy", "format": "wav"},
    "background_options": {"completion_window": "2h"},
    "container": "container_1",
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "height": 64,
    "image": {"detail": "high"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
    "steps": 4,
    "web_search_options": {},
    "width": 64,
}
"""Fields without a place here -> a value that asks for something."""


def fields_of(create: Any) -> set[str]:
    return set(getattr(create, "model_fields", None) or inspect.signature(create).parameters) - TRANSPORT


@pytest.mark.parametrize("path", APIS)
def test_every_field_of_the_sdk_is_known(path):
    create, body, _ = APIS[path]
    undeclared = fields_of(create) - known_fields(body)
    unknown = undeclared - KNOWN.keys() - LABELS - NO_EFFECT.keys() - REFUSED.keys()
    assert not unknown, f"the SDK has fields that {path} drops: declare or refuse them"


CASES = [
    (path, name)
    for path, (create, body, _) in APIS.items()
    if path != "/v1/messages/count_tokens"  # which makes nothing that a field could change, and reports such fields
    for name in sorted(fields_of(create) - known_fields(body) - LABELS - NO_EFFECT.keys())
]


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_field_without_a_place_is_refused_by_name(application, path, name):
    response = await application.test_client().post(path, json={**APIS[path][2], name: REFUSED[name]})
    error = msgspec.json.decode(await response.get_data())["error"]
    text = error if isinstance(error, str) else error["message"]  # Ollama's errors are texts
    given = error["param"] if "param" in error else text.partition(":")[0]
    assert (response.status_code, given) == (400, name)


async def test_fields_without_effect_are_reported(application):
    body = {"messages": [TEXT], "store": True, "verbosity": "low", "service_tier": "flex", "modalities": ["text"]}
    response = await application.test_client().post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "service_tier, store, verbosity"


async def test_a_prediction_is_drafted_from_or_refused(application, engine):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for content, text in (("one two", "one two"), (parts, "one two")):
        body = {"messages": [TEXT], "prediction": {"type": "content", "content": content}}
        assert (await application.test_client().post("/v1/chat/completions", json=body)).status_code == 200
        assert engine.requests[-1]["params"].prediction == text


def _typed(answer: Any) -> bool:
    return bool(answer["error"]["type"] == "rate_limit_error")


QUEUED = {
    "/v1/responses": lambda answer: _typed(answer) and answer["error"]["code"] == "queue_full",
    "/v1/chat/completions": _typed,
    "/v1/completions": _typed,
    "/v1/messages": lambda answer: _typed(answer) and answer["type"] == "error",
    "/api/chat": lambda answer: answer == {"error": "the queue is full"},
    "/api/generate": lambda answer: answer == {"error": "the queue is full"},
}


@pytest.mark.parametrize("path", QUEUED)
async def test_a_full_queue_is_429_in_the_form_of_each_api(application, engine, path):
    engine.admission_error = QueueFull("the queue is full", retry_after=3)
    body = {**APIS[path][2], **({"stream": False} if path.startswith("/api") else {})}
    response = await application.test_client().post(path, json=body)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
    assert QUEUED[path](msgspec.json.decode(await response.get_data()))
