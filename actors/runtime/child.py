"""The child process's side of an actor in a child process."""

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Union

import msgspec

from actors.runtime.core.actor import Actor, handlers_of
from actors.runtime.core.cell import Cell, CellSettings
from actors.runtime.core.errors import ActorDied, MessageTooLarge, first_cause
from actors.runtime.core.events import Event, EventKind
from actors.runtime.core.incarnation import LocalIncarnation
from actors.runtime.core.message import Envelope, Message
from actors.runtime.core.stacks import of_threads
from actors.runtime.core.supervisor import Strategy, Supervision
from actors.runtime.process.child_log import ChildLog
from actors.runtime.process.frames import Kind
from actors.runtime.process.link import Link
from actors.runtime.process.thread import ActorThread
from actors.runtime.process.wire import ChildSpec, Death, LogLine, carried, import_name, pack_error, unpack_header
from actors.runtime.system import ActorSystem

__all__ = ["main"]

_LOG_BACKLOG = 1024 * 1024
"""Log records are dropped while more bytes than this wait for a parent that does not read."""

_UNHURRIED = 1e6
"""Seconds. The parent decides how long a stop may take."""


def main(sock: socket.socket, thread_sock: socket.socket, spec: bytes, turn: Callable[[], int]) -> None:
    """Run the actor that ``spec`` describes until it is stopped, dies, or loses its parent.

    The process prepares first; then ``turn`` waits for the number of the incarnation that it becomes.
    """
    sock.set_inheritable(False)
    thread_sock.set_inheritable(False)
    described = msgspec.msgpack.decode(spec, type=ChildSpec)
    _show_name(f"{described.name} spare")
    # An error is dropped: the start raises it again and reports it.
    with contextlib.suppress(Exception):
        import_name(described.target).prepare(*_arguments(described))
    incarnation = turn()
    _show_name(described.name)

    async def live() -> None:
        await _Child(described, incarnation, sock, thread_sock).live()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(live())
    _leave()


