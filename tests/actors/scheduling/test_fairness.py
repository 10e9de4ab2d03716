"""Several tenants at one engine: the least served goes first, none starves, and no slot stays idle."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduling.fairness import FairShare
from actors.scheduling.sequence import Sequence
from actors.scheduling.waiting import WaitingQueue
from kernels.contract.step import SlotSampling
from tests.actors.scheduling.stage import Stage, says, spec, unpack


def order_of_start(stage, steps=2000):
    """Sequences in the order in which they first ran, played to the end."""
    started = []
    for _ in range(steps):
        if not stage.planner.has_work:
            break
        stage.now += 0.01
        stage.plan()
        started += [number for number in stage.planner.running() if number not in started]
        if stage.sent:
            stage.finish()
    assert not stage.planner.has_work
    return started


def tenants(numbers, specs):
    return [specs[number].tenant for number in numbers]


def flood(first, count, tenant, *, length=4, max_tokens=4, since=0.0, **kwargs):
    """``count`` sequences of one tenant, numbered from ``first``, with prompts of their own."""
    return [
        spec(first + i, [first + i] * length, max_tokens=max_tokens, tenant=tenant, arrival=since + i / 1000, **kwargs)
        for i in range(count)
    ]


def test_a_flood_does_not_delay_another_tenant_by_more_than_its_own_share():
    stage = Stage(max_running=2, max_slots=3, overlap=False)
    specs = {s.sequence: s for s in flood(0, 60, "flood")}
    stage.submit(*specs.values())
    for _ in range(3):
        stage.step()
    late = {s.sequence: s for s in flood(1000, 5, "late", since=1.0)}
    stage.submit(*late.values())
    started = order_of_start(stage)
    places = [started.index(number) for number in late]
    # At least every other start is the late tenant's, though sixty of the flood came before.
    assert places == sorted(places)
    assert places[-1] <= 2 + 2 * len(late)


def test_a_tenant_alone_has_everything():
    stage = Stage(max_running=4, max_slots=5)
    stage.submit(*flood(0, 8, "only"))
    stage.plan()
    assert len(stage.planner.running()) == 4


def test_without_tenants_it_is_first_come_first_served():
    stage = Stage(max_running=1, max_slots=2, overlap=False)
    stage.submit(*flood(0, 12, ""))
    assert order_of_start(stage) == list(range(12))


def test_long_requests_pay_for_their_length():
    stage = Stage(max_running=1, max_slots=2, pages=128, overlap=False)
    specs = {s.sequence: s for s in flood(0, 6, "long", length=30, max_tokens=30)}
    specs |= {s.sequence: s for s in flood(100, 60, "short", length=3, max_tokens=3)}
    stage.submit(*specs.values())
    first = tenants(order_of_start(stage)[:22], specs)
    # A long one costs 90, a short one 9.
    assert 1 <= first.count("long") <= 4


def test_a_tenant_that_was_away_has_saved_up_nothing():
    shares = FairShare()
    a, b = (Sequence(spec(number, [1] * 10, tenant=tenant), 0) for number, tenant in ((1, "a"), (2, "b")))
    shares.arrive("a", ())
    shares.admit(a, 0)
    a.known += 500
    shares.arrive("b", [a])
    assert shares.served("b") == shares.served("a") == 10 + 2 * 500
    shares.admit(b, 4)
    assert shares.served("b") == shares.served("a") + 6


def test_scored_prompt_tokens_are_charged_as_output_tokens():
    shares = FairShare()
    plain, scored = (
        Sequence(spec(number, [1] * 100, tenant=name, sampling=SlotSampling(prompt_logprobs=top)), 0)
        for number, name, top in ((1, "plain", -1), (2, "scored", 0))
    )
    for sequence in (plain, scored):
        shares.arrive(sequence.tenant, ())
    for sequence in (plain, scored):
        shares.admit(sequence, 0)
    assert (shares.served("plain"), shares.served("scored")) == (100, 200)


def test_a_tenant_that_had_more_keeps_its_debt_when_away_for_a_moment():
    shares = FairShare()
    greedy, other = (
        Sequence(spec(number, [1] * 100, tenant=name), 0) for number, name in ((1, "greedy"), (2, "other"))
    )
    shares.arrive("greedy", ())
    shares.arrive("other", ())
    shares.admit(greedy, 0)
    shares.leave("greedy")
    shares.arrive("greedy", ())
    assert shares.served("greedy") == 100
    assert shares.served("other") == 0
    shares.leave("greedy")
    shares.leave("other")
    shares.arrive("greedy", ())
    assert shares.served("greedy") == 0  # the engine was idle: no tenant was kept waiting
    assert not shares.several
    del other


def test_what_idle_tenants_owe_is_forgotten_when_the_others_have_caught_up():
    shares = FairShare()
    shares.arrive("base", ())
    for number in range(100):
        shares.arrive(f"guest-{number}", ())
        shares.leave(f"guest-{number}")
    assert len(shares._counters) < 5


def test_a_priority_counts_among_ones_own_only():
    config = {"priority_scheduling": True, "preemption_threshold": 0, "max_running": 2, "max_slots": 3}
    stage = Stage(overlap=False, **config)
    stage.submit(spec(1, [1] * 4, max_tokens=40, tenant="a"), spec(2, [2] * 4, max_tokens=40, tenant="b"))
    stage.step()
    stage.submit(*flood(10, 10, "a", priority=1000))
    for _ in range(5):
        stage.step()
    running = stage.planner.running()
    assert 2 in running  # no request takes the place of another tenant's sequence
    assert 1 not in running  # but one's own yields
    stage.submit(spec(3, [3] * 4, max_tokens=4, tenant="b", arrival=1.0))
    started = order_of_start(stage)
    assert started.index(3) <= 4


def test_a_request_waiting_for_pages_is_not_overtaken_by_another_tenant():
    stage = Stage(overlap=False, pages=12, priority_scheduling=True, preemption_threshold=0, max_running=4)
    stage.submit(spec(1, [1] * 16, max_tokens=24, tenant="a"), spec(2, [2] * 4, max_tokens=12, tenant="b"))
    stage.step()
    stage.submit(spec(3, [3] * 32, max_tokens=4, tenant="b", arrival=1.0))  # needs 8 pages
    stage.step()
    stage.submit(spec(4, [4] * 4, max_tokens=12, tenant="a", priority=10, arrival=2.0))  # would fit at once
    assert order_of_start(stage)[-2:] == [3, 4]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 4),
    max_running=st.integers(1, 6),
    overlap=st.booleans(),
    policy=st.sampled_from(["fcfs", "lpm"]),
    priorities=st.booleans(),
)
def test_tenants_with_work_waiting_are_served_alike(seed, count, max_running, overlap, policy, priorities):
    """The bound of the paper: two tenants that both have work waiting differ by no more than twice the larger of one
    prompt and what all running sequences may put out."""
    draw = random.Random(seed)
    stage = Stage(
        max_running=max_running,
        max_slots=max_running + 1,
        step_tokens=1024,
        pages=512,
        overlap=overlap,
        policy=policy,
        priority_scheduling=priorities,
        use_cache=False,
    )
    names = [f"t{i}" for i in range(count)]
    number, longest, most = 0, 24, 16
    for name in names:
        for _ in range(25):
            prompt = [draw.randrange(900) for _ in range(draw.randint(1, longest))]
            priority = draw.randint(0, 50) if priorities else 0
            stage.submit(spec(number, prompt, max_tokens=draw.randint(1, most), tenant=name, priority=priority))
            number += 1
    bound = 2 * max(longest, 2 * most * max_running)
    shares = stage.planner._table._shares
    while stage.planner.has_work:
        stage.now += 0.05
        planned = stage.planner.can_send and stage.plan() is not None
        waiting = {sequence.tenant for sequence in stage.planner._table.waiting}
        shares.charge(stage.planner._table.running.values())
        served = [shares.served(name) for name in waiting]
        assert not served or max(served) - min(served) <= bound
        if planned and waiting:
            assert len(stage.planner.running()) == max_running, "a place stands idle"
        if stage.sent and (not planned or draw.random() < 0.7):
            stage.finish()
    assert len(stage.reported) == number
    assert all(stage.end(n).reason in ("stop", "length") for n in range(number))


def chunks_of(batch, stage, number):
    """Tokens of a sequence's prompt in a step."""
    slots, counts = unpack(batch.slots), unpack(batch.counts)
    slot = stage.planner._table.sequences[number].slot
    return sum(count for at, count in zip(slots, counts, strict=True) if at == slot)


