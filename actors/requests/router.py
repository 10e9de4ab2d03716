"""Router: chooses the replica that runs a request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal
from actors.protocol import SchedulerProtocol, WorkerProtocol
from actors.requests.prefix_index import PrefixIndex
from actors.runtime import ActorRef

__all__ = ["METHODS", "Route", "Router"]

METHODS = ("cache_aware", "total_tokens", "total_requests", "round_robin")

_MAX_IMBALANCE = 1.5
"""A replica with more than this many times the mean of the tokens gets no further requests for its cached prefixes."""
_SLACK_TOKENS = 16384
"""With at most this many live tokens no replica is overloaded: its steps are hardly longer for them."""

_BLOCKS_A_REPLICA = 8192
"""Blocks of 64 tokens: half a million tokens, the cache of a large device."""


_Cache = tuple[int, int]
"""The number of a replica and the epoch of its workers: new workers have an empty cache."""


class Route(msgspec.Struct, frozen=True, eq=False):
    """What a request needs of its replica: the journal that it is written to, the scheduler that runs it, and the
    workers that compile its grammar."""

    scheduler: ActorRef[SchedulerProtocol]
    journal: Journal
    board: HealthBoard
    workers: tuple[ActorRef[WorkerProtocol], ...] = ()  # rank 0 first
    number: int = 0


class Router:
    """Chooses the replica of each request. ``method``: one of METHODS.

    - ``round_robin``: the replicas in turn.
    - ``total_requests``: the replica with the fewest live sequences.
    - ``total_tokens``: the replica with the fewest live tokens, of prompts and outputs.
    - ``cache_aware``: the replica that has seen most of the prompt's prefix, if its live tokens are at most 1.5 times
      the mean or few, and it has fewer than ``max_running`` live sequences; else as ``total_tokens``. This is
      consistent hashing with bounded loads (V. Mirrokni, M. Thorup, M. Zadimoghaddam, 2018), with the longest known
      prefix in place of the hash.

    A replica whose workers are loading gets requests only while no other is ready. It is a plain object of the loop
    and no actor: the choice and the submission are one turn of the loop, so each choice sees the load of all before.
    """

    def __init__(self, routes: Sequence[Route], method: str = "cache_aware", max_running: int = sys.maxsize) -> None:
        if not routes:
            raise ValueError("a router needs at least one route")
        if method not in METHODS:
            raise ValueError(f"a router has no method {method!r}")
        self._routes = tuple(routes)
        self._method = method
        self._max_running = max_running
        self._turn = 0
        self._by_number = {route.number: route for route in routes}
        self._prefixes: PrefixIndex[_Cache] = PrefixIndex(_BLOCKS_A_REPLICA * len(routes))

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._routes

    def choose(self, prompt: bytes = b"", salt: bytes = b"", replica: int | None = None) -> Route:
        """The route of a new request. All of its choices take it, so that they share their prompt's pages.

        ``prompt``: int32 token ids. ``salt``: prefixes are shared only with the same one. ``replica``: the one that
        the client names, which the method replaces while its workers load and others are ready; None: the method
        chooses. Raises IndexError where there is no such replica.
        """
        if replica is not None:
            named = self._routes[replica]
            if named.board.worker is not None or all(route.board.worker is None for route in self._routes):
                return named
        if len(self._routes) == 1:
            return self._routes[0]
        routes = [route for route in self._routes if route.board.worker is not None] or self._routes
        if self._method == "round_robin":
            self._turn += 1
            return routes[self._turn % len(routes)]
        if self._method == "total_requests":
            return min(routes, key=_sequences)
        if self._method == "total_tokens":
            return min(routes, key=_tokens)
        return self._cache_aware(routes, prompt, salt)

    def _cache_aware(self, routes: Sequence[Route], prompt: bytes, salt: bytes) -> Route:
        blocks = self._prefixes.blocks(prompt, salt)
        mean = (sum(map(_tokens, routes)) + len(prompt) // 4) / len(routes)
        limit = max(_MAX_IMBALANCE * mean, _SLACK_TOKENS)
        chosen: Route | None = None
        for caches in self._prefixes.holders(blocks):  # of the longest prefix first
            holders = [route for cache in caches if (route := self._holder(cache, limit)) is not None]
            if holders:
                chosen = min(holders, key=_tokens)
                break
        if chosen is None:
            chosen = min(routes, key=_tokens)
        self._prefixes.add(blocks, _cache_of(chosen))
        return chosen

    def _holder(self, cache: _Cache, limit: float) -> Route | None:
        """The replica with this cache, if the cache is there still and the replica has few enough live tokens."""
        route = self._by_number[cache[0]]
        if cache != _cache_of(route) or cache[1] < 0 or len(route.journal) >= self._max_running:
            return None
        return route if route.journal.tokens <= limit else None


_tokens: Callable[[Route], int] = attrgetter("journal.tokens")


def _sequences(route: Route) -> int:
    return len(route.journal)


def _cache_of(route: Route) -> _Cache:
    """The cache of a replica's present workers; epoch -1 while they load."""
    return route.number, -1 if route.board.worker is None else route.board.worker[1]
