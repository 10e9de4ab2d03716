"""The lines of a batch: requests in, results out, both JSONL in OpenAI's form."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Meta

__all__ = [
    "ENDPOINTS",
    "MAX_LINES",
    "BatchLine",
    "Checked",
    "LineError",
    "Tokens",
    "check_lines",
    "decode_line",
    "finished_lines",
    "read_lines",
    "result_line",
]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_LINES = 50_000
MAX_LINE = 8 << 20
"""Bytes of a line, as of any body."""

_MAX_ERRORS = 100


class BatchLine(msgspec.Struct, frozen=True):
    """One request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Checked(msgspec.Struct):
    """``total``: the number of requests. ``model``: of the first. With ``errors`` nothing may run."""

    total: int = 0
    model: str | None = None
    errors: list[LineError] = []


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    background: bool | None = None


class Tokens(msgspec.Struct):
    """Tokens of all answers of a batch."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, body: bytes | msgspec.Raw) -> None:
        """Add the usage in an answer of any of the endpoints."""
        try:
            usage = msgspec.json.decode(body, type=_Answer).usage or {}
        except msgspec.MsgspecError:
            return
        into = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
        out = usage.get("output_tokens_details") or usage.get("completion_tokens_details")
        self.input += usage.get("input_tokens", usage.get("prompt_tokens", 0))
        self.output += usage.get("output_tokens", usage.get("completion_tokens", 0))
        self.cached += (into or {}).get("cached_tokens", 0)
        self.reasoning += (out or {}).get("reasoning_tokens", 0)


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


_RESULT = b'{"id":"batch_req_'
"""How a line of results begins."""

_line = msgspec.json.Decoder(BatchLine)


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1. A line that is too long is cut after its limit."""
    number = 0
    while data := file.readline(MAX_LINE + 1):
        number += 1
        if len(data) > MAX_LINE and not data.endswith(b"\n"):
            yield number, data
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
        elif data := data.strip():
            yield number, data


def check_lines(path: Path, endpoint: str | None) -> Checked:
    """Check every line before the first runs. ``endpoint``: that all must have; None allows any of ENDPOINTS."""
    checked, seen = Checked(), set[str]()

    def wrong(code: str, message: str, number: int | None, param: str | None = None) -> None:
        if len(checked.errors) < _MAX_ERRORS:
            checked.errors.append(LineError(code, message, number, param))

    with path.open("rb") as file:
        for number, data in read_lines(file):
            checked.total += 1
            if checked.total > MAX_LINES:
                wrong("too_many_requests", f"has more than {MAX_LINES} lines; split the file", None)
                break
            if len(data) > MAX_LINE:
                wrong("line_too_long", f"has more than {MAX_LINE} bytes", number)
                continue
            try:
                line = _line.decode(data)
                body = msgspec.json.decode(line.body, type=_Body)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                wrong("invalid_json_line", f"not a batch request: {error}"[:300], number)
                continue
            if line.custom_id in seen:
                wrong("duplicate_custom_id", "the custom_id was there before", number, "custom_id")
            seen.add(line.custom_id)
            if line.url not in ((endpoint,) if endpoint is not None else ENDPOINTS):
                allowed = endpoint or ", ".join(ENDPOINTS)
                wrong("invalid_url", f"the url must be {allowed}, not {line.url[:64]!r}", number, "url")
            if body.stream:
                wrong("invalid_value", "a batch has no streams; leave stream out", number, "body.stream")
            if body.background:
                wrong("invalid_value", "lines run in the background already; leave it out", number, "body.background")
            checked.model = checked.model or body.model
    if not checked.total and not checked.errors:
        wrong("empty_file", "the file has no requests", None)
    return checked


def decode_line(data: bytes) -> BatchLine:
    """A line that was checked."""
    return _line.decode(data)


def result_line(
    custom_id: str, *, status: int = 0, request_id: str = "", body: bytes = b"", error: LineError | None = None
) -> bytes:
    """A line of the output file, or of the error file. ``error``: why there was no answer at all."""
    response: object = None
    if error is None:
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    failure = None if error is None else {"code": error.code, "message": error.message}
    return (
        msgspec.json.encode(
            {
                "id": f"batch_req_{secrets.token_hex(16)}",
                "custom_id": custom_id,
                "response": response,
                "error": failure,
            }
        )
        + b"\n"
    )


def finished_lines(path: Path, tokens: Tokens | None = None) -> set[str]:
    """The custom ids in a file of results; a last line that was cut is removed. ``tokens``: gets their usage. Raises
    ValueError for a file of anything else, which it leaves as it is."""
    done: set[str] = set()
    if not path.exists():
        return done
    with path.open("r+b") as file:
        whole = 0
        for data in iter(file.readline, b""):
            if not data.endswith(b"\n") and data.startswith(_RESULT[: len(data)]):
                break
            try:
                result = msgspec.json.decode(data, type=_Result)
            except msgspec.MsgspecError:
                raise ValueError(f"{path}: has something else than results of a batch; choose another file") from None
            whole += len(data)
            done.add(result.custom_id)
            if tokens is not None and result.response is not None:
                tokens.add(result.response.body)
        file.truncate(whole)
    return done
