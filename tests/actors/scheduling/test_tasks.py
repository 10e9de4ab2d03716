"""Tasks that generate no text, in the planner."""

import pytest

from actors.scheduling.testing import pooled_vector
from kernels.contract.step import SlotSampling
from kernels.contract.tasks import Embed, Score
from tests.actors.scheduling.stage import DraftingStage, Stage, spec


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_an_embedding_comes_with_the_end_of_its_prompt(overlap, length):
    stage = Stage(overlap=overlap, step_tokens=16)
    stage.submit(spec(0, range(length), max_tokens=1, task=Embed()), spec(1, range(3), max_tokens=6))
    stage.play()
    assert [output.vector for output in stage.reported[0]] == [pooled_vector(list(range(length)))]
    assert stage.end(0).reason == "length"
    assert all(output.vector == b"" for output in stage.reported[1])
    assert len(stage.tokens(1)) == 6


def test_an_embedding_goes_on_under_the_next_worker():
    stage = Stage(step_tokens=16)
    stage.submit(spec(0, range(40), max_tokens=1, task=Embed()))
    stage.plan()
    stage.lose_worker()
    stage.play()
    assert [output.vector for output in stage.reported[0]] == [pooled_vector(list(range(40)))]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [12, 13, 14])
def test_an_embedding_ends_beside_rows_that_verify_draft_tokens(overlap, length):
    """Also a prompt that leaves one token to a step, which is then a row like that of a decode."""
    stage = DraftingStage(overlap=overlap, step_tokens=16)
    stage.submit(spec(0, range(3), max_tokens=60))
    stage.step()
    stage.submit(spec(1, range(length), max_tokens=1, sampling=SlotSampling(max_drafts=0), task=Embed()))
    stage.play()
    assert [output.vector for output in stage.reported[1]] == [pooled_vector(list(range(length)))]
    assert all(output.vector == b"" for output in stage.reported[0])


def test_a_score_carries_the_log_probabilities_of_its_prompt():
    stage = Stage(step_tokens=16)
    sampling = SlotSampling(prompt_logprobs=0)
    stage.submit(spec(0, range(40), max_tokens=1, sampling=sampling, task=Score(start=30)))
    stage.play()
    (output,) = stage.reported[0]
    assert len(output.prompt_scores.logprobs) == 4 * 39
