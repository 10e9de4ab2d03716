"""The door: a request takes a ticket before anything is awaited for it, or is refused."""

from __future__ import annotations

import math

from actors.requests import QueueFull
from telemetry.tally import Tally

__all__ = ["Door", "Ticket"]

_MAX_RETRY_AFTER = 120.0
"""Seconds. Common clients give up on a larger value instead of waiting."""

_MIN_RETRY_AFTER = 1.0
_DRAIN_WINDOW = 10.0
_RETRY_AFTER = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0)


class Ticket:
    """The right of one request to be in the house, with its prompt tokens. Give it back exactly once."""

    __slots__ = ("choices", "open", "tokens")

    def __init__(self, choices: int, tokens: int) -> None:
        self.choices = choices
        self.tokens = tokens
        self.open = True


class Door:
    """Counts sequences and prompt tokens of all live requests.

    ``max_sequences`` and ``max_tokens`` bound them (None: no bound). Refusals carry the seconds after which the
    measured rate of endings should have made room.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int | None) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0
        self.refusals = {"sequences": 0, "tokens": 0}  # requests, by the bound they met
        self.retry_after_seconds = Tally(_RETRY_AFTER)  # what they were told
        self._rate = 0.0  # sequences ended per second, decaying average
        self._rate_at = 0.0

    def enter(self, choices: int, tokens: int, now: float) -> Ticket:
        """A ticket, or QueueFull. ``tokens`` may be an estimate; :meth:`correct` sets it right after encoding."""
        if self.sequences + choices > self._max_sequences:
            why = f"The server holds {self.sequences} of at most {self._max_sequences} sequences"
            raise self._refusal("sequences", why, choices, now)
        if self._max_tokens is not None and self.tokens and self.tokens + tokens > self._max_tokens:
            why = f"The server holds {self.tokens} of at most {self._max_tokens} prompt tokens"
            raise self._refusal("tokens", why, choices, now)
        self.sequences += choices
        self.tokens += tokens
        return Ticket(choices, tokens)

    @property
    def refused(self) -> int:
        """Requests refused."""
        return sum(self.refusals.values())

    def correct(self, ticket: Ticket, tokens: int) -> None:
        """Replace the estimate of a ticket's prompt tokens by their number."""
        if ticket.open:
            self.tokens += tokens - ticket.tokens
            ticket.tokens = tokens

    def leave(self, ticket: Ticket, now: float) -> None:
        """Give the ticket back; a second time does nothing."""
        if not ticket.open:
            return
        ticket.open = False
        self.sequences -= ticket.choices
        self.tokens -= ticket.tokens
        decay = math.exp(-(now - self._rate_at) / _DRAIN_WINDOW) if self._rate_at else 0.0
        self._rate = self._rate * decay + ticket.choices / _DRAIN_WINDOW
        self._rate_at = now

    def retry_after(self, choices: int, now: float) -> float:
        """Seconds until ``choices`` more sequences should fit, from the rate at which sequences have ended lately."""
        excess = max(1, self.sequences + choices - self._max_sequences)
        rate = self._rate * math.exp(-(now - self._rate_at) / _DRAIN_WINDOW) if self._rate_at else 0.0
        if rate <= 0:
            return 5.0
        return min(_MAX_RETRY_AFTER, max(_MIN_RETRY_AFTER, math.ceil(excess / rate)))

    def _refusal(self, bound: str, why: str, choices: int, now: float) -> QueueFull:
        wait = self.retry_after(choices, now)
        self.refusals[bound] += 1
        self.retry_after_seconds.add(wait)
        return QueueFull(f"{why}. Try again in {wait:.0f} s.", retry_after=wait)
