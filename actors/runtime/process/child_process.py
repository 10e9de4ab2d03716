"""ChildProcess: a child process and its link. Standby: a prepared child for a quick restart."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from actors.runtime.core.clock import Clock, within
from actors.runtime.process.launched import LaunchedProcess
from actors.runtime.process.link import Link
from actors.runtime.process.wire import ChildSpec

__all__ = ["ChildProcess", "Standby"]

_MIN_DELAY_SECONDS = 2.0
_MAX_DELAY_SECONDS = 120.0
"""Seconds before a standby is launched: the new incarnation comes first. The delay grows while standbys keep dying."""


def _nothing() -> None:
    pass


def _ignore(error: BaseException | None) -> None:
    pass


class ChildProcess:
    """A child that imports and prepares its actor's class, then waits for :meth:`begin`.

    ``exited`` is set and ``on_exit`` is called when it has ended and was reaped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: ChildSpec,
        process: LaunchedProcess,
    ) -> None:
        self.exited = False
        self.on_exit: Callable[[], None] = _nothing
        self._loop = loop
        body = msgspec.msgpack.encode(spec)
        self._process = process
        self.link = Link(loop, process.sock, self._early_frame, self._early_end, spec.limit)
        # The link to the actor's thread. Its end is ignored: only that of the other link counts.
        self.thread_link = Link(loop, process.thread_sock, self._early_frame, _ignore, spec.limit)
        self.link.write(process.start_of_stream + len(body).to_bytes(4, "little") + body)
        process.watch_exit(loop, self._exit)

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
        """Make it incarnation number ``incarnation`` of the actor."""
        self.on_exit = on_exit
        self.link.rebind(on_frame, on_lost)
        self.thread_link.rebind(on_frame, lambda error: None if error is None else on_lost(error))
        self.link.write(incarnation.to_bytes(8, "little"))

    def abandon(self, on_exit: Callable[[], None]) -> None:
        """Kill it and ignore everything but its exit."""
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
        raise ValueError(f"a frame of kind {kind} came before the child began")

    def _early_end(self, error: BaseException | None) -> None:
        if not self.exited:
            self.kill()

    def _exit(self) -> None:
        self.exited = True
        self.thread_link.drain()
        self.link.drain()
        self.on_exit()


class Standby:
    """Keeps one child of an actor prepared, so that a restart does not wait for imports."""

    def __init__(self, launch: Callable[[], Awaitable[ChildProcess]], clock: Clock) -> None:
        self._launch = launch
        self._launching = anyio.CancelScope()
        self._clock = clock
        self._child: ChildProcess | None = None
        self._change = anyio.Event()
        self._wanted = False
        self._dismissed = False

    @property
    def pid(self) -> int | None:
        """The process id of the waiting child, if any."""
        return None if self._child is None else self._child.pid

    def take(self) -> ChildProcess | None:
        """Remove and return the prepared child, if any; the next is launched after :meth:`want`."""
        child, self._child = self._child, None
        self._wanted = False
        self._notify()
        return child

    def want(self) -> None:
        """Prepare the next child, now that the current incarnation has started."""
        self._wanted = True
        self._notify()

    def dismiss(self) -> None:
        """End the child and :meth:`run`: there will be no next incarnation."""
        self._dismissed = True
        self._launching.cancel()
        self._notify()

    async def run(self) -> None:
        delay = _MIN_DELAY_SECONDS
        try:
            while not self._dismissed:
                await self._until(lambda: self._wanted or self._dismissed)
                with within(self._clock, delay):
                    await self._until(lambda: not self._wanted or self._dismissed)
                if not self._wanted or self._dismissed:
                    continue
                try:
                    with anyio.CancelScope() as self._launching:
                        self._child = await self._launch()
                except OSError:  # no memory or no processes left: the restart will report it
                    delay = min(2 * delay, _MAX_DELAY_SECONDS)
                    continue
                if self._child is None:
                    continue
                self._child.on_exit = self._lost
                await self._until(lambda: self._child is None or self._dismissed)
                delay = min(2 * delay, _MAX_DELAY_SECONDS) if self._wanted else _MIN_DELAY_SECONDS
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
