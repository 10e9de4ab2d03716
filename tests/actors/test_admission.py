from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.admission import Door, Ticket, most_for_one
from actors.drain_rate import DrainRate
from actors.requests import QueueFull


def refused_for(door: Door, now: float, choices: int = 1, tokens: int = 1, tenant: str = "") -> float:
    """The Retry-After of a request that is refused."""
    with pytest.raises(QueueFull) as refusal:
        door.enter(choices, tokens, now, tenant)
    return refusal.value.retry_after


def test_refuses_sequences_past_the_bound_and_admits_again_after_a_leave() -> None:
    door = Door(max_sequences=3, max_tokens=None)
    first = door.enter(2, 10, 0.0)
    door.enter(1, 10, 0.0)
    with pytest.raises(QueueFull, match="3 of at most 3"):
        door.enter(1, 10, 0.0)
    door.leave(first, 1.0)
    door.enter(2, 10, 1.0)
    assert door.sequences == 3
    assert door.refused == 1


def test_a_ticket_counts_once_however_often_it_is_given_back() -> None:
    door = Door(max_sequences=8, max_tokens=None)
    ticket = door.enter(3, 30, 0.0)
    door.leave(ticket, 1.0)
    door.leave(ticket, 1.0)
    assert (door.sequences, door.tokens) == (0, 0)


def test_prompt_tokens_are_bounded_and_an_estimate_is_set_right() -> None:
    door = Door(max_sequences=8, max_tokens=100)
    ticket = door.enter(1, 20, 0.0)
    door.correct(ticket, 90)
    with pytest.raises(QueueFull, match="90 of at most 100 prompt tokens"):
        door.enter(1, 20, 0.0)
    door.leave(ticket, 0.0)
    assert door.tokens == 0


def test_one_request_larger_than_the_token_bound_gets_in_when_the_house_is_empty() -> None:
    assert Door(max_sequences=8, max_tokens=100).enter(1, 500, 0.0).tokens == 500


# -- when to come back


def full_house(rate: float, seconds: float, *, size: int = 1000, start: float = 0.0) -> tuple[Door, float]:
    """A full house in which ``rate`` sequences a second have ended for so long, each followed by another."""
    door = Door(max_sequences=size, max_tokens=None)
    tickets = [door.enter(1, 1, start) for _ in range(size)]
    now = start
    for number in range(int(rate * seconds)):
        now += 1 / rate
        door.leave(tickets[number], now)
        tickets.append(door.enter(1, 1, now))
    return door, now


def test_nothing_is_known_at_first() -> None:
    door, now = full_house(10, 0)
    assert refused_for(door, now) == 5.0


@pytest.mark.parametrize("rate", [2.0, 20.0, 50.0])
@pytest.mark.parametrize("seconds", [1.0, 8.0, 60.0])
def test_the_wait_is_what_the_rate_makes_it_however_short_it_was_measured(rate: float, seconds: float) -> None:
    door, now = full_house(rate, seconds, size=4000)
    assert refused_for(door, now, choices=int(20 * rate)) == pytest.approx(20, rel=0.15)


def test_a_quiet_night_is_no_slow_drain() -> None:
    door = Door(max_sequences=100, max_tokens=None)
    tickets = [door.enter(1, 1, 0.0) for _ in range(100)]
    for number, ticket in enumerate(tickets):
        door.leave(ticket, (number + 1) / 10)
        if number < 50:
            tickets.append(door.enter(1, 1, (number + 1) / 10))  # so that it stays full for a while
    quiet = 40_000.0
    for _ in range(100):
        door.enter(1, 1, quiet)
    assert refused_for(door, quiet, choices=20) == pytest.approx(2, abs=1)


@pytest.mark.parametrize(("working", "expected"), [(10, 10.0), (9, 5.0)])
def test_a_rate_is_that_of_an_engine_with_enough_to_do_full_house_or_not(working: int, expected: float) -> None:
    """Five a second end, and 50 are too many. With less to do nothing is known of the full rate."""
    door = Door(max_sequences=100, max_tokens=None, busy_from=10)
    tickets = [door.enter(1, 1, 0.0) for _ in range(working)]
    for step in range(50):
        now = step * 0.2
        door.leave(tickets.pop(0), now)
        tickets.append(door.enter(1, 1, now))
    door.enter(100 - working, 1, now)
    assert refused_for(door, now, choices=50) == expected


