"""The planner case by case, with a prefix cache and a simulated runner around it: ends of all kinds, and limits."""

import pytest

from actors.scheduling import PlannerConfig
from actors.scheduling.testing import drive
from tests.actors.scheduling.stage import Stage, says, spec, unpack


def counts(batch):
    return unpack(batch.counts)


# -- ends of all kinds -------------------------------------------------------------------------------------------------


def test_an_abort_frees_slot_and_pages_with_the_next_plan():
    stage = Stage()
    stage.submit(spec(0, range(9), max_tokens=99), spec(1, range(50, 52), max_tokens=99))
    stage.plan()
    stage.plan()
    stage.hear(stage.planner.abort([0, 77]))
    assert stage.end(0).reason == "abort"
    assert stage.planner.abort([0]) == []
    stage.finish()
    stage.finish()
    batch = stage.plan()
    assert len(unpack(batch.released)) == 1
    assert stage.cache.usage().sequences == 1
    assert stage.tokens(0) == []


def test_an_abort_of_the_last_sequence_is_still_work_for_the_cache():
    stage = Stage()
    stage.submit(spec(0, range(9)))
    stage.step()
    stage.hear(stage.planner.abort([0]))
    assert stage.planner.has_work
    assert stage.plan() is None
    assert not stage.planner.has_work
    assert stage.cache.usage().used == 0


def test_a_stopped_text_ends_without_a_word():
    stage = Stage()
    stage.submit(spec(0, range(9)), spec(1, range(50, 53)))
    stage.step()
    stage.plan()
    stage.planner.text_stopped([0, 55])
    stage.finish()
    stage.play()
    assert len(stage.tokens(0)) == 1
    assert stage.end(0) is None
    assert stage.tokens(1) == says(range(50, 53), 4)


def test_a_failed_row_ends_its_sequence_and_no_other():
    stage = Stage(fails=lambda tokens: "bad grammar" if tokens[0] == 5 and len(tokens) > 3 else None)
    stage.submit(spec(0, [5, 6], max_tokens=9), spec(1, [6, 7], max_tokens=9))
    stage.play()
    assert (stage.end(0).reason, stage.end(0).message) == ("error", "bad grammar")
    assert stage.tokens(0) == says([5, 6], 2)
    assert stage.tokens(1) == says([6, 7], 9)


def test_a_row_that_is_at_fault_itself_ends_as_invalid():
    stage = Stage(fails=lambda tokens: "invalid grammar" if len(tokens) > 3 else None)
    stage.submit(spec(0, [5, 6], max_tokens=9))
    stage.play()
    assert (stage.end(0).reason, stage.end(0).message) == ("invalid", "invalid grammar")


def test_deadlines_end_waiting_and_running_sequences():
    stage = Stage(max_running=1, max_slots=2)
    stage.submit(spec(0, range(3), max_tokens=99, deadline=5.0), spec(1, range(3), deadline=4.0), spec(2, range(3)))
    stage.step()
    assert stage.planner.expire(3.9) == []
    stage.hear(stage.planner.expire(5.0))
    assert stage.end(0).reason == stage.end(1).reason == "timeout"
    stage.play()
    assert stage.end(2).reason == "length"


def test_a_sequence_known_already_is_left_alone():
    stage = Stage()
    stage.submit(spec(0, range(3)))
    stage.submit(spec(0, range(9)))
    stage.play()
    assert stage.tokens(0) == says(range(3), 4)


def test_load_counts():
    stage = Stage(max_running=1, max_slots=2)
    assert stage.planner.load(9.0).last_step_age == 0.0
    stage.now = 10.0
    stage.submit(spec(0, range(3), max_tokens=9), spec(1, range(7)))
    stage.plan()
    stage.plan()
    load = stage.planner.load(12.5)
    assert (load.running, load.waiting, load.waiting_tokens, load.steps, load.steps_in_flight) == (1, 1, 7, 2, 2)
    assert load.last_step_age == 2.5


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_running": 0}, "max-running-requests"),
        ({"max_slots": 1}, "max-running-requests"),
        ({"step_tokens": 3}, "chunked-prefill-size"),
        ({"max_prefill_tokens": 0}, "max-prefill-tokens"),
        ({"prefill_max_requests": 0}, "prefill-max-requests"),
        ({"conservativeness": -1.0}, "schedule-conservativeness"),
        ({"ageing_seconds": 0.0}, "ages"),
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        PlannerConfig(**{"max_running": 4, "max_slots": 5, "step_tokens": 8} | change)


def test_deadlines_of_the_ended_are_forgotten():
    stage = Stage()
    stage.submit(spec(0, range(3), deadline=7.0))
    for i in range(1, 500):
        stage.submit(spec(i, range(3), deadline=1000.0 - i))
        stage.hear(stage.planner.abort([i]))
    assert len(stage.planner._deadlines) < 100
    assert [e.sequence for e in stage.planner.expire(7.0)] == [0]


# -- limits on waiting, and pauses ------------------------------------------------------------------------------------


def test_a_sequence_that_waits_too_long_for_its_start_ends():
    stage = Stage(max_running=1, step_tokens=8)
    stage.submit(spec(0, range(3), max_tokens=9, start_by=1.0), spec(1, range(3), start_by=1.0), spec(2, range(3)))
    stage.step()
    stage.now = 2.0
    stage.hear(stage.planner.expire(stage.now))
    assert (stage.end(0), stage.end(1).reason) == (None, "late")
    stage.play()
    assert stage.tokens(0) == says(range(3), 9)
    assert stage.tokens(2) == says(range(3), 4)


def test_a_preempted_sequence_does_not_wait_for_its_start():
    stage = Stage()
    stage.submit(spec(0, range(3), start_by=1.0))
    stage.step()
    stage.planner.retract()
    stage.hear(stage.planner.expire(2.0))
    stage.play()
    assert stage.tokens(0) == says(range(3), 4)


def test_a_paused_planner_plans_no_step_and_takes_results():
    stage = Stage()
    stage.submit(spec(0, range(3)))
    stage.plan()
    stage.planner.paused = True
    assert (stage.planner.can_send, stage.plan(), stage.planner.load(0.0).paused) == (False, None, True)
    stage.submit(spec(1, range(5)))
    stage.finish()
    assert len(stage.tokens(0)) == 1
    stage.planner.paused = False
    stage.play()
    assert (stage.tokens(0), stage.tokens(1)) == (says(range(3), 4), says(range(5), 4))


def test_retracted_sequences_hold_no_page_and_change_no_token():
    stage = Stage()
    stage.submit(spec(0, range(9)), spec(1, range(50, 60)))
    stage.step()
    stage.step()
    stage.planner.paused = True
    stage.planner.retract()
    drive(stage.planner.sync_cache(), stage.cache)
    assert (stage.planner.running(), stage.planner.load(0.0).waiting) == ((), 2)
    assert stage.cache.flush()
    assert stage.cache.usage().free == stage.cache.usage().total
    stage.planner.paused = False
    stage.play()
    assert (stage.tokens(0), stage.tokens(1)) == (says(range(9), 4), says(range(50, 60), 4))
