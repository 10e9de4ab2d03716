import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import (
    BadPrompt,
    Bequeath,
    Block,
    Chain,
    Chatter,
    ChildProtocol,
    Count,
    Counted,
    Exit,
    Garbage,
    Hold,
    Inspect,
    Large,
    Leave,
    Missing,
    Multiply,
    Offspring,
    Ping,
    Poison,
    Progress,
    Raise,
    Settings,
    Sleep,
    Speak,
    Step,
)

from actors.runtime import (
    ActorDied,
    ActorRef,
    ActorSystem,
    AskTimeout,
    Backoff,
    ChildCrash,
    EventKind,
    MessageTooLarge,
    Strategy,
    Supervision,
    UnknownMessage,
    current_traceparent,
)
from actors.runtime.link import Link
from actors.runtime.process import ProcessIncarnation
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")

QUICK = Supervision(max_restarts=5, within=60.0, backoff=Backoff(first=0.01, jitter=0.0))
TARGET = "runtime_child_actors:ChildActor"


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem() as system:
        yield system


async def spawn(system: ActorSystem, settings: Settings | None = None, **options: Any) -> ActorRef[ChildProtocol]:
    options = {"name": "worker", "target": TARGET, "supervision": QUICK, **options}
    return await system.spawn_process(ChildProtocol, config=settings or Settings(), **options)


async def in_hand(system: ActorSystem, message: str, waiting: int = 0) -> None:
    """Wait until the first actor's child has a message of this type, and so many of its data wait behind it here."""

    def has() -> bool:
        status = system.describe()[0]
        return status.message == message and status.mailbox["data"] == waiting

    await until(has, f"{message} is not in hand")


async def test_messages_config_environment_and_trace_reach_the_child(system: ActorSystem) -> None:
    ref = await spawn(system, Settings(factor=3), environment={"TROUPE_TEST": "only there"})
    assert await ref.ask(Multiply(14), timeout=PATIENCE) == 42
    rows = await ref.ask(Step(7, b"\x00\x01\x02"), timeout=PATIENCE)
    assert (rows.number, rows.tokens) == (7, b"\x02\x01\x00")
    token = current_traceparent.set("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
    facts = await ref.ask(Inspect(), timeout=PATIENCE)
    current_traceparent.reset(token)
    assert facts.traceparent == "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    assert facts.pid == system.describe()[0].pid != os.getpid()
    assert facts.environment == "only there"
    assert "TROUPE_TEST" not in os.environ
    assert facts.sigint_ignored
    assert "multiprocessing" not in facts.modules
    assert "pickle" not in facts.modules


async def test_the_child_inherits_nothing_but_its_socket_and_stderr(system: ActorSystem, tmp_path: Path) -> None:
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    ref = await spawn(system)
    facts = await ref.ask(Inspect(), timeout=PATIENCE)
    os.close(secret)
    assert not [name for name in facts.descriptors if "secret" in name]


async def test_what_the_child_starts_does_not_hold_the_link_open(system: ActorSystem) -> None:
    ref = await spawn(system)
    assert "socket:" not in await ref.ask(Offspring(), timeout=PATIENCE)


async def test_several_incarnations_keep_their_number(system: ActorSystem) -> None:
    ref = await spawn(system)
    with pytest.raises(ActorDied):
        await ref.ask(Raise(), timeout=PATIENCE)
    assert (await ref.ask(Inspect(), timeout=PATIENCE)).incarnation == 1


@pytest.mark.parametrize(
    ("message", "words", "returncode"),
    [
        (Exit(code=3), "exited with code 3", 3),
        (Exit(signal=signal.SIGKILL), "killed by SIGKILL", -9),
        (Exit(code=0), "exited with code 0", 0),
        (Raise(), "ValueError: the device is on fire", 1),
        (Garbage(b"\xff" * 100), "cannot be understood", None),
        (Garbage(b"\x0a\x00\x00\x00\xee" + b"\x00" * 20), "unknown kind", None),
    ],
)
async def test_every_death_fails_the_ask_with_its_cause_and_is_restarted(
    system: ActorSystem, message: Any, words: str, returncode: int | None
) -> None:
    ref = await spawn(system)
    with pytest.raises(ActorDied, match=words) as died:
        await ref.ask(message, timeout=PATIENCE)
    cause = died.value.cause
    assert isinstance(cause, ChildCrash)
    assert cause.returncode == returncode
    assert await ref.ask(Multiply(2), timeout=PATIENCE) == 2


async def test_a_killed_child_fails_all_asks_on_their_way_at_once(system: ActorSystem) -> None:
    ref = await spawn(system)
    asks = [asyncio.create_task(ref.ask(Sleep(600), timeout=600)) for _ in range(3)]
    await in_hand(system, "Sleep")
    pid = system.describe()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for ask in asks:
        with pytest.raises(ActorDied, match="killed by SIGKILL"):
            await ask
    assert not os.path.exists(f"/proc/{pid}"), "reaped"
    assert await ref.ask(Multiply(1), timeout=PATIENCE) == 1


async def test_request_errors_come_back_as_themselves(system: ActorSystem) -> None:
    ref = await spawn(system)
    with pytest.raises(BadPrompt, match="too long") as bad:
        await ref.ask(Raise(bad_request=True), timeout=PATIENCE)
    assert bad.value.param == "prompt"
    assert system.describe()[0].incarnation == 0


async def test_control_overtakes_data_on_its_way(system: ActorSystem, tmp_path: Path) -> None:
    ref = await spawn(system, window=2)
    order: list[str] = []
    gate = tmp_path / "gate"

    async def ask(message: Any, name: str) -> None:
        await ref.ask(message, timeout=PATIENCE)
        order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(Hold(str(gate)), "data 1"))
        for number in (2, 3, 4):
            tasks.create_task(ask(Multiply(number), f"data {number}"))
        await in_hand(system, "Hold", waiting=2)
        tasks.create_task(ask(Ping(), "control"))
        # On its way; the child looks for the file no sooner than it looks at its socket.
        await until(lambda: ref._cell.incarnation._sent[1], "it is not sent")  # type: ignore[union-attr, attr-defined]
        gate.touch()
    assert order == ["data 1", "control", "data 2", "data 3", "data 4"]


