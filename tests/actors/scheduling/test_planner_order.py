"""The planner's order: who goes first, who gives way, who is refused."""

import pytest

from actors.protocol import PeekPrefixes
from tests.actors.scheduling.stage import Stage, says, spec

# -- order and priority ------------------------------------------------------------------------------------------------


def priorities(**config):
    return Stage(max_running=1, max_slots=2, overlap=False, priority_scheduling=True, **config)


def admitted(stage):
    """Sequences in the order of their first token."""
    stage.play()
    return sorted(stage.reported, key=lambda i: list(stage.reported).index(i))


def test_first_come_first_served_also_when_submitted_out_of_order():
    stage = Stage(max_running=1, max_slots=2)
    stage.submit(spec(0, [1], arrival=2.0), spec(1, [2], arrival=1.0), spec(2, [3], arrival=2.0))
    assert admitted(stage) == [1, 0, 2]


@pytest.mark.parametrize(("low_first", "order"), [(False, [1, 2, 0]), (True, [0, 2, 1])])
def test_the_higher_priority_goes_first(low_first, order):
    stage = priorities(low_priority_values_first=low_first)
    stage.submit(spec(0, [1], priority=1), spec(1, [2], priority=7), spec(2, [3], priority=5))
    assert admitted(stage) == order


def test_waiting_raises_the_priority():
    stage = priorities(ageing_seconds=10.0)
    stage.now = 50.0
    stage.submit(spec(0, [1], priority=0, arrival=0.0), spec(1, [2], priority=4, arrival=50.0))
    assert admitted(stage) == [0, 1]


@pytest.mark.parametrize(("priority", "preempts"), [(10, False), (11, True)])
def test_a_difference_beyond_the_threshold_preempts_a_full_batch(priority, preempts):
    stage = priorities()
    stage.submit(spec(0, range(6), max_tokens=8))
    stage.step()
    stage.submit(spec(1, range(20, 23), max_tokens=2, priority=priority, arrival=1.0))
    stage.play()
    ends = [stage.reported[i] for i in (0, 1)]
    assert (stage.planner.load(0.0).preemptions == 1) is preempts
    assert [e.start for e in ends[0]] == list(range(8))
    assert stage.tokens(0) == says(range(6), 8)
    assert stage.tokens(1) == says(range(20, 23), 2)


def test_the_last_slot_is_taken_by_preemption_too():
    stage = Stage(max_running=4, max_slots=2, overlap=False, priority_scheduling=True)
    stage.submit(spec(0, range(6), max_tokens=8))
    stage.step()
    stage.submit(spec(1, range(20, 23), max_tokens=2, priority=50, arrival=1.0))
    stage.step()
    assert len(stage.tokens(1)) == 1


def test_a_low_value_preempts_when_low_values_go_first():
    stage = priorities(low_priority_values_first=True)
    stage.submit(spec(0, range(6), priority=20))
    stage.step()
    stage.submit(spec(1, range(20, 23), priority=5, arrival=1.0))
    stage.step()
    assert len(stage.tokens(1)) == 1


def test_no_sequence_is_preempted_twice_without_progress():
    stage = priorities()
    stage.submit(spec(0, range(6), max_tokens=8))
    stage.step()
    stage.submit(spec(1, [1], max_tokens=1, priority=50, arrival=1.0))
    stage.step()
    stage.plan()  # 0 is back, in flight
    stage.submit(spec(2, [2], max_tokens=1, priority=50, arrival=2.0))
    stage.finish()
    stage.plan()
    assert stage.planner.load(0.0).preemptions == 2  # it had its token in between
    assert len(stage.tokens(0)) == 2

    stage = Stage(max_running=1, max_slots=2, priority_scheduling=True)
    stage.submit(spec(0, range(6), max_tokens=8))
    stage.step()
    stage.submit(spec(1, [1], max_tokens=1, priority=50, arrival=1.0))
    stage.step()
    stage.plan()
    stage.submit(spec(2, [2], max_tokens=1, priority=50, arrival=2.0))
    stage.plan()  # two in flight, nothing confirmed since 0 came back
    assert stage.planner.load(0.0).preemptions == 1


def test_a_pressing_request_takes_pages_too():
    stage = Stage(pages=8, overlap=False, priority_scheduling=True, max_running=4)
    stage.submit(*[spec(i, range(20 * i, 20 * i + 10), max_tokens=8, arrival=float(i)) for i in range(2)])
    stage.step()
    stage.submit(spec(9, range(100, 116), max_tokens=2, priority=99, arrival=5.0))
    for _ in range(4):
        stage.step()
    assert stage.end(9).reason == "length"
    assert stage.end(0) is None
    stage.play()
    assert all(stage.tokens(i) == says(range(20 * i, 20 * i + 10), 8) for i in range(2))


def test_an_urgent_request_takes_pages_before_an_older_one():
    stage = Stage(pages=8, overlap=False, priority_scheduling=True, max_running=4, ageing_seconds=1.0)
    stage.submit(*[spec(i, range(20 * i, 20 * i + 10), max_tokens=8, arrival=float(i)) for i in range(2)])
    stage.step()
    stage.now = 500.0
    stage.submit(spec(5, range(200, 224), max_tokens=2, arrival=2.0))
    stage.step()
    stage.submit(spec(9, range(100, 116), max_tokens=2, priority=99, arrival=499.0))
    for _ in range(4):
        stage.step()
    assert stage.end(9).reason == "length"
    assert stage.tokens(5) == []
    stage.play()
    assert stage.tokens(5) == says(range(200, 224), 2)


def test_priorities_mean_nothing_when_they_are_off():
    stage = Stage(max_running=1, max_slots=2)
    stage.submit(spec(0, [1], priority=0), spec(1, [2], priority=99))
    assert admitted(stage) == [0, 1]


def test_lpm_takes_the_longest_prefix_first_but_long_waits_before_that():
    stage = Stage(max_running=1, max_slots=2, policy="lpm", overlap=False)
    stage.submit(spec(0, range(12), max_tokens=1))
    stage.play()
    stage.now = 100.0
    stage.submit(spec(1, range(50, 62), arrival=99.0), spec(2, range(12), arrival=99.0))
    stage.submit(spec(3, range(80, 83), arrival=1.0))
    stage.reported.clear()
    assert admitted(stage) == [3, 2, 1]


@pytest.mark.parametrize(("waiting", "asks"), [(1, False), (2, True), (128, True), (129, False)])
def test_lpm_compares_prefixes_of_a_short_queue_only(waiting, asks):
    stage = Stage(policy="lpm")
    stage.submit(*[spec(i, [i, 1, 2]) for i in range(waiting)])
    assert isinstance(next(stage.planner.plan(0.0)), PeekPrefixes) is asks
