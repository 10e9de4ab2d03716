"""How many guesses are worth making, by what was accepted and what steps cost (``--speculative-adaptive``).

A step of a batch costs ``plain + per_level * levels + per_node * nodes`` seconds: what a step without guesses costs at
that batch size, each pass of the draft, and each guess that is verified. A request's k-th guess is accepted with a
probability that is learnt as it goes. The plan of a step is the one that promises the most tokens a second, and plain
decoding where none promises more. Rows that do not guess are probed now and then: of each request twice as seldom
after every probe that changed nothing, and of all never more than a small share of the time pays for.

Pure: no clock, no torch. One plan is made for all ranks of a model, for measured times differ between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["AdaptiveConfig", "AdaptiveSteps", "Track"]

PRIOR = 0.6
"""A guess's chance of being accepted, before any was judged."""
LEAST_GAIN = 1.04
"""Guessing must promise this much over plain decoding: promises are noisy, and plain decoding keeps its word."""
PROBING = 0.005
"""Share of the time that guessing may lose."""
DEBT, SAVINGS = 4.0, 64.0
"""Plain steps of time that may be lost and not yet made up for, as many of them before anything was gained; and that
may be lost of what was gained before."""
REFRESH = 32
"""Steps with guesses between two without, which tell what a plain one costs now."""
SOONEST = 8
"""Steps between two probes of a request, at first; in between a batch that does not guess is not thought over."""
LATEST = 256
"""The same at last. All are powers of two, so that requests are probed in the same steps."""
LONGEST = 32
"""Steps that a batch that does not guess is not thought over, at most."""
TIMED = 4
"""One of so many of these steps is timed: what is not asked takes no time."""
FORLORN = 0.1
"""A first guess's chance at which a request is probed ever more seldom even while there is time to lose."""
STREAK = 4
"""Probes in a row after one that was accepted, while there is time to lose."""
TRIALS = 3
"""Steps that all guess to learn what it costs, and steps with guesses whose cost is believed, whatever it is."""
SURPRISE = 0.3
"""Share of what was expected by which a step's seconds are believed to be more or less: others use the machine, too."""

Reals = npt.NDArray[np.float64]


class AdaptiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that ``--speculative-adaptive-config`` may hold; names are SGLang's where it has them.

    ``candidate_steps``: how many levels may be drafted, empty for any; none at all is always possible. ``ema_alpha``:
    the weight of a new outcome. ``warmup_batches``: steps without guesses that a batch size begins with, to learn their
    cost. ``zero_step_probe_interval``: steps between probes of rows that do not guess; 0: by what probes cost and find.
    """

    candidate_steps: tuple[Annotated[int, msgspec.Meta(ge=0, le=63)], ...] = ()
    ema_alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    warmup_batches: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    zero_step_probe_interval: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class Track:
    """What is known of one request. ``hits`` [levels]: chances of each guess, given that those before it were right."""

    __slots__ = ("eager", "hits", "interval")

    def __init__(self, hits: Reals, interval: int) -> None:
        self.hits = hits
        self.eager = 0  # probes to make at once
        self.interval = interval  # steps between others


class _Cost:
    """Seconds of a step, at batch sizes of one power of two."""

    __slots__ = ("credit", "deepest", "guesses", "paused", "per_level", "per_node", "plain", "seen", "trials")

    def __init__(self) -> None:
        self.seen = 0  # plain steps
        self.guesses = 0  # steps with guesses
        self.trials = 0  # times that guesses were asked for whatever they cost: not all are timed, nor all made
        self.deepest = 0  # levels of the deepest of these
        self.paused = True  # whether the last step was plain
        self.credit = DEBT  # plain steps of time that may be lost
        self.plain = 0.0
        self.per_level = 0.0
        self.per_node = 0.0

    def learn(self, levels: int, nodes: int, seconds: float, weight: float) -> None:
        paused, self.paused = self.paused, not nodes
        if not nodes:
            self.seen += 1
            if self.seen <= TRIALS and not self.guesses:  # what runs for the first time is slow
                self.plain = min(seconds, self.plain or seconds)
                self.per_level, self.per_node = 0.1 * self.plain, 0.03 * self.plain
            # Others' use of the machine makes a step longer, nothing makes it shorter; steps after guesses are few.
            error = min(seconds - self.plain, SURPRISE * self.plain)
            self.plain += error * min((2 if paused or error > 0 else 6) * weight, 1.0)
        elif self.seen:
            self.guesses += 1
            self.deepest = max(self.deepest, levels)
            expected = self.expected(levels, nodes)
            error = seconds - expected
            if paused:  # the draft saw much that was left for later
                error = min(error, 0.0)
            if self.guesses > TRIALS:
                error = 2 * weight * _bounded(error, SURPRISE * expected)
            elif error > 0:  # of the first few the quickest is believed most
                error /= self.guesses
            error /= levels**2 + nodes**2
            # Normalized least mean squares: what cannot be told apart is blamed by its share.
            self.per_level = max(0.0, self.per_level + error * levels)
            self.per_node = max(0.0, self.per_node + error * nodes)

    def gained(self, gain: float) -> None:
        """A step with guesses brought so many plain steps of time."""
        least = -1.0 if self.guesses <= TRIALS else -DEBT
        self.credit = min(max(self.credit + max(gain, least), -DEBT), SAVINGS)

    def saved(self) -> None:
        """A step without guesses went by."""
        self.credit = max(self.credit, min(self.credit + PROBING, DEBT))

    def expected(self, levels: int, nodes: int) -> float:
        return self.plain + self.per_level * levels + self.per_node * nodes


class AdaptiveSteps:
    """The policy. ``nodes``: ``nodes[n]`` guesses are verified of a draft of n levels; ``nodes[0]`` is 0."""

    def __init__(self, nodes: Sequence[int], config: AdaptiveConfig | None = None) -> None:
        self._config = config or AdaptiveConfig()
        self._nodes = np.asarray(nodes, dtype=np.int64)
        most = len(nodes) - 1
        chosen = {level for level in self._config.candidate_steps if level <= most}
        self._levels = sorted(chosen - {0}) if self._config.candidate_steps else list(range(1, most + 1))
        self._prior: Reals = np.full(most, PRIOR)
        self._costs: dict[int, _Cost] = {}
        self._steps = 0
        self._guessing = 0  # steps with guesses since the last without
        self._idle: _Cost | None = None  # where no row guessed, and nothing was learnt of any since
        self._rest = SOONEST  # steps between two in which such a batch is thought over
        self._interval = SOONEST  # a new request's

    def track(self) -> Track:
        """A new request: it is expected to do as others did."""
        self._idle = None
        return Track(self._prior.copy(), self._interval)

    def rests(self, rows: int) -> bool:
        """Whether ``choose`` for the ``rows`` of the last step would let none of them guess, without a look at them;
        it need not be asked then."""
        if self._idle is None or self._cost(rows) is not self._idle or not (self._steps + 1) % self._rest:
            return False
        self._steps += 1
        if not self.times:  # those that are timed are counted then
            self._idle.saved()
        return True

    @property
    def times(self) -> bool:
        """Whether a step that ``rests`` is worth the time that timing takes."""
        return self._steps % TIMED == TIMED // 2

    def choose(self, tracks: Sequence[Track]) -> list[int]:
        """Levels to draft for each row of the next step, 0 for none."""
        rows = len(tracks)
        cost = self._cost(rows)
        self._steps += 1
        if not self._levels or cost.seen < self._config.warmup_batches or self._guessing >= REFRESH:
            self._guessing = 0
            return [0] * rows
        fixed = self._config.zero_step_probe_interval
        if self._idle is cost and self._steps % self._rest:
            return [0] * rows
        self._rest = fixed or SOONEST
        trial = cost.trials < TRIALS
        may = cost.credit > 0 or trial  # what was promised was not always kept
        if not (may or fixed):
            self._guessing, self._idle = 0, cost
            return [0] * rows
        chances = np.cumprod(np.stack([track.hits for track in tracks]), axis=1)
        chosen = self._best(cost, chances) if may else [0] * rows
        for row, track in enumerate(tracks):
            if chosen[row]:
                track.interval = SOONEST
            elif (trial and track.hits[0] > FORLORN) or (self._steps % fixed == 0 if fixed else self._due(track, cost)):
                chosen[row] = self._levels[0]
        if trial and any(chosen):
            cost.trials += 1
        self._guessing = self._guessing + 1 if all(chosen) else 0
        self._idle = None if any(chosen) else cost
        if not fixed:
            self._rest = min(LONGEST, *(1 if track.eager else track.interval for track in tracks))
        return chosen

    def _due(self, track: Track, cost: _Cost) -> bool:
        """Whether a request that does not guess is to be probed."""
        if track.eager:
            track.eager -= 1
            return True
        if self._steps % track.interval:
            return False
        cheap = cost.credit > DEBT / 2 and track.hits[0] > FORLORN
        track.interval = self._interval = SOONEST if cheap else min(2 * track.interval, LATEST)
        return True

    def judged(self, track: Track, accepted: int, levels: int) -> None:
        """Of the ``levels`` that were drafted of a request the first ``accepted`` were right."""
        if not levels:
            return
        self._idle = None
        alpha = self._config.ema_alpha
        if accepted and levels == self._levels[0] and track.hits[0] < PRIOR:
            track.eager, track.interval, self._interval = STREAK, SOONEST, SOONEST
        for hits, weight in ((track.hits, alpha), (self._prior, alpha / 4)):
            reached = min(accepted + 1, levels)
            right = np.arange(reached) < accepted
            hits[:reached] += weight * (right - hits[:reached])
            # What was not tried is slowly expected to be like the last that was.
            hits[levels:] += weight / 4 * (hits[levels - 1] - hits[levels:])

    def timed(self, rows: int, levels: int, nodes: int, seconds: float, accepted: int) -> None:
        """A step of ``rows`` decodes and nothing else took ``seconds``: the deepest draft had ``levels``, and
        ``nodes`` guesses were verified in all, of which ``accepted`` were right.
        """
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        # After a pause the draft sees what was left for later: that is no part of what guesses cost, and still lost.
        surprise = (2 if cost.paused else 1) * SURPRISE
        cost.learn(levels, nodes, seconds, self._config.ema_alpha)
        if not nodes:
            cost.saved()
        elif cost.plain:
            expected = cost.expected(levels, nodes)
            taken = expected + _bounded(seconds - expected, surprise * expected)
            cost.gained(1 + accepted / rows - taken / cost.plain)

    def untimed(self, rows: int, levels: int, nodes: int, accepted: int) -> None:
        """A step of ``rows`` decodes among prompts: its guesses cost what such guesses do."""
        if not rows:
            return
        cost = self._cost(rows)
        if not nodes:
            cost.saved()
        elif cost.plain:
            cost.gained(1 + accepted / rows - cost.expected(levels, nodes) / cost.plain)

    def vain(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` decodes and nothing else took ``seconds``, in which the draft had no guess to make."""
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        cost.paused = False
        if cost.plain:
            cost.gained(min(1 - seconds / cost.plain, 0.0))

    def _cost(self, rows: int) -> _Cost:
        return self._costs.setdefault(rows.bit_length(), _Cost())

    def _best(self, cost: _Cost, chances: Reals) -> list[int]:
        """The plan of the most tokens a second. ``chances`` [rows, levels]: that so many guesses are accepted."""
        rows = len(chances)
        steps = np.diff(self._nodes)
        rate = rows / cost.plain
        best = np.zeros(rows, dtype=np.int64)
        least = rate * LEAST_GAIN
        tried = bisect_right(self._levels, cost.deepest)
        for most in self._levels[: max(1, 2 * tried)]:  # few at first, whose cost says that of more
            # A level is worth it while it promises more than its seconds would yield elsewhere.
            worth = chances[:, :most] >= cost.per_node * steps[:most] * rate
            levels = np.where(worth.all(1), most, worth.argmin(1))
            if self._config.candidate_steps:
                levels = np.array([max((0, *(n for n in self._levels if n <= level))) for level in levels.tolist()])
            taken = np.arange(most) < levels[:, None]
            tokens = rows + float((chances[:, :most] * taken).sum())
            seconds = cost.expected(int(levels.max()), int(self._nodes[levels].sum()))
            if tokens / seconds > least:
                best, least = levels, tokens / seconds
                rate = least
        return [int(level) for level in best]


def _bounded(value: float, most: float) -> float:
    return min(max(value, -most), most)
