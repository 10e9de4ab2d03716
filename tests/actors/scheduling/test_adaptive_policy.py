"""The adaptive number of draft tokens, in a world where every step's cost and every draft token's chance are known."""

import itertools

import msgspec
import pytest

from actors.scheduling.speculation.policy import CONSTANTS, AcceptanceEstimate, AdaptiveConfig, AdaptivePolicy
from tests.kits.speculation.worlds import LEVEL, NODE, PLAIN, World, chain


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("node", [0.01, 0.04, 0.3])
def test_hostile_requests_cost_next_to_nothing(rows: int, node: float) -> None:
    world = World(chain(), [0.02] * rows, node=node)
    assert world.run(1000) * PLAIN > 0.97
    assert sum(map(any, world.levels[100:])) > 0  # they are probed all the same


@pytest.mark.parametrize("rows", [1, 4])
def test_drafts_that_are_right_and_do_not_pay_are_hardly_made(rows: int) -> None:
    """Half of the probes are right: none of them is to lead to many others."""
    policy = chain()
    for _ in range(5):
        World(policy, [0.5] * rows, node=0.5 / rows).run(96)
    worlds = [World(policy, [0.5] * rows, node=0.5 / rows) for _ in range(20)]
    assert sum(world.run(96) for world in worlds) / 20 * PLAIN > 0.99
    assert sum(any(levels) for world in worlds for levels in world.levels) > 0
    assert World(policy, [0.95] * rows, node=0.5 / rows).run(400) > 1.15


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 8])
def test_it_comes_near_the_best_fixed_number(rows: int, chance: float) -> None:
    best = max(World(levels, [chance] * rows).run(1500) for levels in range(7))
    assert World(chain(), [chance] * rows).run(1500) > 0.94 * best


def test_a_batch_of_both_kinds_drafts_for_those_it_pays_for() -> None:
    world = World(chain(), [0.95, 0.0, 0.95, 0.0], node=0.05)
    world.run(300)
    late = world.levels[200:]
    assert sum(levels[0] for levels in late) > 2 * len(late)
    assert sum(levels[1] for levels in late) < 0.1 * len(late)


def test_a_batch_size_that_is_new_is_taken_to_be_like_another() -> None:
    """The last requests of a batch end one after the other: none of these sizes is worth steps that try it."""
    policy = chain()
    World(policy, [0.3] * 4, node=0.1).run(100)
    few = World(policy, [0.3] * 2, node=0.1)
    few.run(20)
    assert sum(map(any, few.levels)) <= 1
    unlike = World(chain(), [0.3] * 2, node=0.1)
    unlike.run(20)
    assert sum(map(any, unlike.levels)) > 2
    right = World(policy, [0.9])
    assert right.run(300) > 1.5


def test_sizes_that_last_for_a_step_are_not_drafted_at_unless_it_paid() -> None:
    policy = chain()
    World(policy, [0.3] * 4, node=0.1).run(100)
    for _ in range(20):
        few = World(policy, [0.9])
        few.run(3)
        assert not any(map(any, few.levels))
        World(policy, [0.3] * 4, node=0.1).run(3)
    World(policy, [0.9]).run(300)
    World(policy, [0.3] * 4, node=0.1).run(3)
    few = World(policy, [0.9])
    few.run(3)
    assert any(map(any, few.levels))


def test_a_probe_is_not_made_again_before_its_outcome_counts() -> None:
    world = World(chain(), [0.0])
    world.run(1000)
    made = [step for step, levels in enumerate(world.levels) if any(levels) and step > 50]
    assert len(made) > 1
    assert all(after - step > 1 for step, after in itertools.pairwise(made))


def test_costs_are_learnt_for_each_batch_size() -> None:
    policy = chain()
    world = World(policy, [0.5], node=0.01)
    world.run(200)
    crowd = World(policy, [0.5] * 32, node=0.2)
    crowd.run(200)
    assert sum(map(max, world.levels[100:])) > 100
    assert sum(map(max, crowd.levels[100:])) < 50
    assert World(policy, [0.5], node=0.01).run(200) > 1.2


def test_it_follows_a_request_that_changes() -> None:
    world = World(chain(), [0.01])
    world.run(400)
    assert sum(map(max, world.levels[-100:])) < 20
    world.chances = [0.95]
    world.run(300)
    assert world.run(100) > 1.8
    world.chances = [0.01]
    world.run(100)
    assert world.run(400) * PLAIN > 0.97


