"""What adaptive drafting loses at most, on a clock that is made up and whatever steps cost."""

import itertools
import random

import pytest

from actors.scheduling.speculation.policy import CONSTANTS, AdaptiveConfig, AdaptivePolicy, LossBudget
from tests.kits.speculation.worlds import LEVEL, NODE, PLAIN, World, chain


def max_overdraft(start: float, left: float, chance: float, length: int) -> float:
    """Plain steps lost beyond ``CONSTANTS.total_loss_share`` of the time, at the worst moment, by batches of changing
    sizes that last for ``length`` steps each. ``start``: what drafting takes beside its levels and nodes; ``left``:
    what the plain step behind it takes longer; ``chance``: of each draft token."""
    draw, policy = random.Random(7), AdaptivePolicy(range(17))
    lost = seconds = worst = 0.0
    drafted = False
    for _ in range(200):
        rows = draw.choice((1, 2, 4, 8, 16, 32))
        estimates = [policy.new_estimate() for _ in range(rows)]
        for _ in range(length):
            rested = policy.skip(rows)
            levels = [0] * rows if rested else policy.choose(estimates)
            nodes, taken = sum(levels), PLAIN
            accepted = [next((at for at in range(most) if draw.random() >= chance), most) for most in levels]
            if nodes:
                taken += start + 0.1 * max(levels) + 0.02 * nodes
            elif drafted:
                taken += left
            drafted = nodes > 0
            for estimate, right, most in zip(estimates, accepted, levels, strict=True):
                policy.add_accepted(estimate, right, most)
            if not rested or policy.is_timed:
                policy.add_timed(rows, max(levels), nodes, taken, sum(accepted))
            seconds += PLAIN
            lost += taken - PLAIN * (1 + sum(accepted) / rows)
            worst = max(worst, lost - CONSTANTS.total_loss_share * seconds)
    return worst / PLAIN


@pytest.mark.parametrize(
    ("start", "left", "chance", "length"), [*itertools.product((0.3, 2.0, 6.0), (0.0, 2.0), (0.0, 0.3), (10, 100))]
)
def test_drafts_never_lose_more_than_their_share(start: float, left: float, chance: float, length: int) -> None:
    step = start + 0.1 * 16 + 0.02 * 16 + left  # one overdraws it, and the first few are forgotten
    assert max_overdraft(start, left, chance, length) < CONSTANTS.max_debt + step + CONSTANTS.trials * step


def test_an_account_that_is_overdrawn_is_paid_for_by_its_share() -> None:
    budget = LossBudget()
    for _ in range(CONSTANTS.trials):  # which are slow
        budget.add_drafting(PLAIN, 1, 100 * PLAIN)
    assert not budget.is_spent(PLAIN)
    budget.add_drafting(PLAIN, 1, 100 * PLAIN)
    owed, steps = CONSTANTS.trials + CONSTANTS.max_credit - CONSTANTS.max_debt, 0
    while budget.is_spent(PLAIN) and steps < 10_000:
        budget.add_steps(PLAIN)
        steps += 1
    assert steps == pytest.approx(owed / CONSTANTS.total_loss_share, abs=1)


def test_what_drafts_gain_may_be_lost_up_to_a_bound() -> None:
    budget = LossBudget()
    for _ in range(1000):
        budget.add_drafting(PLAIN, 3, 2 * PLAIN)
    steps = 0
    while not budget.is_spent(PLAIN) and steps < 1000:
        budget.add_drafting(PLAIN, 1, 2 * PLAIN)
        steps += 1
    assert steps == CONSTANTS.max_credit + CONSTANTS.max_debt + 1
    rich = LossBudget()
    rich.add_drafting(10 * PLAIN, 60, 0.0)  # of longer steps: kept while shorter ones run
    rich.add_steps(PLAIN)
    rich.add_drafting(PLAIN, 1, 2 * PLAIN)
    assert not any((rich.add_drafting(PLAIN, 1, 2 * PLAIN), rich.is_spent(PLAIN))[1] for _ in range(500))


