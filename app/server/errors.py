"""Errors as clients see them: a status, and OpenAI's envelope ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import http
import logging
import math
import sqlite3

import msgspec
from werkzeug.exceptions import HTTPException

from actors.protocol.requests import (
    CompilerBusy,
    EngineDraining,
    EngineFailed,
    EngineNotReady,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    WaitedTooLong,
)
from actors.runtime import RequestError
from app.server.request_body import MAX_BODY

__all__ = [
    "ApiError",
    "ErrorBody",
    "ErrorEnvelope",
    "invalid",
    "shutting_down",
    "to_api_error",
    "too_many_uploads",
]

log = logging.getLogger("troupe.http")

_STARTING_RETRY = 5  # seconds
_DRAINING_RETRY_SECONDS = 10
_UPLOADS_RETRY_SECONDS = 5
_WAITED_RETRY_SECONDS = 5
_LONGEST_RETRY = 120  # OpenAI clients stop retrying when the wait is longer


class ErrorBody(msgspec.Struct, kw_only=True):
    """What went wrong and which field to change."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """An error answer.

    ``retry_after``: seconds until a retry may succeed. ``retryable``: False asks clients not to retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        retryable: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.retryable = retryable if retryable is not None else retry_after is not None
        self._headers = headers or {}

    def headers(self) -> dict[str, str]:
        """``Retry-After`` when waiting helps; ``x-should-retry: false`` when a retry cannot succeed."""
        headers = dict(self._headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, min(_LONGEST_RETRY, math.ceil(self.retry_after))))
        if not self.retryable and (self.status >= 500 or self.status in (408, 409, 429)):
            headers["x-should-retry"] = "false"
        return headers


def invalid(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down; send the request again to another replica, or later.",
        kind="service_unavailable_error",
        code="engine_draining",
        retry_after=_DRAINING_RETRY_SECONDS,
        headers={"Connection": "close"},
    )


def too_many_uploads() -> ApiError:
    return ApiError(
        429,
        "Your unfinished uploads hold all the memory that they may take; end some of them, then send this one again.",
        kind="rate_limit_error",
        code="too_many_uploads",
        retry_after=_UPLOADS_RETRY_SECONDS,
    )


def to_api_error(error: BaseException, reference: str) -> ApiError:
    """The answer for any exception. Errors that a client cannot cause are logged under ``reference``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        # A grammar that fails in mid-answer was accepted before, so this is no 400; clients would repeat a 500 in vain.
        status = 422 if error.code == "grammar_failed" else 400
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, CompilerBusy):
        return ApiError(
            503,
            f"{error} Send the request again later.",
            kind="service_unavailable_error",
            code="grammar_backlog",
            retry_after=error.retry_after,
        )
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="queue_full", retry_after=error.retry_after, retryable=True
        )
    if isinstance(error, EngineNotReady):
        return ApiError(
            503,
            "The model is still loading; GET /ready reports the progress.",
            kind="service_unavailable_error",
            code="engine_starting",
            retry_after=_STARTING_RETRY,
        )
    if isinstance(error, EngineDraining):
        return shutting_down()
    if isinstance(error, EngineFailed):
        return ApiError(
            503,
            "The engine has failed and takes no more requests; restart the server (GET /health has the reason).",
            kind="service_unavailable_error",
            code="engine_failed",
        )
    if isinstance(error, RequestTimeout):
        return ApiError(
            504, str(error) or "The request exceeded its deadline.", kind="timeout_error", code="request_timeout"
        )
    if isinstance(error, WaitedTooLong):
        return ApiError(
            503,
            str(error),
            kind="service_unavailable_error",
            code="waited_too_long",
            retry_after=_WAITED_RETRY_SECONDS,
        )
    if isinstance(error, RequestAborted):
        return ApiError(499, "The request was aborted.", kind="request_aborted", code="request_aborted")
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, sqlite3.Error):  # such as a full disk
        log.error("request %s could not use the store of responses: %s", reference, error)
        return ApiError(
            503,
            "The store of responses cannot be written now; the server's log has the reason. Send store: false, or try "
            "later.",
            kind="service_unavailable_error",
            code="store_failed",
        )
    if isinstance(error, RequestFailed):
        log.error("request %s failed: %s", reference, error)
    elif isinstance(error, RequestError):
        log.warning("request %s was refused inside the engine: %s", reference, error)
        return ApiError(400, str(error), code="invalid_request")
    else:
        log.error("request %s met an unexpected error", reference, exc_info=error)
    return ApiError(
        500,
        f"The request met an error inside the server; see its log under {reference}.",
        kind="server_error",
        code="internal_error",
        retryable=isinstance(error, RequestFailed),
    )


def _from_http(error: HTTPException) -> ApiError:
    status = error.code or 500
    text = {
        404: "There is nothing at this path; GET /openapi.json lists what there is.",
        405: "This path does not take this method; GET /openapi.json lists what it takes.",
        408: "The body did not arrive in time.",
        413: f"The body has more than {MAX_BODY} bytes; send less, or several requests.",
    }.get(status)
    phrase = http.HTTPStatus(status).phrase if status in http.HTTPStatus._value2member_map_ else "Error"
    headers: dict[str, str] = {}
    allowed = getattr(error, "valid_methods", None)
    if allowed:
        headers["Allow"] = ", ".join(sorted(allowed))
    return ApiError(
        status,
        text or phrase,
        kind="invalid_request_error" if status < 500 else "server_error",
        code=phrase.lower().replace(" ", "_"),
        retryable=status == 408,
        headers=headers,
    )
