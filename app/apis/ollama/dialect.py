"""Ollama's errors, and its framing of streams: a JSON object a line."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.server.dialect import Dialect
from app.server.errors import ApiError

__all__ = ["OLLAMA", "OllamaDialect"]


class OllamaError(msgspec.Struct):
    """What went wrong. The message begins with the field."""

    error: str


class OllamaDialect(Dialect):
    """``{"error": MESSAGE}``. A stream ends with its last line; no line can say that it goes on."""

    name = "ollama"
    media_type = "application/x-ndjson"
    end = b""
    keep_alive = b""
    default_type = "application/json"  # its clients send none; the policy for browsers' requests does not depend on it

    envelope = OllamaError

    def speaks(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return path.startswith("/api/") and not path.startswith("/api/v1/")

    def body(self, error: ApiError, request_id: str) -> bytes:
        return msgspec.json.encode(OllamaError(error.message))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return self.body(error, request_id) + b"\n"


OLLAMA = OllamaDialect()
