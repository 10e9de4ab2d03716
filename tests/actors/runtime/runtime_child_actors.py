"""Actors that the process tests place in a child, and their messages."""

import asyncio
import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec

from actors.runtime import (
    Actor,
    EarlyReply,
    Lane,
    Later,
    Message,
    RequestError,
    current_traceparent,
    handles,
    handles_in_thread,
)
from tests.kits.waiting import until


class ChildProtocol: ...


class ListenerProtocol: ...


class Settings(msgspec.Struct, frozen=True):
    factor: int = 1
    fail_start: bool = False
    start_seconds: float = 0.0


class Multiply(Message[ChildProtocol, int], frozen=True):
    value: int


class Rows(msgspec.Struct, frozen=True):
    number: int
    tokens: bytes


class Step(Message[ChildProtocol, Rows], frozen=True):
    number: int
    tokens: bytes


class Facts(msgspec.Struct, frozen=True):
    pid: int
    incarnation: int
    descriptors: list[str]
    sigint_ignored: bool
    environment: str | None
    traceparent: str | None
    process_name: str
    modules: list[str]


class Inspect(Message[ChildProtocol, Facts], frozen=True): ...


class Prepared(Message[ChildProtocol, str], frozen=True):
    """What was done before the start."""


class Exit(Message[ChildProtocol, None], frozen=True):
    signal: int = 0
    code: int = 0


class Raise(Message[ChildProtocol, None], frozen=True):
    bad_request: bool = False


class Sleep(Message[ChildProtocol, None], frozen=True):
    seconds: float


class Hold(Message[ChildProtocol, None], frozen=True):
    """Is in hand until there is a file ``path``."""

    path: str


class Block(Message[ChildProtocol, None], frozen=True):
    seconds: float


class Ping(Message[ChildProtocol, str], frozen=True):
    lane: ClassVar[Lane] = Lane.CONTROL


class Count(Message[ChildProtocol, None], frozen=True):
    redeliver: ClassVar[bool] = True
    key: str


class Counted(Message[ChildProtocol, list[str]], frozen=True): ...


class Poison(Message[ChildProtocol, None], frozen=True):
    redeliver: ClassVar[bool] = True
    path: str


class Speak(Message[ChildProtocol, None], frozen=True):
    text: str
    from_thread: bool = False


class Leave(Message[ChildProtocol, None], frozen=True): ...


class Chatter(Message[ChildProtocol, None], frozen=True):
    count: int
    text: str = ""
    from_thread: bool = False


class Chain(Message[ChildProtocol, None], frozen=True): ...


class Missing(Message[ChildProtocol, None], frozen=True): ...


class Large(Message[ChildProtocol, bytes], frozen=True):
    size: int


class Garbage(Message[ChildProtocol, None], frozen=True):
    data: bytes


class Offspring(Message[ChildProtocol, str], frozen=True):
    """What a process that the child starts inherits."""


class Progress(Message[ListenerProtocol, None], frozen=True):
    text: str


class BadPrompt(RequestError):
    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class Bequeath(Message[ChildProtocol, None], frozen=True):
    """Have something done when the process ends, and a thread that does not end."""

    path: str


class Work(Message[ChildProtocol, str], frozen=True):
    """A call in the thread. `how`: say (the trace context), size, refuse, fail, later, later fail, held, first."""

    how: str
    text: str = ""


def _note(path: str) -> None:
    with open(path, "w") as file:
        file.write("done")