def test_the_wait_is_never_longer_than_clients_obey_nor_shorter_than_a_second() -> None:
    door, now = full_house(1.0, 30)
    assert refused_for(door, now, choices=900) == 120.0
    door, now = full_house(500.0, 2)
    assert refused_for(door, now) == 1.0


def test_a_crowd_of_refused_is_spread_over_the_time_it_takes_to_let_them_in() -> None:
    door, now = full_house(20.0, 20)
    waits = [refused_for(door, now) for _ in range(400)]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(400 / 20, rel=0.15)


def test_a_refusal_for_tokens_counts_tokens() -> None:
    door = Door(max_sequences=1000, max_tokens=1000)
    tickets = [door.enter(1, 100, 0.0) for _ in range(10)]
    for second in range(1, 11):
        door.leave(tickets[second - 1], float(second))  # 100 tokens a second
        tickets.append(door.enter(1, 100, float(second)))
    assert refused_for(door, 10.0, tokens=800) == pytest.approx(8, abs=1)


def test_those_whose_turn_has_come_stand_in_nobodys_way() -> None:
    drain = DrainRate()
    for tenth in range(1, 101):
        drain.observe(tenth / 10, 2, busy=True)
    assert drain.promise(400, 1, 10.0) == 1.0
    assert drain.promise(1, 1, 20.0) == pytest.approx(10, abs=1)
    assert drain.promise(1, 1, 100.0) == 1.0


def test_time_without_a_measurement_has_no_rate() -> None:
    drain = DrainRate()
    drain.observe(10.0, 100, busy=False)
    assert drain.rate == 0.0


# -- several tenants


def test_a_flood_of_one_key_leaves_the_others_their_share() -> None:
    door = Door(max_sequences=80, max_tokens=None, tenants=4)
    taken = most_for_one(80, 4)
    assert taken == 50  # more than half: what nobody needs is used
    for _ in range(taken):
        door.enter(1, 1, 0.0, "flood")
    with pytest.raises(QueueFull, match="keeps 30 for other API keys"):
        door.enter(1, 1, 0.0, "flood")
    for name in ("a", "b", "c"):
        for _ in range(10):
            door.enter(1, 1, 0.0, name)
        refused_for(door, 0.0, tenant=name)
    assert door.sequences == 80


def test_tokens_are_shared_too() -> None:
    door = Door(max_sequences=100, max_tokens=400, tenants=2)
    door.enter(1, 300, 0.0, "flood")
    refused_for(door, 0.0, tokens=50, tenant="flood")
    door.enter(1, 100, 0.0, "other")
    assert door.tokens == 400


def test_one_key_alone_may_take_everything() -> None:
    door = Door(max_sequences=5, max_tokens=None, tenants=1)
    for _ in range(5):
        door.enter(1, 1, 0.0, "only")
    assert door.sequences == 5


def test_tenants_that_nobody_configured_share_as_they_come() -> None:
    door = Door(max_sequences=40, max_tokens=None)
    for _ in range(20):
        door.enter(1, 1, 0.0, "first")
    for _ in range(20):
        door.enter(1, 1, 0.0, "second")
    refused_for(door, 0.0, tenant="first")


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 40), st.booleans()), max_size=120),
    size=st.integers(8, 40),
)
def test_the_share_is_always_there_and_the_bound_always_holds(
    steps: list[tuple[int, int, int, bool]], size: int
) -> None:
    tenants = 4
    door = Door(max_sequences=size, max_tokens=None, tenants=tenants)
    held: dict[str, list[Ticket]] = {str(number): [] for number in range(tenants)}
    for number, choices, tokens, leave in steps:
        name = str(number)
        mine = sum(ticket.choices for ticket in held[name])
        if leave and held[name]:
            door.leave(held[name].pop(), 0.0)
            continue
        try:
            held[name].append(door.enter(choices, tokens, 0.0, name))
        except QueueFull:
            assert mine + choices > size // (2 * tenants), "its own share was refused to a key"
        assert door.sequences == sum(ticket.choices for tickets in held.values() for ticket in tickets) <= size
    for tickets in held.values():
        for ticket in tickets:
            door.leave(ticket, 1.0)
    assert (door.sequences, door.tokens) == (0, 0)
