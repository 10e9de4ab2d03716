"""How many guesses are worth making, by what was accepted and what steps cost (``--speculative-adaptive``).

A step of a batch costs ``plain + start + per_level * levels + per_node * nodes`` seconds: what a step without guesses
costs at that batch size, what guessing takes at all, each pass of the draft, and each guess that is verified. A
request's k-th guess is accepted with a probability that is learnt as it goes. The plan of a step is the one that
promises the most tokens a second, and plain decoding where none promises more. Rows that do not guess are probed now
and then: twice as seldom after every probe that changed nothing, new requests as seldom as those before them, and never
more than a small share of the time pays for: see ``budget``. Where hardly a step guesses, the draft
sleeps: see ``sleep``.

Pure: no clock, no torch. One plan is made for all ranks of a model, for measured times differ between them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Annotated

import msgspec

from kernels.speculative.budget import Budget
from kernels.speculative.sleep import LATER, Sleep
from kernels.speculative.step_cost import DEBT, PROBING, SOONEST, STALLED, SURPRISE, TRIALS, StepCost

__all__ = ["AdaptiveConfig", "AdaptiveSteps", "Track"]

PRIOR, SURE = 0.6, 4
"""A guess's chance of being accepted before any was judged, which counts as so many that were."""
LEAST_GAIN = 1.06
"""Guessing must promise this much over plain decoding: promises are noisy, and plain decoding keeps its word."""
STAYING = 1.0
"""The same where a plan was followed just now: to stop and to begin again costs more than a guess or two in vain."""
HOPEFUL = 0.9
"""The same of probes that are worth some of what guesses have brought before."""
SETTLED = 4
"""Steps of one batch size before guesses are made at it that have gained nothing there yet: many sizes last for a step
or two, while requests come and go, and the first step with guesses takes longer than others."""
LATEST = 512
"""Steps between two probes of a request, at last, and at first ``SOONEST``. All are powers of two, so that requests are
probed in the same steps."""
LONGEST = 64
"""Steps that a batch that does not guess is not thought over, at most."""
TIMED = 8
"""One of so many of these steps is timed: what is not asked takes no time."""
HOLDS, KNOWN = 3, 8
"""Steps that a plan serves after its own, once the costs of so many steps with guesses are known."""
FORLORN = 0.15
"""A first guess's chance at which a request is no trial, and probed ever more seldom even with time to lose."""
LIKELY, CERTAIN = 0.5, 0.8
"""A first guess's chance from which on a draft does not sleep where such a guess pays; and wherever it does not: it is
the machine that is too slow for it just now."""
STREAK = 4
"""Probes in a row after one that was accepted, while there is time to lose."""
TRIED = 16
"""Levels of a batch's rows together in the first of them, at most."""


class AdaptiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that ``--speculative-adaptive-config`` may hold; names are SGLang's where it has them.

    ``candidate_steps``: how many levels may be drafted, empty for any; none at all is always possible. ``ema_alpha``:
    the weight of a new outcome. ``warmup_batches``: steps without guesses that a batch size begins with, to learn their
    cost. ``zero_step_probe_interval``: steps between probes of rows that do not guess, whatever they cost: ``budget``
    then forbids none; 0: by what probes cost and find.
    """

    candidate_steps: tuple[Annotated[int, msgspec.Meta(ge=0, le=63)], ...] = ()
    ema_alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    warmup_batches: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    zero_step_probe_interval: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class Track:
    """What is known of one request. ``hits`` [levels]: chances of each guess, given that those before it were right."""

    __slots__ = ("eager", "hits", "interval", "judged")

    def __init__(self, hits: list[float], interval: int) -> None:
        self.hits = hits
        self.judged = SURE  # times
        self.eager = 0  # probes to make at once
        self.interval = interval  # steps between others


class AdaptiveSteps:
    """The policy. ``nodes``: ``nodes[n]`` guesses are verified of a draft of n levels; ``nodes[0]`` is 0."""

    def __init__(self, nodes: Sequence[int], config: AdaptiveConfig | None = None) -> None:
        self._config = config or AdaptiveConfig()
        self._nodes = list(nodes)
        self._widths = [after - before for before, after in pairwise(nodes)]  # guesses of each level
        most = len(nodes) - 1
        chosen = {level for level in self._config.candidate_steps if level <= most}
        self._levels = sorted(chosen - {0}) if self._config.candidate_steps else list(range(1, most + 1))
        self._prior = [PRIOR] * most
        self._judged = SURE  # times
        self._costs: dict[int, StepCost] = {}
        self._budget = Budget()
        self._sleep = Sleep()
        self._likely = False  # whether guesses of some request were rather right than wrong, when last thought of
        self._declined = 0  # steps in a row whose requests want no guesses
        self._owed = False  # whether requests, also new ones, are probed once the draft is awake
        self._steps = 0
        self._guessing = 0  # steps with guesses since the last without
        self._planned: tuple[StepCost | None, int] = (None, 0)  # the last step that guessed by a plan, and its size
        self._idle: StepCost | None = None  # where no row guessed, and nothing was learnt of any since
        self._rest = SOONEST  # steps between two in which such a batch is thought over
        self._slept = 0  # steps that rested and are not counted yet where they pay in
        self._interval = SOONEST  # a new request's
        self._size: StepCost | None = None  # of the last step
        self._lasted = 0  # steps of that size before it
        self._plan: tuple[StepCost, list[Track], list[int]] | None = None  # made in a step before this one
        self._served = 0  # steps, by this plan

    def track(self) -> Track:
        """A new request: it is expected to do as others did."""
        return Track(self._prior.copy(), self._interval)

    def rests(self, rows: int) -> bool:
        """Whether ``choose`` for the ``rows`` of the last step would let none of them guess, without a look at them;
        it need not be asked then."""
        step = self._steps + 1
        if self._idle is None or self._costs.get(rows.bit_length()) is not self._idle or not step % self._rest:
            return False
        self._steps = step
        if step % TIMED != TIMED // 2:  # those that are timed are counted then
            self._slept += 1
        return True

    @property
    def times(self) -> bool:
        """Whether a step that ``rests`` is worth the time that timing takes."""
        return self._steps % TIMED == TIMED // 2

    @property
    def asleep(self) -> bool:
        """Whether nothing of the step that was chosen last, and of prompts with it, is to be kept for the draft."""
        awake = self._likely or self._config.zero_step_probe_interval
        return not awake and self._sleep.deep(self._steps)

    def declined(self) -> None:
        """A step goes by whose requests want no guesses."""
        self._steps += 1
        self._declined += 1
        if self._declined >= LATER:  # fewer are the last tokens of requests
            self._likely = False

    def _wake(self) -> None:
        """Count the steps that rested, together: each by itself would take longer than all that is asked of it."""
        if self._slept and self._idle is not None:
            self._pass(self._idle, self._slept)
        self._slept = 0

    def choose(self, tracks: Sequence[Track]) -> list[int]:
        """Levels to draft for each row of the next step, 0 for none."""
        self._wake()
        rows = len(tracks)
        cost = self._cost(rows)
        self._steps += 1
        self._declined = 0
        lasted = self._lasted = self._lasted + 1 if cost is self._size else 0
        self._size = cost
        if not self.asleep:  # else nothing but ``Sleep.wake`` ends it
            likely = self._likely_from(cost, rows)
            self._likely = any(track.hits[0] > likely for track in tracks)
        if not self._levels or cost.seen < self._config.warmup_batches or self._guessing >= cost.refresh:
            self._guessing = 0
            return [0] * rows
        if lasted < SETTLED and cost.credit <= DEBT and cost.trials >= TRIALS:
            return [0] * rows
        fixed = self._config.zero_step_probe_interval
        if self._budget.spent(cost.plain) and not fixed:
            self._guessing, self._idle, self._rest = 0, cost, _until(self._budget.wait(cost.plain))
            return [0] * rows
        if self._sleep.stirs(self._steps) and not fixed:
            self._guessing, self._idle, self._rest = 0, cost, SOONEST
            return [0] * rows
        if self.asleep and (wait := self._sleep.sound(self._steps)):
            self._guessing, self._idle, self._rest = 0, cost, _until(wait)
            return [0] * rows
        held, self._plan = self._plan, None
        if self.asleep:  # it is from before, and the draft is to be woken
            held = None
        if held is not None and held[0] is cost and cost.credit > 0 and self._served < HOLDS and held[1] == tracks:
            self._plan = held
            self._served += 1
            self._guessing += 1
            self._planned = cost, self._steps
            return held[2]
        if self._idle is cost and self._steps % self._rest:
            return [0] * rows
        self._rest = fixed or SOONEST
        trial = cost.trials < TRIALS
        may = cost.credit > 0 or trial  # what was promised was not always kept
        if not (may or fixed):
            self._guessing, self._idle, self._rest = 0, cost, _until(-cost.credit / PROBING)
            return [0] * rows
        probed: list[int] = []
        owed, self._owed = self._owed, False
        if trial:  # the deepest and the shallowest tell most of costs
            deep = bisect_right(self._levels, max(self._levels[0], TRIED // rows))
            some = self._levels[0 if cost.trials % 2 else deep - 1]
            chosen = [some if track.hits[0] > FORLORN else 0 for track in tracks]
        else:
            size, step = self._planned
            stays = size is cost and self._steps - step <= 2  # a plain step between tells what it costs
            chosen = self._best(cost, tracks, STAYING if stays else LEAST_GAIN) if may else [0] * rows
        planned = any(chosen) and not trial
        for row, track in enumerate(tracks):
            if chosen[row]:
                track.interval = SOONEST
            elif self._steps % fixed == 0 if fixed else owed or self._due(track):
                probed.append(row)
        if probed:  # there is time to lose where guesses have brought some
            rich = cost.credit > DEBT and not fixed
            plan = self._best(cost, [tracks[row] for row in probed], HOPEFUL) if rich else [0] * len(probed)
            for row, levels in zip(probed, plan, strict=True):
                chosen[row] = levels or self._levels[0]
                if levels and tracks[row].hits[0] > FORLORN:
                    tracks[row].interval = self._interval = SOONEST
        if any(chosen):
            if self.asleep:
                self._sleep.wake(self._steps)
                self._owed = bool(probed)
                self._guessing, self._idle, self._rest = 0, cost, SOONEST
                return [0] * rows
            self._sleep.guessed(self._steps)
            cost.trials += trial
            if planned:
                self._planned = cost, self._steps
        self._guessing = self._guessing + 1 if any(chosen) else 0
        self._idle = None if any(chosen) else cost
        if all(chosen) and not (trial or probed) and cost.guesses >= KNOWN:
            self._plan, self._served, self._interval = (cost, list(tracks), chosen), 0, SOONEST
        if not fixed:
            self._rest = min(LONGEST, *(1 if track.eager else track.interval for track in tracks))
        return chosen

    def _due(self, track: Track) -> bool:
        """Whether a request that does not guess is to be probed."""
        if track.eager:
            track.eager -= 1
            return True
        if self._steps % track.interval:
            return False
        track.interval = self._interval = min(2 * track.interval, LATEST)
        return True

    def judged(self, track: Track, accepted: int, levels: int) -> None:
        """Of the ``levels`` that were drafted of a request the first ``accepted`` were right."""
        if not levels:
            return
        self._wake()
        self._idle = None
        alpha = self._config.ema_alpha
        if accepted == levels == self._levels[0] and track.hits[0] < PRIOR:
            track.eager = STREAK
        track.judged, self._judged = track.judged + 1, self._judged + 1
        own, shared = max(alpha, 1 / track.judged) if alpha >= 0.1 else alpha, max(alpha / 4, 1 / self._judged)
        for hits, weight in ((track.hits, own), (self._prior, shared)):
            for level in range(min(accepted + 1, levels)):
                hits[level] += weight * ((level < accepted) - hits[level])
            # What was not tried is slowly expected to be like the last that was.
            last = hits[levels - 1]
            for level in range(levels, len(hits)):
                hits[level] += weight / 4 * (last - hits[level])

    def timed(
        self, rows: int, levels: int, nodes: int, seconds: float, accepted: int, seen: float = 0.0, behind: bool = False
    ) -> None:
        """A step of ``rows`` decodes and nothing else took ``seconds``: the deepest draft had ``levels``, and
        ``nodes`` guesses were verified in all, of which ``accepted`` were right. ``seen``: of a step without guesses,
        seconds that went into showing the draft what those before it left. ``behind``: of such a step, whether it ran
        right behind prompts; it takes longer than those in the middle of answers, and tells little of them.
        """
        self._wake()
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        if behind and cost.seen >= TRIALS:
            cost.seen += 1
            self._pass(cost)
            return
        # After a pause the draft sees what was left for later: that is no part of what guesses cost, and still lost.
        paused = cost.paused
        surprise = (2 if paused else 1) * SURPRISE
        left = not (nodes or paused)  # what guesses left behind is seen to by the next step
        cost.learn(levels, nodes, seconds, self._config.ema_alpha, seen)
        if left and seconds > cost.plain:
            self._budget.guessed(cost.plain, cost.load, min(seconds, STALLED * cost.plain))
        if not nodes:
            self._pass(cost)
        elif cost.plain:
            expected = cost.expected(levels, nodes)
            taken = expected + _bounded(seconds - expected, surprise * expected)
            self._gain(cost, 1 + accepted / rows, taken, seconds if paused else min(seconds, STALLED * expected))

    def untimed(self, rows: int, levels: int, nodes: int, accepted: int) -> None:
        """A step of ``rows`` decodes among prompts: its guesses cost what such guesses do."""
        self._wake()
        if not rows:
            return
        cost = self._cost(rows)
        if not nodes:
            self._pass(cost)
        elif cost.plain:
            expected = cost.expected(levels, nodes)
            self._gain(cost, 1 + accepted / rows, expected, cost.load * expected)

    def vain(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` decodes and nothing else took ``seconds``, in which the draft had no guess to make."""
        self._wake()
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        cost.paused = False
        if cost.plain:
            self._gain(cost, 1.0, max(seconds, cost.plain), max(seconds, cost.plain))

    def _pass(self, cost: StepCost, steps: int = 1) -> None:
        """Steps without guesses went by."""
        cost.saved(steps)
        self._budget.passed(cost.plain, steps)

    def _gain(self, cost: StepCost, tokens: float, believed: float, seconds: float) -> None:
        """A step with guesses brought so many ``tokens`` a row, and took ``seconds``."""
        gain = tokens - believed / cost.plain
        cost.gained(gain)
        self._sleep.gained(gain)
        self._budget.passed(cost.plain)
        # As many plain steps would have been as slow on this machine as those there were.
        self._budget.guessed(cost.plain, tokens * cost.load, seconds)

    def _cost(self, rows: int) -> StepCost:
        size = rows.bit_length()
        found = self._costs.get(size)
        if found is None:
            known = [other for other, cost in self._costs.items() if cost.guesses >= TRIALS]
            near = min(known, key=lambda other: abs(other - size), default=None)
            found = self._costs[size] = StepCost(None if near is None else self._costs[near])
        return found

    def interrupted(self) -> None:
        """Prompts were run, which the draft will see before it guesses again."""
        for cost in self._costs.values():
            cost.paused = True

    def _likely_from(self, cost: StepCost, rows: int) -> float:
        """A first guess's chance from which on the draft of such a batch stays awake."""
        if not (self._levels and cost.plain):
            return LIKELY
        first = self._levels[0]
        pays = LEAST_GAIN * cost.expected(first, rows * self._nodes[first]) / cost.plain - 1
        return min(max(pays, LIKELY), CERTAIN)

    def _best(self, cost: StepCost, tracks: Sequence[Track], gain: float) -> list[int]:
        """The plan of the most tokens a second; plain decoding where it is not ``gain`` times better."""
        rows, rate = len(tracks), len(tracks) / cost.plain
        chances = [list(accumulate(track.hits, mul)) for track in tracks]  # that so many guesses are accepted
        expected = [list(accumulate(each, initial=0.0)) for each in chances]  # tokens of so many levels
        best, least = [0] * rows, rate * gain
        tried = bisect_right(self._levels, cost.deepest)
        for most in self._levels[: max(1, 2 * tried)]:  # few at first, whose cost says that of more
            # A level is worth it while it promises more than its seconds would yield elsewhere.
            worth = [cost.per_node * rate * nodes for nodes in self._widths[:most]]
            levels = [next((n for n in range(most) if each[n] < worth[n]), most) for each in chances]
            if self._config.candidate_steps:
                levels = [max((0, *(n for n in self._levels if n <= level))) for level in levels]
            tokens = rows + sum([each[level] for each, level in zip(expected, levels, strict=True)])
            seconds = cost.expected(max(levels), sum([self._nodes[level] for level in levels]))
            if tokens / seconds > least:
                best, least = levels, tokens / seconds
                rate = least
        return best


def _until(steps: float) -> int:
    """How long a batch rests that cannot guess for so many steps: a power of two, as all intervals are."""
    return 1 << int(min(max(steps, SOONEST), LONGEST)).bit_length() - 1


def _bounded(value: float, most: float) -> float:
    return min(max(value, -most), most)
