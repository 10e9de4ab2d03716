"""JSON bodies as structs: one decoder per type, every mistake a 400 that names the field, unknown fields counted."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from app.errors import ApiError, invalid

__all__ = ["UnknownFields", "check_depth", "check_json_content", "check_size", "decode", "shallow_objects"]

log = logging.getLogger("troupe.http")

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_DEPTH = 64
MAX_OPENINGS = 1 << 18
"""Brackets and braces in a body, those in its texts included. An empty list costs twenty times its two bytes."""

_shallow = msgspec.json.Decoder(dict[str, msgspec.Raw])
_shallow_list = msgspec.json.Decoder(list[dict[str, msgspec.Raw] | None])
_AT = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def check_json_content(content_type: str, content_encoding: str) -> None:
    """Raise 415 unless the body says that it is plain JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"The body must be JSON with 'Content-Type: application/json', not {kind[:64]!r}.",
            code="unsupported_media_type",
        )
    if content_encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, "A compressed body is not read; send it plain.", code="unsupported_media_type")


@functools.cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[Body]) -> tuple[Body, Mapping[str, msgspec.Raw]]:
    """The body as ``kind``, and its top-level fields undecoded. Raises :class:`ApiError`."""
    if len(data) > MAX_OPENINGS and data.count(b"[") + data.count(b"{") > MAX_OPENINGS:
        raise invalid(
            f"The body holds more than {MAX_OPENINGS} brackets and braces; split the request.", code="too_many_values"
        )
    try:
        return _decoder(kind).decode(data), _shallow.decode(data)
    except msgspec.ValidationError as error:
        message, path = explain(str(error))
        raise invalid(message, param=path or None, code="invalid_type") from None
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise invalid("The body is not valid JSON: it is not UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise invalid(f"The body is nested more than {MAX_DEPTH} levels deep.", code="too_deep") from None


def shallow_objects(raw: msgspec.Raw | None, param: str) -> list[dict[str, msgspec.Raw]]:
    """The objects of a field that holds one or a list of them, with their fields undecoded; none for anything else.

    Raises 400 for names that the body's decoder skipped over and that are not text.
    """
    if raw is None:
        return []
    first = bytes(raw)[:1]
    try:
        if first == b"{":
            return [_shallow.decode(raw)]
        if first == b"[":
            return [item for item in _shallow_list.decode(raw) if isinstance(item, dict)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid(f"{param}: holds a name that is not UTF-8.", param=param, code="invalid_json") from None
    return []


def explain(text: str, prefix: str = "") -> tuple[str, str]:
    """msgspec's sentence as ours, and the path of the field: ``Expected `str` ...`` and ``messages[0].role``."""
    found = _AT.search(text)
    path = found.group("path") if found else ""
    sentence = text[: found.start()] if found else text
    missing = _MISSING.search(sentence)
    if missing:
        path = f"{path}.{missing.group('name')}" if path else missing.group("name")
        sentence = "this field is required"
    path = f"{prefix}{path}" if path else prefix.rstrip(".")
    sentence = sentence.replace("`", "'")
    sentence = sentence[:1].lower() + sentence[1:]
    return (f"{path}: {sentence}." if path else f"The body: {sentence}."), path


def check_depth(value: object, param: str, limit: int = MAX_DEPTH) -> None:
    """Raise 400 when free-form JSON is nested deeper than ``limit``. Iterative: depth cannot exhaust the stack."""
    level = [value]
    for _ in range(limit):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return
        level = deeper
    raise invalid(f"{param}: nested more than {limit} levels deep.", param=param, code="too_deep")


def check_size(value: object, param: str, limit: int) -> None:
    """Raise 400 when free-form JSON has more than ``limit`` bytes."""
    size = len(msgspec.json.encode(value))
    if size > limit:
        raise invalid(f"{param}: has {size} bytes as JSON; at most {limit} are read.", param=param, code="too_large")


class UnknownFields:
    """Counts fields that nobody knows, under a bounded number of names, and logs each name once."""

    def __init__(self, count: Callable[[str], None], limit: int = 64) -> None:
        self._count = count
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, name: str) -> None:
        if name in self._seen:
            self._count(name)
            return
        if len(self._seen) < self._limit and re.fullmatch(r"[A-Za-z_][\w.]{0,63}", name, re.ASCII):
            self._seen.add(name)
            self._count(name)
            log.info("requests carry the unknown field %r; it is ignored (said once)", name)
        else:
            self._count("other")
