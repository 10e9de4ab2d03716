"""The routes of Ollama's API."""

from __future__ import annotations

from typing import Any

from app.apis.ollama.answers import OllamaChatAnswer, OllamaGenerateAnswer
from app.apis.ollama.dialect import OLLAMA
from app.apis.ollama.handlers import EmbedAnswer, OllamaEmbeddingsAnswer, chat, embed, embeddings, generate
from app.apis.ollama.models import OllamaModels, RunningList, ShowAnswer, VersionAnswer, running, show, tags, version
from app.apis.ollama.requests import (
    EmbedRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
    ShowRequest,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

_USER: dict[str, Any] = {"level": AccessLevel.USER, "tag": "ollama", "dialect": OLLAMA}
_GENERATES: dict[str, Any] = {
    **_USER,
    "methods": ("POST",),
    "media": ("application/json", "application/x-ndjson"),
    "needs_engine": True,
    "nested": (("options", Options), ("messages", OllamaMessage)),
}

ROUTES: tuple[Route, ...] = (
    Route(
        path="/api/chat",
        handler=chat,
        summary="Answer a conversation",
        body=OllamaChatRequest,
        answer=OllamaChatAnswer,
        operation="chat",
        spelling=(("prompt", "messages"), ("max_tokens", "options.num_predict")),
        **_GENERATES,
    ),
    Route(
        path="/api/generate",
        handler=generate,
        summary="Answer one turn, or continue a text",
        body=OllamaGenerateRequest,
        answer=OllamaGenerateAnswer,
        operation="text_completion",
        spelling=(("messages", "prompt"), ("max_tokens", "options.num_predict")),
        **_GENERATES,
    ),
    Route(
        path="/api/embed",
        methods=("POST",),
        handler=embed,
        summary="Embeddings of texts",
        body=EmbedRequest,
        answer=EmbedAnswer,
        needs_engine=True,
        **_USER,
    ),
    Route(
        path="/api/embeddings",
        methods=("POST",),
        handler=embeddings,
        summary="The embedding of a text",
        body=OllamaEmbeddingsRequest,
        answer=OllamaEmbeddingsAnswer,
        needs_engine=True,
        **_USER,
    ),
    Route(
        path="/api/show",
        methods=("POST",),
        handler=show,
        summary="What is known of the model",
        body=ShowRequest,
        answer=ShowAnswer,
        needs_engine=True,
        **_USER,
    ),
    Route(path="/api/tags", methods=("GET",), handler=tags, summary="The models", answer=OllamaModels, **_USER),
    Route(path="/api/ps", methods=("GET",), handler=running, summary="Loaded models", answer=RunningList, **_USER),
    Route(
        path="/api/version",
        methods=("GET",),
        handler=version,
        summary="The version of Ollama whose API this is",
        answer=VersionAnswer,
        **_USER,
    ),
)
