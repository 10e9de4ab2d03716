"""A process that was started before anybody knew which actor it would be."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import ChildProtocol, Inspect, Settings

from actors.runtime import ActorDied, ActorSystem, Backoff, BlankProcess, Supervision

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")


@pytest.mark.parametrize("fate", ["waits", "is dead", "has another environment"])
async def test_it_is_the_first_life_where_it_can_be(system: ActorSystem, fate: str) -> None:
    environment = {"TROUPE_TEST": "set"}
    blank = BlankProcess({} if fate == "has another environment" else environment, ["no.such.module", "colorsys"])
    blank.begin()
    if fate == "is dead":
        os.kill(blank.process.pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, blank.process.pid, os.WEXITED | os.WNOWAIT)
    given = [blank]
    ref = await system.spawn_process(
        ChildProtocol,
        name="worker",
        target="runtime_child_actors:ChildActor",
        config=Settings(),
        environment=environment,
        supervision=Supervision(backoff=Backoff(first=0.01, jitter=0.0)),
        blank=lambda: given.pop() if given else None,
    )
    facts = await ref.ask(Inspect(), timeout=60)
    assert (facts.pid == blank.process.pid) is (fate == "waits")
    assert ("colorsys" in facts.modules) is (fate == "waits")
    assert facts.environment == "set"
    if fate != "waits":
        assert blank.process.returncode is not None
    os.kill(facts.pid, signal.SIGKILL)
    while True:
        try:
            assert (await ref.ask(Inspect(), timeout=60)).pid not in (facts.pid, blank.process.pid)
            break
        except ActorDied:
            continue


def test_one_that_nobody_needs_is_ended() -> None:
    blank = BlankProcess({})
    blank.close()
    assert blank.process.returncode == -signal.SIGKILL
    assert blank.sock.fileno() == blank.thread_sock.fileno() == -1
