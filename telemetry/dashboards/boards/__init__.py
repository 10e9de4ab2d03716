"""The boards, one file each."""

from telemetry.dashboards.boards.actors import ACTORS
from telemetry.dashboards.boards.cache import CACHE
from telemetry.dashboards.boards.latency import LATENCY
from telemetry.dashboards.boards.overview import OVERVIEW

__all__ = ["BOARDS"]

BOARDS = (OVERVIEW, LATENCY, CACHE, ACTORS)
