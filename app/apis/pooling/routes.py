"""The routes of ranking, scoring and classifying."""

from __future__ import annotations

from typing import Any

from app.apis.pooling.answers import (
    ClassifyAnswer,
    CohereAnswer,
    CohereDialect,
    EncodeAnswer,
    PoolingAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from app.apis.pooling.handlers import classify, cohere_rerank, encode, pooling, rerank, score
from app.apis.pooling.requests import (
    ClassifyRequest,
    CohereRerankRequest,
    EncodeRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]


def _route(path: str, field: str, **more: Any) -> Route:
    """``field``: the prompt's name in the body."""
    fixed: dict[str, Any] = {"methods": ("POST",), "level": AccessLevel.USER, "needs_engine": True, "tag": "ranking"}
    return Route(path=path, spelling=(("prompt", field),), **fixed, **more)


ROUTES: tuple[Route, ...] = (
    *(
        _route(
            path,
            "documents",
            handler=rerank,
            summary="Documents in the order of their relevance to a query",
            body=RerankRequest,
            answer=RerankAnswer,
            id_prefix="rerank-",
            operation="rerank",
        )
        for path in ("/v1/rerank", "/rerank")
    ),
    _route(
        "/v2/rerank",
        "documents",
        handler=cohere_rerank,
        summary="The same in Cohere's form",
        body=CohereRerankRequest,
        answer=CohereAnswer,
        id_prefix="rerank-",
        operation="rerank",
        dialect=CohereDialect(),
    ),
    *(
        _route(
            path,
            "items",
            handler=score,
            summary="Scores of pairs of texts, or of tokens after texts",
            body=ScoreRequest,
            answer=ScoreAnswer,
            id_prefix="score-",
            operation="score",
        )
        for path in ("/v1/score", "/score")
    ),
    _route(
        "/classify",
        "input",
        handler=classify,
        summary="Classes of texts, by a model with a head that classifies",
        body=ClassifyRequest,
        answer=ClassifyAnswer,
        id_prefix="classify-",
        operation="classify",
    ),
    _route(
        "/pooling",
        "input",
        handler=pooling,
        summary="Vectors of texts, whatever the model makes",
        body=PoolingRequest,
        answer=PoolingAnswer,
        id_prefix="pool-",
        operation="embeddings",
        effects=("task",),
    ),
    _route(
        "/encode",
        "text",
        handler=encode,
        summary="Vectors of texts in SGLang's form",
        body=EncodeRequest,
        answer=EncodeAnswer,
        operation="embeddings",
    ),
)
