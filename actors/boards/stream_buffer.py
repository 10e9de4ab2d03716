"""StreamBuffer: the queue of deltas between the journal and the stream of a request."""

from __future__ import annotations

import asyncio
import time

import msgspec

from actors.boards.wake_limiter import WakeLimiter
from actors.protocol.requests import Delta, RequestTimeout, TokenLogprob
from telemetry.timeline import Hop, RequestTimeline

__all__ = ["StreamBuffer", "merge"]


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
        hidden_states=b"".join([d.hidden_states for d in deltas]),
        routed_experts=b"".join([d.routed_experts for d in deltas]),
        prompt_token_ids=next((d.prompt_token_ids for d in deltas if d.prompt_token_ids is not None), None),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        usage=last.usage,
        result=last.result,
    )


class StreamBuffer:
    """The deltas of a request on the way from the journal to its stream; at most one wake-up a step.

    Deltas of a choice that wait for a slow reader are merged, so the buffer is bounded by the request's own length.
    With a ``wake_limiter``, the readers of a large batch are not all woken in one turn of the loop.
    ``shares_prompt_logprobs``: all choices report the prompt log-probabilities of the first, and no delta is shown
    before they are known.
    """

    def __init__(
        self,
        timeline: RequestTimeline,
        choices: int,
        *,
        interval: int = 1,
        wake_limiter: WakeLimiter | None = None,
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
        self._wake_limiter = wake_limiter
        self._running = choices  # choices without their last delta
        self._pending: dict[int, list[Delta]] = {}
        self._due: dict[int, None] = {}  # choices with deltas to show, the longest waiting first
        self._awaits_prompt_logprobs = shares_prompt_logprobs
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of the first choice, for the others
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False  # whether the waiter waits at the wake limiter

    def push(self, delta: Delta) -> None:
        """Add a delta of a choice. Deltas are shown at the first token, every ``interval`` tokens, and at the end."""
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
        """Store the prompt's scores and show the choices that waited for them."""
        self._awaits_prompt_logprobs, self._prompt_logprobs = False, found
        for index, (first, *_) in self._pending.items():
            self._pending[index][0] = msgspec.structs.replace(first, prompt_logprobs=found)
            self._due[index] = None

    def fail(self, error: Exception) -> None:
        """End with ``error`` after the deltas already held. No effect if the stream is already complete or failed."""
        if self.error is None and self._running:
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Wake the reader."""
        waiter = self._waiter
        if waiter is None or waiter.done() or self._woken:
            return
        if self._wake_limiter is None:
            waiter.set_result(None)
        else:
            self._woken = True
            self._wake_limiter.release(waiter)

    def take(self) -> Delta | None:
        """Remove and return the merged deltas of the choice that waits longest, or None."""
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
        """Record that the reader has left or has read everything."""
        if self._taking is not None:
            self.timeline.finish(self._taking, now, deltas=self.deltas)

    async def wait(self, deadline: float | None) -> None:
        """Wait until there may be a delta. After ``deadline`` (``time.monotonic`` seconds) the stream fails with
        RequestTimeout.

        Raises RuntimeError while another task waits: a stream has one reader.
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
            self.fail(RequestTimeout("The request timed out. Request fewer tokens or allow more time."))
        finally:
            self._waiter = None
