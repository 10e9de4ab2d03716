"""The adaptive policy: how many draft tokens each request gets in each step (``--speculative-adaptive``).

A decode step of one batch size is modelled as ``plain + start + per_level * levels + per_node * nodes`` seconds: the
time of a step without draft tokens, the fixed cost of drafting, the cost of each pass of the draft and the cost of each
node that is verified (``StepCost``). The k-th draft token of a request is accepted with a probability that is learnt as
the request runs (``AcceptanceEstimate``). The plan of a step is the one with the most expected tokens a second; it is
plain decoding where nothing promises more.

Three mechanisms bound what speculation may lose:

* Requests that do not draft are probed now and then. The interval doubles after every probe that changes nothing, and a
  new request starts with the interval of those before it.
* ``LossBudget`` is an account in seconds over all batch sizes. Nothing is drafted while it is overdrawn.
* ``DraftSleep`` stops the observation of steps by a draft that hardly ever drafts, since observing costs time too.

Pure: no clock and no torch. The scheduler makes one plan for all ranks of a model, because measured times differ
between ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Annotated

import msgspec

__all__ = [
    "CONSTANTS",
    "AcceptanceEstimate",
    "AdaptiveConfig",
    "AdaptivePolicy",
    "DraftSleep",
    "LossBudget",
    "PolicyConstants",
    "StepCost",
]


@dataclass(frozen=True)
class PolicyConstants:
    """The policy's constants. A "plain step" as a unit is the time of one step without draft tokens.

    Each was compared with its neutral value by simulation (decision 0015): it gains 4 % or more in some workload, or it
    is part of the bound on losses.
    """

    # Acceptance of a request's draft tokens.
    prior: float = 0.6  # the chance that a draft token is accepted, before any was verified
    prior_weight: int = 4  # the number of outcomes that the prior counts as: a request shows its kind within some steps
    probe_streak: int = 4  # probes in a row after one that was accepted: a request that changed is followed at once

    # Speedup over plain decoding that starts drafting: estimates are noisy, and starting takes time. Once a batch
    # drafts, any speedup keeps it drafting.
    min_gain: float = 1.06

    # Steps between decisions. Intervals are powers of two, so that requests are probed in the same steps.
    min_interval: int = (
        8  # between the first probes of a request; between reviews of any batch; one plan is used so long
    )
    max_review_interval: int = 64  # between reviews of a batch that does not draft, and plain steps of one that does
    max_probe_interval: int = 512  # between probes of a request: a probe costs about half a plain step
    stable_steps: int = 4  # at one batch size before drafting starts there: while requests end, sizes last for a step

    # Cost of steps.
    trials: int = 3  # drafting steps that learn the cost; also slow first steps, whose time is taken as it is
    trial_levels: int = 16  # levels of the deepest trial, summed over all rows: it bounds the cost of trials
    outlier: float = 0.3  # share by which a step may exceed its expected cost; the rest is attributed to the machine
    stall: float = 4.0  # multiple of the expected cost to which the time of a step is cut: the machine stalled
    faster_weight: float = 8.0  # weight of a step below its expected cost: noise makes steps slower, never faster
    first_shares: tuple[float, float, float] = (0.3, 0.08, 0.03)  # a draft, a level, a node in plain steps, untimed

    # Bounds on what drafting loses, in plain steps unless stated otherwise.
    loss_share: float = 0.005  # share of the time, by batch size
    total_loss_share: float = 0.02  # share of the time, in all
    max_debt: float = 4.0  # before that, by batch size and in all
    first_debt: float = 1.0  # the same where costs are copied from another batch size; the loss of a first, slow step
    max_credit: float = 64.0  # past gain that is remembered, by batch size and in all; also the most loss of one step

    # Sleep of the draft, which then does not observe steps. Observing takes some 8 % of a plain step of a small model.
    awake_steps: int = 48  # without draft tokens before a draft sleeps; also observed before it drafts again
    awake_per_draft: int = 16  # steps by which a drafting step postpones sleep
    awake_chance: float = 0.8  # a first draft token as likely as this keeps a draft awake: only the moment was too slow


CONSTANTS = PolicyConstants()


class AdaptiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that ``--speculative-adaptive-config`` may hold; names are SGLang's where it has them.

    ``candidate_steps``: levels that may be drafted; empty: any. No level at all is always possible. ``ema_alpha``:
    weight of a new outcome. ``warmup_batches``: plain steps at the start of each batch size, to learn their cost.
    ``zero_step_probe_interval``: steps between probes of requests that do not draft, whatever the loss budget; 0:
    chosen from the cost and the success of probes.
    """

    candidate_steps: tuple[Annotated[int, msgspec.Meta(ge=0, le=63)], ...] = ()
    ema_alpha: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    warmup_batches: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    zero_step_probe_interval: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class AcceptanceEstimate:
    """Acceptance statistics of one request. ``chances`` [levels]: the chance that each draft token is accepted, given
    that those before it are."""

    __slots__ = ("chances", "interval", "outcomes", "pending_probes")

    def __init__(self, chances: list[float], interval: int) -> None:
        self.chances = chances
        self.outcomes = CONSTANTS.prior_weight
        self.pending_probes = 0  # to make at once
        self.interval = interval  # steps between other probes


