from __future__ import annotations

import pytest

from actors.admission import Door
from actors.requests import QueueFull


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


def test_retry_after_follows_the_measured_rate_and_stays_within_what_clients_obey() -> None:
    door = Door(max_sequences=10, max_tokens=None)
    tickets = [door.enter(1, 1, 0.0) for _ in range(10)]
    assert door.retry_after(1, 0.0) == 5.0  # nothing measured yet
    now = 0.0
    for ticket in tickets[:5]:
        now += 0.1
        door.leave(ticket, now)
        door.enter(1, 1, now)
    soon = door.retry_after(1, now)
    later = door.retry_after(8, now)
    assert 1.0 <= soon < later <= 120.0
    assert door.retry_after(10_000, now) == 120.0
