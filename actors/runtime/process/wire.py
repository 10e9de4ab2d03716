"""The contents of frames: headers of messages, errors, log records, and the spec of a child."""

import importlib
import logging
import math
import struct
from typing import Any

import msgspec

from actors.runtime.core.errors import AskTimeout, RequestError, UnknownMessage

__all__ = [
    "ChildSpec",
    "Death",
    "LogLine",
    "RemoteError",
    "carried",
    "import_name",
    "log_line",
    "name_of",
    "pack_error",
    "pack_header",
    "unpack_error",
    "unpack_header",
    "write_record",
]

_HEADER = struct.Struct("<dB")

_HALF_TEXT = 24 * 1024
"""Characters kept at the beginning and at the end of a log record's text. More than the log keeps: it removes secrets
before it clips, and a secret that was cut here would not be recognized."""


class ChildSpec(msgspec.Struct, frozen=True):
    """The specification of a child's actor, sent first. Times are in seconds, sizes in bytes."""

    name: str
    target: str
    config_type: str | None
    config: bytes
    window: int
    limit: int
    heartbeat: float
    log_level: int


class RemoteError(msgspec.Struct, frozen=True):
    """An error that goes to a caller in the other process."""

    kind: str
    arguments: list[Any]
    fields: dict[str, Any]
    text: str


class Death(msgspec.Struct, frozen=True):
    """The cause of death that a child reports."""

    reason: str
    detail: str


class LogLine(msgspec.Struct, frozen=True):
    """A log record of a child."""

    name: str
    level: int
    text: str
    path: str
    line: int
    function: str | None
    created: float
    process: int | None
    thread: str | None
    error: str | None
    traceparent: str | None


def pack_header(time: float | None, traceparent: str | None) -> bytes:
    """Encode a time in seconds and the trace context. For a mailbox the time is that left until the deadline; for an
    actor's thread it is the send time, by the monotonic clock."""
    trace = b"" if traceparent is None else traceparent.encode("ascii", "replace")[:255]
    return _HEADER.pack(math.nan if time is None else time, len(trace)) + trace


def unpack_header(body: memoryview) -> tuple[float | None, str | None, memoryview]:
    """The time, the trace context, and the rest of the frame. Raises ValueError."""
    try:
        time, length = _HEADER.unpack_from(body)
    except struct.error as error:
        raise ValueError("a message frame is too short") from error
    end = _HEADER.size + length
    trace = str(body[_HEADER.size : end], "ascii") if length else None
    return (None if math.isnan(time) else time), trace, body[end:]


def name_of(cls: type) -> str:
    """``module:name`` of a class. Raises ValueError if another process cannot import it."""
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise ValueError(f"a child process cannot import {cls.__qualname__}: put it at the top level of a module")
    return f"{cls.__module__}:{cls.__qualname__}"


def import_name(name: str) -> Any:
    """Import the object called ``module:name``."""
    module, _, qualified = name.partition(":")
    result: Any = importlib.import_module(module)
    for part in qualified.split("."):
        result = getattr(result, part)
    return result


def pack_error(error: BaseException) -> bytes:
    """An error as bytes; arguments and attributes that msgpack cannot carry become text."""
    cls = type(error)
    arguments = [_plain(argument) for argument in error.args]
    fields = {name: _plain(value) for name, value in vars(error).items() if name != "__notes__"}
    return msgspec.msgpack.encode(
        RemoteError(f"{cls.__module__}:{cls.__qualname__}", arguments, fields, f"{cls.__name__}: {carried(error)}")
    )


def _plain(value: Any) -> Any:
    try:
        result = msgspec.to_builtins(value, builtin_types=(bytes,))
        msgspec.msgpack.encode(result)  # msgpack cannot encode all integers and strings of Python
    except (TypeError, ValueError, OverflowError, RecursionError):
        return carried(value)
    return result


def carried(value: object) -> str:
    """``str(value)`` as text that msgpack can encode: file names may contain lone surrogates."""
    try:
        text = str(value)
    except Exception as error:  # the caller must get a reply in any case
        text = f"{type(value).__name__} (its text fails: {type(error).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def unpack_error(body: memoryview) -> Exception:
    """Decode an error of ``pack_error``, with its own class if this process has imported it. Imports nothing."""
    remote = msgspec.msgpack.decode(body, type=RemoteError)
    known: list[type[Exception]] = [RequestError, AskTimeout, UnknownMessage]
    while known:
        cls = known.pop()
        if f"{cls.__module__}:{cls.__qualname__}" == remote.kind:
            error = cls.__new__(cls, *remote.arguments)
            error.args = tuple(remote.arguments)
            error.__dict__.update(remote.fields)
            return error
        known.extend(cls.__subclasses__())
    return RequestError(remote.text)


def log_line(record: logging.LogRecord, traceparent: str | None) -> LogLine:
    """Convert a log record. The middle of a text that is too long is removed."""
    error = None
    if record.exc_info and record.exc_info[0] is not None:
        error = carried(_clipped(logging.Formatter().formatException(record.exc_info)))
    return LogLine(
        name=record.name,
        level=record.levelno,
        text=carried(_clipped(record.getMessage())),
        path=record.pathname,
        line=record.lineno,
        function=record.funcName,
        created=record.created,
        process=record.process,
        thread=record.threadName,
        error=error,
        traceparent=traceparent,
    )


def _clipped(text: str) -> str:
    if len(text) <= 2 * _HALF_TEXT:
        return text
    return f"{text[:_HALF_TEXT]}\n...\n{text[-_HALF_TEXT:]}"


def write_record(line: LogLine, actor: str) -> None:
    """Pass a child's record to the logger of the same name in this process."""
    logger = logging.getLogger(line.name)
    if not logger.isEnabledFor(line.level):
        return
    record = logging.LogRecord(line.name, line.level, line.path, line.line, line.text, None, None, line.function)
    record.created = line.created
    record.msecs = (line.created % 1.0) * 1000.0
    record.process = line.process
    record.threadName = line.thread
    record.exc_text = line.error
    record.actor = actor
    record.traceparent = line.traceparent
    logger.handle(record)
