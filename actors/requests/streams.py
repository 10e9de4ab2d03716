"""RequestStream: a request as its caller sees it, an asynchronous iterator of deltas."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from actors.boards.stream_buffer import StreamBuffer
from actors.faults import FaultInjector
from actors.protocol.requests import Delta, RequestAborted, RequestTimeout
from telemetry.timeline import RequestTimeline

__all__ = ["RequestStream"]

_PROMPT_END = 16  # tokens of a prompt that its stream keeps


class RequestStream:
    """Deltas of all choices of one request. Get it from :meth:`Engine.generate`.

    Iterate it, or call :meth:`ready` first to learn whether the request is acceptable, how many ``prompt_tokens`` it
    has, and with which few its prompt ends (``prompt_end``). :meth:`aclose` ends it early: the engine then frees its
    slot and pages. A stream that is simply dropped is ended so too, when it is collected.

    Raises while iterating: ``InvalidRequest`` (after the first delta only for a grammar that cannot go on),
    ``RequestFailed``, ``RequestTimeout``, ``RequestAborted``, ``EngineFailed``.
    """

    def __init__(
        self,
        buffer: StreamBuffer,
        *,
        label: str | None,
        deadline: float | None,
        admit: Callable[[StreamBuffer], Awaitable[Sequence[int]]],
        release: Callable[[StreamBuffer], None],
        faults: FaultInjector | None = None,
    ) -> None:
        self.request_id = buffer.request_id
        self.label = label
        self.prompt_tokens = 0
        self.prompt_end: tuple[int, ...] = ()
        self._buffer = buffer
        self._deadline = deadline
        self._admit = admit
        self._admission: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._finalizer = weakref.finalize(self, _release_in_loop, loop, release, buffer)
        self._finalizer.atexit = False
        self._open = True  # until the finalizer is detached
        self._release = release
        self._faults = faults

    @property
    def timeline(self) -> RequestTimeline:
        """What has happened to the request so far."""
        return self._buffer.timeline

    @property
    def complete(self) -> bool:
        """Whether the last delta of every choice was returned."""
        return self._buffer.open_choices == 0

    async def ready(self) -> None:
        """Return when the request was rendered, encoded, checked and accepted; else raise what is wrong with it."""
        if self._admission is not None:
            # Another task's admission of the same stream: its outcome is ours, our cancellation is not its.
            await asyncio.shield(self._admission)
            return
        if not self._open:
            raise RuntimeError("This stream is closed.")
        self._admission = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(None if self._deadline is None else self._deadline - time.monotonic()):
                prompt = await self._admit(self._buffer)
                self.prompt_tokens, self.prompt_end = len(prompt), tuple(prompt[-_PROMPT_END:])
        except TimeoutError:
            error = RequestTimeout("The request's time was over before it could start.")
            self._refused(error)
            raise error from None
        except BaseException as error:
            self._refused(error)
            raise
        self._admission.set_result(None)

    def _refused(self, error: BaseException) -> None:
        assert self._admission is not None
        if isinstance(error, Exception):
            self._buffer.fail(error)
        else:  # our own cancellation: other waiters see an end like any other
            error = RequestAborted("The task that sent this request was cancelled before it was accepted.")
        self._admission.set_exception(error)
        self._admission.exception()  # marks it as seen: there may be no second waiter
        self._close()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Delta:
        if not self._open:
            raise StopAsyncIteration
        if self._admission is None or not self._admission.done():
            await self.ready()
        if self._faults is not None:
            await self._faults.strike_async("stream")
        buffer = self._buffer
        while self._open:
            delta = buffer.take()
            if delta is not None:
                if buffer.open_choices == 0:
                    self._close()
                return delta
            if buffer.error is not None:
                self._close()
                raise buffer.error
            await buffer.wait(self._deadline)
        raise StopAsyncIteration  # closed by another task

    def _close(self) -> None:
        self._open = False
        if self._finalizer.detach() is not None:
            self._release(self._buffer)
            self._buffer.wake()

    async def aclose(self) -> None:
        """Leave the stream: an unfinished request is aborted. Idempotent, and never interrupted: it awaits nothing."""
        self._close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()


def _release_in_loop(
    loop: asyncio.AbstractEventLoop, release: Callable[[StreamBuffer], None], buffer: StreamBuffer
) -> None:
    # The collector may run anywhere, also in another thread; the engine's state belongs to its loop.
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine with it
        loop.call_soon_threadsafe(release, buffer)
