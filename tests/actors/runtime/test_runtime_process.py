"""What goes between an actor in a child process and its system."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import (
    BadPrompt,
    Chain,
    Chatter,
    Count,
    Counted,
    Exit,
    Garbage,
    Hold,
    Inspect,
    Large,
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
    ActorSystem,
    AskTimeout,
    ChildCrash,
    MessageTooLarge,
    UnknownMessage,
    current_traceparent,
)
from actors.runtime.process.frames import Kind, frame
from actors.runtime.process.link import Link
from tests.actors.runtime.children import in_hand, spawn
from tests.kits.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair and signals")


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
        (Garbage(b"\xff" * 100), "invalid frame", None),
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


DEEP = b"\x91" * 20_000 + b"\xc0"


@pytest.mark.parametrize(
    "sent",
    [
        (2**32 - 1).to_bytes(4, "little") + bytes(9),
        bytes(13),
        frame(Kind.REPLY, 1, msgspec.msgpack.encode("three")),
        frame(Kind.REPLY, 1, DEEP),
        frame(Kind.ERROR, 1, b"\xc1"),
        frame(Kind.ERROR, 1, DEEP),
        frame(Kind.ERROR, 1, msgspec.msgpack.encode({"kind": 1, "arguments": {}, "fields": [], "text": None})),
        frame(Kind.EVENT, 0, msgspec.msgpack.encode({"type": "Progress", "done": "all"})),
        frame(Kind.LOG, 0, msgspec.msgpack.encode([1, 2, 3])),
        frame(Kind.LOG, 0, DEEP),
        frame(Kind.READY, 0, msgspec.msgpack.encode([["Multiply"], 5])),
        frame(Kind.DIED, 0, msgspec.msgpack.encode({"reason": 5})),
        frame(Kind.MESSAGE, 1, b""),
    ],
    ids=lambda sent: repr(sent[:24]),
)
async def test_a_hostile_frame_of_a_child_ends_that_child_alone(system: ActorSystem, sent: bytes) -> None:
    ref, other = await spawn(system), await spawn(system, name="other")
    with pytest.raises(ActorDied, match="invalid frame"):
        await ref.ask(Garbage(sent), timeout=PATIENCE)
    assert await other.ask(Multiply(2), timeout=PATIENCE) == 2
    assert await ref.ask(Multiply(2), timeout=PATIENCE) == 2
    assert [status.incarnation for status in system.describe()] == [1, 0]


async def test_replies_without_an_ask_are_counted(system: ActorSystem) -> None:
    ref = await spawn(system)
    await ref.tell(Garbage(frame(Kind.REPLY, 2**64 - 1, b"\xc1") * 2000))
    assert await ref.ask(Multiply(2), timeout=PATIENCE) == 2
    assert system.late_replies >= 2000


def test_a_crash_is_one_line_where_it_is_named_in_passing() -> None:
    crash = ChildCrash("ValueError: the device is on fire", "Traceback (most recent call last):\n  File ...", 1)
    assert f"lost in a crash: {crash!r}" == "lost in a crash: ChildCrash('ValueError: the device is on fire')"


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
        await until((tmp_path / "gate.begun").exists, "it has not begun")  # in hand may also mean: on its way
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


async def test_unhandled_messages_survive_a_death(system: ActorSystem) -> None:
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


async def test_poison_kills_two_incarnations_and_is_quarantined(system: ActorSystem, tmp_path: Path) -> None:
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
    ref = await spawn(system, heartbeat=0.02)
    gate = tmp_path / "gate"
    with pytest.raises(AskTimeout):
        await ref.ask(Hold(str(gate)), timeout=1.0)  # in which it begins, also on a busy machine
    await until((tmp_path / "gate.begun").exists, "it has not begun")
    await ref.tell(Count("expired"), deadline=time.monotonic() + 0.01)
    heard = set[float]()

    def beats() -> int:
        heard.add(ref._cell.incarnation._last_frame_at)  # type: ignore[union-attr, attr-defined]
        return len(heard)

    # The child counts the time that is left from when it reads the message, at the latest before its second heartbeat.
    await until(lambda: beats() > 4, "its heart does not beat")
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
    reported: list[Progress] = []
    ref = await spawn(system, events=reported.append, events_type=Progress)
    with caplog.at_level(logging.INFO, logger="troupe"):
        await ref.ask(Speak("hello"), timeout=PATIENCE)
        await ref.ask(Speak("from a thread", from_thread=True), timeout=PATIENCE)
        await until(lambda: len(reported) == 2)
        await until(lambda: any(record.name == "troupe.child" for record in caplog.records))
    assert reported == [Progress("hello"), Progress("from a thread")]
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
    (reported, *_) = [record for record in caplog.records if record.name == "troupe.logs"]
    assert (reported.levelno, reported.__dict__["actor"]) == (logging.WARNING, "worker")


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
    assert len(line) < 50_000


async def test_a_death_reports_its_first_cause(system: ActorSystem) -> None:
    ref = await spawn(system)
    with pytest.raises(ActorDied) as caught:
        await ref.ask(Chain(), timeout=PATIENCE)
    assert isinstance(caught.value.cause, ChildCrash)
    first = r"OSError: the cable to caf\udce9 was pulled"
    assert caught.value.cause.reason == f"RuntimeError: the step failed (first cause: {first})"


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
    received: list[tuple[int, int, bytes]] = []
    lost: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    link = Link(loop, ours, lambda kind, number, body: received.append((kind, number, bytes(body))), lost.append)
    peer = Link(loop, theirs, lambda *frame: None, lambda error: None)
    peer.send(9, 1, b"fare", b"well")
    peer.send(10, 2)
    peer.close()
    link.drain()
    assert received == [(9, 1, b"farewell"), (10, 2, b"")]
    assert lost == [None]


async def test_what_a_slow_peer_has_read_is_no_backlog() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    received: list[tuple[int, int]] = []
    link = Link(loop, ours, lambda *frame: None, lambda error: None)
    for number in range(100):
        link.send(1, number, b"x" * 100_000)
    waiting = link.backlog
    assert 0 < waiting < 100 * 100_013
    peer = Link(loop, theirs, lambda kind, number, body: received.append((number, len(body))), lambda error: None)
    await asyncio.wait_for(link.flush(), PATIENCE)
    assert link.backlog == 0
    await until(lambda: len(received) == 100)
    assert received == [(number, 100_000) for number in range(100)]
    link.close()
    peer.close()


async def test_a_link_that_was_lost_in_waiting_notifies_its_new_owner() -> None:
    ours, theirs = socket.socketpair()
    lost: list[str] = []
    link = Link(asyncio.get_running_loop(), ours, lambda *frame: None, lambda error: lost.append("old"))
    theirs.close()
    await until(lambda: link.closed)
    link.rebind(lambda *frame: None, lambda error: lost.append("new"))
    assert lost == ["old"]  # not before the owner is done with taking it over
    await until(lambda: len(lost) == 2)
    assert lost == ["old", "new"]
