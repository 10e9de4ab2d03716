"""The planner case by case, with a prefix cache and a simulated runner around it."""

import numpy as np
import pytest

from actors.protocol import PeekPrefixes
from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import model_info
from kernels.step import SlotSampling
from tests.actors.scheduling.stage import Stage, says, spec, unpack


def counts(batch):
    return unpack(batch.counts)


# -- one sequence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_sequence_runs_to_its_length(overlap, length, max_tokens):
    stage = Stage(overlap=overlap)
    stage.submit(spec(0, range(length), max_tokens=max_tokens))
    stage.play()
    assert stage.tokens(0) == says(range(length), max_tokens)
    assert stage.end(0).reason == "length"
    assert [emission.start for emission in stage.told[0]] == list(range(max_tokens))
    assert stage.runner.computed_tokens == length + max_tokens - 1  # nothing runs beyond the last token


def test_two_steps_are_in_flight_and_no_third():
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=9))
    assert counts(stage.plan()) == [3]
    assert counts(stage.plan()) == [1]
    assert stage.planner.in_flight == 2
    assert not stage.planner.can_send
    assert stage.plan() is None
    stage.finish()
    assert stage.planner.can_send


def test_without_overlap_one_step_is_in_flight():
    stage = Stage(overlap=False)
    stage.submit(spec(0, range(3)))
    stage.plan()
    assert not stage.planner.can_send
    assert stage.plan() is None


def test_a_stop_is_known_one_step_late_and_the_stray_token_is_dropped():
    stop = says(range(3), 2)[-1]
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=9, stop_ids=(stop,)))
    stage.play()
    assert stage.tokens(0) == says(range(3), 2)
    assert (stage.end(0).reason, stage.end(0).matched) == ("stop", stop)
    assert stage.runner.computed_tokens == 3 + 1 + 1  # prompt, first token, and the stop token in vain


def test_the_slot_of_an_ended_sequence_is_released_with_the_next_batch_and_gets_a_new_generation():
    stage = Stage(max_running=1, max_slots=2)
    stage.submit(spec(0, [1, 2], max_tokens=1), spec(1, [3, 4], max_tokens=1))
    first = stage.step()
    second = stage.step()
    assert unpack(first.slots) == unpack(second.slots) == unpack(second.released) == [1]
    assert (unpack(first.generations), unpack(second.generations)) == ([1], [2])
    assert first.released == b""


def test_min_tokens_keeps_a_stop_id_from_ending():
    one, two, three = says(range(3), 3)
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=9, min_tokens=2, stop_ids=(one, two, three)))
    stage.play()
    assert stage.tokens(0) == [one, two, three]
    assert stage.end(0).matched == three


def test_a_stop_id_as_the_last_token_allowed_is_a_stop():
    stop = says(range(3), 2)[-1]
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=2, stop_ids=(stop,)))
    stage.play()
    assert stage.end(0).reason == "stop"


def test_the_context_ends_a_sequence():
    stage = Stage(context_length=6)
    stage.submit(spec(0, range(4), max_tokens=99), spec(1, range(6)), spec(2, range(5), max_tokens=99))
    assert stage.end(1).reason == "error"
    assert "6 tokens, the context holds 6" in stage.end(1).message
    stage.play()
    assert (stage.tokens(0), stage.end(0).reason) == (says(range(4), 2), "length")
    assert (stage.tokens(2), stage.end(2).reason) == (says(range(5), 1), "length")


def test_a_prompt_longer_than_the_budget_runs_in_chunks():
    stage = Stage(step_tokens=8)
    stage.submit(spec(0, range(20), max_tokens=2))
    assert [counts(stage.step()) for _ in range(3)] == [[8], [8], [4]]
    assert stage.tokens(0) == says(range(20), 1)


def test_max_prefill_tokens_bounds_the_prefills_of_a_step():
    stage = Stage(max_prefill_tokens=5)
    stage.submit(spec(0, range(7)), spec(1, range(20, 23)))
    assert counts(stage.step()) == [5]
    assert counts(stage.step()) == [2, 3]


