"""Errors of llama.cpp's server, and its framing of streams."""

from __future__ import annotations

import msgspec

from app.server.dialect import Dialect
from app.server.errors import ApiError

__all__ = ["LLAMA_CPP", "LlamaCppDialect"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class LlamaErrorDetail(msgspec.Struct, kw_only=True):
    """``code`` is the status, ``param`` the field."""

    code: int
    message: str
    type: str
    param: str | None = None


class LlamaError(msgspec.Struct):
    error: LlamaErrorDetail


class LlamaCppDialect(Dialect):
    """``{"error": {"code", "message", "type", "param"}}``. A stream ends with its last event."""

    name = "llama.cpp"
    end = b""
    envelope = LlamaError

    def body(self, error: ApiError, request_id: str) -> bytes:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        if error.code == "context_length_exceeded":
            kind = "exceed_context_size_error"
        kind = _TYPES.get(error.status, kind)
        detail = LlamaErrorDetail(code=error.status, message=error.message, type=kind, param=error.param)
        return msgspec.json.encode(LlamaError(detail))

    def event(self, error: ApiError, request_id: str) -> bytes:
        return b"data: " + self.body(error, request_id) + b"\n\n"


LLAMA_CPP = LlamaCppDialect()
