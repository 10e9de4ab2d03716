"""Steps that a device prepares from its own table of tokens, on a CPU that stands in for it, against those that it does
not prepare."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from tests.kits.parity import traffic
from tests.kits.prepared_steps import drive_prepared


@pytest.fixture
def prepared(drive, monkeypatch):
    """A driver whose device prepares steps."""
    return lambda path, **options: drive_prepared(drive, monkeypatch, path, **options)


OPTIONS = {"page_size": 16, "max_step_tokens": 256, "dtype": "float32"}


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_mixed_traffic_is_the_same(name, prepared, drive, prompts, reference):
    path = reference(name).path
    driver, platform = prepared(path, **OPTIONS)
    assert driver.info.graph_rows == (1, 2, 4)
    assert traffic(driver, prompts) == traffic(drive(path, **OPTIONS), prompts)
    assert platform.prepared > 0
    assert platform.chunks > 3


def test_tokens_that_a_step_brings_itself_are_not_fetched(prepared, drive, prompts, reference):
    path = reference("llama2").path
    driver, platform = prepared(path, **OPTIONS)
    platform.brings = True
    assert traffic(driver, prompts) == traffic(drive(path, **OPTIONS), prompts)
    assert platform.prepared > 0


def test_rows_that_are_sampled_or_scored_are_the_same(prepared, drive, prompts, reference):
    path = reference("qwen3").path
    found = []
    driver, platform = prepared(path, **OPTIONS)
    for one in (driver, drive(path, **OPTIONS)):
        for slot, prompt in enumerate(prompts(5, 40, 9), start=1):
            sampling = SlotSampling(temperature=0.0 if slot == 1 else 0.8, seed=7, logprobs=2 if slot == 3 else -1)
            one.admit(slot, prompt, sampling=sampling)
        # The second's first token comes with a decode and a part of the third's prompt beside it.
        results = [one.step([(1, 5), (2, 39)]), one.step([(1, 1), (2, 1), (3, 7)]), one.step([(3, 2)])]
        results += [one.step([(slot, 1) for slot in (1, 2, 3)]) for _ in range(8)]
        found.append([(result.tokens, result.top_ids, result.accepted) for result in results])
        found[-1].append(
            [np.nan_to_num(np.frombuffer(result.logprobs, np.float32)).round(3).tolist() for result in results]
        )
    assert found[0] == found[1]
    assert platform.prepared == 8


def test_prompts_that_go_in_a_token_at_a_time_keep_what_is_known(prepared, drive, prompts, reference):
    path = reference("llama2").path
    (prompt,) = prompts(6)
    driver, platform = prepared(path, **OPTIONS)
    found = []
    for one in (driver, drive(path, **OPTIONS)):
        one.admit(1, prompt)
        for _ in range(5):
            assert one.step([(1, 1)]).tokens == b""
        found.append(one.generate(1, len(prompt) + 6))
    assert found[0] == found[1]
    assert platform.prepared == 5 + 6
    assert platform.grown == 6


def test_a_row_that_is_not_finite_fails_alone(prepared, prompts, reference):
    driver, _ = prepared(reference("llama2").path, **OPTIONS)
    for slot, prompt in enumerate(prompts(5, 40), start=1):
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
    head = driver.runner._loaded.model.head

    def spoilt(hidden):
        logits = head(hidden)
        logits[0] = torch.nan
        return logits

    driver.runner._loaded.model.head = spoilt
    result = driver.step([(1, 1), (2, 1)])
    assert [error.slot for error in result.failed] == [1]
    assert np.frombuffer(result.accepted, np.int32).tolist() == [0, 1]
    assert len(result.tokens) == 4
    (prompt,) = prompts(60)
    driver.admit(3, prompt)
    result = driver.step([(3, 40)])  # a part of a prompt, of which no token is wanted yet, is looked at as well
    assert [error.slot for error in result.failed] == [3]
    assert not np.frombuffer(result.accepted, np.int32).any()


def test_scores_of_prompts_are_the_same(prepared, drive, prompts, reference):
    path = reference("qwen3").path
    driver, platform = prepared(path, **OPTIONS)
    (prompt,) = prompts(90)
    found = []
    for one in (driver, drive(path, **OPTIONS)):
        one.admit(1, prompt, sampling=SlotSampling(temperature=0.0, prompt_logprobs=0))
        results = [one.step([(1, 50)]), one.step([(1, 40)])]
        found.append(np.concatenate([np.frombuffer(result.prompt_logprobs, np.float32) for result in results]))
        assert results[1].tokens
    assert platform.chunks == 0  # which would have left out what is scored
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    driver.step([(1, 1)])
    driver.admit(2, prompt)
    driver.step([(1, 1), (2, 50)])
    assert platform.chunks == 1  # the first one's scores are reported
