"""When nothing is kept for a draft, and that it is shown some steps before it drafts again."""

import itertools
import random

import pytest

from actors.scheduling.speculation.policy import CONSTANTS, AdaptivePolicy
from tests.kits.speculation.worlds import NODE, World, chain


def play(policy: AdaptivePolicy, world: World, steps: int) -> list[tuple[bool, bool]]:
    """Whether each step drafted, and whether nothing of it was kept; as the scheduler asks."""
    found = []
    for _ in range(steps):
        drafted = False
        if not policy.skip(len(world.chances)):
            world.step()
            drafted = any(world.levels[-1])
        found.append((drafted, policy.is_asleep))
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_of_hardly_a_step_anything_is_kept_where_drafts_are_wrong(rows: int) -> None:
    policy = chain()
    found = play(policy, World(policy, [0.01] * rows), 3000)
    assert not any(asleep for _, asleep in found[: CONSTANTS.awake_steps - 1])
    assert sum(asleep for _, asleep in found[-2000:]) > 0.8 * 2000
    assert any(drafted for drafted, _ in found[-2000:])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_is_shown_some_steps_before_it_drafts(rows: int) -> None:
    """It is drafted right behind steps that were kept, or not long after others that were; and never while asleep."""
    policy = chain()
    found = []
    for chance in (0.01, 0.9, 0.01, 0.5, 0.01):
        found += play(policy, World(policy, [chance] * rows), 700)
    wakes = [place for place, ((_, slept), (_, sleeps)) in enumerate(itertools.pairwise(found)) if slept and not sleeps]
    assert len(wakes) > 3
    for place in wakes:
        assert not any(drafted for drafted, _ in found[place + 1 : place + CONSTANTS.awake_steps])
    assert any(
        drafted
        for place in wakes
        for drafted, _ in found[place + CONSTANTS.awake_steps : place + CONSTANTS.awake_steps + 16]
    )
    assert not any(drafted and asleep for drafted, asleep in found)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_plan_from_before_the_draft_slept_is_made_again(rows: int) -> None:
    """Stalls overdraw the budget in the middle of a plan, and it rests until the draft sleeps."""
    policy = chain()
    world = World(policy, [0.4] * rows, node=0.02)
    world.stalls = 0.1
    found = play(policy, world, 2000)
    assert any(asleep for _, asleep in found)
    assert not any(drafted and asleep for drafted, asleep in found)


def test_what_woke_a_draft_is_done_once_it_was_shown_enough() -> None:
    """A probe that is due, or draft tokens that promise enough."""
    policy = chain()
    play(policy, World(policy, [0.01] * 4), 600)
    found = play(policy, World(policy, [0.95] * 4), 1500)
    first = next(place for place, (drafted, _) in enumerate(found) if drafted)
    assert sum(drafted for drafted, _ in found[first + 60 :]) > 0.9 * len(found[first + 60 :])
    assert not any(asleep for _, asleep in found[first:])


def test_a_probe_runs_though_the_batch_size_has_changed() -> None:
    policy = chain()
    wrong = World(policy, [0.01] * 4)
    play(policy, wrong, 600)
    for _ in range(600):
        if not play(policy, wrong, 1)[0][1]:
            break
    assert not policy.is_asleep
    found = play(policy, World(policy, [0.9]), CONSTANTS.awake_steps + 16)
    assert any(drafted for drafted, _ in found)


def test_right_draft_tokens_on_a_slow_machine_do_not_put_a_draft_to_sleep() -> None:
    """It may have less to do soon, and drafts draft best that were shown all."""
    policy = chain()
    play(policy, World(policy, [0.9]), 200)
    found = play(policy, World(policy, [0.9], node=9.0), 600)
    assert sum(drafted for drafted, _ in found[-200:]) < 20
    assert not any(asleep for _, asleep in found)


def test_nearly_always_right_draft_tokens_do_not_put_a_draft_to_sleep() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.97] * 4, node=2.0), 1200)
    assert not any(asleep for _, asleep in found[-600:])


def test_last_tokens_of_requests_do_not_put_a_draft_to_sleep() -> None:
    policy = chain()
    world = World(policy, [0.97] * 4, node=2.0)
    play(policy, world, 600)
    for _ in range(CONSTANTS.awake_steps):
        policy.add_declined()
        assert not policy.is_asleep
        assert not any(asleep for _, asleep in play(policy, world, 2))
    for _ in range(CONSTANTS.awake_steps):
        policy.add_declined()
    assert policy.is_asleep


def test_drafts_that_pay_though_most_are_wrong_keep_a_draft_awake() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 600)
    found = play(policy, World(policy, [0.4], node=0.01), 1500)[-500:]
    assert sum(drafted for drafted, _ in found) > 0.8 * len(found)
    assert not any(asleep for _, asleep in found)


def test_a_promising_new_request_drafts_after_some_observed_steps() -> None:
    policy = chain()
    play(policy, World(policy, [0.95]), 600)
    play(policy, World(policy, [0.01]), 300)
    assert policy.is_asleep
    assert policy.new_estimate().chances[0] > 0.5
    found = play(policy, World(policy, [0.95]), 300)
    assert found[0] == (False, True)
    last = max(place for place, (_, asleep) in enumerate(found) if asleep)
    assert not any(drafted for drafted, _ in found[: last + CONSTANTS.awake_steps])
    assert any(drafted for drafted, _ in found)


def test_where_the_settings_say_when_to_probe_nothing_sleeps() -> None:
    policy = chain(zero_step_probe_interval=100)
    found = play(policy, World(policy, [0.01]), 800)
    assert not any(asleep for _, asleep in found)


def test_short_requests_do_not_keep_a_draft_asleep_forever() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 1200)
    found = [each for _ in range(400) for each in play(policy, World(policy, [0.95]), 12)]
    assert sum(drafted for drafted, _ in found[-1200:]) > 0.5 * 1200


def _rounds(policy: AdaptivePolicy, chance: float, node: float, count: int) -> list[tuple[bool, bool]]:
    """Four requests at a time, of which one decodes for a step while the others' prompts are run."""
    found = []
    for number in range(count):
        for rows, steps in ((1, 1), (4, 93)):
            world = World(policy, [chance] * rows, node=node if rows > 1 else NODE)
            world.random = random.Random(number)
            found += play(policy, world, steps)
    return found


def test_a_sleeping_draft_is_probed_despite_brief_batch_sizes() -> None:
    policy = chain()
    found = _rounds(policy, 0.01, 0.04, 40)
    assert any(drafted for drafted, _ in found[-1200:])


def test_a_draft_that_is_often_right_but_does_not_pay_sleeps() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.65] * 4, node=0.3), 1500)
    assert sum(asleep for _, asleep in found[-1000:]) > 0.7 * 1000


def test_drafts_that_lose_as_much_as_they_bring_wake_a_draft_seldom() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.3] * 4), 4000)[-3000:]
    assert sum(asleep for _, asleep in found) > 0.65 * 3000


def test_a_draft_whose_drafts_have_paid_again_is_woken_at_once() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 2000)
    play(policy, World(policy, [0.95]), 1000)
    wrong = World(policy, [0.01])
    assert any(play(policy, wrong, 1)[0][1] for _ in range(500))
    found = play(policy, World(policy, [0.95]), 200)
    assert any(drafted for drafted, _ in found)
