"""The route of embeddings."""

from __future__ import annotations

from app.apis.embeddings.handlers import EmbeddingsAnswer, EmbeddingsRequest, embeddings
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/embeddings",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=embeddings,
        summary="Vectors of texts, by a model that was trained for them",
        body=EmbeddingsRequest,
        answer=EmbeddingsAnswer,
        tag="openai",
        id_prefix="embd-",
        operation="embeddings",
        spelling=(("prompt", "input"),),
        needs_engine=True,
    ),
)