class StepCost:
    """The cost of steps in seconds, for batch sizes up to one power of two.

    ``like``: another size whose draft steps were timed. Without it a few trial steps learn the cost.
    """

    __slots__ = (
        "credit", "deepest", "drafting_steps", "load", "paused", "per_level", "per_node", "plain", "plain_steps",
        "shares", "start", "trials",
    )  # fmt: skip

    def __init__(self, like: StepCost | None = None) -> None:
        self.plain_steps = 0  # timed
        self.drafting_steps = 0  # timed
        self.trials = 0  # trial steps requested: some are not timed, and some find no draft tokens
        self.deepest = 0  # levels of the deepest timed draft
        self.load = 1.0  # average time of plain steps in units of ``plain``, which is close to their minimum
        self.paused = True  # whether the last step was plain
        self.credit = CONSTANTS.max_debt  # plain steps that may be lost
        self.shares = CONSTANTS.first_shares  # start, level and node in plain steps, before any was timed
        if like is not None:
            self.trials, self.credit = CONSTANTS.trials, CONSTANTS.first_debt
            self.shares = (like.start / like.plain, like.per_level / like.plain, like.per_node / like.plain)
        self.plain: float = 0.0
        self.start: float = 0.0
        self.per_level: float = 0.0
        self.per_node: float = 0.0

    def learn(self, levels: int, nodes: int, seconds: float, weight: float, observe: float = 0.0) -> None:
        """Learn from a timed step. ``observe``: seconds in which the draft observed tokens that drafting steps left."""
        paused, self.paused = self.paused, not nodes
        if not nodes:
            self._learn_plain(seconds - observe, paused, weight, bool(observe))
        elif self.plain_steps:
            self._learn_drafting(levels, nodes, seconds, paused, weight)

    def _learn_plain(self, seconds: float, paused: bool, weight: float, observed: bool) -> None:
        # ``observe`` is subtracted: a plain step estimated too slow would never be corrected, since each follows a
        # drafting one.
        self.plain_steps += 1
        if self.plain_steps <= CONSTANTS.trials and not self.drafting_steps:  # the first steps are slow
            self.plain = min(seconds, self.plain or seconds)
            self.start, self.per_level, self.per_node = (share * self.plain for share in self.shares)
        if paused or observed:
            self.load += (min(seconds / self.plain, CONSTANTS.stall) - self.load) / CONSTANTS.max_review_interval
        if paused or self.plain_steps <= CONSTANTS.trials or seconds < self.plain:
            self.plain += _damped(seconds - self.plain, self.plain, weight)

    def _learn_drafting(self, levels: int, nodes: int, seconds: float, paused: bool, weight: float) -> None:
        self.drafting_steps += 1
        self.deepest = max(self.deepest, levels)
        expected = self.expected(levels, nodes)
        error = seconds - expected
        if self.drafting_steps > CONSTANTS.trials:
            error = _damped(error, expected, weight)
        if paused:  # the draft first observed all deferred tokens
            error = min(error, 0.0)
        # Normalized least mean squares: indistinguishable parts share an error by their squared prior.
        start, level, node = (share * share for share in CONSTANTS.first_shares)
        error /= start + level * levels**2 + node * nodes**2
        # No part exceeds the whole excess of this step: a stall would otherwise distort many probes.
        overhead = max(0.0, seconds - self.plain)
        self.start = min(max(0.0, self.start + error * start), overhead)
        self.per_level = min(max(0.0, self.per_level + error * level * levels), overhead / max(levels, 1))
        self.per_node = min(max(0.0, self.per_node + error * node * nodes), overhead / nodes)

    @property
    def refresh(self) -> int:
        """Drafting steps before a plain one: fewer while few plain steps were timed."""
        return min(CONSTANTS.max_review_interval, CONSTANTS.min_interval + 2 * self.plain_steps)

    def add_gain(self, gain: float) -> None:
        """Record the gain of a drafting step, in plain steps of time."""
        min_gain = -CONSTANTS.first_debt if self.drafting_steps <= CONSTANTS.trials else -CONSTANTS.max_debt
        self.credit = min(max(self.credit + max(gain, min_gain), -CONSTANTS.max_debt), CONSTANTS.max_credit)

    def add_plain(self, steps: int) -> None:
        """Record steps without draft tokens."""
        self.credit = max(self.credit, min(self.credit + CONSTANTS.loss_share * steps, CONSTANTS.max_debt))

    def expected(self, levels: int, nodes: int) -> float:
        """Seconds of a step with a deepest draft of ``levels`` and ``nodes`` draft tokens in all."""
        return self.plain + self.start + self.per_level * levels + self.per_node * nodes


