"""When nothing is kept for a draft, and that it is shown some steps before it guesses again."""

import itertools
import random

import pytest

from kernels.speculative.adaptive import LIKELY, AdaptiveSteps
from kernels.speculative.sleep import LATER, SHOWN, SOUND, Sleep
from tests.kernels.speculative.worlds import NODE, World, chain


def play(policy: AdaptiveSteps, world: World, steps: int) -> list[tuple[bool, bool]]:
    """Whether each step guessed, and whether nothing of it was kept; as the scheduler asks."""
    found = []
    for _ in range(steps):
        guessed = False
        if not policy.rests(len(world.chances)):
            world.step()
            guessed = any(world.levels[-1])
        found.append((guessed, policy.asleep))
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_of_hardly_a_step_anything_is_kept_where_guesses_are_wrong(rows: int) -> None:
    policy = chain()
    found = play(policy, World(policy, [0.01] * rows), 3000)
    assert not any(asleep for _, asleep in found[: LATER - 1])
    assert sum(asleep for _, asleep in found[-2000:]) > 0.8 * 2000
    assert any(guessed for guessed, _ in found[-2000:])


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_is_shown_some_steps_before_it_guesses(rows: int) -> None:
    """It is guessed right behind steps that were kept, or not long after others that were; and never while asleep."""
    policy = chain()
    found = []
    for chance in (0.01, 0.9, 0.01, 0.5, 0.01):
        found += play(policy, World(policy, [chance] * rows), 700)
    wakes = [place for place, ((_, slept), (_, sleeps)) in enumerate(itertools.pairwise(found)) if slept and not sleeps]
    assert len(wakes) > 3
    for place in wakes:
        assert not any(guessed for guessed, _ in found[place + 1 : place + SHOWN])
    assert any(guessed for place in wakes for guessed, _ in found[place + SHOWN : place + SHOWN + 16])
    assert not any(guessed and asleep for guessed, asleep in found)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_plan_from_before_the_draft_slept_is_made_anew(rows: int) -> None:
    """Stalls overdraw the budget in the middle of a plan, and it rests until the draft sleeps."""
    policy = chain()
    world = World(policy, [0.4] * rows, node=0.02)
    world.stalls = 0.1
    found = play(policy, world, 2000)
    assert any(asleep for _, asleep in found)
    assert not any(guessed and asleep for guessed, asleep in found)


def test_what_woke_a_draft_is_done_once_it_was_shown_enough() -> None:
    """A probe that is due, or guesses that promise enough."""
    policy = chain()
    play(policy, World(policy, [0.01] * 4), 600)
    found = play(policy, World(policy, [0.95] * 4), 1500)
    first = next(place for place, (guessed, _) in enumerate(found) if guessed)
    assert sum(guessed for guessed, _ in found[first + 60 :]) > 0.9 * len(found[first + 60 :])
    assert not any(asleep for _, asleep in found[first:])


def test_a_probe_that_woke_a_draft_is_made_though_the_batch_has_another_size_by_then() -> None:
    policy = chain()
    wrong = World(policy, [0.01] * 4)
    play(policy, wrong, 600)
    for _ in range(600):
        if not play(policy, wrong, 1)[0][1]:
            break
    assert not policy.asleep
    found = play(policy, World(policy, [0.9]), SHOWN + 16)
    assert any(guessed for guessed, _ in found)


def test_a_machine_too_slow_for_guesses_that_are_right_is_no_reason_to_sleep() -> None:
    """It may have less to do soon, and drafts guess best that were shown all."""
    policy = chain()
    play(policy, World(policy, [0.9]), 200)
    found = play(policy, World(policy, [0.9], node=9.0), 600)
    assert sum(guessed for guessed, _ in found[-200:]) < 20
    assert not any(asleep for _, asleep in found)


def test_guesses_that_never_paid_are_no_reason_to_sleep_where_nearly_all_are_right() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.97] * 4, node=2.0), 1200)
    assert not any(asleep for _, asleep in found[-600:])


def test_the_last_tokens_of_requests_let_no_draft_sleep_that_many_in_a_row_would() -> None:
    policy = chain()
    world = World(policy, [0.97] * 4, node=2.0)
    play(policy, world, 600)
    for _ in range(LATER):
        policy.declined()
        assert not policy.asleep
        assert not any(asleep for _, asleep in play(policy, world, 2))
    for _ in range(LATER):
        policy.declined()
    assert policy.asleep


