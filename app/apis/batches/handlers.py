"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from quart import Response, request

from app.apis.batches.lines import ENDPOINTS
from app.apis.batches.records import (
    UNFINISHED,
    BatchList,
    BatchRecord,
    FileAnswer,
    FileDeleted,
    FileList,
    batch_answer,
)
from app.apis.batches.runner import BatchRunner
from app.apis.batches.storage import StorageFull, StoredFile, TooManyUploads
from app.apis.batches.upload import MAX_UPLOAD, read_form
from app.apis.embeddings.handlers import embeds
from app.apis.openai.requests import Metadata, Name
from app.server.errors import ApiError, invalid
from app.server.exchange import Exchange
from app.server.query import page, word
from app.server.service import Service, json_response

__all__ = [
    "BatchRequest",
    "cancel_batch",
    "create_batch",
    "delete_file",
    "file_content",
    "get_batch",
    "get_file",
    "list_batches",
    "list_files",
    "upload_file",
]

_MAX_UNFINISHED = 64  # batches of one key
_WINDOW = 24 * 3600  # seconds
_MIN_EXPIRY, _MAX_EXPIRY = 3600, 30 * 24 * 3600  # seconds of expires_after
_PIECE = 256 << 10  # bytes of a file that are sent at once
_NAME_CHARS = 255


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=_MIN_EXPIRY, le=_MAX_EXPIRY)]


class BatchRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/batches``."""

    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def _runner(service: Service) -> BatchRunner:
    if service.batches is None:
        raise ApiError(
            400,
            "Files and batches are off here; start the server with --file-storage-path DIRECTORY.",
            code="files_disabled",
        )
    return service.batches


# -- files


async def upload_file(service: Service, exchange: Exchange, body: None) -> Response:
    """Store a file, which arrives as a form."""
    store = _runner(service).store
    declared = request.content_length
    if declared is not None and declared > MAX_UPLOAD + (64 << 10):
        raise ApiError(413, f"The file has more than {MAX_UPLOAD} bytes; split it.", param="file")
    try:
        with store.writing(service.owner(exchange)) as writer:
            fields, filename = await read_form(request.headers.get("Content-Type", ""), exchange.body.pieces(), writer)
            seconds = _checked(fields, filename)
            file = await writer.finish(filename=_shown(filename or ""), purpose=fields["purpose"], seconds=seconds)
    except StorageFull:
        raise ApiError(
            413,
            "The storage has no room for this file; delete files, or start the server with more --file-storage-gib.",
            param="file",
            code="storage_full",
        ) from None
    except TooManyUploads:
        raise ApiError(
            429,
            "Too many of your files are arriving together; wait until one of them is complete.",
            kind="rate_limit_error",
            code="too_many_uploads",
            retry_after=5,
        ) from None
    except TimeoutError:
        raise ApiError(408, "The file did not arrive in time.", code="request_timeout", retryable=True) from None
    return json_response(_file_answer(file))


def _checked(fields: dict[str, str], filename: str | None) -> int | None:
    """Check a form. Returns the seconds until the file expires. Raises 400."""
    if filename is None:
        raise invalid("file: this field is required. Add it.", param="file", code="missing_field")
    purpose = fields.get("purpose")
    if purpose != "batch":
        given = "this field is required" if purpose is None else f"{purpose[:64]!r} has no use here"
        raise invalid(f"purpose: {given}; send 'batch'.", param="purpose")
    for name in fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        raise invalid(f"{name[:64]}: there is no such field. Leave it out.", param=name[:64])
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise invalid("expires_after.anchor: must be created_at.", param="expires_after.anchor")
    text = fields.get("expires_after[seconds]")
    if text is None:
        return None
    if not text.isdecimal() or not text.isascii() or not _MIN_EXPIRY <= int(text[:12]) <= _MAX_EXPIRY:
        raise invalid(f"expires_after.seconds: must be {_MIN_EXPIRY} to {_MAX_EXPIRY}.", param="expires_after.seconds")
    return int(text)


def _shown(name: str) -> str:
    """The client's name of a file, to be shown: without folders and unprintable characters."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[:_NAME_CHARS] or "file"


async def list_files(service: Service, exchange: Exchange, body: None) -> Response:
    store = _runner(service).store
    purpose = word("purpose")
    files = [
        file for file in store.newest_first() if service.sees(exchange, file.owner) and purpose in (None, file.purpose)
    ]
    shown, more = page(files, _id, maximum=10_000, default=10_000)
    answers = [_file_answer(file) for file in shown]
    first, last = _ends(answers)
    return json_response(FileList(data=answers, first_id=first, last_id=last, has_more=more))