def test_a_new_request_is_expected_to_do_as_the_others_did() -> None:
    policy = chain()
    fresh = policy.new_estimate().chances[0]
    assert World(policy, [0.0]).run(60) < 0.97
    for _ in range(10):
        World(policy, [0.0]).run(60)
    assert policy.new_estimate().chances[0] < 0.6 * fresh
    assert World(policy, [0.0]).run(60) > 0.97


def test_one_slow_step_does_not_turn_the_plan() -> None:
    policy = chain()
    world = World(policy, [0.9])
    world.run(200)
    policy.add_timed(1, 0, 0, 1000.0, 0)
    policy.add_timed(1, 6, 6, 1000.0, 6)
    assert World(policy, [0.9]).run(200) > 1.8


def test_first_steps_that_are_slow_are_forgotten() -> None:
    policy = chain()
    world = World(policy, [0.9])
    while policy.choose([policy.new_estimate()]) == [0]:
        policy.add_timed(1, 0, 0, PLAIN, 0)
    policy.add_timed(1, 1, 1, 30 * PLAIN, 1)
    assert world.run(300) > 1.8


@pytest.mark.parametrize("most", [7, 16])
@pytest.mark.parametrize("stalled", [2, 3])
def test_a_trial_that_stalled_is_no_reason_never_to_draft(most: int, stalled: int) -> None:
    """What the first drafts cost is believed, and a stall of the last of them is blamed on its many levels."""
    policy = chain(most)
    world = World(policy, [0.85])
    drafted = 0
    while drafted < stalled:
        (levels,) = policy.choose(world.estimates)
        drafted += levels > 0
        policy.add_accepted(world.estimates[0], levels, levels)
        stall = 100 * PLAIN if drafted == stalled else 0.0
        policy.add_timed(1, levels, levels, PLAIN + (LEVEL + NODE) * levels + stall, levels)
    world.run(200)
    assert world.run(200) > 1.8


def test_a_machine_that_stalls_now_and_then_is_no_reason_to_draft() -> None:
    """What a step costs is not what it costs when others use the machine."""
    world = World(chain(), [0.5], node=0.5)
    world.stalls = 0.08
    world.run(200)
    assert world.run(1500) * PLAIN > 0.97


@pytest.mark.parametrize("rows", [1, 4])
def test_trials_end_where_no_step_is_timed(rows: int) -> None:
    """Prompts join every step: what draft tokens cost is never measured, that they are wrong is known all the same."""
    policy = chain()
    estimates = [policy.new_estimate() for _ in range(rows)]
    for _ in range(5):
        assert policy.choose(estimates)
        policy.add_timed(rows, 0, 0, PLAIN, 0)
    drafted = 0
    for _ in range(2000):
        levels = policy.choose(estimates)
        drafted += any(levels)
        for estimate, level in zip(estimates, levels, strict=True):
            policy.add_accepted(estimate, 0, level)
        policy.add_untimed(rows, max(levels), sum(levels), 0)
    assert 0 < drafted < 60


@pytest.mark.parametrize("timed", [True, False])
def test_drafts_that_pay_go_on_among_prompts(timed: bool) -> None:
    policy = chain()
    world = World(policy, [0.95])
    world.run(20)
    for _ in range(100):
        (levels,) = policy.choose(world.estimates)
        policy.add_accepted(world.estimates[0], levels, levels)
        if timed:
            policy.add_timed(1, levels, levels, PLAIN + (LEVEL + NODE) * levels, levels)
        else:
            policy.add_untimed(1, levels, levels, levels)
    assert policy.choose(world.estimates)[0] > 3


def test_drafts_that_are_wrong_among_prompts_end_them() -> None:
    policy = chain()
    world = World(policy, [0.95])
    world.run(20)
    assert policy.choose(world.estimates)[0]
    for _ in range(80):
        policy.add_untimed(1, 6, 6, 0)
    assert policy.choose(world.estimates) == [0]
    for _ in range(4000):
        policy.add_untimed(1, 0, 0, 0)
    assert any(policy.choose(world.estimates)[0] for _ in range(8 + CONSTANTS.awake_steps))  # it may have to wake


def test_rejected_drafts_are_paid_for_and_are_no_plain_steps() -> None:
    """An n-gram draft that finds nothing takes its time, too."""
    policy = chain()
    estimate = policy.new_estimate()
    plain = empty = 0
    for _ in range(2000):
        if policy.choose([estimate])[0]:
            empty += 1
            policy.add_empty(1, 1.5 * PLAIN)
        else:
            plain += 1
            policy.add_timed(1, 0, 0, PLAIN, 0)
    assert 0 < empty < 50
    assert World(policy, [0.9], node=0.01).run(300) > 1.8  # and draft tokens are not held to be dear for it


