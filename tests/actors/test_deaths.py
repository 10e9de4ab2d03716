"""How the deaths of an engine's actors are told."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from actors.deaths import Deaths
from actors.life import Life
from actors.runtime import ChildCrash, Event, EventKind

ALONE = ChildCrash("GroupError: rank 0 of 2: a collective failed", "Traceback of rank 0")


def died(cause: ChildCrash) -> Event:
    return Event(EventKind.DIED, "worker-0", 1.0, 0, cause)


@pytest.fixture
def deaths() -> Deaths:
    vitals: Any = SimpleNamespace(read_batch=None)
    traffic: Any = None
    return Deaths("cpu", Life(), vitals, traffic, model_info=lambda: None, journal=lambda: None)


@pytest.mark.parametrize(
    ("phase", "cause", "told"),
    [
        ("ready", ALONE, True),
        ("draining", ALONE, True),
        ("stopped", ALONE, False),
        ("stopped", ChildCrash("MemoryError: none left"), True),
    ],
)
async def test_a_rank_left_by_its_peers_at_the_end_is_no_death_to_tell(
    deaths: Deaths, phase: Any, cause: ChildCrash, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("troupe").propagate = True
    deaths._life.phase = phase
    with caplog.at_level(logging.INFO, "troupe.engine"):
        deaths.tell(died(cause))
    assert ("Actor worker-0 died: " + cause.reason in caplog.text) == told
    assert bool(caplog.records) == told
