"""At most so many adapters run together, and every waiting sequence gets its turn."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.scheduling.stage import Stage, says, spec


def adapters_of(stage):
    running = stage.planner._table.running.values()
    return {sequence.spec.adapter for sequence in running if sequence.spec.adapter}


def test_another_adapter_waits_for_a_place_and_the_plain_ones_pass():
    stage = Stage(max_adapters=1, overlap=False)
    stage.submit(*(spec(number, [number + 1], adapter=adapter) for number, adapter in enumerate((5, 6, 0, 5))))
    batch = stage.step()
    assert [admission.adapter for admission in batch.admitted] == [5, 0]  # the second of 5 came after that of 6
    stage.play()
    assert all(stage.tokens(number) == says([number + 1], 4) for number in range(4))


def test_any_number_of_requests_without_a_place_lets_others_pass():
    stage = Stage(max_adapters=1, overlap=False)
    stage.submit(spec(0, [1], adapter=5, max_tokens=50))
    stage.step()
    stage.submit(*(spec(number, [2], adapter=6, arrival=float(number)) for number in range(1, 101)))
    stage.submit(spec(101, [3], arrival=101.0))
    stage.step()
    assert len(stage.tokens(101)) == 1
    assert not stage.tokens(1)


def test_others_go_on_while_the_least_used_adapter_makes_room():
    stage = Stage(max_adapters=2, overlap=False)
    for number, adapter in enumerate((1, 1, 2, 3, 1, 2)):
        stage.submit(spec(number, [number + 1], adapter=adapter, arrival=float(number)))
    batch = stage.step()
    assert [admission.adapter for admission in batch.admitted] == [1, 1, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=10),
    limit=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_more_adapters_than_places_all_get_their_turns(arrivals, limit, overlap):
    stage = Stage(max_adapters=limit, overlap=overlap, max_running=4, max_slots=5, step_tokens=16)
    count = 0
    rest = 8 * (4 + sum(map(len, arrivals)))  # steps without a new request
    for adapters in (*arrivals, *[[]] * rest):
        for adapter in adapters:
            stage.submit(spec(count, [count % 9], adapter=adapter, max_tokens=2, arrival=float(count)))
            count += 1
        if stage.plan() is not None:
            stage.finish()
        assert len(adapters_of(stage)) <= limit
    assert all(stage.tokens(number) for number in range(count))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), limit=st.integers(1, 3), max_running=st.integers(1, 5), overlap=st.booleans())
def test_no_request_starves_however_many_of_other_adapters_come(data, limit, max_running, overlap):
    stage = Stage(
        max_adapters=limit, overlap=overlap, max_running=max_running, max_slots=max_running + 1, step_tokens=16
    )
    busy = data.draw(st.lists(st.integers(0, limit), min_size=1, max_size=4))  # that always have requests
    rare = limit + 1
    number, waited = 1, 0
    for adapter in busy:
        stage.submit(spec(number, [number % 9], adapter=adapter, max_tokens=4, arrival=float(number)))
        number += 1
    stage.step()
    stage.submit(spec(0, [7], adapter=rare, max_tokens=2, arrival=float(number)))
    ahead = len(stage.planner._table.sequences)
    while not stage.tokens(0):
        for adapter in busy:
            number += 1
            stage.submit(
                spec(
                    number,
                    [number % 9],
                    adapter=adapter,
                    max_tokens=data.draw(st.integers(1, 4)),
                    arrival=float(number),
                )
            )
        if stage.plan() is not None:
            stage.finish()
        assert len(adapters_of(stage)) <= limit
        waited += 1
        assert waited <= 8 * (ahead + max_running)
