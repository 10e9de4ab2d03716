"""Draft tokens with compressed attention: rejected ones leave no trace in windows and entries, however the work is cut
into steps."""

from __future__ import annotations

import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.planned_runner import Line

NGRAM = SpeculativeSettings("NGRAM", num_draft_tokens=8)


def test_ngrams_change_no_token_of_planned_traffic(reference, prompts):
    """Longer drafts than a window, of which some are rejected; prompts in chunks, behind cached prefixes, preempted."""
    model, (shared, *ends) = reference("deepseek-v4"), prompts(40, 3, 25, 9, seed=5)
    texts = [shared + ends[0], ends[1], shared + ends[2]]
    answer = model.greedy(texts[0], 43 + 40)
    texts.append(answer[:60])
    line = Line(model.path, {"speculation": NGRAM, "max_total_tokens": 2048}, max_running=2, priority_scheduling=True)
    line.submit(0, answer, 1)
    line.play()
    for number in (1, 2):
        line.submit(number, texts[number - 1], 30)
    for _ in range(3):
        line.step()
    line.submit(3, texts[2], 30, priority=100)
    line.submit(4, texts[3], 23)
    line.play()
    for number in (1, 2, 3):
        assert model.continues(texts[number - 1], line.outputs[number])
        assert len(line.outputs[number]) == 30
    assert line.outputs[4] == answer[60:83]
    assert min(line.cached[3], line.cached[4]) >= 32
    load = line.planner.load(0.0)
    assert load.preemptions > 0
    assert load.steps < 55  # less than without draft tokens


def test_two_ranks_accept_the_same_ngrams(reference, prompts):
    model, (text,) = reference("parallel-deepseek-v4"), prompts(30)
    answer = model.greedy(text, 60)
    job = {"model": str(model.path), "prompts": [answer, text], "length": 60, "speculation": {"algorithm": "NGRAM"}}
    first, second = run_ranks([job])
    assert first[0]["tokens"] == second[0]["tokens"]
    assert model.continues(text, first[0]["tokens"][1][30:60])
    assert max(count for counts in first[0]["accepted"] for count in counts) > 3


def test_trees_of_draft_tokens_are_refused(reference, drive):
    settings = SpeculativeSettings("STANDALONE", topk=2, num_draft_tokens=6)
    with pytest.raises(ConfigError, match="keep windows, which follow a single chain"):
        drive(reference("deepseek-v4").path, speculation=settings)
