"""The planner and the pages: prefixes that are shared, and a cache that is full."""

import numpy as np
import pytest

from kernels.contract.step import SlotSampling
from tests.actors.scheduling.stage import Stage, says, spec, unpack


def counts(batch):
    return unpack(batch.counts)


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
    assert stage.reported[1][0].cached_tokens == cached
    assert stage.tokens(1) == stage.tokens(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_siblings_wait_for_the_prefix_one_of_them_computes(overlap):
    stage = Stage(overlap=overlap, step_tokens=16)
    stage.submit(*[spec(i, range(30), max_tokens=3) for i in range(4)], spec(9, range(100, 106), max_tokens=3))
    stage.play()
    # 30 once, then two tokens of each sibling's last page; 6 of the other; two decoded tokens each.
    assert stage.runner.computed_tokens == 30 + 3 * 2 + 6 + 5 * 2
    assert all(stage.tokens(i) == says(range(30), 3) for i in range(4))


def test_an_unrelated_sequence_overtakes_those_held_for_a_sibling():
    stage = Stage()
    stage.submit(spec(0, range(8)), spec(1, range(8)), spec(2, range(50, 53)))
    assert counts(stage.step()) == [8, 3]


def test_no_sequence_waits_for_a_prefix_whose_prefill_was_abandoned():
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
    assert stage.reported[1][0].cached_tokens == 0


def test_scored_prompts_are_computed_in_full_and_scored_once():
    stage = Stage(step_tokens=8, max_running=2)
    scored = SlotSampling(prompt_logprobs=1, logprobs=0)
    stage.submit(spec(0, range(12), max_tokens=1))
    stage.play()
    stage.submit(spec(1, range(12), max_tokens=3, sampling=scored))
    stage.play()
    assert stage.reported[1][0].cached_tokens == 0
    scores = stage.reported[1][0].prompt_scores
    assert np.frombuffer(scores.logprobs, np.float32).tolist() == [-t for t in range(1, 12)]
    assert unpack(scores.top_ids) == list(range(1, 12))
    assert all(output.prompt_scores is None for output in stage.reported[1][1:])
    assert [np.frombuffer(e.scores.logprobs, np.float32)[0] for e in stage.reported[1]] == [-t for t in stage.tokens(1)]


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


def test_a_sequence_that_ends_with_the_steps_in_flight_is_not_preempted():
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
    assert {output.cached_tokens for output in stage.reported[0]} == {0}


def test_the_head_of_the_queue_is_tried_again_as_the_reserve_shrinks():
    stage = Stage(pages=64, conservativeness=1.0, overlap=False)
    stage.submit(spec(0, range(4), max_tokens=200), spec(1, range(50, 58), max_tokens=145, arrival=1.0))
    for _ in range(60):
        stage.step()
    assert stage.tokens(1)
    assert stage.end(0) is None


def test_a_queue_whose_head_does_not_fit_asks_the_cache_only_after_changes():
    stage = Stage(pages=8, overlap=False)
    stage.submit(spec(0, range(100, 110), max_tokens=16), spec(1, range(28), max_tokens=2, arrival=1.0))
    stage.step()
    stage.step()
    queried = stage.cache.usage().queried_tokens
    for _ in range(3):
        stage.step()
    assert stage.cache.usage().queried_tokens == queried


def test_a_preemption_makes_the_planner_careful_again():
    stage = Stage(pages=8, conservativeness=1.0, overlap=False)
    stage.submit(*[spec(i, range(20 * i, 20 * i + 6), max_tokens=14, arrival=float(i)) for i in range(3)])
    growth = stage.planner._planning._growth
    growth._share = 0.0
    stage.play()
    assert stage.planner.load(0.0).preemptions > 0
    assert growth._share > 0.5


def test_a_request_waiting_for_a_prefix_is_not_blocked_by_a_later_one():
    stage = Stage(pages=10, overlap=False)
    stage.submit(spec(0, range(8), max_tokens=20), spec(1, range(8), max_tokens=2, arrival=1.0))
    stage.submit(spec(2, range(100, 136), arrival=2.0))
    assert counts(stage.step()) == [8]
    assert counts(stage.step()) == [1, 4]
    assert len(stage.tokens(1)) == 1
