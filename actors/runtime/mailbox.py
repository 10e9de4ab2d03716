"""A bounded mailbox with a control lane, a data lane and a lane for the actor's own replies."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from actors.runtime.errors import MailboxFull
from actors.runtime.message import Envelope, Lane

__all__ = ["Mailbox"]

_DATA_A_REPLY = 8  # messages taken before the next reply, at most


class _Queue:
    """One bounded lane and the senders that wait for room in it, first come first served.

    A waiting sender's envelope moves into the lane the moment one is taken out, so nobody can overtake it and a
    sender never has to be woken to try again. While anybody waits, the lane is full.
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
            elif envelope.reply is not None and envelope.reply.done():  # its asker has gone
                continue
            entries.append(envelope)


class Mailbox:
    """Bounded, two lanes, and a lane for replies that never blocks and is never refused.

    Control is taken first, then replies, then data. But between two replies some data are taken where there are any: an
    actor that asks again at each reply, and is answered before it looks, would hear of nothing else. The mailbox
    outlives the incarnations of its actor: what arrives between two of them waits here.
    """

    __slots__ = ("_control", "_data", "_due", "_on_work", "_replies", "name")

    def __init__(self, name: str, capacity: int, control_capacity: int) -> None:
        self.name = name
        self._data = _Queue(capacity)
        self._control = _Queue(control_capacity)
        self._replies: deque[Envelope] = deque()
        self._due = 0  # of data, before the next reply
        self._on_work: Callable[[], None] | None = None

    def offer(self, envelope: Envelope) -> None:
        """Put a message in, or raise MailboxFull."""
        queue = self._data if envelope.message.lane is Lane.DATA else self._control
        if len(queue.entries) >= queue.capacity:
            raise MailboxFull(self.name, queue.capacity)
        queue.entries.append(envelope)
        if self._on_work is not None:
            self._on_work()

    def submit(self, envelope: Envelope) -> bool:
        """Put a message in, or stand it in line for room. Returns False while it stands in line.

        The line holds one entry for each waiting sender; when one gives up, its future is done and it is skipped.
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
        """Put a message of the actor to itself in. Never refused; its number is that of the actor's own pipes."""
        self._replies.append(envelope)
        if self._on_work is not None:
            self._on_work()

    def put_first(self, envelope: Envelope) -> None:
        """Give a message back to be taken first in its lane, even past the capacity."""
        queue = self._data if envelope.message.lane is Lane.DATA else self._control
        queue.entries.appendleft(envelope)
        if self._on_work is not None:
            self._on_work()

    def take(self) -> Envelope | None:
        """Take the next message out; None when there is none."""
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
        """Take the next message of one lane out; None when there is none."""
        queue = self._data if lane is Lane.DATA else self._control
        if not queue.entries:
            return None
        envelope = queue.entries.popleft()
        if queue.waiting:
            queue.admit_waiting()
        return envelope

    def on_work(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` whenever something is put in, until it is replaced."""
        self._on_work = callback

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sleep until something may have been put in, or `wake` is called. May return for no reason."""
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
        """Empty the reply lane: what it held was meant for an incarnation that is gone."""
        while self._replies:
            yield self._replies.popleft()

    def drain(self) -> Iterator[Envelope]:
        """Empty everything, waiting senders too. Their futures are left to the caller."""
        for queue in (self._control, self._data):
            while queue.entries:
                yield queue.entries.popleft()
            while queue.waiting:
                yield queue.waiting.popleft()
        yield from self.drop_replies()

    def depths(self) -> dict[str, int]:
        """How many messages wait in each lane; senders in line for room count for their lane."""
        return {
            "control": len(self._control.entries) + len(self._control.waiting),
            "replies": len(self._replies),
            "data": len(self._data.entries) + len(self._data.waiting),
        }

    def __len__(self) -> int:
        return len(self._control.entries) + len(self._replies) + len(self._data.entries)