def test_a_plain_step_that_was_overestimated_is_corrected_soon() -> None:
    """The machine was slow while plain steps were timed: draft tokens seem cheap beside them, and few plain ones
    follow."""
    found = []
    for seed in range(8):
        policy = chain()
        world = World(policy, [0.5], node=0.3)
        world.random.seed(seed)
        world.run(300)
        for _ in range(40):
            policy.add_timed(1, 0, 0, 2.2 * PLAIN, 0)
        world.run(40)
        found.append(world.run(200) * PLAIN)
    assert sum(found) / len(found) > 0.97


def test_an_overestimated_plain_step_cost_is_corrected() -> None:
    """While most steps draft, no plain one follows another: what it took to show the draft their draft tokens is
    reported."""
    policy = chain()
    world = World(policy, [0.5], node=0.5)
    world.seeing = 0.7
    world.slow = 1.7
    world.run(12)
    world.slow = 1.0
    world.run(100)
    assert world.run(300) * PLAIN > 0.97


def test_a_batch_that_does_not_draft_is_hardly_thought_over() -> None:
    policy = chain()
    world = World(policy, [0.01] * 4)
    world.run(400)
    rested = thought = 0
    for _ in range(400):
        if policy.skip(4):
            rested += 1
        else:
            thought += 1
            world.step()
    assert rested > 300
    assert any(map(any, world.levels[-thought:]))
    assert not policy.skip(1)  # another batch size
    while not policy.skip(4):
        world.step()
    policy.new_estimate()
    assert policy.skip(4)  # a new request, which is as the others are


def test_the_settings_have_their_effect() -> None:
    world = World(chain(candidate_steps=[0, 2, 5, 60]), [0.9])
    world.run(300)
    assert {level for levels in world.levels for level in levels} == {0, 2, 5}
    world = World(chain(warmup_batches=20), [0.9])
    world.run(21)
    assert [levels[0] > 0 for levels in world.levels] == [False] * 20 + [True]
    world = World(chain(zero_step_probe_interval=10), [0.0])
    world.run(500)
    assert sum(levels[0] for levels in world.levels[300:]) == 20
    quick, slow = (chain(ema_alpha=alpha) for alpha in (0.9, 0.01))
    for policy in (quick, slow):
        policy.add_accepted(estimate := policy.new_estimate(), 0, 3)
        assert bool(estimate.chances[0] < 0.1) is (policy is quick)


def test_only_tried_levels_are_judged_and_others_follow_slowly() -> None:
    policy = chain(levels=4)
    estimate = policy.new_estimate()
    before = estimate.chances.copy()
    policy.add_accepted(estimate, 1, 3)
    assert estimate.chances[0] > before[0]
    assert estimate.chances[1] < before[1]
    assert estimate.chances[2] == before[2]
    policy.add_accepted(estimate, 0, 0)
    for _ in range(200):
        policy.add_accepted(estimate, 1, 1)
    assert estimate.chances[3] > 0.9


def test_a_tree_counts_all_its_nodes() -> None:
    wide = AdaptivePolicy([0, 4, 20, 36])
    world_nodes = []
    estimate = wide.new_estimate()
    for _ in range(10):
        wide.choose([estimate])
        wide.add_timed(1, 0, 0, 1.0, 0)
    for _ in range(50):
        (levels,) = wide.choose([estimate])
        world_nodes.append(levels)
        wide.add_accepted(estimate, levels, levels)
        nodes = (0, 4, 20, 36)[levels]
        wide.add_timed(1, levels, nodes, 1.0 + 0.5 * nodes, levels)
    assert sum(world_nodes[20:]) < 10  # every draft token is right, and still costs more than it brings


@pytest.mark.parametrize("settings", [{"up_hysteresis": 1}, {"ema_alpha": 0}, {"candidate_steps": [-1]}])
def test_settings_that_mean_nothing_here_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, AdaptiveConfig)


def test_estimates_of_requests_are_independent() -> None:
    policy = chain()
    one, other = policy.new_estimate(), policy.new_estimate()
    policy.add_accepted(one, 0, 1)
    assert isinstance(one, AcceptanceEstimate)
    assert other.chances[0] > one.chances[0]