class ChildActor(Actor[ChildProtocol]):
    prepared = ""
    end = "in order"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counted: list[str] = []

    @classmethod
    def prepare(cls, settings: Settings) -> None:
        cls.prepared = f"prepared before {'started' if isinstance(settings, Settings) else 'what?'}"

    async def started(self) -> None:
        if self.settings.start_seconds:
            await asyncio.sleep(self.settings.start_seconds)
        if self.settings.fail_start:
            raise RuntimeError("no device found")

    async def stopping(self) -> None:
        logging.getLogger("troupe.child").warning("stopping %s", self.end)

    @handles
    def multiply(self, message: Multiply) -> int:
        return message.value * self.settings.factor

    @handles
    def step(self, message: Step) -> Rows:
        return Rows(message.number, message.tokens[::-1])

    @handles
    def tell_prepared(self, message: Prepared) -> str:
        return self.prepared

    @handles
    def inspect(self, message: Inspect) -> Facts:
        return Facts(
            pid=os.getpid(),
            incarnation=self.context.incarnation,
            descriptors=[os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)],
            sigint_ignored=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            environment=os.environ.get("TROUPE_TEST"),
            traceparent=current_traceparent.get(),
            process_name=Path("/proc/self/comm").read_text().strip(),
            modules=sorted(name for name in sys.modules if "." not in name),
        )

    @handles
    def exit(self, message: Exit) -> None:
        if message.signal:
            os.kill(os.getpid(), message.signal)
        os._exit(message.code)

    @handles
    def fail(self, message: Raise) -> None:
        if message.bad_request:
            raise BadPrompt("too long", param="prompt")
        raise ValueError("the device is on fire")

    @handles
    async def sleep(self, message: Sleep) -> None:
        await asyncio.sleep(message.seconds)

    @handles
    async def hold(self, message: Hold) -> None:
        _note(f"{message.path}.begun")
        await until(lambda: os.path.exists(message.path))

    @handles
    def block(self, message: Block) -> None:
        time.sleep(message.seconds)

    @handles
    def ping(self, message: Ping) -> str:
        return "pong"

    @handles
    def count(self, message: Count) -> None:
        self.counted.append(message.key)

    @handles
    def tell_counted(self, message: Counted) -> list[str]:
        return self.counted

    @handles
    def poison(self, message: Poison) -> None:
        with open(message.path, "a") as file:
            file.write("x")
        os._exit(3)

    @handles
    def speak(self, message: Speak) -> None:
        logging.getLogger("troupe.child").warning("said %s", message.text)
        if message.from_thread:
            thread = threading.Thread(target=self.context.parent_tell, args=(Progress(message.text),))
            thread.start()
            thread.join()
        else:
            self.context.parent_tell(Progress(message.text))

    @handles
    def chatter(self, message: Chatter) -> None:
        log = logging.getLogger("troupe.child")

        def talk() -> None:
            for number in range(message.count):
                log.info("chatter %d %s", number, message.text)
            log.error("the end of it")
            warnings.warn("deprecated thing", stacklevel=1)
            logging.getLogger("some.library").warning("from a library")

        if message.from_thread:
            thread = threading.Thread(target=talk)
            thread.start()
            thread.join()
        else:
            talk()

    @handles
    def chain(self, message: Chain) -> None:
        try:
            try:
                raise OSError("the cable to caf\udce9 was pulled")  # as the names of some files are
            except OSError as error:
                raise ValueError("no answer from the device") from error
        except ValueError:
            _fail_step()

    @handles
    def bequeath(self, message: Bequeath) -> None:
        atexit.register(_note, message.path)
        threading.Thread(target=threading.Event().wait).start()

    @handles
    def leave(self, message: Leave) -> None:
        self.context.stop_self()

    @handles
    def large(self, message: Large) -> bytes:
        return b"x" * message.size

    @handles
    def offspring(self, message: Offspring) -> str:
        return subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
        ).stdout

    @handles
    def garbage(self, message: Garbage) -> None:
        """Write what is no frame to the link, the only socket here."""
        for fd in os.listdir("/proc/self/fd"):
            if _open(fd) and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(int(fd), message.data)


class ChildWithThread(ChildActor):
    @handles_in_thread
    def work(self, message: Work, sent: float) -> str | EarlyReply[str] | Later[str]:
        assert threading.current_thread() is not threading.main_thread()
        assert 0.0 <= time.monotonic() - sent < 600.0
        if message.how == "refuse":
            raise BadPrompt("too long", param="prompt")
        if message.how == "fail":
            raise ValueError("the device is on fire")
        if message.how == "disconnect":
            raise ConnectionResetError("the peers of the device are gone")
        if message.how == "held":
            _note(f"{message.text}.begun")
            while not os.path.exists(message.text):
                time.sleep(0.005)
            self.end = f"after {message.text}"
        if message.how == "size":
            return "x" * int(message.text)
        if message.how.startswith("first"):
            return EarlyReply("first", partial(self._then, message.how, message.text))
        if not message.how.startswith("later"):
            return current_traceparent.get() or message.text
        later: Later[str] = Later()

        def fulfil() -> None:
            if message.how == "later":
                later.set_result(message.text)
            else:
                later.set_exception(BadPrompt("no", param="x") if message.text else ConnectionError("lost later"))

        threading.Thread(target=fulfil).start()
        return later

    def _then(self, how: str, gate: str) -> None:
        if how == "first fail":
            raise ValueError("lost after the answer")
        while not os.path.exists(gate):
            time.sleep(0.005)
        self.end = f"after {gate}"


def _fail_step() -> None:
    raise RuntimeError("the step failed")


def _open(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")
