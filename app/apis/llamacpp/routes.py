"""The routes of llama.cpp's own API; ``/tokenize`` and ``/detokenize`` are in ``app.apis.tokens``."""

from __future__ import annotations

from typing import Any

from app.apis.llamacpp.answers import LlamaCompletionAnswer
from app.apis.llamacpp.dialect import LLAMA_CPP
from app.apis.llamacpp.handlers import (
    PropsAnswer,
    TemplateAnswer,
    apply_template,
    completion,
    infill,
    props,
    slots,
)
from app.apis.llamacpp.requests import InfillRequest, LlamaCompletionRequest, TemplateRequest
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

_USER: dict[str, Any] = {"level": AccessLevel.USER, "tag": "llama.cpp", "dialect": LLAMA_CPP}
_GENERATES: dict[str, Any] = {
    **_USER,
    "methods": ("POST",),
    "media": ("application/json", "text/event-stream"),
    "id_prefix": "cmpl-",
    "operation": "text_completion",
    "needs_engine": True,
    "spelling": (("max_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty"), ("logprobs", "n_probs")),
}

ROUTES: tuple[Route, ...] = (
    Route(path="/completion", handler=completion, summary="Continue texts", body=LlamaCompletionRequest, **_GENERATES),
    Route(
        path="/infill",
        handler=infill,
        summary="Write what is between two texts",
        body=InfillRequest,
        answer=LlamaCompletionAnswer,
        **_GENERATES,
    ),
    Route(
        path="/apply-template",
        methods=("POST",),
        handler=apply_template,
        summary="The prompt that the chat template makes",
        body=TemplateRequest,
        answer=TemplateAnswer,
        needs_engine=True,
        **_USER,
    ),
    Route(path="/props", methods=("GET",), handler=props, summary="Facts of the server", answer=PropsAnswer, **_USER),
    Route(
        path="/slots",
        methods=("GET",),
        handler=slots,
        summary="The slots, and which are busy",
        query=(("fail_on_no_slot", "1: status 503 if no slot is free", 0, 1),),
        **_USER,
    ),
)
