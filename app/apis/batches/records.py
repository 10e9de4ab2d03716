"""Batches as they are stored and as clients see them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from app.apis.batches.lines import LineError, Tokens

__all__ = [
    "UNFINISHED",
    "BatchAnswer",
    "BatchList",
    "BatchRecord",
    "FileAnswer",
    "FileDeleted",
    "FileList",
    "Status",
    "batch_answer",
]

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch. ``total`` counts its lines, ``completed`` and ``failed`` those with a result. ``ending``: its last
    status, while its files of results are made. Times since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    ending: Status | None = None
    metadata: dict[str, str] | None = None
    output_seconds: int | None = None  # until its output files expire
    times: dict[str, int] = {}  # of its states, by the names of OpenAI's fields
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    tokens: Tokens = msgspec.field(default_factory=Tokens)


class Counts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchAnswer(msgspec.Struct, kw_only=True):
    """A batch as OpenAI's API shows it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileAnswer(msgspec.Struct, kw_only=True):
    """A file as OpenAI's API shows it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def batch_answer(record: BatchRecord) -> BatchAnswer:
    tokens = record.tokens
    at = record.times.get
    return BatchAnswer(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors={"object": "list", "data": record.errors} if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=Counts(record.total, record.completed, record.failed),
        usage={
            "input_tokens": tokens.input,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.output,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.input + tokens.output,
        },
        metadata=record.metadata,
        in_progress_at=at("in_progress_at"),
        finalizing_at=at("finalizing_at"),
        completed_at=at("completed_at"),
        failed_at=at("failed_at"),
        expired_at=at("expired_at"),
        cancelling_at=at("cancelling_at"),
        cancelled_at=at("cancelled_at"),
    )
