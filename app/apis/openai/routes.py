"""The routes of OpenAI's API."""

from __future__ import annotations

from app.apis.openai.answers import ChatAnswer, CompletionAnswer
from app.apis.openai.chat import chat_completions
from app.apis.openai.completions import completions
from app.apis.openai.models import ModelCard, ModelList, get_model, list_models
from app.apis.openai.requests import ChatRequest, CompletionRequest
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/models",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=list_models,
        summary="The served model, as a list",
        answer=ModelList,
        tag="openai",
    ),
    Route(
        path="/v1/models/{model}",
        slashes=True,
        methods=("GET",),
        level=AccessLevel.USER,
        handler=get_model,
        summary="The served model",
        answer=ModelCard,
        tag="openai",
    ),
    Route(
        path="/v1/chat/completions",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=chat_completions,
        summary="Answer a conversation",
        body=ChatRequest,
        media=("application/json", "text/event-stream"),
        answer=ChatAnswer,
        tag="openai",
        id_prefix="chatcmpl-",
        operation="chat",
        spelling=(("prompt", "messages"), ("logprobs", "top_logprobs")),
        needs_engine=True,
    ),
    Route(
        path="/v1/completions",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=completions,
        summary="Continue texts",
        body=CompletionRequest,
        media=("application/json", "text/event-stream"),
        answer=CompletionAnswer,
        tag="openai",
        id_prefix="cmpl-",
        operation="text_completion",
        spelling=(("messages", "prompt"),),
        needs_engine=True,
    ),
)
