"""How actors in child processes start, stop and end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import (
    Bequeath,
    Block,
    Exit,
    Inspect,
    Leave,
    Multiply,
    Settings,
)

from actors.runtime import (
    ActorDied,
    ActorSystem,
    Backoff,
    ChildCrash,
    EventKind,
    Strategy,
    Supervision,
)
from actors.runtime.process.incarnation import ProcessIncarnation
from tests.actors.runtime.children import TARGET, in_hand, spawn
from tests.kits.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")


async def test_a_failing_start_is_reported_to_the_spawner(system: ActorSystem) -> None:
    with pytest.raises(ChildCrash, match="no device found"):
        await spawn(system, Settings(fail_start=True))
    with pytest.raises(ChildCrash, match="No module named 'no_such_module'"):
        await spawn(system, target="no_such_module:Worker")
    with pytest.raises(ChildCrash, match="did not start within"):
        await spawn(system, Settings(start_seconds=60), start_timeout=0.3)
    assert system.describe() == []


async def test_what_a_child_could_not_import_is_refused_before_it_starts(system: ActorSystem) -> None:
    class Local: ...

    with pytest.raises(ValueError, match="top level of a module"):
        await spawn(system, config_type=Local)
    with pytest.raises(ValueError, match="target must be"):
        await spawn(system, target="no_colon")
    with pytest.raises(ValueError, match="import the module that defines them"):
        await system.spawn_process(Local, name="x", target=TARGET)


async def test_an_orderly_stop_runs_stopping_and_reaps(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    ref = await spawn(system)
    pid = system.describe()[0].pid
    await system.stop_actor(ref)
    assert "stopping in order" in caplog.text
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(ActorDied):
        await ref.ask(Multiply(1), timeout=1)


async def test_a_stopped_child_runs_exit_functions_and_waits_for_no_thread(
    system: ActorSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.runtime.process.incarnation._KILL_AFTER_SECONDS", PATIENCE)
    ref = await spawn(system, stop_timeout=PATIENCE)
    await ref.ask(Bequeath(str(tmp_path / "reported")), timeout=PATIENCE)
    life = ref._cell.incarnation
    assert isinstance(life, ProcessIncarnation)
    assert life._child is not None
    await system.stop_actor(ref)
    assert life._child.returncode == 0
    assert (tmp_path / "reported").read_text() == "done"


async def test_a_hanging_child_is_terminated_after_its_stop_timeout(system: ActorSystem) -> None:
    ref = await spawn(system, stop_timeout=0.2)
    hanging = asyncio.create_task(ref.ask(Block(600), timeout=600))
    await in_hand(system, "Block")
    pid = system.describe()[0].pid
    await system.stop_actor(ref)
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(ActorDied):
        await hanging


async def test_a_stopped_process_is_killed(system: ActorSystem) -> None:
    """SIGTERM does not reach a process that is halted by SIGSTOP; SIGKILL does."""
    ref = await spawn(system, stop_timeout=0.1)
    pid = system.describe()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await system.stop_actor(ref)
    assert not os.path.exists(f"/proc/{pid}")


async def test_a_silent_loop_is_found_by_its_heartbeat(system: ActorSystem) -> None:
    ref = await spawn(system, heartbeat=0.05, heartbeat_timeout=3.0)
    assert system.describe()[0].heartbeat_age is not None
    with pytest.raises(ActorDied, match="no heartbeat"):
        await ref.ask(Block(600), timeout=600)
    assert await ref.ask(Multiply(1), timeout=PATIENCE) == 1


async def test_a_child_may_stop_itself(system: ActorSystem) -> None:
    ref = await spawn(system)
    await ref.ask(Leave(), timeout=PATIENCE)
    await until(lambda: not ref.is_alive())
    assert not system.failed.is_set()


async def test_a_group_of_children_restarts_as_one(system: ActorSystem) -> None:
    together = Supervision(Strategy.RESTART_GROUP, backoff=Backoff(first=0.01))
    refs = [await spawn(system, name=f"worker-{rank}", group="engine", supervision=together) for rank in range(2)]
    restarted: list[str] = []
    system.on_event(lambda event: restarted.append(event.actor) if event.kind is EventKind.RESTARTED else None)
    for status in system.describe():
        assert status.pid is not None
        os.kill(status.pid, signal.SIGKILL)
    await until(lambda: len(restarted) == 2)
    assert [(await ref.ask(Inspect(), timeout=PATIENCE)).incarnation for ref in refs] == [1, 1]
    assert sorted(restarted) == ["worker-0", "worker-1"]


async def test_past_the_intensity_the_system_fails_with_the_cause(system: ActorSystem) -> None:
    ref = await spawn(system, supervision=Supervision(max_restarts=1, backoff=Backoff(first=0.01)))
    for _ in range(2):
        with pytest.raises(ActorDied):
            await ref.ask(Exit(code=7), timeout=PATIENCE)
    assert str(await asyncio.wait_for(system.failed.wait(), 60)) == "exited with code 7"


def test_the_child_dies_with_its_parent() -> None:
    """Even when a handler blocks its loop, so that it cannot see its socket end: the death signal reaches it."""
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from runtime_child_actors import ChildProtocol, Settings, Block
from actors.runtime import ActorSystem
async def main():
    async with ActorSystem() as system:
        ref = await system.spawn_process(ChildProtocol, name="w", target={TARGET!r}, config=Settings())
        ref.offer(Block(600))
        while system.describe()[0].message != "Block":
            await asyncio.sleep(0.01)
        print(system.describe()[0].pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{pid}")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not os.path.exists(f"/proc/{pid}")))
