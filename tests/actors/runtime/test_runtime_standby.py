"""A child kept in standby is the next incarnation of its actor, with its preparations done."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import ChildProtocol, Inspect, Prepared, Settings

from actors.runtime import ActorRef, ActorSystem, Backoff, Supervision
from actors.runtime.process import child_process
from actors.runtime.process.blank_process import BlankProcess, launch_blank
from actors.runtime.process.child_process import Standby
from tests.kits.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")

QUICK = Supervision(max_restarts=5, within=60.0, backoff=Backoff(first=0.01, jitter=0.0))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_MIN_DELAY_SECONDS", 0.01)


async def spawn(system: ActorSystem) -> ActorRef[ChildProtocol]:
    return await system.spawn_process(
        ChildProtocol,
        name="worker",
        target="runtime_child_actors:ChildActor",
        config=Settings(),
        supervision=QUICK,
        standby=True,
    )


def standby_of(ref: ActorRef[ChildProtocol]) -> Standby:
    assert ref._cell.standby is not None
    return ref._cell.standby


async def living_pid(ref: ActorRef[ChildProtocol]) -> int:
    return (await ref.ask(Inspect(), timeout=60.0)).pid


async def test_the_child_in_standby_is_the_next_incarnation(system: ActorSystem) -> None:
    ref = await spawn(system)
    facts = await ref.ask(Inspect(), timeout=60.0)
    first = facts.pid
    await until(lambda: standby_of(ref).pid is not None)
    waiting = standby_of(ref).pid
    if sys.platform == "linux":
        name = facts.process_name
        await until(lambda: Path(f"/proc/{waiting}/comm").read_text().strip() == f"{name} spare"[:15])
    os.kill(first, signal.SIGKILL)
    await until(lambda: system.describe()[0].incarnation == 1)
    facts = await ref.ask(Inspect(), timeout=60.0)
    assert facts.pid == waiting != first
    assert sys.platform != "linux" or facts.process_name == name
    await until(lambda: standby_of(ref).pid not in (None, waiting))  # and the next one waits


async def test_a_child_prepares_before_its_turn_and_lives_after_it(system: ActorSystem) -> None:
    ref = await spawn(system)
    assert await ref.ask(Prepared(), timeout=60.0) == "prepared before started"


async def test_a_dead_standby_is_replaced_and_harms_no_request(system: ActorSystem) -> None:
    ref = await spawn(system)
    first = await living_pid(ref)
    await until(lambda: standby_of(ref).pid is not None)
    waiting = standby_of(ref).pid
    assert waiting is not None
    os.kill(waiting, signal.SIGKILL)
    await until(lambda: standby_of(ref).pid not in (None, waiting))
    assert await living_pid(ref) == first


async def test_both_killed_at_once_still_restart(system: ActorSystem) -> None:
    ref = await spawn(system)
    first = await living_pid(ref)
    await until(lambda: standby_of(ref).pid is not None)
    waiting = standby_of(ref).pid
    assert waiting is not None
    os.kill(waiting, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
    await until(lambda: system.describe()[0].incarnation, "it did not come back")
    assert await living_pid(ref) not in (first, waiting)


async def test_nothing_is_left_of_it() -> None:
    async with ActorSystem() as system:
        ref = await spawn(system)
        await until(lambda: standby_of(ref).pid is not None)
        waiting = standby_of(ref).pid
        await system.stop_actor(ref)
        await until(lambda: not psutil.pid_exists(waiting or 0))
        again = await spawn(system)
        await until(lambda: standby_of(again).pid is not None)
        waiting = standby_of(again).pid
    await until(lambda: not psutil.pid_exists(waiting or 0))


async def test_without_it_no_second_child_is_started(system: ActorSystem) -> None:
    launched = []

    async def launch(environment: Mapping[str, str]) -> BlankProcess:
        launched.append(environment)
        return await launch_blank(environment)

    ref = await system.spawn_process(
        ChildProtocol, name="alone", target="runtime_child_actors:ChildActor", config=Settings(), launcher=launch
    )
    assert ref._cell.standby is None
    await asyncio.sleep(0.05)  # five times as long as a standby waits
    assert len(launched) == 1


async def test_a_frozen_standby_is_replaced_when_its_turn_comes(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.runtime.process.incarnation._STANDBY_PATIENCE_SECONDS", 0.2)
    ref = await spawn(system)
    first = await living_pid(ref)
    await until(lambda: standby_of(ref).pid is not None)
    frozen = standby_of(ref).pid
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    await until(lambda: system.describe()[0].incarnation == 1)
    assert await living_pid(ref) not in (first, frozen)
    assert not psutil.pid_exists(frozen)
