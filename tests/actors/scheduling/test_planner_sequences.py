"""The planner and one sequence: its steps, its chunks, and its rerun by the next worker."""

import pytest

from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import model_info
from kernels.contract.grammar import Grammar
from kernels.contract.step import SlotSampling
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
    assert [output.start for output in stage.reported[0]] == list(range(max_tokens))
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
    assert stage.runner.computed_tokens == 3 + 1 + 1  # prompt, first token, and the wasted row of the stop token


def test_the_slot_of_an_ended_sequence_gets_a_new_generation():
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


@pytest.mark.parametrize("leave", ["retract", "lose_worker"])
def test_a_sequence_waits_until_a_new_worker_has_its_grammar(leave):
    stage, form = Stage(), Grammar("regex", "ab")
    for number in (0, 1):
        stage.submit(spec(number, range(3), sampling=SlotSampling(grammar=form if number else None)))
    assert stage.planner.held_grammars() == []
    stage.step()
    (stage.planner.retract if leave == "retract" else stage.lose_worker)()
    assert stage.planner.load(0.0).waiting == 2
    assert len(counts(stage.step())) == 1
    assert stage.planner.held_grammars() == [form]
    assert stage.planner.grammar_compiled(Grammar("regex", "b")) == []
    assert len(counts(stage.step())) == 1
    stage.planner.grammar_compiled(form)
    stage.play()
    assert stage.tokens(0) == stage.tokens(1) == says(range(3), 4)


def test_a_held_sequence_can_be_aborted_or_meet_the_next_worker():
    stage, form = Stage(), Grammar("regex", "ab")
    stage.submit(*(spec(number, range(3), sampling=SlotSampling(grammar=form)) for number in (0, 1)))
    stage.lose_worker()
    stage.lose_worker()
    stage.hear(stage.planner.abort([0]))
    assert stage.end(0).reason == "abort"
    stage.planner.grammar_compiled(form)
    stage.play()
    assert stage.tokens(1) == says(range(3), 4)


def test_a_prompt_longer_than_the_budget_runs_in_chunks():
    stage = Stage(step_tokens=8)
    stage.submit(spec(0, range(20), max_tokens=2))
    assert [counts(stage.step()) for _ in range(3)] == [[8], [8], [4]]
    assert stage.tokens(0) == says(range(20), 1)


def test_a_short_tail_of_a_prompt_is_not_left_for_the_next_step():
    stage = Stage(step_tokens=8, tail_tokens=2)
    stage.submit(spec(0, range(8)), spec(1, range(20, 28)), spec(2, range(40, 51)), spec(3, range(60, 70)))
    steps = [counts(stage.step()) for _ in range(4)]
    assert steps == [[8], [1, 8], [1, 1, 6], [1, 1, 5, 1]]
    stage.play()
    assert [len(stage.tokens(number)) for number in range(4)] == [4, 4, 4, 4]
    bounded = Stage(step_tokens=8, tail_tokens=2, max_prefill_tokens=7)
    bounded.submit(spec(0, range(8)))
    assert counts(bounded.step()) == [7]


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
    assert stage.reported[0][0].start == 3
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
    sent = [batch.number for batch in stage.sent]
    assert set(stage.planner.in_steps(sent)) == {0, 1}
    assert stage.planner.in_steps([]) == {}
    stale = stage.runner.run(stage.sent[0])
    reported = {i: list(stage.tokens(i)) for i in range(3)}
    stage.lose_worker()
    assert stage.planner.in_flight == 0
    assert stage.planner.in_steps(sent) == {}
    assert stage.planner.finish_step(stale, 0.0) == []
    assert {i: stage.tokens(i) for i in range(3)} == reported
    stage.play()
    for i in range(3):
        assert stage.tokens(i) == says(range(10 * i, 10 * i + 6), 6)


def test_news_of_the_old_worker_is_not_reported_to_the_new_cache():
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
    outputs = planner.worker_ready(model_info(num_pages=9, page_size=4, context_length=8), 0.0)
    assert [(e.sequence, e.ended.reason) for e in outputs] == [(0, "error")]
    assert planner.is_known(1)


def test_answers_out_of_order_are_refused():
    stage = Stage()
    stage.submit(spec(0, range(3), max_tokens=9))
    stage.plan()
    stage.plan()
    stage.runner.run(stage.sent[0])
    with pytest.raises(RuntimeError, match="step 2 was answered before step 1"):
        stage.planner.finish_step(stage.runner.run(stage.sent[1]), 0.0)