async def get_file(service: Service, exchange: Exchange, file_id: str) -> Response:
    return json_response(_file_answer(_file(service, exchange, file_id)))


async def delete_file(service: Service, exchange: Exchange, file_id: str) -> Response:
    file = _file(service, exchange, file_id)
    runner = _runner(service)
    if runner.uses(file.id):
        raise invalid(f"{file.id}: an unfinished batch reads this file; cancel the batch first.", code="file_in_use")
    runner.store.delete(file.id)
    return json_response(FileDeleted(id=file.id))


async def file_content(service: Service, exchange: Exchange, file_id: str) -> Response:
    file = _file(service, exchange, file_id)
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(file.bytes),
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(_bytes(_runner(service).store.path(file.id)), headers=headers)


async def _bytes(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _file(service: Service, exchange: Exchange, file_id: str) -> StoredFile:
    file = _runner(service).store.get(file_id)
    if file is None or not service.sees(exchange, file.owner):
        raise ApiError(404, f"There is no file {file_id[:64]!r}.", param="file_id", code="not_found")
    return file


def _file_answer(file: StoredFile) -> FileAnswer:
    return FileAnswer(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


# -- batches


async def create_batch(service: Service, exchange: Exchange, body: BatchRequest) -> Response:
    runner = _runner(service)
    if body.endpoint not in ENDPOINTS or service.table.find("POST", body.endpoint) is None:
        raise invalid(f"endpoint: must be one of {', '.join(ENDPOINTS)}, not {body.endpoint[:64]!r}.", param="endpoint")
    if body.endpoint == "/v1/embeddings" and not embeds(service):
        raise invalid("endpoint: this model generates text; embeddings need --is-embedding.", param="endpoint")
    file = runner.store.get(body.input_file_id)
    if file is None or not service.sees(exchange, file.owner):
        raise invalid(
            f"input_file_id: there is no file {body.input_file_id[:64]!r}; upload it to /v1/files.",
            param="input_file_id",
        )
    if file.purpose != "batch":
        raise invalid("input_file_id: must be a file with the purpose 'batch'.", param="input_file_id")
    owner = service.owner(exchange)
    if runner.unfinished(owner) >= _MAX_UNFINISHED:
        raise ApiError(
            429,
            f"{_MAX_UNFINISHED} of your batches are not finished; wait for one of them, or cancel it.",
            kind="rate_limit_error",
            code="too_many_batches",
            retry_after=60,
        )
    now = int(time.time())
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(16)}",
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + _WINDOW,
        metadata=body.metadata,
        output_seconds=body.output_expires_after.seconds if body.output_expires_after is not None else None,
    )
    runner.add(record)
    return json_response(batch_answer(record))


async def list_batches(service: Service, exchange: Exchange, body: None) -> Response:
    records = [record for record in _runner(service).newest_first() if service.sees(exchange, record.owner)]
    shown, more = page(records, _id, maximum=100, default=20)
    answers = [batch_answer(record) for record in shown]
    first, last = _ends(answers)
    return json_response(BatchList(data=answers, first_id=first, last_id=last, has_more=more))


async def get_batch(service: Service, exchange: Exchange, batch_id: str) -> Response:
    return json_response(batch_answer(_batch(service, exchange, batch_id)))


async def cancel_batch(service: Service, exchange: Exchange, batch_id: str) -> Response:
    record = _batch(service, exchange, batch_id)
    if record.status not in UNFINISHED:
        raise ApiError(409, f"The batch is {record.status} already.", code="batch_not_cancellable", retryable=False)
    if record.status != "cancelling":
        _runner(service).cancel(record)
    return json_response(batch_answer(record))


def _batch(service: Service, exchange: Exchange, batch_id: str) -> BatchRecord:
    record = _runner(service).get(batch_id)
    if record is None or not service.sees(exchange, record.owner):
        raise ApiError(404, f"There is no batch {batch_id[:64]!r}.", param="batch_id", code="not_found")
    return record


def _id(stored: StoredFile | BatchRecord) -> str:
    return stored.id


def _ends(answers: Sequence[Any]) -> tuple[str | None, str | None]:
    return (answers[0].id, answers[-1].id) if answers else (None, None)
