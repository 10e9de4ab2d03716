"""Answers of ranking, scoring and classifying."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "ClassifyAnswer",
    "ClassifyObject",
    "CohereAnswer",
    "CohereDialect",
    "CohereResult",
    "DocumentText",
    "EncodeAnswer",
    "PoolingAnswer",
    "PoolingObject",
    "RankUsage",
    "RerankAnswer",
    "RerankResult",
    "ScoreAnswer",
    "ScoreObject",
]

from app.server.dialect import Dialect
from app.server.errors import ApiError


class RankUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class DocumentText(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: DocumentText | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    """The best documents first."""

    id: str
    model: str
    usage: RankUsage
    results: list[RerankResult]


class CohereResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: DocumentText | msgspec.UnsetType = msgspec.UNSET


class CohereAnswer(msgspec.Struct, kw_only=True):
    """The best documents first."""

    id: str
    results: list[CohereResult]
    meta: dict[str, Any]


class CohereError(msgspec.Struct):
    id: str
    message: str


class CohereDialect(Dialect):
    """``{"id", "message"}``."""

    name = "cohere"
    envelope = CohereError

    def body(self, error: ApiError, request_id: str) -> bytes:
        return msgspec.json.encode(CohereError(request_id, error.message))


class ScoreObject(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``data``: of pairs of texts. ``scores``: of labels, one list for each item."""

    id: str
    object: str
    created: int
    model: str
    usage: RankUsage
    data: list[ScoreObject] | None = None
    scores: list[list[float]] | None = None


class ClassifyObject(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassifyObject]
    usage: RankUsage


class PoolingObject(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingObject]
    usage: RankUsage


class EncodeAnswer(msgspec.Struct, kw_only=True):
    """Of several inputs, a list of these."""

    embedding: list[float]
    meta_info: dict[str, Any]