async def test_the_window_bounds_what_is_under_way_and_the_mailbox_the_rest(
    system: ActorSystem, tmp_path: Path
) -> None:
    ref = await spawn(system, window=2, capacity=3)
    gate = tmp_path / "gate"
    ask = asyncio.create_task(ref.ask(Hold(str(gate)), timeout=PATIENCE))
    await in_hand(system, "Hold")
    tells = [asyncio.create_task(ref.tell(Count(str(number)))) for number in range(6)]
    await until(lambda: sum(tell.done() for tell in tells) >= 4, "they are not taken")
    for _ in range(20):  # turns of the loop in which a fifth could be
        await asyncio.sleep(0)
    assert sum(tell.done() for tell in tells) == 4  # one under way, three in the mailbox
    gate.touch()
    await ask
    await asyncio.gather(*tells)
    assert await ref.ask(Counted(), timeout=PATIENCE) == ["0", "1", "2", "3", "4", "5"]


async def test_told_messages_that_were_not_begun_survive_a_death(system: ActorSystem) -> None:
    ref = await spawn(system)
    sleeping = asyncio.create_task(ref.ask(Sleep(600), timeout=600))
    await in_hand(system, "Sleep")
    for number in range(20):  # more than the window
        await ref.tell(Count(str(number)))
    pid = system.describe()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied):
        await sleeping
    assert await ref.ask(Counted(), timeout=PATIENCE) == [str(number) for number in range(20)]


async def test_poison_kills_two_incarnations_and_is_set_apart(system: ActorSystem, tmp_path: Path) -> None:
    ref = await spawn(system)
    await ref.tell(Poison(str(tmp_path / "deaths")))
    await ref.tell(Count("behind it"))
    counted = None
    while counted is None:
        try:
            counted = await ref.ask(Counted(), timeout=PATIENCE)
        except ActorDied:  # asked while the poison was in hand
            continue
    assert counted == ["behind it"]
    assert (tmp_path / "deaths").read_text() == "xx"
    assert system.events.dead_letters == 1


