"""A process that was started before it was known which actor it would run."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import ChildProtocol, Inspect, Settings

from actors.runtime import ActorDied, ActorSystem, Backoff, BlankProcess, Supervision

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")


async def test_a_launcher_starts_each_incarnation(system: ActorSystem) -> None:
    launched: list[BlankProcess] = []

    async def launch(environment: Mapping[str, str]) -> BlankProcess:
        launched.append(BlankProcess(environment, ["no.such.module", "colorsys"]))
        return launched[-1]

    ref = await system.spawn_process(
        ChildProtocol,
        name="worker",
        target="runtime_child_actors:ChildActor",
        config=Settings(),
        environment={"TROUPE_TEST": "set"},
        supervision=Supervision(backoff=Backoff(first=0.01, jitter=0.0)),
        launcher=launch,
    )
    facts = await ref.ask(Inspect(), timeout=60)
    assert [process.pid for process in launched] == [facts.pid]
    assert "colorsys" in facts.modules
    assert facts.environment == "set"
    assert facts.process_name == "worker"
    os.kill(facts.pid, signal.SIGKILL)
    while True:
        try:
            assert (await ref.ask(Inspect(), timeout=60)).pid == launched[1].pid
            break
        except ActorDied:
            continue
    assert len(launched) == 2


def test_one_that_is_not_needed_is_ended() -> None:
    blank = BlankProcess({})
    blank.close()
    assert blank.process.returncode == -signal.SIGKILL
    assert blank.sock.fileno() == blank.thread_sock.fileno() == -1
