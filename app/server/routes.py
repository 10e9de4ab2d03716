"""The route table: path, level and body of each operation. Undeclared paths require a key and then return 404."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from app.server.auth import AccessLevel
from app.server.dialect import OPENAI, Dialect

if TYPE_CHECKING:
    from quart import Response

    from app.server.exchange import Exchange
    from app.server.service import Service

__all__ = ["Handler", "Route", "RouteTable"]

Handler = Callable[["Service", "Exchange", Any], Awaitable["Response"]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation. ``path`` may have variable parts, as in ``/v1/models/{model}``; the exchange has their values
    (``exchange.parts``).

    ``body``: the struct of the JSON body; None without a body. ``handler(service, exchange, body)`` receives the body;
    without one, the last variable part of the path.
    """

    path: str
    methods: tuple[str, ...]
    level: AccessLevel
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    optional_body: bool = False  # an absent body is an empty object
    answer: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = ("application/json",)  # media types of the answer
    tag: str = "server"
    id_prefix: str = "req-"
    logged: bool = True
    dialect: Dialect = OPENAI  # the form of its errors and streams
    operation: str = ""  # of those that generate: OpenTelemetry's name, chat | text_completion | generate_content
    needs_engine: bool = False  # 503 while the engine does not take requests, before the body is read
    spelling: tuple[tuple[str, str], ...] = ()  # of those that generate: the engine's name of a field -> the body's
    query: tuple[tuple[str, str, int, int], ...] = ()  # whole numbers after the ?: name, meaning, least and most
    words: tuple[tuple[str, str], ...] = ()  # texts after the ?: name and meaning
    effects: tuple[str, ...] = ()  # fields that have an effect here, though they have none at other paths
    slashes: bool = False  # whether the last variable part may contain slashes
    upload: bool = False  # multipart/form-data, which the handler reads from exchange.body
    nested: tuple[
        tuple[str, type[msgspec.Struct]], ...
    ] = ()  # fields of the body that hold structs to be screened as well

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variable parts."""
        return tuple(re.findall(r"\{(\w+)\}", self.path))

    @property
    def prefix(self) -> str:
        """The part of the path before the first variable one."""
        return self.path.partition("{")[0]

    def filled(self, value: str) -> str:
        """The path with this value in all variable parts."""
        return re.sub(r"\{\w+\}", lambda _: value, self.path)

    def pattern(self) -> re.Pattern[str]:
        """Matches the paths of this operation."""
        fixed = re.split(r"\{\w+\}", self.path)
        part = "(.+)" if self.slashes else "([^/]+)"
        return re.compile(part.join(map(re.escape, fixed)))


class RouteTable:
    """Finds the route of a raw path, for the key check and for the handler.

    ``dialects``: the APIs whose requests are known by their paths and headers.
    """

    def __init__(self, routes: Iterable[Route], dialects: Iterable[Dialect] = ()) -> None:
        self._dialects = tuple(dialects)
        self.routes = tuple(routes)
        self._fixed: dict[str, list[Route]] = {}
        self._open: list[tuple[re.Pattern[str], Route]] = []
        for route in self.routes:
            if route.variables:
                self._open.append((route.pattern(), route))
            else:
                self._fixed.setdefault(route.path, []).append(route)

    def at(self, path: str) -> list[Route]:
        """All routes of this path, with any method."""
        result = self._fixed.get(path)
        if result is not None:
            return result
        return [route for pattern, route in self._open if path.startswith(route.prefix) and pattern.fullmatch(path)]

    def find(self, method: str, path: str) -> Route | None:
        """The route of a request; HEAD uses the route of GET."""
        wanted = "GET" if method == "HEAD" else method
        for route in self.at(path):
            if wanted in route.methods:
                return route
        return None

    def dialect(self, route: Route | None, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Dialect:
        """The form of the answer to a request, with ``route`` or none."""
        for dialect in self._dialects:
            if dialect.speaks(path, headers) or (route is None and dialect.claims(headers)):
                return dialect
        return OPENAI if route is None else route.dialect

    def methods(self, path: str) -> list[str]:
        """The methods of a path, for ``Allow``."""
        names = {method for route in self.at(path) for method in route.methods}
        if "GET" in names:
            names.add("HEAD")
        return sorted(names | {"OPTIONS"}) if names else []