async def test_timeouts_deadlines_and_late_replies(system: ActorSystem, tmp_path: Path) -> None:
    ref = await spawn(system)
    gate = tmp_path / "gate"
    with pytest.raises(AskTimeout):
        await ref.ask(Hold(str(gate)), timeout=0.1)
    await ref.tell(Count("expired"), deadline=(deadline := time.monotonic() + 0.01))
    await until(lambda: time.monotonic() > deadline + 0.01)  # the child knows how long is left, from when it heard
    gate.touch()
    assert await ref.ask(Counted(), timeout=PATIENCE) == []
    assert system.late_replies == 1
    assert system.events.dead_letters == 1


async def test_unknown_messages_are_refused(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    early = await spawn(system, wait=False)
    before_it_is_known = asyncio.create_task(early.ask(Missing(), timeout=PATIENCE))
    with pytest.raises(UnknownMessage, match="Missing"):
        await before_it_is_known
    with pytest.raises(UnknownMessage):
        early.offer(Missing())
    with pytest.raises(UnknownMessage):
        early.offer(Progress("of another protocol"))  # type: ignore[arg-type]
    assert "has no handler for Missing" in caplog.text


async def test_frames_have_a_limit_on_both_ways(system: ActorSystem) -> None:
    ref = await spawn(system, frame_limit=100_000)
    assert len(await ref.ask(Large(90_000), timeout=PATIENCE)) == 90_000
    with pytest.raises(MessageTooLarge, match="message of"):
        await ref.ask(Step(1, b"x" * 100_000), timeout=PATIENCE)
    with pytest.raises(MessageTooLarge, match="reply of"):
        await ref.ask(Large(100_000), timeout=PATIENCE)
    assert system.describe()[0].incarnation == 0


async def test_large_frames_pass_in_pieces(system: ActorSystem) -> None:
    ref = await spawn(system)
    sizes = [5_000_000, 10, 3_000_000, 100]
    replies = await asyncio.gather(*(ref.ask(Large(size), timeout=PATIENCE) for size in sizes))
    assert [len(reply) for reply in replies] == sizes
    rows = await ref.ask(Step(1, b"ab" * 2_000_000), timeout=PATIENCE)
    assert rows.tokens == b"ba" * 2_000_000
    assert await ref.ask(Multiply(1), timeout=PATIENCE) == 1


async def test_events_and_logs_come_from_the_child(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Progress] = []
    ref = await spawn(system, events=told.append, events_type=Progress)
    with caplog.at_level(logging.INFO, logger="troupe"):
        await ref.ask(Speak("hello"), timeout=PATIENCE)
        await ref.ask(Speak("from a thread", from_thread=True), timeout=PATIENCE)
        await until(lambda: len(told) == 2)
        await until(lambda: any(record.name == "troupe.child" for record in caplog.records))
    assert told == [Progress("hello"), Progress("from a thread")]
    (first, *_) = [record for record in caplog.records if record.name == "troupe.child"]
    assert first.getMessage() == "said hello"
    assert first.process != os.getpid()
    assert first.__dict__["actor"] == "worker"


@pytest.mark.parametrize("from_thread", [False, True])
async def test_a_burst_of_records_is_cut_and_counted(
    system: ActorSystem, caplog: pytest.LogCaptureFixture, from_thread: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="troupe"):
        ref = await spawn(system, heartbeat=0.02)
        await ref.ask(Chatter(20_000, from_thread=from_thread), timeout=PATIENCE)
        # What is said in a thread may be overtaken by the word of what was dropped.
        await until(lambda: "log records of this process were dropped" in caplog.text)
        await until(lambda: "the end of it" in caplog.text)
    lines = [record.getMessage() for record in caplog.records if record.name == "troupe.child"]
    chatter = [line for line in lines if line.startswith("chatter")]
    assert 200 <= len(chatter) < 10_000
    assert "the end of it" in lines
    (told, *_) = [record for record in caplog.records if record.name == "troupe.logs"]
    assert (told.levelno, told.__dict__["actor"]) == (logging.WARNING, "worker")


async def test_what_other_libraries_say_in_a_child_comes_too(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await spawn(system)
    with caplog.at_level(logging.WARNING, logger="troupe"):
        await ref.ask(Chatter(0), timeout=PATIENCE)
    found = {record.name: record.getMessage() for record in caplog.records}
    assert found["troupe.libraries.some.library"] == "from a library"
    assert "UserWarning: deprecated thing" in found["troupe.libraries.py.warnings"]


async def test_a_record_larger_than_any_frame_breaks_no_link(
    system: ActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="troupe"):
        ref = await spawn(system)
        await ref.ask(Chatter(1, text="x" * 3_000_000), timeout=PATIENCE)
        await ref.ask(Multiply(1), timeout=PATIENCE)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("chatter 0 x")]
    assert len(line) < 40_000


async def test_a_death_tells_its_first_cause(system: ActorSystem) -> None:
    ref = await spawn(system)
    with pytest.raises(ActorDied) as caught:
        await ref.ask(Chain(), timeout=PATIENCE)
    assert isinstance(caught.value.cause, ChildCrash)
    assert caught.value.cause.reason == "RuntimeError: the step failed (first cause: OSError: the cable was pulled)"


async def test_a_failing_start_is_told_to_the_spawner(system: ActorSystem) -> None:
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
    monkeypatch.setattr("actors.runtime.process._KILL_AFTER", PATIENCE)
    ref = await spawn(system, stop_timeout=PATIENCE)
    await ref.ask(Bequeath(str(tmp_path / "told")), timeout=PATIENCE)
    life = ref._cell.incarnation
    assert isinstance(life, ProcessIncarnation)
    assert life._child is not None
    await system.stop_actor(ref)
    assert life._child.returncode == 0
    assert (tmp_path / "told").read_text() == "done"


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
    await asyncio.sleep(0.3)
    assert system.describe()[0].incarnation == 0
    age = system.describe()[0].heartbeat_age
    assert age is not None
    assert age < 3.0
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
    assert restarted == ["worker-0", "worker-1"]


async def test_past_the_intensity_the_system_fails_with_the_cause(system: ActorSystem) -> None:
    ref = await spawn(system, supervision=Supervision(max_restarts=1, backoff=Backoff(first=0.01)))
    for _ in range(2):
        with pytest.raises(ActorDied):
            await ref.ask(Exit(code=7), timeout=PATIENCE)
    assert str(await asyncio.wait_for(system.failed.wait(), 60)) == "exited with code 7"


async def test_a_link_that_loses_its_peer_while_sending_is_lost_once() -> None:
    ours, theirs = socket.socketpair()
    lost: list[BaseException | None] = []
    link = Link(asyncio.get_running_loop(), ours, lambda *frame: None, lost.append)
    for _ in range(100):
        link.send(1, 1, b"x" * 100_000)
    assert link.backlog > 0
    theirs.close()
    link.send(1, 1, b"x")
    await until(lambda: lost)
    for _ in range(20):  # turns of the loop in which it could be lost again
        await asyncio.sleep(0)
    assert lost == [None]
    assert link.backlog == 0


async def test_last_words_are_heard_when_the_end_is_noticed_first() -> None:
    ours, theirs = socket.socketpair()
    heard: list[tuple[int, int, bytes]] = []
    lost: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    link = Link(loop, ours, lambda kind, number, body: heard.append((kind, number, bytes(body))), lost.append)
    peer = Link(loop, theirs, lambda *frame: None, lambda error: None)
    peer.send(9, 1, b"fare", b"well")
    peer.send(10, 2)
    peer.close()
    link.drain()
    assert heard == [(9, 1, b"farewell"), (10, 2, b"")]
    assert lost == [None]


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
