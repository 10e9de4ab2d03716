"""The routes of files and batches."""

from __future__ import annotations

from app.apis.batches.handlers import (
    BatchRequest,
    cancel_batch,
    create_batch,
    delete_file,
    file_content,
    get_batch,
    get_file,
    list_batches,
    list_files,
    upload_file,
)
from app.apis.batches.records import BatchAnswer, BatchList, FileAnswer, FileDeleted, FileList
from app.server.auth import AccessLevel
from app.server.routes import Route

__all__ = ["ROUTES"]

_AFTER = ("after", "The id after which the list begins.")
_ORDER = ("order", "desc (newest first) or asc.")

ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/files",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=upload_file,
        summary="Upload a file of requests",
        upload=True,
        answer=FileAnswer,
        tag="batches",
    ),
    Route(
        path="/v1/files",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=list_files,
        summary="The files of this key",
        query=(("limit", "Files of one page.", 1, 10_000),),
        words=(_AFTER, _ORDER, ("purpose", "Files with this purpose only.")),
        answer=FileList,
        tag="batches",
    ),
    Route(
        path="/v1/files/{file_id}",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=get_file,
        summary="A file's description",
        answer=FileAnswer,
        tag="batches",
    ),
    Route(
        path="/v1/files/{file_id}",
        methods=("DELETE",),
        level=AccessLevel.USER,
        handler=delete_file,
        summary="Delete a file",
        answer=FileDeleted,
        tag="batches",
    ),
    Route(
        path="/v1/files/{file_id}/content",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=file_content,
        summary="The bytes of a file",
        media=("application/octet-stream",),
        tag="batches",
    ),
    Route(
        path="/v1/batches",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=create_batch,
        summary="Run the requests of a file after all others",
        body=BatchRequest,
        answer=BatchAnswer,
        tag="batches",
    ),
    Route(
        path="/v1/batches",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=list_batches,
        summary="The batches of this key",
        query=(("limit", "Batches of one page.", 1, 100),),
        words=(_AFTER, _ORDER),
        answer=BatchList,
        tag="batches",
    ),
    Route(
        path="/v1/batches/{batch_id}",
        methods=("GET",),
        level=AccessLevel.USER,
        handler=get_batch,
        summary="A batch with its counts",
        answer=BatchAnswer,
        tag="batches",
    ),
    Route(
        path="/v1/batches/{batch_id}/cancel",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=cancel_batch,
        summary="Cancel a batch; its finished lines stay",
        answer=BatchAnswer,
        tag="batches",
    ),
)
