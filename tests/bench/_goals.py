"""The project's performance goals, and the rows that stand for each benchmark in RESULTS.md: ``goals.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

__all__ = ["Goal", "Goals", "Headline", "read_goals"]


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of a metric at points of a benchmark; ``points`` are patterns as of fnmatch.

    The newest row of every matching point must be within the bounds; with ``best``, the best of them.
    """

    what: str
    goal: str
    benchmark: str
    points: tuple[str, ...]
    metric: str
    minimum: float | None = None
    maximum: float | None = None
    best: bool = False


class Headline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A point and a metric that stand for a benchmark in the table of benchmarks."""

    benchmark: str
    point: str
    metric: str


class Goals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``goals.toml``."""

    goal: tuple[Goal, ...]
    headline: tuple[Headline, ...]


def read_goals() -> Goals:
    """The goals and headlines. Raises msgspec.ValidationError for a field that none has."""
    return msgspec.convert(tomllib.loads(Path(__file__).with_name("goals.toml").read_text(encoding="utf-8")), Goals)