def test_observing_after_a_pause_is_no_part_of_the_draft_cost() -> None:
    policy = chain()
    World(policy, [0.9]).run(100)
    cost = policy._cost(1)

    def drafted(seconds: float) -> tuple[float, float]:
        """What is expected of such a step then, and what was lost by this one."""
        credit = cost.credit = 0.0
        policy.add_timed(1, 3, 3, seconds, 0)
        return cost.expected(3, 3), credit - cost.credit

    usual = PLAIN + 3 * (LEVEL + NODE)
    held, lost = drafted(usual)
    policy.add_timed(1, 0, 0, PLAIN, 0)
    expected, more = drafted(1.6 * usual)
    assert expected <= held
    assert more > lost + 0.5 * usual
    expected, more = drafted(1.6 * usual)  # without one it is believed to be the machine's, in part
    assert expected > held
    assert more < lost + 0.4 * usual


def test_a_plain_step_with_draft_work_does_not_set_the_plain_cost() -> None:
    policy = chain()
    World(policy, [0.9]).run(100)
    cost = policy._cost(1)
    plain = cost.plain
    policy.add_timed(1, 3, 3, 1.5, 0)
    policy.add_timed(1, 0, 0, 1.2 * plain, 0)
    assert cost.plain == plain
    policy.add_timed(1, 0, 0, 1.2 * plain, 0)
    assert cost.plain > plain


def test_a_probe_that_was_right_is_followed_by_others_at_once() -> None:
    world = World(chain(), [0.01], node=0.5)  # of which most must be right
    world.run(400)
    world.chances = [1.0]
    while not world.levels[-1][0]:
        world.step()
    for _ in range(CONSTANTS.probe_streak):
        world.step()
        assert world.levels[-1][0]


def test_deep_drafts_are_come_to_by_twice_the_depth_that_was_tried() -> None:
    policy = chain(16)
    World(policy, [0.99], node=0.01).run(200)  # from which more rows expect as much
    world = World(policy, [0.99] * 8, node=0.01)
    world.run(200)
    depths = [max(levels) for levels in world.levels if any(levels)]
    assert max(depths) == 16
    assert all(depth <= 2 * max(depths[:number]) for number, depth in enumerate(depths) if number)


def test_a_plain_step_right_behind_a_prompt_reports_nothing_of_others() -> None:
    """It takes longer; but for the first there are. What others are measured by does not wait for it either."""
    policy = chain()
    for _ in range(3):
        policy.add_plain(1, 2 * PLAIN, 0.0, True)
    cost = policy._cost(1)
    assert cost.plain == pytest.approx(2 * PLAIN)
    World(policy, [0.9]).run(100)

    def learnt() -> list[float]:
        return [cost.plain, cost.load, cost.expected(3, 3)]

    before = learnt()
    assert cost.plain == pytest.approx(PLAIN, rel=0.01)
    policy.add_prompts()
    policy.add_plain(1, 3 * PLAIN, 0.0, True)
    assert learnt() == before
    policy.add_timed(1, 0, 0, 3 * PLAIN, 0)
    assert learnt() != before


def test_drafts_that_hardly_pay_go_on_and_are_not_begun() -> None:
    """To stop and to begin again costs more than it brings. Of one batch size: another begins for itself."""
    policy = chain(1)
    world = World(policy, [0.9])
    world.run(100)
    cost, (estimate,) = policy._cost(1), world.estimates
    cost.plain, cost.start, cost.per_level, cost.per_node = 1.0, 0.0, 0.16, 0.04  # 1.2 a step with a draft token
    policy._budget.add_steps(1.0, 1000)
    cost.credit = 10.0

    def next_step(chance: float) -> list[int]:
        estimate.chances[0], policy._plan, policy._idle = chance, None, None  # nothing is left of other plans
        estimate.interval = 512
        return policy.choose(world.estimates)

    policy._planned = None, 0
    assert next_step(0.24) == [0]  # which promises 1.24 tokens
    assert next_step(0.3) == [1]
    assert next_step(0.24) == [1]
    assert policy._plan is not None
    assert policy.choose(world.estimates) == [1]  # by the same plan
    policy._steps += 1
    assert next_step(0.24) == [1]
    assert next_step(0.19) == [0]
    policy._steps += 2
    assert next_step(0.24) == [0]
    policy._planned = policy._cost(2), policy._steps
    assert next_step(0.24) == [0]


def test_what_is_tried_is_no_plan_to_stay_with() -> None:
    policy = chain()
    world = World(policy, [0.9])
    while policy._cost(1).trials < CONSTANTS.trials:
        world.step()
    assert any(map(any, world.levels))
    assert policy._planned == (None, 0)
