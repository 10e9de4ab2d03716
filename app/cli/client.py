"""A client of OpenAI's HTTP API for commands of the terminal, from the standard library."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

__all__ = ["DEFAULT_URL", "ApiClient", "ClientError", "error_message"]

DEFAULT_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "TROUPE_API_KEY"
_LONGEST_LINE = 16 << 20  # bytes of one event
_SHOWN = 500  # characters of an error
_BROKEN = (OSError, http.client.HTTPException)


class ClientError(Exception):
    """No answer, or an error. ``status``: of the answer; 0 without one. ``retry_after``: seconds, where it says so.
    ``cut``: an answer began and did not end."""

    def __init__(self, message: str, status: int = 0, body: bytes = b"", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.cut = False
        self.status = status
        self.body = body
        self.retry_after = retry_after


class ApiClient:
    """``url``: of the server, with or without /v1. ``key``: None takes the first of TROUPE_API_KEY, for a server on
    this machine alone. ``timeout``: seconds without a byte.

    Raises ValueError for a URL that is not one of HTTP.
    """

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None, *, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: is no URL of a server; write it as in {DEFAULT_URL}")
        path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        local = _is_local(parts.hostname)
        if key is None and local:
            key = os.environ.get(_KEY_VARIABLE, "").partition(",")[0].strip() or None
        self._headers = {"Content-Type": "application/json", "User-Agent": "troupe"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        # A proxy of the environment cannot reach this machine's own addresses.
        proxies = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(_NoRedirects, *proxies)

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises ClientError."""
        with self._open(path, None) as answer:
            return _json(self._read(answer))

    def post(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Status, body and request id of an answer, also of an error. Raises ClientError without an answer, and for
        status 429 and 503, after which the request may be sent again."""
        try:
            with self._open(path, body) as answer:
                return answer.status, self._read(answer), answer.headers.get("x-request-id", "")
        except ClientError as error:
            if error.status in (0, 429, 503):
                raise
            return error.status, error.body, ""

    def events(self, path: str, body: bytes) -> Iterator[dict[str, Any]]:
        """The JSON objects of a stream of server-sent events, which ends with [DONE], or after a ``finish_reason``
        where a server sends no [DONE]. Raises ClientError, also for an error in the stream and for one that was cut."""
        with self._open(path, body) as answer:
            if not answer.headers.get("Content-Type", "").startswith("text/event-stream"):
                yield _json(self._read(answer))
                return
            finished = False
            while True:
                try:
                    line = answer.readline(_LONGEST_LINE)
                except _BROKEN as error:
                    raise self._broken(error) from None
                if not line and not finished:
                    raise self._broken(EOFError("the stream has no end"))
                if not line:
                    return
                field, _, value = line.decode("utf-8", "replace").strip().partition(":")
                if field != "data" or not value.strip():
                    continue
                if value.strip() == "[DONE]":
                    return
                event = _json(value.encode())
                if "error" in event and event["error"] and "choices" not in event:
                    raise ClientError(_reason(event, "the stream ended with an error"))
                finished = finished or any(choice.get("finish_reason") for choice in event.get("choices") or ())
                yield event

    @contextlib.contextmanager
    def _open(self, path: str, body: bytes | None) -> Iterator[Any]:
        request = urllib.request.Request(self.url + path, data=body, headers=self._headers)
        try:
            answer = self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            content = self._read(error)
            message = _reason(_json_or_none(content), f"status {error.code} {error.reason}")
            raise ClientError(message, error.code, content, _seconds(error.headers.get("Retry-After"))) from None
        except _BROKEN as error:
            raise self._broken(error, cut=isinstance(error, http.client.HTTPException)) from None
        with answer:
            yield answer

    def _read(self, answer: Any) -> bytes:
        try:
            return bytes(answer.read())
        except _BROKEN as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception, *, cut: bool = True) -> ClientError:
        if not cut:
            return ClientError(f"{self.url}: no answer ({getattr(error, 'reason', None) or error})")
        failure = ClientError(f"{self.url}: the answer was cut ({error or type(error).__name__})")
        failure.cut = True
        return failure


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would take the key to another server."""

    def redirect_request(self, *args: Any, **keywords: Any) -> None:
        return None


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _seconds(text: str | None) -> float | None:
    try:
        return min(120.0, max(0.0, float(text))) if text is not None else None
    except ValueError:
        return None


def _json_or_none(data: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


def _json(data: bytes) -> dict[str, Any]:
    value = _json_or_none(data)
    if not isinstance(value, dict):
        raise ClientError("the answer is no JSON object; is this a server with OpenAI's API?")
    return value


def error_message(status: int, body: bytes) -> str:
    """The message of an error's answer, in one line."""
    return " ".join(_reason(_json_or_none(body), f"status {status}").split())


def _reason(value: Any, default: str) -> str:
    """The message of an error in OpenAI's or a plain form."""
    error = value.get("error", value) if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:_SHOWN] if isinstance(message, str) and message else default
