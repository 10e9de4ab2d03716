"""What a system leaves behind when it is closed: nothing."""

import asyncio
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import Block, ChildActor, ChildProtocol, Hold, Multiply, Settings

from actors.runtime import ActorDied, ActorRef, ActorSystem, Backoff, Supervision
from tests.kits.waiting import PATIENCE, blocking_until, until

TARGET = "runtime_child_actors:ChildActor"


def held() -> Counter[str]:
    """What a process has that a system could leave behind. What others have begun here may end meanwhile."""
    gc.collect()
    process = psutil.Process()
    tasks = (f"task {task.get_name()}" for task in asyncio.all_tasks())
    threads = (f"thread {thread.name}" for thread in threading.enumerate())
    children = (f"child {child.pid}" for child in process.children(recursive=True))
    return Counter([*tasks, *threads, *children, *["descriptor"] * process.num_fds()])


def settings() -> dict[str, Any]:
    root = logging.getLogger()
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "root logger": (root.level, list(root.handlers), list(root.filters)),
        "troupe logger": (logging.getLogger("troupe").level, list(logging.getLogger("troupe").handlers)),
        "path": list(sys.path),
        "loop policy": type(asyncio.get_event_loop_policy()),
        "wakeup": signal.set_wakeup_fd(-1) if threading.current_thread() is threading.main_thread() else None,
    }


async def warm(system: ActorSystem) -> tuple[ActorRef[ChildProtocol], ActorRef[ChildProtocol]]:
    local = await system.spawn(lambda: ChildActor(Settings(factor=2)), name="local")
    remote = await system.spawn_process(ChildProtocol, name="remote", target=TARGET, config=Settings(factor=3))
    assert await local.ask(Multiply(2), timeout=60) == 4
    assert await remote.ask(Multiply(2), timeout=60) == 6
    return local, remote


async def quietly() -> None:
    async with ActorSystem() as system:
        await warm(system)


async def with_work_in_hand() -> None:
    async with ActorSystem() as system:
        local, remote = await warm(system)
        with tempfile.TemporaryDirectory() as folder:
            gate = Path(folder, "gate")
            asks = [asyncio.create_task(ref.ask(Hold(str(gate)), timeout=60)) for ref in (local, remote)]
            await until(lambda: [actor.message for actor in system.describe()] == ["Hold"] * 2)
            queued = asyncio.create_task(remote.ask(Multiply(1), timeout=60))
            await until(lambda: len(remote._cell.incarnation._sent[0]) == 2)  # type: ignore[union-attr, attr-defined]
            stopping = asyncio.create_task(system.stop())
            await until(lambda: system.stopping)
            gate.touch()
            await stopping
    assert [await ask for ask in asks] == [None, None], "what is in hand is finished"
    with pytest.raises(ActorDied):
        await queued


async def with_a_hanging_child() -> None:
    async with ActorSystem() as system:
        ref = await system.spawn_process(
            ChildProtocol, name="remote", target=TARGET, config=Settings(), stop_timeout=0.1
        )
        ref.offer(Block(600))
        await until(lambda: system.describe()[0].message == "Block")


async def while_a_child_starts() -> None:
    async with ActorSystem() as system:
        await system.spawn_process(
            ChildProtocol, name="remote", target=TARGET, config=Settings(start_seconds=60), wait=False
        )
        await until(lambda: system.describe()[0].pid)


async def while_a_child_is_restarted() -> None:
    async with ActorSystem() as system:
        slow = Supervision(backoff=Backoff(first=60.0, max=60.0))
        ref = await system.spawn_process(
            ChildProtocol, name="remote", target=TARGET, config=Settings(), supervision=slow
        )
        system.crash_actor(ref, RuntimeError("test"))
        await until(lambda: system.describe()[0].state == "restarting", "it does not wait for its restart")


async def by_an_error() -> None:
    async def fail() -> None:
        async with ActorSystem() as system:
            await warm(system)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def by_cancellation_in_the_middle_of_its_stop() -> None:
    opened = asyncio.Event()
    systems: list[ActorSystem] = []

    async def use() -> None:
        async with ActorSystem() as system:
            systems.append(system)
            _, remote = await warm(system)
            remote.offer(Block(600))
            await until(lambda: system.describe()[1].message == "Block")
            opened.set()

    task = asyncio.create_task(use())
    await opened.wait()
    await until(lambda: systems[0].stopping)
    task.cancel()  # while it waits out the stop timeout of 5 s
    with pytest.raises(asyncio.CancelledError):
        await task


async def from_another_task_than_opened_it() -> None:
    system = ActorSystem()
    await asyncio.create_task(system.__aenter__())
    await warm(system)
    await asyncio.create_task(system.stop())
    await system.stop()  # again: nothing happens


async def a_spawn_is_cancelled() -> None:
    async with ActorSystem() as system:
        spawning = asyncio.create_task(
            system.spawn_process(ChildProtocol, name="remote", target=TARGET, config=Settings(start_seconds=60))
        )
        await until(lambda: system.describe() and system.describe()[0].pid)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert system.describe() == []


@pytest.mark.parametrize(
    "use",
    [
        quietly,
        with_work_in_hand,
        with_a_hanging_child,
        while_a_child_starts,
        while_a_child_is_restarted,
        by_an_error,
        by_cancellation_in_the_middle_of_its_stop,
        from_another_task_than_opened_it,
        a_spawn_is_cancelled,
    ],
)
async def test_closing_leaves_nothing_behind(use: Callable[[], Awaitable[None]]) -> None:
    before, had = settings(), held()
    await use()
    await until(lambda: held() <= had, "something is left behind")
    assert settings() == before


@pytest.mark.parametrize("uvloop", [False, True])
def test_in_another_thread_with_either_loop_and_when_the_loop_just_ends(uvloop: bool) -> None:
    """`asyncio.run` that is left in the middle cancels everything: children are killed and reaped all the same."""
    factory = pytest.importorskip("uvloop").new_event_loop if uvloop else asyncio.new_event_loop
    pids: list[int | None] = []
    failures: list[BaseException] = []

    async def abandon() -> None:
        system = ActorSystem()
        await system.__aenter__()
        await warm(system)
        pids.extend(status.pid for status in system.describe())

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(quietly())
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(abandon())
        except BaseException as error:
            failures.append(error)

    factory().close()  # libuv keeps a pipe of its own for the life of the process
    descriptors = psutil.Process().num_fds()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert failures == []
    assert pids[1] is not None
    assert not os.path.exists(f"/proc/{pids[1]}")
    gc.collect()
    blocking_until(lambda: psutil.Process().num_fds() <= descriptors, "a descriptor is left behind")


async def test_a_closed_system_is_garbage() -> None:
    async with ActorSystem() as system:
        await warm(system)
    remains = weakref.ref(system)
    del system

    def collected() -> bool:
        gc.collect()
        return remains() is None

    await until(collected, "it is kept")
