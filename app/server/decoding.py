"""JSON bodies as structs: one decoder per type, each error is a 400 that names the field, and unknown fields are
counted."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from app.server.errors import ApiError, invalid
from app.server.validation_errors import describe_validation_error

__all__ = ["UnknownFields", "check_depth", "check_json_content", "check_size", "decode", "shallow_objects"]

log = logging.getLogger("troupe.http")

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_DEPTH = 64
MAX_OPENINGS = 1 << 18
"""Brackets and braces in a body, those inside strings included. An empty list takes twenty times its two bytes."""

_shallow = msgspec.json.Decoder(dict[str, msgspec.Raw])
_shallow_list = msgspec.json.Decoder(list[dict[str, msgspec.Raw] | None])
_FREE_FORM = frozenset({"messages", "tools", "chat_template_kwargs", "tool_choice"})
"""Fields whose numbers belong to the client: they are kept as written."""


def check_json_content(content_type: str, content_encoding: str) -> None:
    """Raise 415 unless the headers declare plain JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        given = f"but has the type {kind[:64]!r}" if kind else "and its type must be named"
        raise ApiError(
            415,
            f"The body must be JSON, {given}; add -H 'Content-Type: application/json'.",
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
        fields = _shallow.decode(data)
        try:
            return _decoder(kind).decode(data), fields
        except msgspec.ValidationError as error:
            return _decode_leniently(data, kind, str(error)), fields
    except msgspec.ValidationError as error:  # of the body as such
        if "out of range" in str(error):
            raise invalid("The body holds a number that is out of range. Send a smaller one.") from None
        raise invalid("The body: must be a JSON object.", code="invalid_type") from None
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise invalid("The body is not valid JSON: it is not UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise invalid(f"The body is nested more than {MAX_DEPTH} levels deep. Flatten it.", code="too_deep") from None


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


def _decode_leniently(data: bytes, kind: type[Body], error: str) -> Body:
    """Decode with whole floats accepted as integers. Raises :class:`ApiError`."""
    body = msgspec.json.decode(data)
    if "got `float`" in error:
        body = {name: value if name in _FREE_FORM else _with_integers(value) for name, value in body.items()}
        try:
            return msgspec.convert(body, kind, str_keys=True)
        except msgspec.ValidationError as again:
            error = str(again)
    mistake = describe_validation_error(error, kind, body)
    raise invalid(mistake.message, param=mistake.path or None, code=mistake.code) from None


def _with_integers(value: Any) -> Any:
    """The same JSON with integers in place of whole floats."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**64 else value
    if isinstance(value, list):
        return [item if isinstance(item, (int, str)) else _with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value


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
    raise invalid(f"{param}: nested more than {limit} levels deep. Flatten it.", param=param, code="too_deep")


def check_size(value: object, param: str, limit: int) -> None:
    """Raise 400 when free-form JSON has more than ``limit`` bytes."""
    size = len(msgspec.json.encode(value))
    if size > limit:
        raise invalid(
            f"{param}: has {size} bytes as JSON; at most {limit} are read. Shorten it.", param=param, code="too_large"
        )


class UnknownFields:
    """Counts unknown fields, under a bounded number of names, and logs each name once."""

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
            log.info("requests carry the unknown field %r; it is ignored (logged once)", name)
        else:
            self._count("other")
