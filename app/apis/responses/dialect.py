"""The Responses API's framing of streams: named events, and no ``[DONE]``."""

from __future__ import annotations

import msgspec

from app.server.dialect import Dialect
from app.server.errors import ApiError

__all__ = ["RESPONSES"]


class ResponsesDialect(Dialect):
    """A stream ends with its last event, or an event ``error``."""

    name = "responses"
    end = b""

    def event(self, error: ApiError, request_id: str) -> bytes:
        event = {
            "type": "error",
            "sequence_number": 0,
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


RESPONSES = ResponsesDialect()