def test_prefill_max_requests_bounds_the_prefills_of_a_step():
    stage = Stage(prefill_max_requests=1)
    stage.submit(spec(0, [1]), spec(1, [2]))
    assert counts(stage.step()) == [1]
    assert counts(stage.step()) == [1, 1]


@pytest.mark.parametrize(("chunked", "expected"), [(True, [7, 4]), (False, [7])])
def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it(chunked, expected):
    stage = Stage(chunked=chunked, step_tokens=11, max_running=2, max_slots=3)
    stage.submit(spec(0, range(7)), spec(1, range(20, 28)))
    assert counts(stage.step()) == expected
    stage.play()
    assert stage.tokens(1) == says(range(20, 28), 4)


def test_without_chunking_a_prompt_that_no_step_holds_is_split_nonetheless():
    stage = Stage(chunked=False, step_tokens=8)
    stage.submit(spec(0, range(20)))
    stage.play()
    assert stage.tokens(0) == says(range(20), 4)


def test_decodes_stand_before_prefills_in_a_mixed_step():
    stage = Stage(step_tokens=10)
    stage.submit(spec(0, range(3), max_tokens=9))
    stage.step()
    stage.submit(spec(1, range(30, 42)))
    batch = stage.step()
    assert counts(batch) == [1, 9]
    assert counts(stage.step()) == [1, 3]
    stage.play()
    assert stage.tokens(1) == says(range(30, 42), 4)


# -- the earlier life of a sequence ------------------------------------------------------------------------------------


def test_a_resumed_sequence_goes_on_where_it_was():
    prompt = range(5)
    stage = Stage()
    stage.submit(spec(0, prompt, max_tokens=4, output=says(prompt, 3)))
    stage.play()
    assert stage.tokens(0) == says(prompt, 4)[3:]
    assert stage.told[0][0].start == 3
    assert stage.end(0).reason == "length"


def test_a_resumed_sequence_that_was_complete_ends_at_once():
    prompt = range(5)
    output = says(prompt, 2)
    stage = Stage()
    stage.submit(spec(0, prompt, max_tokens=2, output=output))
    stage.submit(spec(1, prompt, max_tokens=9, output=output, stop_ids=(output[-1],)))
    assert stage.end(0).reason == "length"
    assert (stage.end(1).reason, stage.end(1).matched) == ("stop", output[-1])
    assert not stage.planner.has_work


def test_a_new_worker_gets_everything_again_and_old_answers_are_ignored():
    stage = Stage(max_running=2, max_slots=3)
    stage.submit(*[spec(i, range(10 * i, 10 * i + 6), max_tokens=6) for i in range(3)])
    for _ in range(3):
        stage.step()
    stage.plan()
    assert set(stage.planner.sequences_in_flight()) == {0, 1}
    stale = stage.runner.run(stage.sent[0])
    told = {i: list(stage.tokens(i)) for i in range(3)}
    stage.lose_worker()
    assert stage.planner.in_flight == 0
    assert stage.planner.sequences_in_flight() == ()
    assert stage.planner.finish_step(stale, 0.0) == []
    assert {i: stage.tokens(i) for i in range(3)} == told
    stage.play()
    for i in range(3):
        assert stage.tokens(i) == says(range(10 * i, 10 * i + 6), 6)


def test_news_of_the_old_worker_is_not_told_to_the_new_cache():
    stage = Stage()
    stage.submit(spec(0, range(9), max_tokens=9), spec(1, range(50, 59)))
    stage.step()
    stage.hear(stage.planner.abort([0]))  # with two pages to commit, and pages to close
    stage.lose_worker()
    stage.play()
    assert stage.tokens(1) == says(range(50, 59), 4)


def test_what_was_queued_before_the_first_worker_is_examined_when_it_comes():
    planner = Planner(PlannerConfig(max_running=1, max_slots=2, step_tokens=8))
    assert not planner.ready
    assert planner.submit([spec(0, range(9)), spec(1, range(3))], 0.0) == []
    assert not planner.can_send
    emissions = planner.worker_ready(model_info(num_pages=9, page_size=4, context_length=8), 0.0)
    assert [(e.sequence, e.ended.reason) for e in emissions] == [(0, "error")]
    assert planner.is_known(1)


