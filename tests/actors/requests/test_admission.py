from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol.requests import QueueFull
from actors.requests.admission import AdmissionControl, Permit, max_per_tenant
from actors.requests.drain_rate import DrainRate


def refused_for(admission: AdmissionControl, now: float, choices: int = 1, tokens: int = 1, tenant: str = "") -> float:
    """The Retry-After of a request that is refused."""
    with pytest.raises(QueueFull) as refusal:
        admission.admit(choices, tokens, now, tenant)
    return refusal.value.retry_after


def test_refuses_sequences_past_the_bound_and_admits_again_after_a_leave() -> None:
    admission = AdmissionControl(max_sequences=3, max_tokens=None)
    first = admission.admit(2, 10, 0.0)
    admission.admit(1, 10, 0.0)
    with pytest.raises(QueueFull, match="3 of at most 3"):
        admission.admit(1, 10, 0.0)
    admission.release(first, 1.0)
    admission.admit(2, 10, 1.0)
    assert admission.sequences == 3
    assert admission.refused == 1


def test_a_ticket_counts_once_however_often_it_is_returned() -> None:
    admission = AdmissionControl(max_sequences=8, max_tokens=None)
    permit = admission.admit(3, 30, 0.0)
    admission.release(permit, 1.0)
    admission.release(permit, 1.0)
    assert (admission.sequences, admission.tokens) == (0, 0)


def test_prompt_tokens_are_bounded_and_an_estimate_is_set_right() -> None:
    admission = AdmissionControl(max_sequences=8, max_tokens=100)
    permit = admission.admit(1, 20, 0.0)
    admission.resize(permit, 90)
    with pytest.raises(QueueFull, match="90 of at most 100 prompt tokens"):
        admission.admit(1, 20, 0.0)
    admission.release(permit, 0.0)
    assert admission.tokens == 0


def test_a_request_above_the_token_limit_is_admitted_when_nothing_runs() -> None:
    assert AdmissionControl(max_sequences=8, max_tokens=100).admit(1, 500, 0.0).tokens == 500


# -- when to come back


def full_house(rate: float, seconds: float, *, size: int = 1000, start: float = 0.0) -> tuple[AdmissionControl, float]:
    """A full house in which ``rate`` sequences a second have ended for so long, each followed by another."""
    admission = AdmissionControl(max_sequences=size, max_tokens=None)
    permits = [admission.admit(1, 1, start) for _ in range(size)]
    now = start
    for number in range(int(rate * seconds)):
        now += 1 / rate
        admission.release(permits[number], now)
        permits.append(admission.admit(1, 1, now))
    return admission, now


def test_nothing_is_known_at_first() -> None:
    admission, now = full_house(10, 0)
    assert refused_for(admission, now) == 5.0


@pytest.mark.parametrize("rate", [2.0, 20.0, 50.0])
@pytest.mark.parametrize("seconds", [1.0, 8.0, 60.0])
def test_the_wait_is_what_the_rate_makes_it_however_short_it_was_measured(rate: float, seconds: float) -> None:
    admission, now = full_house(rate, seconds, size=4000)
    assert refused_for(admission, now, choices=int(20 * rate)) == pytest.approx(20, rel=0.15)


def test_a_quiet_night_is_no_slow_drain() -> None:
    admission = AdmissionControl(max_sequences=100, max_tokens=None)
    permits = [admission.admit(1, 1, 0.0) for _ in range(100)]
    for number, permit in enumerate(permits):
        admission.release(permit, (number + 1) / 10)
        if number < 50:
            permits.append(admission.admit(1, 1, (number + 1) / 10))  # so that it stays full for a while
    quiet = 40_000.0
    for _ in range(100):
        admission.admit(1, 1, quiet)
    assert refused_for(admission, quiet, choices=20) == pytest.approx(2, abs=1)