def _damped(error: float, expected: float, weight: float) -> float:
    """The change of an estimate by an error."""
    return min(error, CONSTANTS.outlier * expected) * min((1.0 if error > 0 else CONSTANTS.faster_weight) * weight, 1.0)


class LossBudget:
    """Bound on the total loss by speculation, whatever steps cost and however few draft tokens are accepted.

    An account in seconds, for one model and all batch sizes. Every step pays in a small share of a plain step. Drafting
    steps pay in their gain over plain ones or take out their loss. While the account is overdrawn no step drafts,
    except for probes of ``zero_step_probe_interval``. So the loss never exceeds that share of the time plus a loan, the
    overdraft of the last step and the first few drafting steps; stalls of the machine are not counted.
    """

    def __init__(self) -> None:
        self._balance = 0.0  # seconds
        self._first = CONSTANTS.trials  # initial drafting steps still to come; they are slow

    def is_spent(self, plain: float) -> bool:
        """Whether nothing may be drafted before a step whose plain time is ``plain`` seconds."""
        return self._balance + CONSTANTS.max_debt * plain < 0

    def steps_until(self, plain: float) -> float:
        """Plain steps of ``plain`` seconds until the budget is no longer spent."""
        if not plain:
            return 0.0
        return max(0.0, -(self._balance + CONSTANTS.max_debt * plain) / (CONSTANTS.total_loss_share * plain))

    def add_steps(self, plain: float, steps: int = 1) -> None:
        """Record steps, drafting or not, whose plain time is ``plain`` seconds."""
        self._add(CONSTANTS.total_loss_share * plain * steps, plain)

    def add_drafting(self, plain: float, tokens: float, seconds: float) -> None:
        """Record a step that took ``seconds``: it drafted, or the draft observed tokens of such a step.

        ``tokens``: tokens by row, each counted as the plain steps that it would have taken.
        """
        max_debt = CONSTANTS.first_debt if self._first else CONSTANTS.max_credit
        self._first = max(self._first - 1, 0)
        self._add(max(tokens * plain - seconds, -max_debt * plain), plain)

    def _add(self, seconds: float, plain: float) -> None:
        # Savings of batch sizes with longer steps are kept.
        self._balance += min(seconds, max(CONSTANTS.max_credit * plain - self._balance, 0.0))


