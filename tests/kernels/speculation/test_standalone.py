"""A draft model of its own: it drafts what it would say, and what the target says does not change."""

from __future__ import annotations

import pytest

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from tests.kits.speculation.lossless import SAMPLINGS, truth
from tests.kits.speculation.oracles import run_mixed


def settings(path, **options):
    return SpeculativeSettings("STANDALONE", draft_model_path=str(path), **options)


CHAIN = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 8}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("draft", ["qwen3", "llama2", "qwen2-window"])
def test_generates_what_the_target_generates(draft, shape, reference, drive, prompts):
    path = reference("qwen3").path
    batch = prompts(5, 23, 1, 40, 17, 9)
    samplings = list(SAMPLINGS.values())
    expected, _ = truth(drive, path, batch, samplings, 80)
    driver = drive(path, speculation=settings(reference(draft).path, **shape))
    assert driver.info.draft_parameters > 0
    found, _ = run_mixed(driver, batch, samplings, expected, 80)
    assert found == expected


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_a_draft_that_is_the_target_drafts_right(sampling, shape, page_size, reference, drive, prompts):
    """Greedy or with the same noise, whatever is prefilled in chunks, brought back or shared: its cache is right."""
    path = reference("qwen3").path
    batch = prompts(5, 23, 1, 40)
    samplings = [SlotSampling(temperature=0.0) if sampling == "greedy" else SlotSampling(temperature=0.9, seed=3)] * 4
    expected, _ = truth(drive, path, batch, samplings, 60)
    driver = drive(path, page_size=page_size, speculation=settings(path, **shape))
    recorded = []
    found, _ = run_mixed(driver, batch, samplings, expected, 60, reported=recorded)
    assert found == expected
    assert len(recorded) > 20
    if shape is CHAIN:
        assert all(accepted == depth for accepted, depth in recorded)
    else:  # of few nodes the best ones may leave the most likely path after its first
        assert all(accepted for accepted, _ in recorded)
        assert sum(accepted for accepted, _ in recorded) > 0.7 * sum(depth for _, depth in recorded)


def test_pages_of_others_hold_the_drafts_cache_too(reference, drive, prompts):
    path = reference("qwen3").path
    (prompt,) = prompts(50)
    (expected,), _ = truth(drive, path, [prompt], [SlotSampling(temperature=0.0)], 80)
    driver = drive(path, speculation=settings(path, **CHAIN))
    driver.admit(1, prompt)
    driver.generate(1, 60)
    shared = driver.pages[1][:3]
    driver.admit(2, prompt, shared=shared)
    driver.step([(2, driver.pending(2)), (1, 1)], {1: 3})
    for _ in range(5):
        result = driver.step([(2, 1)], {2: 3})
        assert result.accepted == b"\x04\0\0\0"
    assert driver.tokens[2] == expected[: len(driver.tokens[2])]


def test_unobserved_tokens_are_caught_up_in_passes_of_at_most_a_step(reference, drive, prompts):
    """There is memory for that, and no more: prompts of many requests may be waiting."""
    path = reference("qwen3").path
    batch = prompts(50, 70, 7)
    expected, _ = truth(drive, path, batch, [SlotSampling(temperature=0.0)] * 3, 100)
    driver = drive(path, speculation=settings(path, **CHAIN), max_step_tokens=24)
    slots = (1, 2, 3)
    for slot, prompt in zip(slots, batch, strict=True):
        driver.admit(slot, prompt)
        while driver.pending(slot) > 1 or len(driver.tokens[slot]) == len(prompt):
            driver.step([(slot, min(driver.pending(slot), 24))], unobserved=True)
    token_counts, model = [], driver.runner._loaded.speculator.drafter._model
    forward = model.forward
    model.forward = lambda batch, *rest: token_counts.append(len(batch.token_ids)) or forward(batch, *rest)
    for number in range(4):
        result = driver.step([(slot, 1) for slot in slots], dict.fromkeys(slots, 3) if number else None)
    assert max(token_counts) == 24
    assert result.accepted == b"\x04\0\0\0" * 3
    for slot in slots:
        assert driver.tokens[slot] == expected[slot - 1][: len(driver.tokens[slot])]


def test_a_draft_that_no_family_runs_is_named(reference, drive, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(ConfigError, match=f"--speculative-draft-model-path {tmp_path}: no supported architecture"):
        drive(reference("qwen3").path, speculation=settings(tmp_path))


def test_a_draft_of_another_vocabulary_is_refused(reference, drive):
    with pytest.raises(ConfigError, match="212 tokens"):
        drive(reference("qwen3").path, speculation=settings(reference("parallel-qwen3").path))
