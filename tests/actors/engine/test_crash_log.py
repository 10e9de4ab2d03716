"""Deaths of an engine's actors are logged, counted and reported by health checks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from actors.boards.health_board import HealthBoard
from actors.engine.crash_log import CrashLog
from actors.engine.lifecycle import Lifecycle
from actors.runtime import ChildCrash, Event, EventKind
from actors.workers.group import PeerDied, WorkerGroup
from kernels.contract.topology import WorkerId

ALONE = ChildCrash("GroupError: rank 0 of 2: a collective failed", "Traceback of rank 0")
ENDED = PeerDied("ended because worker-1 had died")


def died(cause: ChildCrash) -> Event:
    return Event(EventKind.DIED, "worker-0", 1.0, 0, cause)


@pytest.fixture
def crash_log() -> CrashLog:
    replica: Any = SimpleNamespace(board=SimpleNamespace(read_batch=None))
    traffic: Any = None
    return CrashLog("cpu", Lifecycle(), traffic, model_info=lambda: None, find=lambda actor: replica)


@pytest.mark.parametrize(
    ("phase", "cause", "reported"),
    [
        ("ready", ALONE, True),
        ("draining", ALONE, True),
        ("stopped", ALONE, False),
        ("ready", ENDED, True),
        ("stopped", ENDED, False),
        ("stopped", ChildCrash("MemoryError: none left"), True),
    ],
)
async def test_a_rank_left_by_its_peers_at_the_end_is_no_death_to_tell(
    crash_log: CrashLog, phase: Any, cause: ChildCrash, reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("troupe").propagate = True
    crash_log._lifecycle.phase = phase
    with caplog.at_level(logging.INFO, "troupe.engine"):
        crash_log.log(died(cause))
    assert ("Actor worker-0 died: " + cause.reason in caplog.text) == reported
    assert bool(caplog.records) == reported


def test_the_others_of_a_group_end_with_the_one_that_died() -> None:
    causes: dict[object, BaseException] = {}
    system: Any = SimpleNamespace(crash_actor=causes.__setitem__)
    nothing: Any = None
    ids = WorkerId(0), WorkerId(1)
    group = WorkerGroup(
        system,
        ids,
        address=None,
        configure=nothing,
        on_progress=nothing,
        on_loaded=nothing,
        on_refused=nothing,
    )
    workers: dict[WorkerId, Any] = {worker: worker.name for worker in ids}
    group.workers.update(workers)
    group._on_event(died(ALONE))
    assert {worker: str(cause) for worker, cause in causes.items()} == {"worker-1": "ended because worker-0 had died"}
    assert isinstance(causes["worker-1"], PeerDied)


@pytest.mark.parametrize("loaded", [True, False])
def test_only_a_worker_that_never_loaded_ends_an_engine_that_starts(loaded: bool) -> None:
    """That of another replica may still load when the worker of this one dies."""
    board, lifecycle = HealthBoard(), Lifecycle()
    info: Any = None
    board.worker = (info, 0) if loaded else None
    replica: Any = SimpleNamespace(board=board)
    traffic: Any = SimpleNamespace(died=lambda *given: None)
    crash_log = CrashLog("cpu", lifecycle, traffic, model_info=lambda: None, find=lambda actor: replica)
    crash_log.on_event(died(ChildCrash("killed")))
    assert lifecycle.broken.is_set() != loaded
    crash_log.on_event(died(ChildCrash("killed before it had loaded again")))
    assert lifecycle.broken.is_set() != loaded
