"""Anthropic's errors, and its framing of streams."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from app.server.dialect import Dialect
from app.server.errors import ApiError

__all__ = ["ANTHROPIC", "AnthropicDialect"]

OVERLOADED = 529

_OWN_PATHS = re.compile(r"(/anthropic)?(/v1)*/messages(/.*)?|/v1/complete")
_SHARED_PATHS = re.compile(r"/v1/models(/.*)?")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_LOADING = frozenset({"engine_starting", "engine_draining"})


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """What went wrong. The message begins with the field."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str


class AnthropicDialect(Dialect):
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``. A stream ends with its last event, or an event
    ``error``, and has pings."""

    name = "anthropic"
    end = b""
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    envelope = AnthropicError

    def speaks(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if _OWN_PATHS.fullmatch(path):
            return True
        return bool(_SHARED_PATHS.fullmatch(path)) and self.claims(headers)

    def claims(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return any(name.lower() == b"anthropic-version" for name, _ in headers)

    def status(self, error: ApiError) -> int:
        """529 where another replica, or a later time, has room."""
        return OVERLOADED if error.code in _LOADING else error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        kind = _TYPES.get(self.status(error), "api_error")
        message = error.message
        if error.code == "context_length_exceeded":  # Anthropic's words, at which Claude Code shortens the conversation
            message = f"prompt is too long: {message}"
        return msgspec.json.encode(AnthropicError(error=AnthropicErrorDetail(kind, message), request_id=request_id))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        return [(b"request-id", request_id.encode())]


ANTHROPIC = AnthropicDialect()