def _show_name(name: str) -> None:
    """Set the name that ps and top show; only Linux has it, of 15 bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode())


def _leave() -> None:
    """End this process without finalizing the interpreter.

    With torch, finalizing takes half a second, and a native thread that enters the interpreter meanwhile aborts.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _arguments(spec: ChildSpec) -> list[Any]:
    if spec.config_type is None:
        return []
    return [msgspec.msgpack.decode(spec.config, type=import_name(spec.config_type))]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Child:
    """Posts the parent's messages to an actor in its own system, and sends replies and events back."""

    def __init__(self, spec: ChildSpec, incarnation: int, sock: socket.socket, thread_sock: socket.socket) -> None:
        self._spec = spec
        self._incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._done = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._cell: Cell | None = None
        self._decoder: msgspec.msgpack.Decoder[Any] | None = None
        self._thread_sock = thread_sock
        self._actor_thread: ActorThread | None = None
        self._link = Link(self._loop, sock, self._on_frame, self._on_lost, spec.limit)
        self._log = ChildLog(self._send_log, lambda: self._link.backlog < _LOG_BACKLOG)

    async def live(self) -> None:
        # This process belongs to the system, so it may configure the root logger, which has the records of other
        # libraries.
        logging.getLogger().addHandler(self._log)
        logging.captureWarnings(True)
        logger = logging.getLogger("troupe")
        logger.addHandler(self._log)
        logger.setLevel(self._spec.log_level)
        logger.propagate = False
        logging.getLogger("troupe.runtime").setLevel(logging.CRITICAL + 1)  # the parent logs these events
        beat = self._loop.create_task(self._beat(), name="heartbeat")
        try:
            async with ActorSystem(self._spec.name) as system:
                system.on_event(self._on_event)
                await self._spawn(system)
                await self._done.wait()
            if system.failed.cause is not None:
                await self._die(system.failed.cause)
        except (Exception, SystemExit) as error:
            await self._die(error)
        finally:
            beat.cancel()
        self._link.send(Kind.STOPPED, 0)
        await self._link.flush()
        self._link.close()

    async def _spawn(self, system: ActorSystem) -> None:
        spec = self._spec
        cls: type[Actor[Any]] = import_name(spec.target)
        table = handlers_of(cls)
        if not table:
            raise TypeError(f"{spec.target} handles no message: mark its methods with @handles")
        by_mailbox = [message for message, handler in table.items() if not handler.in_thread]
        in_thread = {message: handler.method for message, handler in table.items() if handler.in_thread}
        if by_mailbox:
            self._decoder = msgspec.msgpack.Decoder(Union[tuple(by_mailbox)])  # noqa: UP007 - made at run time
        actor = cls(*_arguments(spec))

        def make(cell: Cell, number: int) -> LocalIncarnation:
            self._cell = cell
            return _ChildIncarnation(cell, self._incarnation, actor, self.end_thread)

        await system.place(
            make,
            frozenset(by_mailbox),
            CellSettings(
                name=spec.name,
                capacity=spec.window,
                control_capacity=spec.window,
                supervision=Supervision(Strategy.ESCALATE),
                group=None,
                stop_timeout=_UNHURRIED,
            ),
            events=self._send_event,
            wait=True,
        )
        if in_thread:
            handlers = {message: getattr(actor, method) for message, method in in_thread.items()}
            self._actor_thread = ActorThread(spec.name, self._thread_sock, handlers, self._crash_safely, spec.limit)
        names = [[message.__name__ for message in part] for part in (by_mailbox, in_thread)]
        self._link.send(Kind.READY, 0, self._encode(names))

    async def end_thread(self) -> None:
        if self._actor_thread is not None:
            await self._loop.run_in_executor(None, self._actor_thread.end)

    def _crash_safely(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._crash, error)

    def _crash(self, error: BaseException) -> None:
        if self._cell is not None and self._cell.incarnation is not None:
            self._cell.incarnation.crash(error)

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.ESCALATED or event.kind is EventKind.STOPPED:
            self._done.set()

    def _on_frame(self, kind: int, correlation: int, body: memoryview) -> None:
        if kind == Kind.STOP:
            self._done.set()
            return
        if kind == Kind.STACKS:
            logging.getLogger("troupe.stall").warning("stacks of actor %s:\n%s", self._spec.name, of_threads())
            return
        cell, decoder = self._cell, self._decoder
        if kind != Kind.MESSAGE or cell is None or decoder is None:
            raise ValueError(f"the parent sent a frame of kind {kind} out of turn")
        remaining, trace, rest = unpack_header(body)
        message: Message[Any, Any] = decoder.decode(rest)
        if cell.closed:
            return  # it is stopping; the parent replies for it
        now = cell.monotonic()
        deadline = None if remaining is None else now + remaining
        cell.post(Envelope(message, trace, now, deadline, _ReplyFrame(self, correlation)))

    def _on_lost(self, error: BaseException | None) -> None:
        if error is not None:
            sys.stderr.write(f"actor {self._spec.name}: the parent sent an invalid frame: {error}\n")
            sys.stderr.flush()
        os._exit(1)

    def reply(self, correlation: int, result: Any) -> None:
        body = self._encode(result)
        if len(body) > self._spec.limit - 64:
            self.reply_error(
                correlation, MessageTooLarge(f"a reply of {len(body)} bytes is over the limit of {self._spec.limit}")
            )
        else:
            self._link.send(Kind.REPLY, correlation, body)

    def reply_error(self, correlation: int, error: BaseException) -> None:
        self._link.send(Kind.ERROR, correlation, pack_error(error))

    def _send_event(self, message: Message[Any, None]) -> None:
        self._send_safely(Kind.EVENT, self._encode(message))

    def _send_log(self, line: LogLine) -> None:
        self._send_safely(Kind.LOG, self._encode(line))

    def _send_safely(self, kind: Kind, body: bytes) -> None:
        """Send from any thread."""
        if threading.get_ident() == self._thread:
            self._link.send(kind, 0, body)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._link.send, kind, 0, body)

    async def _beat(self) -> None:
        while True:
            self._link.send(Kind.HEARTBEAT, 0)
            self._log.tell_dropped()
            await asyncio.sleep(self._spec.heartbeat)

    async def _die(self, error: BaseException) -> None:
        """Report the error and end without waiting for threads that may hang."""
        detail = "".join(traceback.format_exception(error))
        reason, first = f"{type(error).__name__}: {error}", first_cause(error)
        if first is not error:
            reason += f" (first cause: {type(first).__name__}: {first})"
        self._log.tell_dropped()
        self._link.send(Kind.DIED, 0, self._encode(Death(carried(reason), carried(detail))))
        try:
            await asyncio.wait_for(self._link.flush(), 1.0)
        finally:
            os._exit(1)


class _ChildIncarnation(LocalIncarnation):
    """Ends the actor's thread before the actor is stopped."""

    def __init__(
        self, cell: Cell, number: int, actor: Actor[Any], end_thread: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__(cell, number, actor)
        self._end_thread = end_thread

    async def before_stopping(self) -> None:
        await self._end_thread()


class _ReplyFrame:
    """The reply slot of a message from the parent. A message from ``tell`` has one too: its reply is the
    acknowledgement."""

    __slots__ = ("_child", "_correlation")

    def __init__(self, child: _Child, correlation: int) -> None:
        self._child = child
        self._correlation = correlation

    def done(self) -> bool:
        return False

    def set_result(self, result: Any, /) -> None:
        self._child.reply(self._correlation, result)

    def set_exception(self, exception: BaseException, /) -> None:
        if isinstance(exception, ActorDied):
            return  # this actor is ending: the parent replies for unfinished messages
        self._child.reply_error(self._correlation, exception)
