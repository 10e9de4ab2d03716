"""A request as its caller sees it: an asynchronous iterator of deltas, bounded by the request's own length."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

import msgspec

from actors.faults import FaultInjector
from actors.requests import Delta, RequestAborted, RequestTimeout, TokenLogprob
from actors.turnstile import Turnstile
from telemetry.timeline import Hop, RequestTimeline

__all__ = ["RequestStream", "StreamBuffer", "merge"]

_PROMPT_END = 16  # tokens of a prompt that its stream tells


def merge(deltas: list[Delta]) -> Delta:
    """Successive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    scored: list[TokenLogprob] | None = None
    for delta in deltas:
        if delta.logprobs is not None:
            scored = (scored or []) + list(delta.logprobs)
    return Delta(
        request_id=last.request_id,
        index=last.index,
        text="".join(d.text for d in deltas),
        token_ids=tuple(token for d in deltas for token in d.token_ids),
        logprobs=None if scored is None else tuple(scored),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        prompt_token_ids=next((d.prompt_token_ids for d in deltas if d.prompt_token_ids is not None), None),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        usage=last.usage,
    )


class StreamBuffer:
    """Where the journal puts a request's deltas and its stream takes them; one wake-up at most per step.

    Deltas of a choice that wait for a slow reader are handed out merged: the buffer holds no more than the request's
    own length. With a ``turnstile`` the readers of a large batch are not all woken in one turn of the loop.
    ``shares_prompt_logprobs``: the first choice's prompt log-probabilities are those of every choice, and no delta is
    shown before they are there.
    """

    def __init__(
        self,
        timeline: RequestTimeline,
        choices: int,
        *,
        interval: int = 1,
        turnstile: Turnstile | None = None,
        shares_prompt_logprobs: bool = False,
    ) -> None:
        self.timeline = timeline
        self.request_id = timeline.request_id
        self.open_choices = choices
        self.error: Exception | None = None
        self.first_token_at: float | None = None
        self.output_tokens = 0
        self.finish_reasons = [""] * choices
        self.deltas = 0  # taken
        self._taking: Hop | None = None
        self._interval = interval
        self._turnstile = turnstile
        self._running = choices  # whose last delta has not come
        self._pending: dict[int, list[Delta]] = {}
        self._due: dict[int, None] = {}  # choices with enough to show, the longest waiting first
        self._awaits_prompt_logprobs = shares_prompt_logprobs
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of the first choice, for the others
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False  # whether the waiter stands at the turnstile

    def push(self, delta: Delta) -> None:
        """Add news of a choice. They are shown at its first token, then every ``interval`` tokens, and at its end."""
        index = delta.index
        if self._prompt_logprobs is not None and delta.prompt_token_ids is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=self._prompt_logprobs)
        waiting = self._pending.setdefault(index, [])
        waiting.append(delta)
        if delta.token_ids:
            self.output_tokens += len(delta.token_ids)
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
        if delta.finish_reason is not None:
            self.finish_reasons[index] = delta.finish_reason
            self._running -= 1
        if self._awaits_prompt_logprobs:
            if delta.prompt_logprobs is None:
                return
            self._share(delta.prompt_logprobs)
            self.wake()
        elif index not in self._due and (
            delta.finish_reason is not None
            or delta.prompt_token_ids is not None
            or self._interval == 1
            or sum(len(d.token_ids) for d in waiting) >= self._interval
        ):
            self._due[index] = None
            self.wake()

    def _share(self, found: tuple[TokenLogprob, ...]) -> None:
        """The prompt was scored: every choice that waited for it may be shown."""
        self._awaits_prompt_logprobs, self._prompt_logprobs = False, found
        for index, (first, *_) in self._pending.items():
            self._pending[index][0] = msgspec.structs.replace(first, prompt_logprobs=found)
            self._due[index] = None

    def fail(self, error: Exception) -> None:
        """End with ``error``, after what is already there. The first end stays: nothing fails what is complete."""
        if self.error is None and self._running:
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        waiter = self._waiter
        if waiter is None or waiter.done() or self._woken:
            return
        if self._turnstile is None:
            waiter.set_result(None)
        else:
            self._woken = True
            self._turnstile.release(waiter)

    def take(self) -> Delta | None:
        """What waits of the choice that waits longest, or None."""
        due = self._due or (self._pending if self.error is not None else None)
        if not due:
            return None
        index = next(iter(due))
        self._due.pop(index, None)
        delta = merge(self._pending.pop(index))
        if self._taking is None:
            self._taking = self.timeline.begin("stream", time.monotonic())
        self.deltas += 1
        if delta.finish_reason is not None:
            self.open_choices -= 1
        return delta

    def end(self, now: float) -> None:
        """Nobody takes any more."""
        if self._taking is not None:
            self.timeline.finish(self._taking, now, deltas=self.deltas)

    async def wait(self, deadline: float | None) -> None:
        """Return when there may be news. Past ``deadline`` (``time.monotonic`` seconds) the error is RequestTimeout.

        Raises RuntimeError while another task waits: a delta goes to one reader only.
        """
        if self._waiter is not None:
            raise RuntimeError("This stream is being read by another task. Let one task read it.")
        self._waiter = asyncio.get_running_loop().create_future()
        self._woken = False
        try:
            if deadline is None:
                await self._waiter
            else:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._waiter
        except TimeoutError:
            self.fail(RequestTimeout("The request's time is over. Ask for fewer tokens or allow more time."))
        finally:
            self._waiter = None


class RequestStream:
    """Deltas of all choices of one request. Get it from :meth:`Engine.generate`.

    Iterate it, or call :meth:`ready` first to learn whether the request is acceptable, how many ``prompt_tokens`` it
    has, and with which few its prompt ends (``prompt_end``). :meth:`aclose` ends it early: the engine then frees its
    slot and pages. A stream that is simply dropped is ended so too, when it is collected.

    Raises while iterating: ``InvalidRequest`` (only before the first delta), ``RequestFailed``, ``RequestTimeout``,
    ``RequestAborted``, ``EngineFailed``.
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
        """Whether the last delta of every choice was handed out."""
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
        else:  # our own cancellation: to others who wait it is an end like any other
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
