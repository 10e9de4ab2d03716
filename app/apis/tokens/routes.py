"""The routes of the tokenizer."""

from __future__ import annotations

from app.apis.tokens.handlers import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    *(
        route
        for prefix in ("", "/v1")
        for route in (
            Route(
                path=f"{prefix}/tokenize",
                methods=("POST",),
                level=AccessLevel.USER,
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
                level=AccessLevel.USER,
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
        level=AccessLevel.USER,
        handler=tokenizer_info,
        summary="The tokenizer's configuration and the chat template",
        tag="tokens",
    ),
)
