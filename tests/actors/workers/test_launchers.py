"""Where the processes of workers come from."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from actors.runtime import BlankProcess
from actors.workers.launchers.local import LocalLauncher
from kernels.contract.topology import Rank, WorkerId


class Early:
    """One process that was started early, for worker 1."""

    def __init__(self, process: BlankProcess) -> None:
        self._processes = {1: process}

    def take(self, number: int) -> BlankProcess | None:
        return self._processes.pop(number, None)


def end(pid: int) -> None:
    """Kill a process and leave it to be reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("fate", ["waits", "is dead", "has another environment"])
async def test_an_early_process_is_its_workers_first_where_it_can_be(fate: str) -> None:
    environment = {"TROUPE_TEST": "set"}
    early = BlankProcess({} if fate == "has another environment" else environment)
    early.begin()
    if fate == "is dead":
        end(early.pid)
    given: Any = Early(early)
    launcher = LocalLauncher(given)
    other, first, second = [await launcher.launch(WorkerId(n, Rank(tp=n)), environment) for n in (0, 1, 1)]
    try:
        assert (first is early) is (fate == "waits")
        assert first.returncode is None
        assert len({process.pid for process in (other, first, second)}) == 3
        if fate != "waits":
            assert early.returncode is not None, "it is left running"
            assert early.sock.fileno() == -1
    finally:
        for process in (other, first, second):
            process.close()


async def test_without_early_processes_each_launch_starts_one() -> None:
    process = await LocalLauncher().launch(WorkerId(0), {})
    process.close()
    assert process.returncode == -signal.SIGKILL
