"""Steps of a pipeline: as many in flight as there are stages, with other sequences each."""

import pytest

from tests.actors.scheduling.stage import Stage, says, spec, unpack


def submit(stage, sequences):
    prompts = [range(50 * number, 50 * number + 5) for number in range(sequences)]
    stage.submit(*[spec(number, prompt, max_tokens=9) for number, prompt in enumerate(prompts)])
    return prompts


@pytest.mark.parametrize(("stages", "ahead"), [(2, 0), (2, 1), (3, 0)])
def test_steps_in_flight_have_disjoint_rows_of_equal_size(stages, ahead):
    stage = Stage(stages=stages, stages_ahead=ahead)
    flights = stages + ahead
    prompts = submit(stage, 2 * flights)
    stage.step()  # all prompts
    batches = [stage.plan() for _ in range(flights)]
    assert [len(unpack(batch.slots)) for batch in batches] == [2] * flights
    assert len({slot for batch in batches for slot in unpack(batch.slots)}) == 2 * flights
    assert stage.plan() is None
    first = stage.sent[0]
    stage.finish()
    assert unpack(stage.plan().slots) == unpack(first.slots)
    stage.play()
    assert [stage.tokens(number) for number in range(2 * flights)] == [says(prompt, 9) for prompt in prompts]


def test_a_sequence_alone_waits_for_its_token():
    stage = Stage(stages=2)
    (prompt,) = submit(stage, 1)
    stage.plan()
    assert stage.plan() is None
    stage.play()
    assert stage.tokens(0) == says(prompt, 9)


def test_chunks_of_one_prompt_are_in_flight_together():
    stage = Stage(stages=2, step_tokens=8)
    stage.submit(spec(0, range(20)))
    batches = [stage.plan(), stage.plan()]
    assert [unpack(batch.counts) for batch in batches] == [[8], [8]]
    assert [batch.unanswered for batch in batches] == [0, 1]
    assert stage.plan() is None
    stage.finish()
    assert unpack(stage.plan().counts) == [4]
    assert stage.plan() is None
    stage.play()
    assert stage.tokens(0) == says(range(20), 4)


def test_a_micro_batch_has_no_more_rows_than_given():
    stage = Stage(stages=2, micro_batch=2)
    prompts = submit(stage, 6)
    sizes = []
    for _ in range(200):
        while stage.planner.can_send and (batch := stage.plan()) is not None:
            sizes.append(len(unpack(batch.slots)))
        if not stage.sent:
            break
        stage.finish()
    assert max(sizes) == 3  # two decodes, and a prompt
    assert [stage.tokens(number) for number in range(6)] == [says(prompt, 9) for prompt in prompts]


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"overlap": False}, {}])
def test_no_sequence_waits_while_others_run_on(options):
    stage = Stage(stages=2, **options)
    stage.submit(*[spec(number, range(50 * number, 50 * number + 5), max_tokens=60) for number in range(3)])
    for step in range(60):
        if step == 20:
            stage.submit(spec(3, range(5000, 5005), max_tokens=60))
        while stage.planner.can_send and stage.plan() is not None:
            pass
        stage.finish()
    made = [len(stage.tokens(number)) for number in range(3)]
    assert max(made) - min(made) <= 3
    assert len(stage.tokens(3)) >= 5
