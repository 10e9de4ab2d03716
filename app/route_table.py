"""All routes of the server, declared in their packages. Undeclared paths require a key and then return 404."""

from __future__ import annotations

from actors.options import Arguments
from app.apis.admin.routes import ROUTES as ADMIN
from app.apis.anthropic.dialect import ANTHROPIC
from app.apis.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from app.apis.batches.routes import ROUTES as BATCHES
from app.apis.embeddings.routes import ROUTES as EMBEDDINGS
from app.apis.llamacpp.routes import ROUTES as LLAMA_CPP
from app.apis.ollama.dialect import OLLAMA
from app.apis.ollama.routes import ROUTES as OLLAMA_ROUTES
from app.apis.openai.routes import ROUTES as OPENAI
from app.apis.pooling.routes import ROUTES as POOLING
from app.apis.probes.routes import ROUTES as PROBES
from app.apis.responses.routes import ROUTES as RESPONSES
from app.apis.sglang.routes import ROUTES as SGLANG
from app.apis.tokens.routes import ROUTES as TOKENS
from app.live.routes import ROUTES as LIVE_PAGE
from app.server.auth import AccessLevel
from app.server.openapi import openapi
from app.server.openapi_page import docs
from app.server.routes import Route

__all__ = ["DIALECTS", "ROUTES", "routes"]

_DESCRIPTION = (
    Route(
        path="/openapi.json",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=openapi,
        summary="This description",
        tag="pages",
    ),
    Route(
        path="/docs",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=docs,
        summary="The API as a page",
        media=("text/html",),
        tag="pages",
    ),
)

ROUTES: tuple[Route, ...] = (
    *OPENAI,
    *RESPONSES,
    *EMBEDDINGS,
    *POOLING,
    *BATCHES,
    *ANTHROPIC_ROUTES,
    *OLLAMA_ROUTES,
    *LLAMA_CPP,
    *SGLANG,
    *TOKENS,
    *ADMIN,
    *PROBES,
    *_DESCRIPTION,
    *LIVE_PAGE,
)

DIALECTS = (ANTHROPIC, OLLAMA)


def routes(arguments: Arguments) -> tuple[Route, ...]:
    """The routes of a server with these arguments."""
    return tuple(route for route in ROUTES if not (arguments.disable_page and route in LIVE_PAGE))
