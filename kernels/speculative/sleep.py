"""When nothing is kept of steps for a draft, because none guesses for a while.

Plain steps of an engine that could guess cost more than those of one that cannot: what they compute is kept, and shown
to the draft. After some steps without guesses nothing of that is done any more. A draft knows only what it was shown:
before one that slept guesses again, it is shown a few steps, and what lies before them it never sees. Requests that
come after that are seen whole, but for a prefix in the cache that was run unseen.

What it is shown when it wakes takes a few steps' time. One whose guesses did not pay then sleeps longer before it is
woken again.

Counted in steps of the policy; pure, as all of it.
"""

from __future__ import annotations

__all__ = ["LATER", "SHOWN", "SOUND", "Sleep"]

LATER = 48
"""Steps without guesses after which a draft sleeps, at most."""
LONGER = 16
"""Steps by which one with guesses puts that off: few of them among many without keep nobody awake."""
SHOWN = 48
"""Steps that are shown to a draft that slept, before it guesses."""
SOUND, SOUNDEST = 128, 384
"""Steps that a draft sleeps at least after it was woken for nothing: twice as many each time, up to so many. With
what it is shown they are fewer than between two probes at last, or it would miss every other one."""
WORTH = 1.0
"""Plain steps of time that guesses gain, once it is awake, or it was woken for nothing."""


class Sleep:
    """Of one model's draft, at all batch sizes."""

    def __init__(self) -> None:
        self._awake_until = LATER
        self._ready = 0
        self._sound = 0  # steps that it is to sleep at least
        self._gained = 0.0  # plain steps of time, since it was woken

    def deep(self, step: int) -> bool:
        """Whether nothing of this step is to be kept."""
        return step >= self._awake_until

    def stirs(self, step: int) -> bool:
        """Whether the draft was woken, and is not shown enough yet to guess in this step."""
        return step < self._ready

    def sound(self, step: int) -> int:
        """Steps for which a draft that sleeps is not to be woken."""
        return max(self._awake_until + self._sound - step, 0)

    def wake(self, step: int) -> None:
        """This step would guess, had the draft not slept: it and those behind it are shown to it."""
        self._ready = step + SHOWN
        self._awake_until = self._ready + LONGER
        self._sound = min(max(2 * self._sound, SOUND), SOUNDEST)
        self._gained = 0.0

    def gained(self, gain: float) -> None:
        """A step with guesses brought so many plain steps of time."""
        self._gained += gain
        if self._gained > WORTH:
            self._sound = 0

    def guessed(self, step: int) -> None:
        """This step guesses."""
        self._awake_until = min(max(self._awake_until, step) + LONGER, step + LATER)
