"""Every route of the server. A path that is not here does not exist."""

from __future__ import annotations

from actors.arguments import Arguments
from app.admin import (
    AbortRequest,
    TraceLevel,
    abort_request,
    drain,
    flush_cache,
    model_info,
    server_info,
    set_trace_level,
)
from app.auth import Level
from app.live_page import page, page_file
from app.native import GenerateAnswer, generate
from app.native_requests import NATIVE_SPELLING, GenerateRequest, NativeSampling
from app.openai.answers import ChatAnswer, CompletionAnswer
from app.openai.chat import chat_completions
from app.openai.completions import completions
from app.openai.models import ModelCard, ModelList, get_model, list_models
from app.openai.requests import ChatRequest, CompletionRequest
from app.openapi import openapi
from app.openapi_page import docs
from app.probes import Readiness, health, health_generate, live, loads, metrics, ready, version
from app.routes import Route
from app.stage.answers import Waterfall
from app.stage.handlers import MOST_FRAMES, stage, stage_request
from app.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)

__all__ = ["ROUTES", "routes"]

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
        level=Level.USER,
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
        media=("text/plain",),
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

_NATIVE = (
    Route(
        path="/generate",
        methods=("POST", "PUT"),
        level=Level.USER,
        handler=generate,
        summary="Generate for one prompt or many, in SGLang's form",
        body=GenerateRequest,
        media=("application/json", "text/event-stream"),
        answer=GenerateAnswer,
        tag="native",
        id_prefix="gen-",
        operation="generate_content",
        spelling=NATIVE_SPELLING,
        nested=(("sampling_params", NativeSampling),),
        needs_engine=True,
    ),
    *(
        route
        for prefix in ("", "/v1")
        for route in (
            Route(
                path=f"{prefix}/tokenize",
                methods=("POST",),
                level=Level.USER,
                handler=tokenize,
                summary="Text or conversation to token ids",
                body=TokenizeRequest,
                answer=TokenizeAnswer,
                tag="tokens",
                needs_engine=True,
            ),
            Route(
                path=f"{prefix}/detokenize",
                methods=("POST",),
                level=Level.USER,
                handler=detokenize,
                summary="Token ids to text",
                body=DetokenizeRequest,
                answer=DetokenizeAnswer,
                tag="tokens",
                needs_engine=True,
            ),
        )
    ),
    Route(
        path="/tokenizer_info",
        methods=("GET",),
        level=Level.USER,
        handler=tokenizer_info,
        summary="The tokenizer's configuration and the chat template",
        tag="tokens",
    ),
)

_OPERATION = (
    Route(
        path="/abort_request",
        methods=("POST",),
        level=Level.USER,
        handler=abort_request,
        summary="End a request early, or (admin) all of them",
        body=AbortRequest,
        tag="operation",
    ),
    Route(
        path="/flush_cache",
        methods=("POST",),
        level=Level.ADMIN,
        handler=flush_cache,
        summary="Forget every cached prefix",
        tag="operation",
    ),
    Route(
        path="/set_trace_level",
        methods=("POST",),
        level=Level.ADMIN,
        handler=set_trace_level,
        summary="Trace more or less",
        body=TraceLevel,
        optional_body=True,
        tag="operation",
    ),
    Route(
        path="/drain",
        methods=("POST",),
        level=Level.ADMIN,
        handler=drain,
        summary="Take no more requests",
        tag="operation",
    ),
    *(
        Route(
            path=path,
            methods=("GET",),
            level=Level.USER,
            handler=server_info,
            summary="The server: workers, actors, arguments, load",
            tag="operation",
        )
        for path in ("/server_info", "/get_server_info")
    ),
    *(
        Route(
            path=path,
            methods=("GET",),
            level=Level.USER,
            handler=model_info,
            summary="The model",
            tag="operation",
        )
        for path in ("/model_info", "/get_model_info")
    ),
)

_PAGES = (
    Route(
        path="/openapi.json",
        methods=("GET",),
        level=Level.USER,
        handler=openapi,
        summary="This description",
        tag="pages",
    ),
    Route(
        path="/docs",
        methods=("GET",),
        level=Level.USER,
        handler=docs,
        summary="The API, for people",
        media=("text/html",),
        tag="pages",
    ),
)

_LIVE_PAGE = (
    Route(
        path="/",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=page,
        summary="The live page",
        media=("text/html",),
        tag="pages",
    ),
    Route(
        path="/page/{file}",
        methods=("GET",),
        level=Level.PUBLIC,
        handler=page_file,
        summary="A script or a style of the live page",
        media=("text/javascript", "text/css", "image/svg+xml"),
        tag="pages",
        logged=False,
    ),
    Route(
        path="/stage",
        methods=("GET",),
        level=Level.USER,
        handler=stage,
        summary="What the actors and the requests are doing now, four times a second",
        query=(("frames", "End after so many frames; without it the feed goes on.", 1, MOST_FRAMES),),
        media=("text/event-stream",),
        tag="pages",
        logged=False,
    ),
    Route(
        path="/stage/requests/{id}",
        methods=("GET",),
        level=Level.USER,
        handler=stage_request,
        summary="A live or recent request, hop by hop",
        answer=Waterfall,
        tag="pages",
        logged=False,
    ),
)

ROUTES: tuple[Route, ...] = (*_OPENAI, *_NATIVE, *_OPERATION, *_PROBES, *_PAGES, *_LIVE_PAGE)


def routes(arguments: Arguments) -> tuple[Route, ...]:
    """What a server with these arguments has."""
    return tuple(route for route in ROUTES if not (arguments.disable_page and route in _LIVE_PAGE))
