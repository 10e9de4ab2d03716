"""The parent's side of an actor in a child process."""

import signal
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import msgspec

from actors.runtime.core.cell import Cell
from actors.runtime.core.clock import Timer, within
from actors.runtime.core.errors import ChildCrash, MessageTooLarge, UnknownMessage
from actors.runtime.core.incarnation import Incarnation
from actors.runtime.core.message import Envelope, Lane
from actors.runtime.process.child_process import ChildProcess, Standby
from actors.runtime.process.frames import Kind
from actors.runtime.process.launched import Launcher
from actors.runtime.process.link import Link
from actors.runtime.process.plan import ProcessPlan, launch
from actors.runtime.process.wire import Death, LogLine, pack_header, unpack_error, write_record

__all__ = ["ProcessIncarnation"]

_KILL_AFTER_SECONDS = 1.0
"""Seconds between the end of a child's link and SIGKILL."""

_STANDBY_PATIENCE_SECONDS = 10.0
"""Seconds that a standby, whose imports are mostly done, may take to start before a new process replaces it: it may
have been stopped (SIGSTOP) while it waited."""

_HEADROOM = 512
"""Bytes of a frame besides the message: header, deadline, trace context."""


class ProcessIncarnation(Incarnation):
    """One child process.

    Messages stay in this mailbox until the child has room: at most ``window`` of each lane are in flight. A child
    handles them in order, in its mailbox and in its thread. So when it dies, only the oldest of each lane in each of
    these can have been begun; the others return to the mailbox, and every ask in flight fails with ActorDied.
    """

    def __init__(
        self,
        cell: Cell,
        number: int,
        plan: ProcessPlan,
        launcher: Launcher,
        standby: Standby | None = None,
    ) -> None:
        super().__init__(cell, number)
        self._standby = standby
        self._launcher = launcher
        self._plan = plan
        self._child: ChildProcess | None = None
        self._link: Link | None = None
        self._scope = anyio.CancelScope()
        self._launching = anyio.CancelScope()
        self._change = anyio.Event()
        self._in_thread: frozenset[Any] = frozenset()  # message types that the actor's thread handles
        self._ready = False
        self._stopping = False
        self._gone = False  # the link has ended
        self._in_order = False
        self._death: Death | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._correlation = 0
        self._sent: tuple[dict[int, tuple[Envelope, float]], ...] = ({}, {})  # by lane, then by correlation id
        self._last_frame_at = cell.monotonic()
        self._heartbeat_timer: Timer | None = None

    # -- start and end -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            try:
                with self._scope:
                    await self._live()
            except (Exception, SystemExit) as error:
                self._blame(error)
            finally:
                self.cell.mailbox.on_work(None)
                with anyio.CancelScope(shield=True):
                    await self._reap()
        finally:
            self.mark_ended()

    async def _live(self) -> None:
        if self._stopping or self.cause is not None:
            return
        if self._begin_standby():
            with within(self.cell.system.clock, _STANDBY_PATIENCE_SECONDS):
                await self._until(lambda: self._ready or self._gone or self._stopping)
            if not (self._ready or self._gone or self._stopping):
                await self._give_up_standby()
        else:
            await self._begin_new()
        with within(self.cell.system.clock, self._plan.start_timeout):
            await self._until(lambda: self._ready or self._gone or self._stopping)
        if self._gone or self._stopping:
            return
        if not self._ready:
            raise ChildCrash(
                f"did not start within {self._plan.start_timeout:g} s: raise start_timeout if it is only slow"
            )
        self.cell.mailbox.on_work(self._pump)
        self.mark_started()
        if self._standby is not None:
            self._standby.want()
        self._pump()
        self._watch_heartbeat()
        await self._until(lambda: self._gone or self._stopping)
        self.cell.mailbox.on_work(None)
        if self._link is not None and not self._gone:
            self._link.send(Kind.STOP, 0)
            await self._until(lambda: self._gone)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._change = anyio.Event()
            await self._change.wait()

    def _begin_standby(self) -> bool:
        """Make the running standby, if any, this incarnation."""
        child = None if self._standby is None else self._standby.take()
        if child is None or child.exited or child.link.closed:
            return False
        self._begin(child)
        return True

    async def _begin_new(self) -> None:
        """Launch a process and make it this incarnation, unless a stop is requested meanwhile."""
        child: ChildProcess | None = None
        with anyio.CancelScope() as self._launching:
            child = await launch(self.cell, self._plan, self._launcher)
        if child is not None:
            self._begin(child)

    def _begin(self, child: ChildProcess) -> None:
        self._child, self._link, self.pid = child, child.link, child.pid
        child.begin(self.number, self._on_frame, self._on_lost, self._on_exit)

    async def _give_up_standby(self) -> None:
        """Replace a standby that does not start by a new process."""
        child = self._child
        assert child is not None
        self.cell.system.logger.warning(
            "the standby of actor %s did not start within %g s: a new process takes its place",
            self.cell.name,
            _STANDBY_PATIENCE_SECONDS,
        )
        child.abandon(self._change_now)
        with anyio.CancelScope(shield=True):
            await self._until(lambda: child.exited)
        child.close()
        await self._begin_new()

    def _change_now(self) -> None:
        self._change.set()

    def _on_exit(self) -> None:
        self._fall()
        self._gone = True
        self._change.set()

    def _watch_heartbeat(self) -> None:
        limit = self._plan.heartbeat_timeout
        if limit is None or self._gone or self._stopping:
            return
        silent = self.cell.monotonic() - self._last_frame_at
        if silent >= limit:
            self.crash(ChildCrash(f"sent no heartbeat for {silent:.1f} s: its event loop hangs"))
        else:
            self._heartbeat_timer = self.cell.call_later(limit - silent, self._watch_heartbeat)

    async def _reap(self) -> None:
        """Wait for the child's end or kill it; reap it and close its links."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        child = self._child
        if child is None:
            return
        gone = self._gone
        if not gone:
            child.kill()
        with anyio.move_on_after(_KILL_AFTER_SECONDS):
            await self._until(lambda: child.exited)
        if not child.exited:
            child.kill()
            await self._until(lambda: child.exited)
        child.close()
        if self._in_order and not self.stop_requested:
            self.stopped_itself = True
        elif gone and not self.stop_requested:
            assert child.returncode is not None
            reason = _verdict(child.returncode)
            if self._death is None:
                self._blame(ChildCrash(reason, "", child.returncode))
            else:
                self._blame(ChildCrash(self._death.reason, self._death.detail, child.returncode))

    def crash(self, error: BaseException) -> None:
        if not self.ended:
            self._blame(error)
            self.cancel()

    def cancel(self) -> None:
        self._scope.cancel()

    def request_stop(self) -> None:
        self._stopping = True
        self._launching.cancel()
        self._change.set()

    def log_stacks(self) -> None:
        if self._link is not None:
            self._link.send(Kind.STACKS, 0)

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, object]], args: tuple[object, ...], name: str | None
    ) -> None:
        raise RuntimeError("this actor runs in a child process: start its tasks there")

    # -- messages ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send waiting messages while the child has room."""
        window, mailbox = self._plan.window, self.cell.mailbox
        for lane in (Lane.CONTROL, Lane.DATA):
            sent = self._sent[lane]
            while len(sent) < window:
                envelope = mailbox.take_from(lane)
                if envelope is None:
                    break
                self._send(envelope, sent)

    def _send(self, envelope: Envelope, sent: dict[int, tuple[Envelope, float]]) -> None:
        cell, message, child = self.cell, envelope.message, self._child
        assert child is not None
        if envelope.reply is not None and envelope.reply.done():
            return
        now = cell.monotonic()
        remaining = None if envelope.deadline is None else envelope.deadline - now
        if remaining is not None and remaining <= 0.0:
            cell.expire(envelope)
            return
        if message.__class__ not in cell.accepts:  # sent before the child reported its message types
            cell.refuse(envelope, UnknownMessage(cell.name, type(message).__name__))
            return
        try:
            body = self._encode(message)
        except Exception as error:
            cell.refuse(envelope, error)
            return
        limit = self._plan.limit
        if len(body) > limit - _HEADROOM:
            cell.refuse(envelope, MessageTooLarge(f"a message of {len(body)} bytes is over the limit of {limit}"))
            return
        self._correlation += 1
        sent[self._correlation] = (envelope, now)
        in_thread = message.__class__ in self._in_thread
        header = pack_header(now if in_thread else remaining, envelope.traceparent)
        link = child.thread_link if in_thread else child.link
        link.send(Kind.MESSAGE, self._correlation, header, body)

    def _on_frame(self, kind: int, correlation: int, body: memoryview) -> None:
        if kind == Kind.REPLY or kind == Kind.ERROR:
            self._on_reply(kind, correlation, body)
            return
        self._last_frame_at = self.cell.monotonic()
        if kind == Kind.EVENT:
            self._on_told(body)
        elif kind == Kind.LOG:
            write_record(msgspec.msgpack.decode(body, type=LogLine), self.cell.name)
        elif kind == Kind.READY:
            self._on_ready(*msgspec.msgpack.decode(body, type=tuple[list[str], list[str]]))
        elif kind == Kind.DIED:
            self._fall()
            self._death = msgspec.msgpack.decode(body, type=Death)
        elif kind == Kind.STOPPED:
            self._in_order = True
        elif kind != Kind.HEARTBEAT:
            raise ValueError(f"a frame of unknown kind {kind}")

    def _on_reply(self, kind: int, correlation: int, body: memoryview) -> None:
        cell = self.cell
        sent = self._sent[0] if correlation in self._sent[0] else self._sent[1]
        entry = sent.get(correlation)
        if entry is None:
            cell.system.late_replies += 1
            return
        envelope, sent_at = entry
        reply = envelope.reply
        # Decode before removing the entry: if the body is invalid, the caller gets ActorDied.
        failure = unpack_error(body) if kind == Kind.ERROR else None
        result: Any = None
        if failure is None and reply is not None and not reply.done():
            result = self._plan.replies[type(envelope.message)].decode(body)
        del sent[correlation]
        if failure is not None:
            cell.refuse(envelope, failure)
        elif reply is not None:
            if reply.done():
                cell.system.late_replies += 1
            else:
                reply.set_result(result)
        handled = cell.system.events.handled
        if handled is not None:
            handled(cell, envelope, sent_at - envelope.enqueued_at, cell.monotonic() - sent_at, failure)
        if not self._stopping and cell.mailbox:
            self._pump()

    def _on_ready(self, names: list[str], in_thread: list[str]) -> None:
        self._in_thread = frozenset(message for message in self._plan.replies if message.__name__ in in_thread)
        by_mailbox = frozenset(message for message in self._plan.replies if message.__name__ in names)
        handled = by_mailbox | self._in_thread
        missing = sorted(message.__name__ for message in self._plan.replies if message not in handled)
        if missing:
            self.cell.system.logger.warning("%s has no handler for %s", self._plan.target, ", ".join(missing))
        self.cell.accepts = handled
        self._ready = True
        self._change.set()

    def _on_told(self, body: memoryview) -> None:
        if self._plan.events is None:
            raise ValueError("the child sent an event without declared event types: pass events and events_type")
        message = self._plan.events.decode(body)
        try:
            self.cell.emit(message)
        except Exception:
            self.cell.system.logger.exception("no listener could take %s from actor %s", message, self.cell.name)

    def _on_lost(self, error: BaseException | None) -> None:
        if error is not None:
            self._blame(ChildCrash(f"sent an invalid frame: {error}"))
            if self._child is not None and not self._child.exited:
                self._child.kill()
        self._fall()
        self._gone = True
        self._change.set()

    # -- what it was doing ---------------------------------------------------------------------------------------

    def _oldest(self) -> tuple[Envelope, float] | None:
        entries = [next(iter(sent.values())) for sent in self._sent if sent]
        return min(entries, key=lambda entry: entry[1], default=None)

    def in_hand(self) -> Envelope | None:
        oldest = self._oldest()
        return None if oldest is None else oldest[0]

    def since(self) -> float:
        oldest = self._oldest()
        return 0.0 if oldest is None else oldest[1]

    def heartbeat_age(self) -> float | None:
        return self.cell.monotonic() - self._last_frame_at if self._ready else None

    def unfinished(self) -> tuple[list[Envelope], list[Envelope]]:
        in_hand: list[Envelope] = []
        untouched: list[Envelope] = []
        for sent in reversed(self._sent):
            begun = {True, False} if self._in_order else set()  # whether the thread handles it
            for envelope, _ in sent.values():
                by_thread = envelope.message.__class__ in self._in_thread
                (untouched if by_thread in begun else in_hand).append(envelope)
                begun.add(by_thread)
        return in_hand, untouched


def _verdict(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
