"""When nothing is kept of steps for a draft, because none guesses for a while.

Plain steps of an engine that could guess cost more than those of one that cannot: what they compute is kept, and shown
to the draft. After some steps without guesses nothing of that is done any more. A draft knows only what it was shown:
before one that slept guesses again, it is shown a few steps, and what lies before them it never sees. Requests that
come after that are seen whole, but for a prefix in the cache that was run unseen.

Counted in steps of the policy; pure, as all of it.
"""

from __future__ import annotations

__all__ = ["LATER", "SHOWN", "Sleep"]

LATER = 48
"""Steps without guesses after which a draft sleeps, at most."""
LONGER = 16
"""Steps by which one with guesses puts that off: few of them among many without keep nobody awake."""
SHOWN = 48
"""Steps that are shown to a draft that slept, before it guesses."""


class Sleep:
    """Of one model's draft, at all batch sizes."""

    def __init__(self) -> None:
        self._awake_until = LATER
        self._ready = 0

    def deep(self, step: int) -> bool:
        """Whether nothing of this step is to be kept."""
        return step >= self._awake_until

    def stirs(self, step: int) -> bool:
        """Whether the draft was woken, and is not shown enough yet to guess in this step."""
        return step < self._ready

    def wake(self, step: int) -> None:
        """This step would guess, had the draft not slept: it and those behind it are shown to it."""
        self._ready = step + SHOWN
        self._awake_until = self._ready + LONGER

    def guessed(self, step: int) -> None:
        """This step guesses."""
        self._awake_until = min(max(self._awake_until, step) + LONGER, step + LATER)
