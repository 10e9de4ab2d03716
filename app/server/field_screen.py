"""Fields of a body that its struct does not declare: refused, ignored by design, or reported as unknown."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from app.server.decoding import UnknownFields
from app.server.errors import invalid
from app.server.known_fields import KNOWN, LABELS, NO_EFFECT, is_empty
from app.server.routes import Route

__all__ = ["FieldScreen", "ignored_fields", "known_fields"]

MAX_FIELDS = 256
"""Fields of one object of a body. Known APIs have about a hundred."""

_MIN_CHARS, _LIKENESS = 5, 0.88  # a shorter or less similar name is another field, not a misspelling
_MAX_COMPARED = 16  # names of a request compared with known fields; each takes up to a millisecond
_OTHERS = frozenset(KNOWN)
_MAX_NAMED, _NAME = 16, re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)


@functools.cache
def known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Field names as a body spells them."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def ignored_fields(names: Iterable[str]) -> str:
    """Names for a header and a log line: at most 16 printable ones, and the number of the others."""
    result = sorted(names)
    named = [name for name in result if _NAME.fullmatch(name)][:_MAX_NAMED]
    rest = len(result) - len(named)
    return ", ".join([*named, *([f"and {rest} more"] if rest else [])])


class FieldScreen:
    """Screens the fields of bodies. ``count`` is called with the name of each unknown field."""

    def __init__(self, routes: Iterable[Route], count: Callable[[str], None]) -> None:
        self._count = UnknownFields(count)
        self._owners: dict[str, str] = {}  # a field of a body that generates -> the first path that has it
        self._spelling: dict[str, dict[str, str]] = {}  # by path: the engine's name -> this path's
        for route in routes:
            if route.body is not None and route.operation:
                self._spelling[route.path] = {name: name for name in known_fields(route.body)} | dict(route.spelling)
                for name in known_fields(route.body):
                    self._owners.setdefault(name, route.path)

    def taken(self, body: msgspec.Struct) -> list[str]:
        """The declared fields of a body that have a value but no effect."""
        return [
            name
            for name, neutral in NO_EFFECT.items()
            if name in known_fields(type(body)) and not _asks_nothing(getattr(body, name), neutral)
        ]

    def left(
        self,
        fields: Mapping[str, msgspec.Raw],
        kind: type[msgspec.Struct],
        route: Route,
        at: str,
        compared: set[str] | None = None,
    ) -> list[str]:
        """The fields that ``kind`` does not declare and that are ignored. Raises 400 for a field that must not be
        ignored.

        ``at``: the field of the body that holds these, empty for the body itself. ``compared``: the names that were
        compared with ours before, for all objects of one request; this call adds its own.
        """
        if len(fields) > MAX_FIELDS:
            raise invalid(
                f"{at or 'The body'}: has {len(fields)} fields; at most {MAX_FIELDS} are read. Send fewer.",
                param=at or None,
                code="too_many_fields",
            )
        prefix = f"{at}." if at else ""
        ignored: list[str] = []
        known = known_fields(kind)
        compared = set() if compared is None else compared
        for name, raw in fields.items():
            if name in known or name in LABELS:
                continue
            value = _value(raw)
            if name in NO_EFFECT:
                if not _asks_nothing(value, NO_EFFECT[name]):
                    ignored.append(prefix + name)
                continue
            if route.operation:
                self._refuse(name, value, route, prefix)
            if name in KNOWN or name in self._owners:
                if route.operation:
                    continue
            elif value is not None and prefix + name not in compared and len(compared) < _MAX_COMPARED:
                compared.add(prefix + name)
                self._refuse_misspelt(name, kind, route, prefix)
            self._count(prefix + name)
            ignored.append(prefix + name)
        return ignored

    def _refuse(self, name: str, value: object, route: Route, prefix: str) -> None:
        """Raise 400 for a field that another API, or another path or level of this one, supports."""
        param = f"{prefix}{name}"
        entry = KNOWN.get(name)
        if is_empty(value) if entry is None else entry.neutral(value):
            return
        place = self._spelling[route.path].get(entry.use if entry is not None and entry.use else name)
        if place is not None:
            reason = f"use {place}, which has this meaning here"
        elif entry is not None:
            reason = entry.reason or "it is not supported; leave it out"
        elif name in self._owners:
            reason = f"only {self._owners[name]} takes it; leave it out here"
        else:
            return
        raise invalid(f"{param}: {reason}.", param=param, code="unsupported_parameter")

    def _refuse_misspelt(self, name: str, kind: type[msgspec.Struct], route: Route, prefix: str) -> None:
        ours = _plain_names(kind, _OTHERS if route.operation else frozenset(), route.spelling)
        plain = _plain(name)
        near = [plain] if plain in ours else []
        if not near and _MIN_CHARS <= len(name) <= 64:
            near = difflib.get_close_matches(plain, ours, n=1, cutoff=_LIKENESS)
        if near:
            param = f"{prefix}{name[:64]}"
            raise invalid(
                f"{param}: there is no such field; the most similar is {ours[near[0]]}. Correct the name, or omit it.",
                param=param,
                code="unknown_parameter",
            )


@functools.cache
def _plain_names(
    kind: type[msgspec.Struct], others: frozenset[str], spelling: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    """Every known name of this object in lower case and without signs -> its spelling."""
    names = {name: name for name in others} | dict(spelling) | {name: name for name in known_fields(kind)}
    return {_plain(name): spelled for name, spelled in names.items()}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _asks_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    return is_empty(value) or any(value == one and type(value) is type(one) for one in neutral)


def _value(raw: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw  # the decoder of the body skipped it; it is not empty
