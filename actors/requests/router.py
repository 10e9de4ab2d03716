"""Router: chooses the replica that runs a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal
from actors.protocol import SchedulerProtocol, WorkerProtocol
from actors.runtime import ActorRef

__all__ = ["Route", "Router"]


class Route(msgspec.Struct, frozen=True, eq=False):
    """What a request needs of its replica: the journal that it is written to, the scheduler that runs it, and the
    workers that compile its grammar."""

    scheduler: ActorRef[SchedulerProtocol]
    journal: Journal
    board: HealthBoard
    workers: tuple[ActorRef[WorkerProtocol], ...] = ()  # rank 0 first


class Router:
    """Sends each request to the replica with the fewest live sequences, among equals to the first.

    A replica whose workers are loading gets new requests only while no other replica is ready.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        if not routes:
            raise ValueError("a router needs at least one route")
        self._routes = tuple(routes)

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._routes

    def choose(self) -> Route:
        """The route of a new request. All of its choices take it, so that they share their prompt's pages."""
        if len(self._routes) == 1:
            return self._routes[0]
        ready = [route for route in self._routes if route.board.worker is not None]
        return min(ready or self._routes, key=lambda route: len(route.journal))
