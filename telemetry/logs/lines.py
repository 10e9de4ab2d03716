"""Log records as lines, in text or JSON: one record is one line, with any text.

Clients choose model names, ids, paths and prompts, so every control character is escaped: no text can forge a line,
move a cursor or colour a terminal.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Mapping

import msgspec

__all__ = ["Event", "JsonLines", "LogContext", "TextLines", "clip", "text_of", "visible"]

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls (C0, C1), line and paragraph separators, direction marks, surrogate halves."""

_PLAIN = re.compile(r"[^\s\"=\\]+")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

_LONGEST_TEXT = 16 * 1024
_LONGEST_ERROR = 32 * 1024


def visible(text: str) -> str:
    """The text with every control character escaped."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters: the beginning, the number of omitted characters, and the end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...({len(text) - 2 * half} characters left out)...{text[-half:]}"


class LogContext(msgspec.Struct, frozen=True):
    """The current work when a record is created. ``traceparent`` is W3C's."""

    traceparent: str | None = None
    request_id: str | None = None
    actor: str | None = None


class Event:
    """A record's message with fields; pass it to a logger instead of text.

    As text it is ``text key=value ...`` (or one JSON object, with ``as_json``), so that it is complete under any
    handler. :class:`JsonLines` makes the fields and ``details`` keys of its object; ``details`` repeat what the text
    contains. Fields that are None are omitted.
    """

    __slots__ = ("as_json", "details", "fields", "text")

    def __init__(
        self,
        text: str,
        fields: Mapping[str, object],
        *,
        details: Mapping[str, object] | None = None,
        as_json: bool = False,
    ) -> None:
        self.text = text
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.details = details or {}
        self.as_json = as_json

    def __str__(self) -> str:
        if self.as_json:
            return _json({"message": self.text, **self.details, **self.fields})
        return visible(self.text) + _pairs(self.fields)


class TextLines(logging.Formatter):
    """``time LEVEL logger: message key=value``; a traceback follows, each of its lines behind a bar."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        text = str(message) if isinstance(message, Event) else visible(clip(text_of(record), _LONGEST_TEXT))
        line = f"{self.formatTime(record)} {record.levelname:<7} {visible(record.name)}: {text}"
        context = _context(record)
        if record.name == f"troupe.{context.get('actor')}":
            del context["actor"]
        if isinstance(message, Event):
            context = {name: value for name, value in context.items() if name not in message.fields}
        line += _pairs(context)
        error = _error(self, record)
        if error:
            line += "".join(f"\n    | {visible(part)}" for part in error.split("\n"))
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``, ``pid``; if known
    ``request_id``, ``actor``, ``trace_id``, ``span_id``; the fields of an event; ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clip(text_of(record), _LONGEST_TEXT),
            "pid": record.process,
            **_context(record),
        }
        if isinstance(message, Event):
            fields |= {**message.details, **message.fields}
        error = _error(self, record)
        if error:
            fields["exception"] = error
        return _json(fields)


def text_of(record: logging.LogRecord) -> str:
    """The record's message; for an event without its fields. Never raises."""
    if isinstance(record.msg, Event):
        return record.msg.text
    try:
        return record.getMessage()
    except Exception as error:  # arguments that do not fit, or whose text fails: the record still has its origin
        return f"{record.msg} (its arguments do not fit: {type(error).__name__}, at {record.pathname}:{record.lineno})"


def _context(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name in ("request_id", "actor"):
        value = getattr(record, name, None)
        if value is not None:
            fields[name] = value
    traceparent = getattr(record, "traceparent", None)
    result = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if result:
        fields["trace_id"], fields["span_id"] = result.groups()
    return fields


def _error(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_text and record.exc_info and record.exc_info[0] is not None:
        record.exc_text = formatter.formatException(record.exc_info)
    return clip((record.exc_text or "").rstrip("\n"), _LONGEST_ERROR)


def _pairs(fields: Mapping[str, object]) -> str:
    return "".join(f" {visible(name)}={_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)) and all(isinstance(part, str) and _PLAIN.fullmatch(part) for part in value):
        value = ",".join(value)
    text = value if isinstance(value, str) else _json(value)
    return visible(text) if _PLAIN.fullmatch(text) or not isinstance(value, str) else _json(text)


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