def test_answers_out_of_order_are_refused():
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=9))
    stage.plan()
    stage.plan()
    stage.runner.run(stage.sent[0])
    with pytest.raises(RuntimeError, match="step 2 was answered before step 1"):
        stage.planner.finish_step(stage.runner.run(stage.sent[1]), 0.0)


# -- sharing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_prompt_seen_before_computes_only_its_end(length):
    stage = Stage()
    stage.submit(spec(0, range(length), max_tokens=1))
    stage.play()
    before = stage.runner.computed_tokens
    stage.submit(spec(1, range(length), max_tokens=1))
    stage.play()
    cached = (length - 1) // 4 * 4
    assert stage.runner.computed_tokens - before == length - cached  # one token at least
    assert stage.told[1][0].cached_tokens == cached
    assert stage.tokens(1) == stage.tokens(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_siblings_wait_for_the_prefix_one_of_them_computes(overlap):
    stage = Stage(overlap=overlap, step_tokens=16)
    stage.submit(*[spec(i, range(30), max_tokens=3) for i in range(4)], spec(9, range(100, 106), max_tokens=3))
    stage.play()
    # 30 once, then two tokens of each sibling's last page; 6 of the other; two decoded tokens each.
    assert stage.runner.computed_tokens == 30 + 3 * 2 + 6 + 5 * 2
    assert all(stage.tokens(i) == says(range(30), 3) for i in range(4))


def test_a_sequence_that_shares_nothing_overtakes_those_held_for_their_siblings():
    stage = Stage()
    stage.submit(spec(0, range(8)), spec(1, range(8)), spec(2, range(50, 53)))
    assert counts(stage.step()) == [8, 3]


def test_nobody_waits_for_a_prefix_whose_prefill_was_given_up():
    stage = Stage()
    stage.submit(spec(0, range(8)), spec(1, range(8)))
    stage.plan()
    stage.hear(stage.planner.abort([0]))
    assert counts(stage.plan()) == [8]
    stage.finish()
    stage.play()
    assert stage.tokens(1) == says(range(8), 4)


def test_tenants_share_nothing():
    stage = Stage()
    stage.submit(spec(0, range(8), max_tokens=1, salt=b"a"), spec(1, range(8), max_tokens=1, salt=b"b"))
    stage.play()
    assert stage.runner.computed_tokens == 16
    assert stage.told[1][0].cached_tokens == 0


def test_scored_prompts_are_computed_in_full_and_scored_once():
    stage = Stage(step_tokens=8, max_running=2)
    scored = SlotSampling(prompt_logprobs=1, logprobs=0)
    stage.submit(spec(0, range(12), max_tokens=1))
    stage.play()
    stage.submit(spec(1, range(12), max_tokens=3, sampling=scored))
    stage.play()
    assert stage.told[1][0].cached_tokens == 0
    scores = stage.told[1][0].prompt_scores
    assert np.frombuffer(scores.logprobs, np.float32).tolist() == [-t for t in range(1, 12)]
    assert unpack(scores.top_ids) == list(range(1, 12))
    assert all(emission.prompt_scores is None for emission in stage.told[1][1:])
    assert [np.frombuffer(e.scores.logprobs, np.float32)[0] for e in stage.told[1]] == [-t for t in stage.tokens(1)]


def test_a_resumed_sequence_does_not_score_its_prompt_again():
    stage = Stage()
    prompt = range(9)
    scored = SlotSampling(prompt_logprobs=0)
    stage.submit(spec(0, prompt, sampling=scored, output=says(prompt, 1)))
    assert stage.plan().admitted[0].sampling.prompt_logprobs == -1


# -- pages run out -----------------------------------------------------------------------------------------------------


def test_when_pages_run_out_the_latest_yields_and_comes_back():
    stage = Stage(pages=8, overlap=False)
    for i in range(3):
        stage.submit(spec(i, range(20 * i, 20 * i + 6), max_tokens=14, arrival=float(i)))
    order = []
    while stage.planner.has_work:
        stage.step()
        order += [i for i in range(3) if stage.end(i) is not None and i not in order]
    assert order == [0, 1, 2]
    assert stage.planner.load(0.0).preemptions > 0
    assert all(stage.tokens(i) == says(range(20 * i, 20 * i + 6), 14) for i in range(3))


def test_who_ends_with_the_steps_in_flight_is_not_preempted():
    stage = Stage(pages=4)
    stage.submit(spec(0, range(7), max_tokens=4), spec(1, range(20, 25), max_tokens=2, arrival=1.0))
    assert counts(stage.plan()) == [7, 5]
    assert counts(stage.plan()) == [1, 1]
    stage.finish()
    assert stage.plan() is None  # 0 needs a page, and 1 will leave two
    stage.finish()
    assert stage.end(1).reason == "length"
    stage.play()
    assert stage.planner.load(0.0).preemptions == 0
    assert stage.tokens(0) == says(range(7), 4)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sequence_alone_may_fill_the_whole_cache(overlap):
    stage = Stage(pages=4, overlap=overlap)
    stage.submit(spec(0, range(8), max_tokens=9))  # computes 16 tokens: the last one needs no place
    stage.play()
    assert stage.end(0).reason == "length"
    assert stage.planner.load(0.0).preemptions == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_sequence_that_outgrows_the_cache_fails_alone(overlap):
    stage = Stage(pages=4, overlap=overlap)
    stage.submit(spec(0, range(8), max_tokens=50), spec(1, range(30, 34), max_tokens=6, arrival=1.0))
    stage.submit(spec(2, range(17)))
    assert stage.end(2).reason == "error"
    stage.play()
    assert stage.end(0).message == (
        "the sequence needs 5 pages, the cache has 4: raise --max-total-tokens or shorten the request"
    )
    assert stage.tokens(0) == says(range(8), 9)
    assert stage.tokens(1) == says(range(30, 34), 6)


def test_a_large_prompt_is_not_overtaken_by_small_ones_for_ever():
    stage = Stage(pages=8, overlap=False)
    stage.submit(spec(0, range(100, 110), max_tokens=4))
    stage.step()
    stage.submit(spec(1, range(28), max_tokens=2, arrival=1.0))
    for i in range(2, 30):
        stage.submit(spec(i, [200 + i], max_tokens=4, arrival=2.0))
    while not stage.tokens(1):
        assert not any(stage.tokens(i) for i in range(2, 30))
        stage.step()
    stage.play()
    assert all(stage.tokens(i) == says([200 + i], 4) for i in range(2, 30))


def test_a_careful_planner_admits_fewer():
    def running(conservativeness):
        stage = Stage(pages=16, conservativeness=conservativeness, overlap=False)
        stage.submit(*[spec(i, [10 * i], max_tokens=20) for i in range(8)])
        stage.step()
        return stage.planner.load(0.0).running

    assert running(0.0) == 8
    assert running(1.0) == 3  # a page for the prompt, and 4 for 14 of the 20 tokens each may write
    assert running(2.0) == 2  # a page, and 5 for all 20


def test_the_next_is_tried_at_once_when_the_head_of_the_queue_is_aborted():
    stage = Stage(pages=8, overlap=False)
    stage.submit(spec(0, range(100, 110), max_tokens=12))
    stage.submit(spec(1, range(28), arrival=1.0), spec(2, [7], max_tokens=2, arrival=2.0))
    stage.step()
    stage.step()
    stage.hear(stage.planner.abort([1]))
    stage.step()
    assert len(stage.tokens(2)) == 1


def test_cached_tokens_are_those_of_the_first_admission():
    stage = Stage(max_running=1, max_slots=2, overlap=False, priority_scheduling=True)
    stage.submit(spec(0, range(9), max_tokens=3))
    stage.step()
    stage.submit(spec(1, [1], max_tokens=1, priority=50, arrival=1.0))
    stage.play()
    assert stage.runner.computed_tokens == 9 + 1 + 2 + 1  # 8 of the 10 known tokens were cached when 0 came back
    assert {emission.cached_tokens for emission in stage.told[0]} == {0}


def test_the_head_of_the_queue_is_tried_again_as_the_reserve_shrinks():
    stage = Stage(pages=64, conservativeness=1.0, overlap=False)
    stage.submit(spec(0, range(4), max_tokens=200), spec(1, range(50, 58), max_tokens=145, arrival=1.0))
    for _ in range(60):
        stage.step()
    assert stage.tokens(1)
    assert stage.end(0) is None


def test_the_queue_waits_while_its_head_does_not_fit_without_asking_the_cache_every_step():
    stage = Stage(pages=8, overlap=False)
    stage.submit(spec(0, range(100, 110), max_tokens=16), spec(1, range(28), max_tokens=2, arrival=1.0))
    stage.step()
    stage.step()
    queried = stage.cache.usage().queried_tokens
    for _ in range(3):
        stage.step()
    assert stage.cache.usage().queried_tokens == queried


# -- order and priority ------------------------------------------------------------------------------------------------


def priorities(**config):
    return Stage(max_running=1, max_slots=2, overlap=False, priority_scheduling=True, **config)


def admitted(stage):
    """Sequences in the order of their first token."""
    stage.play()
    return sorted(stage.told, key=lambda i: list(stage.told).index(i))


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
    ends = [stage.told[i] for i in (0, 1)]
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


def test_nobody_is_preempted_twice_without_progress():
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


def test_a_pressing_request_takes_pages_though_an_older_one_waits_for_pages_too():
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


def test_lpm_takes_the_longest_cached_prefix_first_and_the_long_waiting_before_that():
    stage = Stage(max_running=1, max_slots=2, policy="lpm", overlap=False)
    stage.submit(spec(0, range(12), max_tokens=1))
    stage.play()
    stage.now = 100.0
    stage.submit(spec(1, range(50, 62), arrival=99.0), spec(2, range(12), arrival=99.0))
    stage.submit(spec(3, range(80, 83), arrival=1.0))
    stage.told.clear()
    assert admitted(stage) == [3, 2, 1]


def test_a_full_queue_refuses_the_newcomer_or_the_weakest():
    stage = priorities(max_queued=2)
    stage.submit(spec(0, [1], priority=3), spec(1, [2], priority=1), spec(2, [3], priority=1))
    assert stage.end(2).message == "the queue is full (2 waiting): try again later or raise --max-queued-requests"
    stage.submit(spec(3, [4], priority=2))
    assert stage.end(1).reason == "error"
    stage.submit(spec(4, [4], priority=0, output=[7]))
    assert stage.end(4) is None  # accepted in an earlier life


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


def test_a_preemption_makes_the_planner_careful_again():
    stage = Stage(pages=8, conservativeness=1.0, overlap=False)
    stage.submit(*[spec(i, range(20 * i, 20 * i + 6), max_tokens=14, arrival=float(i)) for i in range(3)])
    growth = stage.planner._planning._growth
    growth._share = 0.0
    stage.play()
    assert stage.planner.load(0.0).preemptions > 0
    assert growth._share > 0.5


def test_who_waited_for_a_prefix_is_not_kept_by_one_behind_who_does_not_fit():
    stage = Stage(pages=10, overlap=False)
    stage.submit(spec(0, range(8), max_tokens=20), spec(1, range(8), max_tokens=2, arrival=1.0))
    stage.submit(spec(2, range(100, 136), arrival=2.0))
    assert counts(stage.step()) == [8]
    assert counts(stage.step()) == [1, 4]
    assert len(stage.tokens(1)) == 1


def test_deadlines_of_the_ended_are_forgotten():
    stage = Stage()
    stage.submit(spec(0, range(3), deadline=7.0))
    for i in range(1, 500):
        stage.submit(spec(i, range(3), deadline=1000.0 - i))
        stage.hear(stage.planner.abort([i]))
    assert len(stage.planner._deadlines) < 100
    assert [e.sequence for e in stage.planner.expire(7.0)] == [0]


@pytest.mark.parametrize(("waiting", "asks"), [(1, False), (2, True), (128, True), (129, False)])
def test_lpm_compares_prefixes_of_a_short_queue_only(waiting, asks):
    stage = Stage(policy="lpm")
    stage.submit(*[spec(i, [i, 1, 2]) for i in range(waiting)])
    assert isinstance(next(stage.planner.plan(0.0)), PeekPrefixes) is asks