@pytest.mark.parametrize(("working", "expected"), [(10, 10.0), (9, 5.0)])
def test_a_rate_is_that_of_an_engine_with_enough_to_do_full_house_or_not(working: int, expected: float) -> None:
    """Five a second end, and 50 are too many. With less to do nothing is known of the full rate."""
    admission = AdmissionControl(max_sequences=100, max_tokens=None, busy_from=10)
    permits = [admission.admit(1, 1, 0.0) for _ in range(working)]
    for step in range(50):
        now = step * 0.2
        admission.release(permits.pop(0), now)
        permits.append(admission.admit(1, 1, now))
    admission.admit(100 - working, 1, now)
    assert refused_for(admission, now, choices=50) == expected


def test_retry_after_is_between_one_second_and_what_clients_obey() -> None:
    admission, now = full_house(1.0, 30)
    assert refused_for(admission, now, choices=900) == 120.0
    admission, now = full_house(500.0, 2)
    assert refused_for(admission, now) == 1.0


def test_retry_after_spreads_many_refused_requests_over_time() -> None:
    admission, now = full_house(20.0, 20)
    waits = [refused_for(admission, now) for _ in range(400)]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(400 / 20, rel=0.15)


def test_a_refusal_for_tokens_counts_tokens() -> None:
    admission = AdmissionControl(max_sequences=1000, max_tokens=1000)
    permits = [admission.admit(1, 100, 0.0) for _ in range(10)]
    for second in range(1, 11):
        admission.release(permits[second - 1], float(second))  # 100 tokens a second
        permits.append(admission.admit(1, 100, float(second)))
    assert refused_for(admission, 10.0, tokens=800) == pytest.approx(8, abs=1)


def test_those_whose_turn_has_come_block_no_other() -> None:
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
    admission = AdmissionControl(max_sequences=80, max_tokens=None, tenants=4)
    taken = max_per_tenant(80, 4)
    assert taken == 50  # more than half: what no other tenant needs is used
    for _ in range(taken):
        admission.admit(1, 1, 0.0, "flood")
    with pytest.raises(QueueFull, match="keeps 30 for other API keys"):
        admission.admit(1, 1, 0.0, "flood")
    for name in ("a", "b", "c"):
        for _ in range(10):
            admission.admit(1, 1, 0.0, name)
        refused_for(admission, 0.0, tenant=name)
    assert admission.sequences == 80


def test_tokens_are_shared_too() -> None:
    admission = AdmissionControl(max_sequences=100, max_tokens=400, tenants=2)
    admission.admit(1, 300, 0.0, "flood")
    refused_for(admission, 0.0, tokens=50, tenant="flood")
    admission.admit(1, 100, 0.0, "other")
    assert admission.tokens == 400


def test_one_key_alone_may_take_everything() -> None:
    admission = AdmissionControl(max_sequences=5, max_tokens=None, tenants=1)
    for _ in range(5):
        admission.admit(1, 1, 0.0, "only")
    assert admission.sequences == 5


def test_tenants_without_configuration_share_as_they_come() -> None:
    admission = AdmissionControl(max_sequences=40, max_tokens=None)
    for _ in range(20):
        admission.admit(1, 1, 0.0, "first")
    for _ in range(20):
        admission.admit(1, 1, 0.0, "second")
    refused_for(admission, 0.0, tenant="first")


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 40), st.booleans()), max_size=120),
    size=st.integers(8, 40),
)
def test_the_share_is_always_there_and_the_bound_always_holds(
    steps: list[tuple[int, int, int, bool]], size: int
) -> None:
    tenants = 4
    admission = AdmissionControl(max_sequences=size, max_tokens=None, tenants=tenants)
    held: dict[str, list[Permit]] = {str(number): [] for number in range(tenants)}
    for number, choices, tokens, leave in steps:
        name = str(number)
        mine = sum(permit.choices for permit in held[name])
        if leave and held[name]:
            admission.release(held[name].pop(), 0.0)
            continue
        try:
            held[name].append(admission.admit(choices, tokens, 0.0, name))
        except QueueFull:
            assert mine + choices > size // (2 * tenants), "its own share was refused to a key"
        assert admission.sequences == sum(permit.choices for permits in held.values() for permit in permits) <= size
    for permits in held.values():
        for permit in permits:
            admission.release(permit, 1.0)
    assert (admission.sequences, admission.tokens) == (0, 0)