class DraftSleep:
    """Decides when a draft that has not drafted for a while stops observing steps. Counted in steps of the policy.

    A plain step costs more where the engine may speculate, because the draft observes its tokens. A sleeping draft
    observes nothing. Before it drafts again it observes some steps; it never observes those that it slept through. It
    observes later requests whole, except for cached prefixes computed while it slept.
    """

    def __init__(self) -> None:
        self._awake_until = CONSTANTS.awake_steps
        self._ready = 0

    def is_asleep(self, step: int) -> bool:
        """Whether the draft does not observe this step."""
        return step >= self._awake_until

    def is_waking(self, step: int) -> bool:
        """Whether the draft is awake but has not observed enough to draft in this step."""
        return step < self._ready

    def wake(self, step: int) -> None:
        """Wake the draft for a step that would draft: it observes this step and those after it."""
        self._ready = step + CONSTANTS.awake_steps
        self._awake_until = self._ready + CONSTANTS.awake_per_draft

    def add_drafting(self, step: int) -> None:
        """Record that this step drafts."""
        self._awake_until = min(max(self._awake_until, step) + CONSTANTS.awake_per_draft, step + CONSTANTS.awake_steps)


class AdaptivePolicy:
    """Chooses levels by row, and learns from accepted draft tokens and step times.

    ``nodes``: ``nodes[n]`` is the number of draft tokens verified of a draft of n levels; ``nodes[0]`` is 0.
    """

    def __init__(self, nodes: Sequence[int], config: AdaptiveConfig | None = None) -> None:
        self._config = config or AdaptiveConfig()
        self._nodes = list(nodes)
        self._widths = [after - before for before, after in pairwise(nodes)]  # draft tokens of each level
        max_levels = len(nodes) - 1
        chosen = {level for level in self._config.candidate_steps if level <= max_levels}
        self._levels = sorted(chosen - {0}) if self._config.candidate_steps else list(range(1, max_levels + 1))
        self._prior = [CONSTANTS.prior] * max_levels
        self._outcomes = CONSTANTS.prior_weight
        self._costs: dict[int, StepCost] = {}
        self._budget = LossBudget()
        self._sleep = DraftSleep()
        self._likely = False  # whether, at the last review, some first draft token was likely to be accepted
        self._declined = 0  # consecutive steps whose requests want no draft tokens
        self._owed = False  # whether all requests are to be probed when the draft is awake
        self._steps = 0
        self._drafting = 0  # drafting steps since the last plain one
        self._planned: tuple[StepCost | None, int] = (None, 0)  # batch size and number of the last step with a plan
        self._idle: StepCost | None = None  # the batch size at which no row drafts until an estimate changes
        self._rest = CONSTANTS.min_interval  # steps between reviews of such a batch
        self._uncounted = 0  # skipped steps that are not counted yet
        self._interval = CONSTANTS.min_interval  # between probes of a new request
        self._size: StepCost | None = None  # of the last step
        self._lasted = 0  # consecutive steps of that size before it
        self._plan: tuple[StepCost, list[AcceptanceEstimate], list[int]] | None = None  # of an earlier step, for reuse
        self._served = 0  # steps that reused it

    def new_estimate(self) -> AcceptanceEstimate:
        """The estimate of a new request, with the acceptance of earlier ones as its prior."""
        return AcceptanceEstimate(self._prior.copy(), self._interval)

    def skip(self, rows: int) -> bool:
        """Count a step with the ``rows`` of the last one if ``choose`` would let none of them draft.

        Otherwise returns False and changes nothing: ``choose`` must decide.
        """
        step = self._steps + 1
        if self._idle is None or self._costs.get(rows.bit_length()) is not self._idle or not step % self._rest:
            return False
        self._steps = step
        if not self.is_timed:  # timed steps are counted with their time
            self._uncounted += 1
        return True

    @property
    def is_timed(self) -> bool:
        """Whether a skipped step is timed: one of ``first_interval`` steps."""
        return self._steps % CONSTANTS.min_interval == CONSTANTS.min_interval // 2

    @property
    def is_asleep(self) -> bool:
        """Whether the draft does not observe the last chosen step and the prompts beside it."""
        awake = self._likely or self._config.zero_step_probe_interval
        return not awake and self._sleep.is_asleep(self._steps)

    def add_declined(self) -> None:
        """Count a step whose requests want no draft tokens."""
        self._steps += 1
        self._declined += 1
        if self._declined >= CONSTANTS.awake_steps:  # fewer are just the last tokens of requests
            self._likely = False

    def _count_skipped(self) -> None:
        """Count all skipped steps at once: one by one takes longer than deciding them."""
        if self._uncounted and self._idle is not None:
            self._add_plain(self._idle, self._uncounted)
        self._uncounted = 0

    def choose(self, estimates: Sequence[AcceptanceEstimate]) -> list[int]:
        """Levels to draft for each row of the next step, 0 for none."""
        self._count_skipped()
        rows = len(estimates)
        cost = self._cost(rows)
        self._steps += 1
        self._declined = 0
        lasted = self._lasted = self._lasted + 1 if cost is self._size else 0
        self._size = cost
        if not self.is_asleep:  # otherwise only ``DraftSleep.wake`` ends it
            self._likely = any(estimate.chances[0] > CONSTANTS.awake_chance for estimate in estimates)
        none = [0] * rows
        if not self._levels or cost.plain_steps < self._config.warmup_batches or self._drafting >= cost.refresh:
            self._drafting = 0
            return none
        if lasted < CONSTANTS.stable_steps and cost.credit <= CONSTANTS.max_debt and cost.trials >= CONSTANTS.trials:
            return none
        fixed = self._config.zero_step_probe_interval
        wait = self._steps_to_wait(cost, bool(fixed))
        if wait is not None:
            self._set_idle(cost, _power_of_two(wait))
            return none
        held, self._plan = self._plan, None
        if held is not None and not self.is_asleep and self._can_reuse(held, cost, estimates):
            self._plan = held
            self._served += 1
            self._drafting += 1
            self._planned = cost, self._steps
            return held[2]
        if self._idle is cost and self._steps % self._rest:
            return none
        self._rest = fixed or CONSTANTS.min_interval
        trial = cost.trials < CONSTANTS.trials
        may = cost.credit > 0 or trial  # expected gains may not have come true
        if not (may or fixed):
            self._set_idle(cost, _power_of_two(-cost.credit / CONSTANTS.loss_share))
            return none
        owed, self._owed = self._owed, False
        chosen = (
            self._plan_trial(cost, estimates) if trial else self._plan_best(cost, estimates) if may else none.copy()
        )
        planned = any(chosen) and not trial
        probed = self._probe(cost, estimates, chosen, owed)
        if any(chosen):
            if self.is_asleep:
                self._sleep.wake(self._steps)
                self._owed = probed
                self._set_idle(cost, CONSTANTS.min_interval)
                return none
            self._sleep.add_drafting(self._steps)
            cost.trials += trial
            if planned:
                self._planned = cost, self._steps
        self._drafting = self._drafting + 1 if any(chosen) else 0
        self._idle = None if any(chosen) else cost
        if all(chosen) and not (trial or probed) and cost.drafting_steps >= CONSTANTS.min_interval:
            self._plan, self._served, self._interval = (cost, list(estimates), chosen), 0, CONSTANTS.min_interval
        if not fixed:
            self._rest = min(
                CONSTANTS.max_review_interval,
                *(1 if estimate.pending_probes else estimate.interval for estimate in estimates),
            )
        return chosen

    def _steps_to_wait(self, cost: StepCost, fixed: bool) -> float | None:
        """Steps for which no row may draft, 0 for the shortest rest; None where drafting is allowed."""
        if not fixed:
            if self._budget.is_spent(cost.plain):
                return self._budget.steps_until(cost.plain)
            if self._sleep.is_waking(self._steps):
                return 0.0
        return None

    def _set_idle(self, cost: StepCost, rest: int) -> None:
        self._drafting, self._idle, self._rest = 0, cost, rest

    def _can_reuse(
        self,
        held: tuple[StepCost, list[AcceptanceEstimate], list[int]],
        cost: StepCost,
        estimates: Sequence[AcceptanceEstimate],
    ) -> bool:
        """Whether this step can reuse the plan of an earlier one."""
        return held[0] is cost and cost.credit > 0 and self._served < CONSTANTS.min_interval and held[1] == estimates

    def _plan_trial(self, cost: StepCost, estimates: Sequence[AcceptanceEstimate]) -> list[int]:
        """The deepest and the shallowest draft in turns, which determine the cost best."""
        deep = bisect_right(self._levels, max(self._levels[0], CONSTANTS.trial_levels // len(estimates)))
        levels = self._levels[0 if cost.trials % 2 else deep - 1]
        return [levels] * len(estimates)

    def _plan_best(self, cost: StepCost, estimates: Sequence[AcceptanceEstimate]) -> list[int]:
        size, step = self._planned
        goes_on = size is cost and self._steps - step <= 2  # a plain step in between refreshes the cost of plain steps
        return self._best(cost, estimates, 1.0 if goes_on else CONSTANTS.min_gain)

    def _probe(self, cost: StepCost, estimates: Sequence[AcceptanceEstimate], chosen: list[int], owed: bool) -> bool:
        """Add due probes of requests that do not draft to ``chosen``; returns whether there is any."""
        fixed = self._config.zero_step_probe_interval
        probed: list[int] = []
        for row, estimate in enumerate(estimates):
            if chosen[row]:
                estimate.interval = CONSTANTS.min_interval
            elif self._steps % fixed == 0 if fixed else owed or self._take_probe(estimate):
                probed.append(row)
        if not probed:
            return False
        rich = cost.credit > CONSTANTS.max_debt and not fixed  # draft tokens have gained time that probes may spend
        plan = self._best(cost, [estimates[row] for row in probed], CONSTANTS.min_gain) if rich else [0] * len(probed)
        for row, levels in zip(probed, plan, strict=True):
            chosen[row] = levels or self._levels[0]
            if levels:
                estimates[row].interval = self._interval = CONSTANTS.min_interval
        return True

    def _take_probe(self, estimate: AcceptanceEstimate) -> bool:
        """Take the due probe of a request that does not draft; returns whether there was one."""
        if estimate.pending_probes:
            estimate.pending_probes -= 1
            return True
        if self._steps % estimate.interval:
            return False
        estimate.interval = self._interval = min(2 * estimate.interval, CONSTANTS.max_probe_interval)
        return True

    def add_accepted(self, estimate: AcceptanceEstimate, accepted: int, levels: int) -> None:
        """Record that the first ``accepted`` of the ``levels`` drafted for a request were accepted."""
        if not levels:
            return
        self._count_skipped()
        self._idle = None
        alpha = self._config.ema_alpha
        if accepted == levels == self._levels[0] and estimate.chances[0] < CONSTANTS.prior:
            estimate.pending_probes = CONSTANTS.probe_streak
        estimate.outcomes, self._outcomes = estimate.outcomes + 1, self._outcomes + 1
        own, shared = max(alpha, 1 / estimate.outcomes) if alpha >= 0.1 else alpha, max(alpha / 4, 1 / self._outcomes)
        for chances, weight in ((estimate.chances, own), (self._prior, shared)):
            for level in range(min(accepted + 1, levels)):
                chances[level] += weight * ((level < accepted) - chances[level])
            # Levels that were not tried slowly approach the last one that was.
            last = chances[levels - 1]
            for level in range(levels, len(chances)):
                chances[level] += weight / 4 * (last - chances[level])

    def add_timed(self, rows: int, levels: int, nodes: int, seconds: float, accepted: int) -> None:
        """Record that a step of ``rows`` decodes and nothing else took ``seconds``.

        Its deepest draft had ``levels``; it verified ``nodes`` draft tokens and accepted ``accepted``. Without draft
        tokens it acts as ``add_plain``.
        """
        if not nodes:
            self.add_plain(rows, seconds)
            return
        self._count_skipped()
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        paused = cost.paused
        cost.learn(levels, nodes, seconds, self._config.ema_alpha)
        if not cost.plain:
            return
        # After a pause the draft observes deferred tokens. That time is lost but is not a cost of draft tokens.
        expected = cost.expected(levels, nodes)
        max_error = (2 if paused else 1) * CONSTANTS.outlier * expected
        believed = expected + min(max(seconds - expected, -max_error), max_error)
        self._add_gain(
            cost, 1 + accepted / rows, believed, seconds if paused else min(seconds, CONSTANTS.stall * expected)
        )

    def add_plain(self, rows: int, seconds: float, observe: float = 0.0, after_prompts: bool = False) -> None:
        """Record that a step of ``rows`` decodes without draft tokens and nothing else took ``seconds``.

        ``observe``: the part in which the draft observed tokens of earlier steps. ``after_prompts``: whether it ran
        right after prompts; such a step takes longer and says little about others.
        """
        self._count_skipped()
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        if after_prompts and cost.plain_steps >= CONSTANTS.trials:
            cost.plain_steps += 1
            self._add_plain(cost)
            return
        after_draft = not cost.paused  # the draft observed tokens that a drafting step left
        cost.learn(0, 0, seconds, self._config.ema_alpha, observe)
        if after_draft and seconds > cost.plain:
            self._budget.add_drafting(cost.plain, cost.load, min(seconds, CONSTANTS.stall * cost.plain))
        self._add_plain(cost)

    def add_untimed(self, rows: int, levels: int, nodes: int, accepted: int) -> None:
        """Record a step of ``rows`` decodes beside prompts, with the expected cost of its draft tokens."""
        self._count_skipped()
        if not rows:
            return
        cost = self._cost(rows)
        if not nodes:
            self._add_plain(cost)
        elif cost.plain:
            expected = cost.expected(levels, nodes)
            self._add_gain(cost, 1 + accepted / rows, expected, cost.load * expected)

    def add_empty(self, rows: int, seconds: float) -> None:
        """Record that a step of ``rows`` decodes and nothing else took ``seconds`` and its drafter found nothing."""
        self._count_skipped()
        if not rows or seconds <= 0:
            return
        cost = self._cost(rows)
        cost.paused = False
        if cost.plain:
            self._add_gain(cost, 1.0, max(seconds, cost.plain), max(seconds, cost.plain))

    def add_prompts(self) -> None:
        """Record that prompts ran; the draft observes them before it drafts again."""
        for cost in self._costs.values():
            cost.paused = True

    def _add_plain(self, cost: StepCost, steps: int = 1) -> None:
        """Record steps without draft tokens."""
        cost.add_plain(steps)
        self._budget.add_steps(cost.plain, steps)

    def _add_gain(self, cost: StepCost, tokens: float, believed: float, seconds: float) -> None:
        """Record a drafting step of ``tokens`` a row that took ``seconds``, of which ``believed`` are attributed to
        it."""
        gain = tokens - believed / cost.plain
        cost.add_gain(gain)
        self._budget.add_steps(cost.plain)
        # The same number of plain steps would have been as slow as recent ones.
        self._budget.add_drafting(cost.plain, tokens * cost.load, seconds)

    def _cost(self, rows: int) -> StepCost:
        size = rows.bit_length()
        result = self._costs.get(size)
        if result is None:
            known = [other for other, cost in self._costs.items() if cost.drafting_steps >= CONSTANTS.trials]
            near = min(known, key=lambda other: abs(other - size), default=None)
            result = self._costs[size] = StepCost(None if near is None else self._costs[near])
        return result

    def _best(self, cost: StepCost, estimates: Sequence[AcceptanceEstimate], gain: float) -> list[int]:
        """The plan with the most tokens a second; plain decoding if none is ``gain`` times better."""
        rows, rate = len(estimates), len(estimates) / cost.plain
        # Of 1, 2, ... accepted draft tokens.
        chances = [list(accumulate(estimate.chances, mul)) for estimate in estimates]
        expected = [
            list(accumulate(each, initial=0.0)) for each in chances
        ]  # draft tokens accepted of 0, 1, ... levels
        best, min_rate = [0] * rows, rate * gain
        tried = bisect_right(self._levels, cost.deepest)
        for max_depth in self._levels[: max(1, 2 * tried)]:  # depth at most doubles: the cost of more is unknown
            # A level pays while it promises more tokens than its seconds would yield elsewhere.
            worth = [cost.per_node * rate * nodes for nodes in self._widths[:max_depth]]
            levels = [next((n for n in range(max_depth) if each[n] < worth[n]), max_depth) for each in chances]
            if self._config.candidate_steps:
                levels = [max((0, *(n for n in self._levels if n <= level))) for level in levels]
            tokens = rows + sum([each[level] for each, level in zip(expected, levels, strict=True)])
            seconds = cost.expected(max(levels), sum([self._nodes[level] for level in levels]))
            if tokens / seconds > min_rate:
                best, min_rate = levels, tokens / seconds
                rate = min_rate
        return best


def _power_of_two(steps: float) -> int:
    """``steps`` as a power of two, like all intervals."""
    return 1 << int(min(max(steps, CONSTANTS.min_interval), CONSTANTS.max_review_interval)).bit_length() - 1