def test_guesses_that_pay_though_most_are_wrong_keep_a_draft_awake() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 600)
    found = play(policy, World(policy, [0.4], node=0.01), 1500)[-500:]
    assert sum(guessed for guessed, _ in found) > 0.8 * len(found)
    assert not any(asleep for _, asleep in found)


def test_a_new_request_of_which_much_is_expected_does_not_guess_before_the_draft_was_shown_some_steps() -> None:
    policy = chain()
    play(policy, World(policy, [0.95]), 600)
    play(policy, World(policy, [0.01]), 300)
    assert policy.asleep
    assert policy.track().hits[0] > LIKELY
    found = play(policy, World(policy, [0.95]), 300)
    assert found[0] == (False, True)
    last = max(place for place, (_, asleep) in enumerate(found) if asleep)
    assert not any(guessed for guessed, _ in found[: last + SHOWN])
    assert any(guessed for guessed, _ in found)


def test_where_the_settings_say_when_to_probe_nothing_sleeps() -> None:
    policy = chain(zero_step_probe_interval=100)
    found = play(policy, World(policy, [0.01]), 800)
    assert not any(asleep for _, asleep in found)


def test_requests_that_end_before_a_draft_has_seen_enough_do_not_let_it_sleep_for_ever() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 1200)
    found = [each for _ in range(400) for each in play(policy, World(policy, [0.95]), 12)]
    assert sum(guessed for guessed, _ in found[-1200:]) > 0.5 * 1200


def _rounds(policy: AdaptiveSteps, chance: float, node: float, count: int) -> list[tuple[bool, bool]]:
    """Four requests at a time, of which one decodes for a step while the others' prompts are run."""
    found = []
    for number in range(count):
        for rows, steps in ((1, 1), (4, 93)):
            world = World(policy, [chance] * rows, node=node if rows > 1 else NODE)
            world.random = random.Random(number)
            found += play(policy, world, steps)
    return found


def test_guesses_that_pay_at_a_batch_size_of_a_moment_wake_a_draft_seldom() -> None:
    policy = chain()
    play(policy, World(policy, [0.48]), 400)
    found = _rounds(policy, 0.48, 0.3, 30)
    wakes = sum(slept and not sleeps for (_, slept), (_, sleeps) in itertools.pairwise(found))
    assert wakes < 10
    assert sum(asleep for _, asleep in found[-2000:]) > 0.7 * 2000


def test_a_draft_that_sleeps_is_woken_now_and_then_though_batch_sizes_of_a_moment_come_between() -> None:
    policy = chain()
    found = _rounds(policy, 0.01, 0.04, 40)
    assert any(guessed for guessed, _ in found[-1200:])


def test_a_draft_sleeps_whose_guesses_are_rather_right_than_wrong_and_do_not_pay() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.65] * 4, node=0.3), 1500)
    assert sum(asleep for _, asleep in found[-1000:]) > 0.7 * 1000


def test_a_draft_that_was_woken_for_nothing_sleeps_ever_longer() -> None:
    sleep, step, pauses = Sleep(), 1000, []
    for _ in range(5):
        sleep.wake(step)
        sleep.gained(-1.0)
        while not sleep.deep(step):
            step += 1
        pauses.append(sleep.sound(step))
        assert not sleep.sound(step + pauses[-1])
        step += pauses[-1]
    assert pauses[:2] == [SOUND, 2 * SOUND]
    assert pauses[-1] == pauses[-2] < 512  # else every other probe is missed
    sleep.wake(step)
    sleep.gained(0.5)
    assert sleep.sound(step + 100)
    sleep.gained(1.0)
    assert not sleep.sound(step + 100)


def test_guesses_that_lose_as_much_as_they_bring_wake_a_draft_seldom() -> None:
    policy = chain()
    found = play(policy, World(policy, [0.3] * 4), 4000)[-3000:]
    assert sum(asleep for _, asleep in found) > 0.65 * 3000


def test_a_draft_whose_guesses_have_paid_again_is_woken_at_once() -> None:
    policy = chain()
    play(policy, World(policy, [0.01]), 2000)  # woken for nothing so often that it sleeps long
    play(policy, World(policy, [0.95]), 1000)
    wrong = World(policy, [0.01])
    assert any(play(policy, wrong, 1)[0][1] for _ in range(500))
    found = play(policy, World(policy, [0.95]), 200)
    assert any(guessed for guessed, _ in found)
