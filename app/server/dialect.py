"""How an API frames its streams and its errors; those of other APIs are in their packages."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from app.server.errors import ApiError, ErrorBody, ErrorEnvelope

__all__ = ["OPENAI", "Dialect"]


class Dialect:
    """OpenAI's form: server-sent events that end with ``[DONE]``, and the envelope
    ``{"error": {"message", "type", "param", "code"}}``. Other APIs override it."""

    name = "openai"
    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"
    """The last bytes of every stream."""

    keep_alive = b": keep-alive\n\n"
    """What a stream without data sends; empty where the form has no such thing."""

    any_type = False
    """Whether a body is read whatever its media type. The check of a browser's origin does not depend on it."""

    envelope: type[msgspec.Struct] = ErrorEnvelope
    """What ``body`` encodes, for the API's description."""

    def speaks(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request is of this API, though the path may not exist or belong to several."""
        return False

    def claims(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether only clients of this API send these headers. It decides where the path has no route."""
        return False

    def status(self, error: ApiError) -> int:
        """The status of an error's answer."""
        return error.status

    def body(self, error: ApiError, request_id: str) -> bytes:
        """The JSON of an error's answer."""
        return msgspec.json.encode(
            ErrorEnvelope(ErrorBody(message=error.message, type=error.kind, param=error.param, code=error.code))
        )

    def event(self, error: ApiError, request_id: str) -> bytes:
        """An error inside a stream, whose headers have left. ``end`` follows."""
        return b"".join(
            (
                b'data: {"error":{"message":',
                msgspec.json.encode(error.message),
                b',"type":',
                msgspec.json.encode(error.kind),
                b',"param":',
                msgspec.json.encode(error.param),
                b',"code":',
                msgspec.json.encode(error.code if error.code is not None else error.status),
                b',"retryable":true}}\n\n' if error.retryable else b',"retryable":false}}\n\n',
            )
        )

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Headers of every response, in addition."""
        return []


OPENAI = Dialect()
