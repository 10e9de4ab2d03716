"""Ollama's errors, and its framing of streams: a JSON object a line."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from app.server.dialect import Dialect
from app.server.errors import ApiError

__all__ = ["OLLAMA", "OllamaDialect"]


_OWN_PATHS = re.compile(r"(/v1)*/api/(?!v1/)")


class OllamaError(msgspec.Struct):
    """What went wrong. The message begins with the field."""

    error: str


class OllamaDialect(Dialect):
    """``{"error": MESSAGE}``. A stream ends with its last line; no line can say that it goes on."""

    name = "ollama"
    media_type = "application/x-ndjson"
    end = b""
    keep_alive = b""
    any_type = True  # its clients send none, and its documentation's curl sends that of a form

    envelope = OllamaError

    def speaks(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return bool(_OWN_PATHS.match(path))

    def body(self, error: ApiError, request_id: str) -> bytes:
        return msgspec.json.encode(OllamaError(error.message))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return self.body(error, request_id) + b"\n"


OLLAMA = OllamaDialect()
