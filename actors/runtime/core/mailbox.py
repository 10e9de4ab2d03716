"""A bounded mailbox with a control lane, a data lane and a lane for the actor's own replies."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from actors.runtime.core.errors import MailboxFull
from actors.runtime.core.message import Envelope, Lane

__all__ = ["Mailbox"]

_DATA_A_REPLY = 8  # most data messages taken between two replies


class _Queue:
    """One bounded lane and the senders that wait for room in it, first come first served.

    A waiting envelope moves into the lane as soon as another is taken out, so no message overtakes it and no sender has
    to retry. While a sender waits, the lane is full.
    """

    __slots__ = ("capacity", "entries", "waiting")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a mailbox lane needs a capacity of at least 1, got {capacity}")
        self.capacity = capacity
        self.entries: deque[Envelope] = deque()
        self.waiting: deque[Envelope] = deque()

    def admit_waiting(self) -> None:
        waiting, entries = self.waiting, self.entries
        while waiting and len(entries) < self.capacity:
            envelope = waiting.popleft()
            if envelope.accepted is not None:
                if envelope.accepted.done():  # its sender was cancelled
                    continue
                envelope.accepted.set_result(True)
            elif envelope.reply is not None and envelope.reply.done():  # its caller has given up
                continue
            entries.append(envelope)


class Mailbox:
    """Two bounded lanes, and an unbounded lane for replies.

    Control is taken first, then replies, then data. Some data messages are taken between two replies: otherwise an
    actor that asks again at each reply might never reach its data. The mailbox outlives the incarnations of its actor:
    messages that arrive between two of them wait here.
    """

    __slots__ = ("_control", "_data", "_due", "_on_work", "_replies", "name")

    def __init__(self, name: str, capacity: int, control_capacity: int) -> None:
        self.name = name
        self._data = _Queue(capacity)
        self._control = _Queue(control_capacity)
        self._replies: deque[Envelope] = deque()
        self._due = 0  # data messages to take before the next reply
        self._on_work: Callable[[], None] | None = None

    def offer(self, envelope: Envelope) -> None:
        """Enqueue a message. Raises MailboxFull."""
        queue = self._data if envelope.message.lane is Lane.DATA else self._control
        if len(queue.entries) >= queue.capacity:
            raise MailboxFull(self.name, queue.capacity)
        queue.entries.append(envelope)
        if self._on_work is not None:
            self._on_work()

    def submit(self, envelope: Envelope) -> bool:
        """Enqueue a message, or let it wait for room. Returns False if it waits.

        One entry waits for each sender; when a sender gives up, its future is done and the entry is skipped.
        """
        queue = self._data if envelope.message.lane is Lane.DATA else self._control
        if len(queue.entries) >= queue.capacity:
            queue.waiting.append(envelope)
            return False
        queue.entries.append(envelope)
        if self._on_work is not None:
            self._on_work()
        return True

    def put_reply(self, envelope: Envelope) -> None:
        """Enqueue a message of the actor to itself. Never refused; the actor's own pipes bound their number."""
        self._replies.append(envelope)
        if self._on_work is not None:
            self._on_work()

    def put_first(self, envelope: Envelope) -> None:
        """Return a message to the front of its lane, even past the capacity."""
        queue = self._data if envelope.message.lane is Lane.DATA else self._control
        queue.entries.appendleft(envelope)
        if self._on_work is not None:
            self._on_work()

    def take(self) -> Envelope | None:
        """Remove and return the next message, or None."""
        queue = self._control
        if not queue.entries:
            queue = self._data
            if self._replies and (self._due <= 0 or not queue.entries):
                self._due = _DATA_A_REPLY
                return self._replies.popleft()
            if not queue.entries:
                return None
            self._due -= 1
        envelope = queue.entries.popleft()
        if queue.waiting:
            queue.admit_waiting()
        return envelope

    def take_from(self, lane: Lane) -> Envelope | None:
        """Remove and return the next message of one lane, or None."""
        queue = self._data if lane is Lane.DATA else self._control
        if not queue.entries:
            return None
        envelope = queue.entries.popleft()
        if queue.waiting:
            queue.admit_waiting()
        return envelope

    def on_work(self, callback: Callable[[], None] | None) -> None:
        """Call ``callback`` whenever a message is enqueued, until it is replaced."""
        self._on_work = callback

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until a message may have been enqueued or ``wake`` is called. May return spuriously."""
        waker = loop.create_future()

        def wake() -> None:
            self._on_work = None
            if not waker.done():
                waker.set_result(None)

        self._on_work = wake
        try:
            await waker
        finally:
            self._on_work = None

    def wake(self) -> None:
        if self._on_work is not None:
            self._on_work()

    def drop_replies(self) -> Iterator[Envelope]:
        """Empty the reply lane, whose messages are for an incarnation that has ended."""
        while self._replies:
            yield self._replies.popleft()

    def drain(self) -> Iterator[Envelope]:
        """Empty all lanes and remove waiting senders, whose futures the caller must complete."""
        for queue in (self._control, self._data):
            while queue.entries:
                yield queue.entries.popleft()
            while queue.waiting:
                yield queue.waiting.popleft()
        yield from self.drop_replies()

    def depths(self) -> dict[str, int]:
        """Messages in each lane, including those of waiting senders."""
        return {
            "control": len(self._control.entries) + len(self._control.waiting),
            "replies": len(self._replies),
            "data": len(self._data.entries) + len(self._data.waiting),
        }

    def __len__(self) -> int:
        return len(self._control.entries) + len(self._replies) + len(self._data.entries)
