"""A child process and the link to it, from its launch to its end; and one kept in standby for a quick restart."""

import asyncio
import os
from collections.abc import Callable, Mapping

import anyio
import msgspec

from actors.runtime.blank_process import BlankProcess
from actors.runtime.clock import Clock, within
from actors.runtime.link import Link
from actors.runtime.wire import ChildSpec

__all__ = ["ChildProcess", "Standby"]

_FIRST_DELAY = 2.0
_LAST_DELAY = 120.0
"""Seconds before a standby is launched: a new life settles first; one that keeps dying is tried ever more rarely."""


def _nothing() -> None:
    pass


def _ignore(error: BaseException | None) -> None:
    pass


class ChildProcess:
    """Launched at once; it gets its actor's class ready and then waits until :meth:`begin` gives it its turn.

    ``blank``: a process with this environment that it becomes. Raises OSError when no process can be started.
    ``exited`` is set, and ``on_exit`` called, when it has ended and was reaped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: ChildSpec,
        environment: Mapping[str, str],
        blank: BlankProcess | None = None,
    ) -> None:
        self.exited = False
        self.on_exit: Callable[[], None] = _nothing
        self._loop = loop
        body = msgspec.msgpack.encode(spec)
        blank = blank or BlankProcess(environment)
        self._process = blank.process
        self.link = Link(loop, blank.sock, self._early_frame, self._early_end, spec.limit)
        # To the actor's thread. Its end means nothing: the other link's tells.
        self.thread_link = Link(loop, blank.thread_sock, self._early_frame, _ignore, spec.limit)
        self.link.write(blank.start_of_stream + len(body).to_bytes(4, "little") + body)
        self._watch_exit()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def begin(
        self,
        incarnation: int,
        on_frame: Callable[[int, int, memoryview], None],
        on_lost: Callable[[BaseException | None], None],
        on_exit: Callable[[], None],
    ) -> None:
        """Let it be the actor's life number ``incarnation``."""
        self.on_exit = on_exit
        self.link.rebind(on_frame, on_lost)
        self.thread_link.rebind(on_frame, lambda error: None if error is None else on_lost(error))
        self.link.write(incarnation.to_bytes(8, "little"))

    def abandon(self, on_exit: Callable[[], None]) -> None:
        """Kill it and hear no more of it but its exit."""
        self.on_exit = on_exit
        for link in (self.link, self.thread_link):
            link.rebind(lambda kind, correlation, body: None, _ignore)
        self.kill()

    def close(self) -> None:
        """Close both links. May be called again."""
        self.link.close()
        self.thread_link.close()

    def kill(self) -> None:
        self._process.kill()

    def _early_frame(self, kind: int, correlation: int, body: memoryview) -> None:
        raise ValueError(f"a frame of kind {kind} came before the child had its turn")

    def _early_end(self, error: BaseException | None) -> None:
        if not self.exited:
            self.kill()

    def _watch_exit(self) -> None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or forbidden
            self._poll_exit()
            return

        def exited() -> None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            self._poll_exit()

        self._loop.add_reader(pidfd, exited)

    def _poll_exit(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(0.02, self._poll_exit)
            return
        self.exited = True
        self.thread_link.drain()
        self.link.drain()
        self.on_exit()


class Standby:
    """Keeps one child of an actor prepared, so that a restart does not wait for imports."""

    def __init__(self, launch: Callable[[], ChildProcess], clock: Clock) -> None:
        self._launch = launch
        self._clock = clock
        self._child: ChildProcess | None = None
        self._change = anyio.Event()
        self._wanted = False
        self._dismissed = False

    @property
    def pid(self) -> int | None:
        """Of the child that waits, if there is one."""
        return None if self._child is None else self._child.pid

    def take(self) -> ChildProcess | None:
        """The prepared child, if there is one; the next is launched after :meth:`want`."""
        child, self._child = self._child, None
        self._wanted = False
        self._notify()
        return child

    def want(self) -> None:
        """The present life has started: prepare for the next."""
        self._wanted = True
        self._notify()

    def dismiss(self) -> None:
        """There will be no next life: end the child, and :meth:`run` with it."""
        self._dismissed = True
        self._notify()

    async def run(self) -> None:
        delay = _FIRST_DELAY
        try:
            while not self._dismissed:
                await self._until(lambda: self._wanted or self._dismissed)
                with within(self._clock, delay):
                    await self._until(lambda: not self._wanted or self._dismissed)
                if not self._wanted or self._dismissed:
                    continue
                try:
                    self._child = self._launch()
                except OSError:  # no memory or no processes left: the restart itself will say so
                    delay = min(2 * delay, _LAST_DELAY)
                    continue
                self._child.on_exit = self._lost
                await self._until(lambda: self._child is None or self._dismissed)
                delay = min(2 * delay, _LAST_DELAY) if self._wanted else _FIRST_DELAY
        finally:
            child = self.take()
            if child is not None:
                with anyio.CancelScope(shield=True):
                    child.on_exit = self._notify
                    child.kill()
                    await self._until(lambda: child.exited)
                    child.close()

    def _lost(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        self._notify()

    def _notify(self) -> None:
        self._change.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._change = anyio.Event()
            await self._change.wait()
