"""What a step takes, with guesses and without, learnt as steps are timed; and what guesses have gained and lost by it.

Pure: no clock, no torch.
"""

from __future__ import annotations

__all__ = ["DEBT", "LOADED", "PROBING", "SOONEST", "STALLED", "SURPRISE", "TRIALS", "StepCost"]

PROBING = 0.005
"""Share of the time that guessing may lose."""
DEBT, SAVINGS = 4.0, 64.0
"""Plain steps of time that may be lost and not yet made up for, as many of them before anything was gained; and that
may be lost of what was gained before."""
LENT = 1.0
"""The same at first of a batch size whose costs are taken to be like another's."""
REFRESH = 32
"""Steps with guesses before one without, which tells whether a plain one costs less now; not whether it costs more, for
it still sees to what guesses left behind."""
SOONEST = 8
"""Steps between two probes of a request, at first; in between a batch that does not guess is not thought over."""
TRIALS = 3
"""Steps that all guess to learn what it costs, and steps with guesses whose cost is believed, whatever it is."""
SURPRISE = 0.3
"""Share of what was expected by which a step's seconds are believed to be more: others use the machine, too."""
STALLED = 4
"""Times what is expected of a step beyond which its time is the machine's, and counted for nobody."""
LOADED = 32
"""Plain steps over which it is averaged how much longer than expected they take: what others add to all steps."""
DEARER, CHEAPER = 1, 8
"""Weights of steps that took longer and less long than expected: nothing makes a step shorter, much makes it longer."""
GUESSED = (0.3, 0.08, 0.03)
"""Start, level and node in plain steps, before any was timed; and how much each may be to blame for a surprise."""


class StepCost:
    """Seconds of a step, at batch sizes of one power of two. ``like``: another size that guesses were made at; without
    it a few steps try what guesses cost."""

    __slots__ = (
        "credit", "deepest", "guesses", "load", "paused", "per_level", "per_node", "plain", "seen", "shares", "start",
        "trials",
    )  # fmt: skip

    def __init__(self, like: StepCost | None = None) -> None:
        self.seen = 0  # plain steps
        self.guesses = 0  # steps with guesses
        self.trials = 0  # times that guesses were asked for whatever they cost: not all are timed, nor all made
        self.deepest = 0  # levels of the deepest of these
        self.load = 1.0  # what plain steps take on the average, in times of ``plain``, which is nearly the least
        self.paused = True  # whether the last step was plain
        self.credit = DEBT  # plain steps of time that may be lost
        self.shares = GUESSED  # start, level and node in plain steps, before any was timed
        if like is not None:
            self.trials, self.credit = TRIALS, LENT
            self.shares = (like.start / like.plain, like.per_level / like.plain, like.per_node / like.plain)
        self.plain = self.start = self.per_level = self.per_node = 0.0

    def learn(self, levels: int, nodes: int, seconds: float, weight: float, seen: float = 0.0) -> None:
        paused, self.paused = self.paused, not nodes
        if not nodes:
            seconds -= seen  # or a plain step held to be dear never proves cheap: each follows one with guesses then
            self.seen += 1
            if self.seen <= TRIALS and not self.guesses:  # what runs for the first time is slow
                self.plain = min(seconds, self.plain or seconds)
                self.start, self.per_level, self.per_node = (share * self.plain for share in self.shares)
            if paused or seen:
                self.load += (min(seconds / self.plain, STALLED) - self.load) / LOADED
            if paused or self.seen <= TRIALS or seconds < self.plain:
                self.plain += _believed(seconds - self.plain, self.plain, weight)
        elif self.seen:
            self.guesses += 1
            self.deepest = max(self.deepest, levels)
            expected = self.expected(levels, nodes)
            error = seconds - expected
            if self.guesses > TRIALS:
                error = _believed(error, expected, weight)
            if paused:  # the draft saw much that was left for later
                error = min(error, 0.0)
            # Normalized least mean squares: what cannot be told apart is blamed by its share.
            start, level, node = (share * share for share in GUESSED)
            error /= start + level * levels**2 + node * nodes**2
            # None of them is more than all of a step: a stall that was blamed on levels would else outlast many probes.
            most = max(0.0, seconds - self.plain)
            self.start = min(max(0.0, self.start + error * start), most)
            self.per_level = min(max(0.0, self.per_level + error * level * levels), most / max(levels, 1))
            self.per_node = min(max(0.0, self.per_node + error * node * nodes), most / nodes)

    @property
    def refresh(self) -> int:
        """Steps with guesses before one without: fewer while little is known of what those cost."""
        return min(REFRESH, SOONEST + 2 * self.seen)

    def gained(self, gain: float) -> None:
        """A step with guesses brought so many plain steps of time."""
        least = -1.0 if self.guesses <= TRIALS else -DEBT
        self.credit = min(max(self.credit + max(gain, least), -DEBT), SAVINGS)

    def saved(self, steps: int) -> None:
        """Steps without guesses went by."""
        self.credit = max(self.credit, min(self.credit + PROBING * steps, DEBT))

    def expected(self, levels: int, nodes: int) -> float:
        return self.plain + self.start + self.per_level * levels + self.per_node * nodes


def _believed(error: float, expected: float, weight: float) -> float:
    """What an estimate changes by."""
    return min(error, SURPRISE * expected) * min((DEARER if error > 0 else CHEAPER) * weight, 1.0)
