"""Every field of OpenAI's current SDK is declared, an explained label, or refused by name: none is dropped unknown."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import openai
import pytest
from openai.resources import Completions, Embeddings
from openai.resources.chat.completions import Completions as Chat
from openai.resources.responses import Responses

from app.apis.embeddings.handlers import EmbeddingsRequest
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
}
REFUSED: dict[str, Any] = {
    "access_programs": [{"type": "cyber"}],
    "audio": {"voice": "alloy", "format": "wav"},
    "background_options": {"completion_window": "2h"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "image": {"detail": "high"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
    "web_search_options": {},
}
"""Fields without a place here -> a value that asks for something."""


def fields_of(create: Any) -> set[str]:
    return set(inspect.signature(create).parameters) - TRANSPORT


@pytest.mark.parametrize("path", APIS)
def test_every_field_of_the_sdk_is_known(path):
    create, body, _ = APIS[path]
    undeclared = fields_of(create) - known_fields(body)
    unknown = undeclared - KNOWN.keys() - LABELS - NO_EFFECT.keys() - REFUSED.keys()
    assert not unknown, f"openai {openai.__version__} has fields that {path} drops: declare or refuse them"


CASES = [
    (path, name)
    for path, (create, body, _) in APIS.items()
    for name in sorted(fields_of(create) - known_fields(body) - LABELS - NO_EFFECT.keys())
]


@pytest.mark.parametrize(("path", "name"), CASES)
async def test_a_field_without_a_place_is_refused_by_name(application, path, name):
    response = await application.test_client().post(path, json={**APIS[path][2], name: REFUSED[name]})
    error = msgspec.json.decode(await response.get_data())["error"]
    assert (response.status_code, error["param"]) == (400, name)


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
