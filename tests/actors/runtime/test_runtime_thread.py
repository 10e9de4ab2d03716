"""Messages that an actor in a child process handles in a thread of its own."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_child_actors import BadPrompt, ChildProtocol, ChildWithThread, Exit, Leave, Multiply, Ping, Settings, Work

from actors.runtime import (
    Actor,
    ActorDied,
    ActorRef,
    ActorSystem,
    Backoff,
    MessageTooLarge,
    Supervision,
    handles_in_thread,
)
from actors.runtime.core.actor import handlers_of
from actors.runtime.core.message import current_traceparent
from tests.kits.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a socket pair")

QUICK = Supervision(max_restarts=5, within=60.0, backoff=Backoff(first=0.01, jitter=0.0))


async def spawn(system: ActorSystem, **options: Any) -> ActorRef[ChildProtocol]:
    target = "runtime_child_actors:ChildWithThread"
    return await system.spawn_process(
        ChildProtocol, name="worker", target=target, config=Settings(), supervision=QUICK, **options
    )


async def hold(ref: ActorRef[ChildProtocol], folder: Path) -> tuple[Path, asyncio.Task[str]]:
    """A message that is in the thread's hand until the file is there."""
    gate = folder / "gate"
    reply = asyncio.create_task(ref.ask(Work("held", str(gate)), timeout=60))
    await until((folder / "gate.begun").exists, "it was not begun")
    return gate, reply


async def test_it_answers_beside_the_mailbox_and_in_order(system: ActorSystem, tmp_path: Path) -> None:
    ref = await spawn(system)
    gate = tmp_path / "gate"
    first = asyncio.create_task(ref.ask(Work("held", str(gate)), timeout=60))
    second = asyncio.create_task(ref.ask(Work("say", "second"), timeout=60))
    assert await ref.ask(Multiply(14), timeout=60) == 14
    assert await ref.ask(Ping(), timeout=60) == "pong"
    assert not first.done()
    assert not second.done()
    gate.touch()
    assert await first == str(gate)
    assert await second == "second"
    token = current_traceparent.set("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
    trace = await ref.ask(Work("say"), timeout=60)
    current_traceparent.reset(token)
    assert trace == "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    assert await ref.ask(Work("say", "none"), timeout=60) == "none"
    assert await ref.ask(Work("later", "in time"), timeout=60) == "in time"
    assert await ref.ask(Work("size", "700000"), timeout=60) == "x" * 700_000


async def test_a_request_error_is_the_askers_and_anything_else_a_death(system: ActorSystem) -> None:
    ref = await spawn(system, frame_limit=4096)
    for bad in (Work("refuse"), Work("later fail", "refuse")):
        with pytest.raises(BadPrompt):
            await ref.ask(bad, timeout=60)
    with pytest.raises(MessageTooLarge):
        await ref.ask(Work("size", "5000"), timeout=60)
    assert system.describe()[0].incarnation == 0
    deaths = {"fail": "the device is on fire", "disconnect": "the peers of the device", "later fail": "lost later"}
    for number, (bad, words) in enumerate(deaths.items(), 1):
        with pytest.raises(ActorDied, match=words):
            await ref.ask(Work(bad), timeout=60)
        assert await ref.ask(Work("say", "alive"), timeout=60) == "alive"
        assert system.describe()[0].incarnation == number


async def test_an_early_reply_does_not_wait_for_the_thread(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await spawn(system, stop_timeout=60.0)
    gate = tmp_path / "gate"
    assert await ref.ask(Work("first", str(gate)), timeout=60) == "first"
    after = asyncio.create_task(ref.ask(Work("say", "after"), timeout=60))
    assert await ref.ask(Ping(), timeout=60) == "pong"
    assert not after.done()
    gate.touch()
    assert await after == "after"
    with suppress(ActorDied):  # its death may be reported before its answer
        assert await ref.ask(Work("first fail"), timeout=60) == "first"
    await until(lambda: system.describe()[0].incarnation == 1, "it lived on")
    assert await ref.ask(Work("say", "alive"), timeout=60) == "alive"
    assert "lost after the answer" in caplog.text


async def test_an_orderly_stop_waits_for_the_message_in_hand(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await spawn(system, stop_timeout=60.0)
    gate, reply = await hold(ref, tmp_path)
    stopping = asyncio.create_task(system.stop_actor(ref))
    await asyncio.sleep(0.01)
    assert not stopping.done()
    gate.touch()
    await stopping
    assert f"stopping after {gate}" in caplog.text
    assert await reply == str(gate)


async def test_an_actor_that_stops_itself_answers_in_its_thread_first(
    system: ActorSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = await spawn(system, stop_timeout=60.0)
    gate, reply = await hold(ref, tmp_path)
    await ref.ask(Leave(), timeout=60)
    more = asyncio.create_task(ref.ask(Work("say", "too late"), timeout=60))  # nobody reads any more
    await asyncio.sleep(0.01)
    gate.touch()
    assert await reply == str(gate)
    await asyncio.gather(more, return_exceptions=True)
    await until(lambda: f"stopping after {gate}" in caplog.text, "it stopped before")


async def test_a_message_that_kills_is_not_handled_again(system: ActorSystem, tmp_path: Path) -> None:
    ref = await spawn(system)
    _, reply = await hold(ref, tmp_path)
    await ref.tell(Exit(code=3))
    await asyncio.gather(reply, return_exceptions=True)
    assert await ref.ask(Work("say", "alive"), timeout=60) == "alive"
    assert await ref.ask(Ping(), timeout=60) == "pong"  # behind what the mailbox would have again
    assert system.describe()[0].incarnation == 1


async def test_only_a_process_has_such_a_thread(system: ActorSystem) -> None:
    with pytest.raises(TypeError, match="spawn_process"):
        await system.spawn(lambda: ChildWithThread(Settings()), name="here")


def test_its_handlers_are_plain_methods_that_take_the_time_of_sending() -> None:
    class Awaits(Actor[ChildProtocol]): ...

    class Short(Actor[ChildProtocol]): ...

    async def awaits(self: Actor[ChildProtocol], message: Work, sent: float) -> str:
        return ""

    def short(self: Actor[ChildProtocol], message: Work) -> str:
        return ""

    for actor, method, words in ((Awaits, awaits, "plain method"), (Short, short, "send time")):
        actor._handlers, actor.work = None, handles_in_thread(method)
        with pytest.raises(TypeError, match=words):
            handlers_of(actor)
