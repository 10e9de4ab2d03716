"""A worker that refuses to load its model: the first start fails; a later incarnation counts as a death."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.protocol import LoadRefused
from actors.workers.group import WorkerGroup
from actors.workers.worker import _is_permanent
from kernels.contract.errors import CacheSizeError, ConfigError, LoadError, UnsupportedError
from kernels.contract.topology import WorkerId

WORKER = WorkerId(0)


class Told:
    """A group of one worker in ``epoch``, and what it did."""

    def __init__(self, epoch: int) -> None:
        self.refused: list[tuple[str, bool]] = []
        self.crashed: list[str] = []
        system: Any = SimpleNamespace(crash_actor=lambda worker, error: self.crashed.append(error.reason))
        nothing: Any = None
        self.group = WorkerGroup(
            system,
            [WORKER],
            address=None,
            configure=nothing,
            on_progress=nothing,
            on_loaded=nothing,
            on_refused=lambda reason, permanent: self.refused.append((reason, permanent)),
        )
        self.group.workers[WORKER], self.group._running, self.group._epoch = nothing, {WORKER: epoch}, epoch

    def tell(self, epoch: int) -> None:
        self.group._on_report(LoadRefused(worker=WORKER, reason="no such dtype", permanent=True, epoch=epoch))


def test_a_refusal_of_the_first_incarnation_ends_the_start() -> None:
    reported = Told(epoch=0)
    reported.tell(0)
    assert (reported.refused, reported.crashed) == ([("no such dtype", True)], [])


def test_a_refusal_after_a_restart_is_a_death_and_a_stale_one_nothing() -> None:
    reported = Told(epoch=2)
    reported.tell(1)
    assert (reported.refused, reported.crashed) == ([], [])
    reported.tell(2)
    assert (reported.refused, reported.crashed) == ([], ["no such dtype"])


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (ConfigError("heads"), True),
        (LoadError("weights"), True),
        (UnsupportedError("dtype"), True),
        (CacheSizeError("memory"), False),
        (ValueError("a mistake of ours"), None),
        (RuntimeError("out of memory"), None),
    ],
)
def test_only_lack_of_memory_may_heal_by_itself(error: Exception, permanent: bool | None) -> None:
    assert _is_permanent(error) is permanent