def test_a_long_prompt_leaves_half_of_each_step_to_another_tenant():
    stage = Stage(step_tokens=16, pages=512, context_length=1024, overlap=False, chunked=True)
    stage.submit(spec(1, [1] * 800, tenant="long"))
    stage.step()
    stage.submit(spec(2, [2] * 5, tenant="short"), spec(3, [3] * 200, tenant="short"))
    batch = stage.step()
    assert (chunks_of(batch, stage, 1), chunks_of(batch, stage, 2), chunks_of(batch, stage, 3)) == (8, 5, 3)
    batch = stage.step()
    assert (chunks_of(batch, stage, 1), chunks_of(batch, stage, 3)) == (7, 8)  # and a decode of the short prompt
    stage.play()
    assert stage.tokens(1) == says([1] * 800, 4)


def test_a_long_prompt_takes_what_another_tenant_leaves():
    stage = Stage(step_tokens=16, pages=512, context_length=1024, overlap=False, chunked=True)
    stage.submit(spec(1, [1] * 800, tenant="long"))
    stage.step()
    stage.submit(spec(2, [2] * 3, tenant="short", max_tokens=1))
    assert chunks_of(stage.step(), stage, 1) == 13
    assert chunks_of(stage.step(), stage, 1) == 16


def test_the_queue_knows_which_tenants_wait():
    queue, sequences = WaitingQueue(), [Sequence(spec(n, range(3)), 0) for n in range(3)]
    for sequence, tenant in zip(sequences, "aab", strict=True):
        sequence.tenant = tenant
        queue.add(sequence)
    assert queue.tenants == {"a": 2, "b": 1}
    queue.remove(sequences[2])
    queue.remove(sequences[0])
    assert dict(queue.tenants) == {"a": 1}