def test_steps_that_are_not_thought_over_pay_in() -> None:
    policy = AdaptivePolicy(range(5))
    estimates = [policy.new_estimate()]
    while not any(policy.choose(estimates)):
        policy.add_timed(1, 0, 0, PLAIN, 0)
    for _ in range(CONSTANTS.trials + 2):
        policy.add_timed(1, 1, 1, 100 * PLAIN, 0)
    owed, thought = CONSTANTS.trials + 2 * CONSTANTS.max_credit - CONSTANTS.max_debt, 0
    for step in range(int(1.1 * owed / CONSTANTS.total_loss_share)):
        rested = policy.skip(1)
        thought += not rested
        if not rested and any(policy.choose(estimates)):
            assert step > 0.9 * owed / CONSTANTS.total_loss_share
            assert thought < step / 32  # while nothing may be drafted there is nothing to think over
            return
        if not rested or policy.is_timed:
            policy.add_timed(1, 0, 0, PLAIN, 0)
    pytest.fail("what was lost is not paid for yet")


def test_probes_at_fixed_steps_are_made_whatever_they_cost() -> None:
    policy = AdaptivePolicy(range(5), AdaptiveConfig(zero_step_probe_interval=10))
    estimate, probes = policy.new_estimate(), 0
    for _ in range(400):
        (levels,) = policy.choose([estimate])
        probes += levels > 0
        policy.add_accepted(estimate, 0, levels)
        policy.add_timed(1, levels, levels, (1 + 9 * (levels > 0)) * PLAIN, 0)
    assert probes >= 40


@pytest.mark.parametrize(("rows", "least"), [(1, 1.5), (4, 1.25)])
def test_a_machine_that_stalls_now_and_then_is_no_reason_not_to_draft(rows: int, least: float) -> None:
    """What draft tokens lose by stalls as many plain steps would have lost as well."""
    world = World(chain(), [0.8] * rows)
    world.stalls = 0.15
    world.run(600)
    assert world.run(1500) > least


def test_drafts_among_prompts_gain_no_more_for_a_machine_that_stalls() -> None:
    """Such steps are not timed: their draft tokens take longer there by as much as plain steps do."""
    policy = chain()
    World(policy, [0.5]).run(100)
    cost = policy._cost(1)
    cost.load = 3.0
    tokens = cost.expected(2, 2) / cost.plain
    before = policy._budget._balance
    policy.add_untimed(1, 2, 2, 0)
    lost = before - policy._budget._balance
    assert lost == pytest.approx(3 * (tokens - 1) * cost.plain, rel=0.1)


def test_a_plain_step_behind_drafts_loses_nothing_where_all_are_as_slow() -> None:
    policy = chain()
    World(policy, [0.5]).run(100)
    cost = policy._cost(1)
    cost.load = 3.0
    policy.add_timed(1, 2, 2, cost.expected(2, 2), 0)
    before = policy._budget._balance
    policy.add_timed(1, 0, 0, 2.9 * cost.plain, 0)
    assert policy._budget._balance > before


def test_stalled_steps_do_not_pause_drafting_for_long() -> None:
    """What others take of the machine for once is not for draft tokens to pay back."""
    policy = chain(7)
    world, drafted = World(policy, [0.8]), 0
    while drafted < CONSTANTS.trials + 2:
        (levels,) = policy.choose(world.estimates)
        drafted += levels > 0
        policy.add_accepted(world.estimates[0], levels, levels)
        stall = 30 * PLAIN if levels and drafted > CONSTANTS.trials else 0.0
        policy.add_timed(1, levels, levels, PLAIN + (LEVEL + NODE) * levels + stall, levels)
    world.run(100)
    assert world.run(200) > 1.6


def test_a_stalled_plain_step_is_held_neither_against_drafts_nor_for_them() -> None:
    policy = chain()
    World(policy, [0.5]).run(100)
    cost = policy._cost(1)
    policy.add_timed(1, 2, 2, cost.expected(2, 2), 0)
    before = policy._budget._balance
    policy.add_timed(1, 0, 0, 100 * cost.plain, 0)  # which sees to what they left, as far as can be reported
    assert before - policy._budget._balance < CONSTANTS.stall * cost.plain
    policy.add_timed(1, 0, 0, 100 * cost.plain, 0)
    assert 1 < cost.load < 1 + CONSTANTS.stall / CONSTANTS.max_review_interval


def test_what_a_draft_saw_after_a_pause_is_paid_for_whole() -> None:
    policy = chain()
    World(policy, [0.5]).run(100)
    cost = policy._cost(1)
    for pauses in (True, False):
        cost.paused = pauses
        before, taken = policy._budget._balance, 2 * CONSTANTS.stall * cost.expected(2, 2)
        policy.add_timed(1, 2, 2, taken, 0)
        assert (before - policy._budget._balance > 0.8 * taken) is pauses
