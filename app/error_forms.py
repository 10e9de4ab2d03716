"""Errors at paths of other APIs, in the form that their clients read. Everywhere else the form is OpenAI's."""

from __future__ import annotations

from itertools import dropwhile

import msgspec

from app.errors import ApiError

__all__ = ["encode_error"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def encode_error(error: ApiError, path: str, request_id: str) -> bytes:
    """The JSON body of ``error``, which answers a request for ``path``."""
    segments = [segment for segment in path.split("/") if segment]
    if segments[:1] == ["anthropic"]:
        del segments[0]
    segments = list(dropwhile(lambda segment: segment == "v1", segments))
    if segments[:1] == ["messages"]:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        inner = {"type": kind, "message": error.message}
        return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})
    if path.startswith("/api/") and segments[1:2] != ["v1"]:
        return msgspec.json.encode({"error": error.message})
    return error.body()
