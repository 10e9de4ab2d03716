"""The form of an upload (multipart/form-data, RFC 7578), read piece by piece into a file."""

from __future__ import annotations

from collections.abc import AsyncIterator

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from app.apis.batches.storage import FileWriter
from app.server.errors import ApiError, invalid

__all__ = ["MAX_UPLOAD", "read_form"]

MAX_UPLOAD = 512 << 20
"""Bytes of one file."""

_MAX_FIELD = 4096  # bytes of a field that is not the file
_MAX_PARTS = 16
_AT_ONCE = 1 << 20  # bytes that are written together


async def read_form(
    content_type: str, pieces: AsyncIterator[bytes], writer: FileWriter
) -> tuple[dict[str, str], str | None]:
    """The fields of a form, whose part ``file`` goes to ``writer``, and the client's name of that file; None without a
    file. Raises 400, 413 and 415, StorageFull, and TimeoutError."""
    kind, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= 256:
        raise ApiError(415, "An upload must be multipart/form-data with a boundary.", code="unsupported_media_type")
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), _AT_ONCE + (1 << 20), max_parts=_MAX_PARTS)
    fields: dict[str, str] = {}
    filename: str | None = None
    name = ""  # of the part that is read
    value, waiting = bytearray(), bytearray()
    try:
        async for piece in pieces:
            decoder.receive_data(piece)
            while not isinstance(event := decoder.next_event(), NeedData):
                if isinstance(event, (Field, File)):
                    name, value = event.name or "", bytearray()
                    if name == "file":
                        if filename is not None:
                            raise invalid("file: is there twice; upload one at a time.", param="file")
                        filename = event.filename if isinstance(event, File) else ""
                elif isinstance(event, Data) and name == "file":
                    waiting += event.data
                    if writer.size + len(waiting) > MAX_UPLOAD:
                        raise _too_large()
                    if len(waiting) >= _AT_ONCE:
                        await writer.write(bytes(waiting))
                        waiting.clear()
                elif isinstance(event, Data):
                    value += event.data
                    if len(value) > _MAX_FIELD:
                        raise invalid(f"{name[:64]}: has more than {_MAX_FIELD} bytes.", param=name[:64])
                    if not event.more_data:
                        fields[name] = value.decode("utf-8", "replace")
                elif isinstance(event, Epilogue):
                    break
        decoder.receive_data(None)
        while not isinstance(decoder.next_event(), (NeedData, Epilogue)):
            pass
    except (ValueError, RequestEntityTooLarge):
        raise invalid("The body is no whole form of multipart/form-data.", code="invalid_form") from None
    await writer.write(bytes(waiting))
    return fields, filename


def _too_large() -> ApiError:
    return ApiError(413, f"The file has more than {MAX_UPLOAD} bytes; split it.", param="file", code="file_too_large")
