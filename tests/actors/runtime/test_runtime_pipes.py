"""What comes to an actor through its own mailbox: answers to what it has piped, and the ends of those it watches."""

from actors.runtime import (
    Actor,
    ActorRef,
    Message,
    Terminated,
    handles,
)
from actors.runtime.testing import TestKit
from tests.actors.runtime.desk import DeskProtocol, Work, desk


class ClientProtocol: ...


class Begin(Message[ClientProtocol, None], frozen=True):
    name: str
    timeout: float = 5.0


class EarlyReply(Message[ClientProtocol, None], frozen=True):
    text: str


class Failed(Message[ClientProtocol, None], frozen=True):
    error: str


class Client(Actor[ClientProtocol]):
    def __init__(self, target: ActorRef[DeskProtocol], log: list[str], watching: bool = False) -> None:
        self.target = target
        self.log = log
        self.watching = watching

    async def started(self) -> None:
        if self.watching:
            self.context.watch(self.target)

    @handles
    def begin(self, message: Begin) -> None:
        if message.name == "crash":
            raise ValueError("as requested")
        self.context.pipe(
            self.target,
            Work(message.name),
            timeout=message.timeout,
            on_reply=lambda text: EarlyReply(text),
            on_error=lambda error: Failed(type(error).__name__),
        )

    @handles
    def answered(self, message: EarlyReply) -> None:
        self.log.append(message.text)

    @handles
    def failed(self, message: Failed) -> None:
        self.log.append(message.error)

    @handles
    def terminated(self, message: Terminated) -> None:
        self.log.append(f"{message.name} ended {message.cause}".strip())


async def test_pipe_brings_answers_and_errors_through_the_mailbox() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        log: list[str] = []
        client = await kit.system.spawn(lambda: Client(ref, log), name="client", capacity=1)
        await client.tell(Begin("a"))
        await kit.run_until_idle()
        assert log == ["A"]
        actor.gate.clear()
        await client.tell(Begin("b", timeout=1.0))
        await kit.advance(1.0)
        assert log == ["A", "AskTimeout"]
        actor.gate.set()
        await kit.run_until_idle()
        assert kit.system.late_replies == 1
        await kit.system.stop_actor(ref)
        await client.tell(Begin("c"))
        await kit.run_until_idle()
        assert log == ["A", "AskTimeout", "ActorDied"]


async def test_a_pipe_of_an_earlier_incarnation_is_dropped() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        log: list[str] = []
        client = await kit.system.spawn(lambda: Client(ref, log), name="client")
        actor.gate.clear()
        await client.tell(Begin("old"))
        await kit.run_until_idle()
        await client.tell(Begin("crash"))
        await kit.advance(1.0)
        assert kit.system.describe()[1].incarnation == 1
        await client.tell(Begin("new"))
        actor.gate.set()
        await kit.run_until_idle()
        assert log == ["NEW"]


async def test_a_reply_is_accepted_when_the_mailbox_is_full() -> None:
    async with TestKit() as kit:
        ref, actor = await desk(kit)
        log: list[str] = []
        client = await kit.system.spawn(lambda: Client(ref, log), name="client", capacity=1)
        actor.gate.clear()
        await client.tell(Begin("a"))
        await kit.run_until_idle()
        await client.tell(Begin("b"))
        actor.gate.set()
        await kit.run_until_idle()
        assert log == ["A", "B"]


async def test_death_watch_fires_once_also_for_the_already_dead() -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        logs: list[list[str]] = [[], []]
        await kit.system.spawn(lambda: Client(ref, logs[0], watching=True), name="before")
        kit.system.crash_actor(ref, ValueError("only a restart"))
        await kit.advance(1.0)
        assert ref.is_alive()
        assert logs[0] == []
        await kit.system.stop_actor(ref)
        await kit.system.spawn(lambda: Client(ref, logs[1], watching=True), name="after")
        await kit.run_until_idle()
        assert logs == [["desk ended"], ["desk ended"]]


async def test_a_watch_ends_with_its_incarnation() -> None:
    async with TestKit() as kit:
        ref, _ = await desk(kit)
        log: list[str] = []
        client = await kit.system.spawn(lambda: Client(ref, log, watching=True), name="client")
        await client.tell(Begin("crash"))
        await kit.advance(1.0)
        await kit.system.stop_actor(ref)
        await kit.run_until_idle()
        assert log == ["desk ended"]
