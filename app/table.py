"""Every route of the server. A path that is not here does not exist."""

from __future__ import annotations

from app.auth import Level
from app.openai.answers import ChatAnswer, CompletionAnswer
from app.openai.chat import chat_completions
from app.openai.completions import completions
from app.openai.models import ModelCard, ModelList, get_model, list_models
from app.openai.refusals import REFUSED
from app.openai.requests import IGNORED, ChatRequest, CompletionRequest
from app.probes import Readiness, health, health_generate, live, loads, metrics, ready, version
from app.routes import Route

__all__ = ["ROUTES"]

_OPENAI = (
    Route(
        path="/v1/models",
        methods=("GET",),
        level=Level.USER,
        handler=list_models,
        summary="The served model, as a list",
        answer=ModelList,
        tag="openai",
    ),
    Route(
        path="/v1/models/{model}",
        methods=("GET",),
        level=Level.USER,
        handler=get_model,
        summary="The served model",
        answer=ModelCard,
        tag="openai",
    ),
    Route(
        path="/v1/chat/completions",
        methods=("POST",),
        level=Level.USER,
        handler=chat_completions,
        summary="Answer a conversation",
        body=ChatRequest,
        answer=ChatAnswer,
        tag="openai",
        id_prefix="chatcmpl-",
        refused=REFUSED,
        ignored=IGNORED,
        needs_engine=True,
    ),
    Route(
        path="/v1/completions",
        methods=("POST",),
        level=Level.USER,
        handler=completions,
        summary="Continue texts",
        body=CompletionRequest,
        answer=CompletionAnswer,
        tag="openai",
        id_prefix="cmpl-",
        refused=REFUSED,
        ignored=IGNORED,
        needs_engine=True,
    ),
)

_PROBES = (
    Route(
        path="/live",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=live,
        summary="Whether the event loop runs",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/ready",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=ready,
        summary="Whether requests are admitted, and how far loading is",
        answer=Readiness,
        tag="probes",
        logged=False,
    ),
    Route(
        path="/health",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=health,
        summary="Whether the engine makes progress",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/ping",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=health,
        summary="The same as /health",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/health_generate",
        methods=("GET",),
        level=Level.USER,
        handler=health_generate,
        summary="Whether a token can be generated, end to end",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/metrics",
        methods=("GET",),
        level=Level.USER,
        handler=metrics,
        summary="Metrics for Prometheus",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/version",
        methods=("GET",),
        level=Level.USER,
        handler=version,
        summary="The version of Troupe",
        tag="probes",
        logged=False,
    ),
    Route(
        path="/v1/loads",
        methods=("GET",),
        level=Level.USER,
        handler=loads,
        summary="Load, for routers",
        tag="probes",
        logged=False,
    ),
)

ROUTES: tuple[Route, ...] = (*_OPENAI, *_PROBES)
