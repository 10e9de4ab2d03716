"""Logits and greedy tokens are those of transformers, however the work is cut into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.models.config_loader import read_config
from tests.kits.driver import ints
from tests.kits.families import COMPARED, ONE_OF_EACH
from tests.kits.parity import half_precision, scored
from tests.kits.planned_runner import PAGE, Line
from tests.kits.published import PUBLISHED
from tests.kits.speculation.oracles import Oracle, draft_with

FAMILIES = COMPARED["cpu"]
VOCAB = 211


def distribution(ids: bytes, logprobs: bytes, rows: int) -> np.ndarray:
    """All of the vocabulary's log-probabilities, [rows, vocab], from a result that lists every token."""
    found = np.full((rows, VOCAB), np.nan, dtype=np.float32)
    order = np.frombuffer(ids, dtype=np.int32).reshape(rows, VOCAB)
    np.put_along_axis(found, order, np.frombuffer(logprobs, dtype=np.float32).reshape(rows, VOCAB), axis=1)
    return found


def each_of(names):
    """The tests of a model run one after the other, so that two processes seldom make the same reference."""
    return pytest.mark.parametrize("name", names, scope="module")


@each_of(FAMILIES)
def test_logits_match_at_every_position(name, reference, drive, prompts):
    """Of a prompt that runs whole, and in chunks."""
    model = reference(name)
    driver = drive(model.path)
    (prompt,) = prompts(61)
    expected = model.logprobs(prompt).numpy()
    for slot, chunks in ((1, [61]), (2, [7, 16, 1, 1, 20, 16])):
        driver.admit(slot, prompt, sampling=SlotSampling(temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB))
        parts, targets = [], []
        for count in chunks:
            result = driver.step([(slot, count)])
            rows = int(np.frombuffer(result.prompt_counts, dtype=np.int32).sum())
            parts.append(distribution(result.prompt_top_ids, result.prompt_top_logprobs, rows))
            targets.append(np.frombuffer(result.prompt_logprobs, dtype=np.float32))
        parts.append(distribution(result.top_ids, result.top_logprobs, 1))
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(np.concatenate(targets), expected[np.arange(60), prompt[1:]], atol=2e-4, rtol=1e-4)


def traffic(prompts):
    shared, *ends = prompts(40, 3, 25, 1, 9, seed=5)
    return [shared + ends[0], ends[1], ends[2], shared + ends[3], shared + ends[0]]


@each_of(FAMILIES)
def test_planned_traffic_gives_the_greedy_tokens(name, reference, prompts):
    """By planner, prefix cache and runner together: prompts run in chunks beside the decodes of others, start behind
    cached prefixes, with snapshots of their states, are preempted and come back."""
    model = reference(name)
    runner = {"max_total_tokens": 2048, "window_pages": True}
    if read_config(model.path).recurrence is not None:
        runner["snapshot_tokens"] = 4 * PAGE
    line = Line(model.path, runner, max_running=3, priority_scheduling=True)
    texts = traffic(prompts)
    for number, text in enumerate(texts[:3]):
        line.submit(number, text, 14)
    mixed = False
    for _ in range(7):
        line.step()
        mixed |= any(len({count > 1 for count in ints(step.counts)}) == 2 for step in line.sent)
    line.submit(3, texts[3], 14, priority=100)
    line.submit(4, texts[4], 14)
    line.play()
    for number, text in enumerate(texts):
        assert len(line.outputs[number]) == 14
        assert model.continues(text, line.outputs[number])
    assert mixed
    assert min(line.cached[3], line.cached[4]) >= 32
    assert line.planner.load(0.0).preemptions > 0


@each_of(ONE_OF_EACH)
def test_draft_tokens_change_no_greedy_token(name, reference, drive, prompts, monkeypatch):
    """Of texts whose greedy tokens ``test_planned_traffic_gives_the_greedy_tokens`` has had checked."""
    model, texts = reference(name), traffic(prompts)[:2]
    oracle = Oracle(3, 1, lambda position: position % 5 > 0, VOCAB)
    draft_with(monkeypatch, oracle)
    driver = drive(model.path, speculation=SpeculativeSettings("STANDALONE", num_draft_tokens=4))
    oracle.truths = [model.greedy(text, len(text) + 14) for text in texts]
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(3):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    for slot, truth in enumerate(oracle.truths, start=1):
        assert driver.tokens[slot] == truth[: len(driver.tokens[slot])]
    assert sum(oracle.accepted) > 5


def test_a_batch_of_many_lengths(reference, drive, prompts):
    """Decodes whose lengths differ widely are gathered in more than one group."""
    model = reference("qwen3")
    driver = drive(model.path, page_size=4)
    texts = prompts(2, 5, 9, 30, 31, 33, 60, 90, 120, 200, seed=7)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(6):
        driver.step([(slot, 1) for slot in range(1, len(texts) + 1)])
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(text) + 7)


def test_long_prompts_run_in_blocks(reference, drive, prompts):
    """More queries in one row than one call of attention takes, after a prefix that is already computed."""
    model = reference("mistral")
    driver = drive(model.path, config_overrides='{"max_position_embeddings": 1024}')
    (prompt,) = prompts(700, seed=9)
    driver.admit(1, prompt)
    driver.step([(1, 100)])
    driver.step([(1, 600)])
    assert driver.tokens[1] == model.greedy(prompt, 701)


ONE_PRECISION = {"apertus", "nemotron-3"}
"""What transformers does not run in bfloat16 at these sizes."""


@each_of([name for name in FAMILIES if name not in {*PUBLISHED, *ONE_PRECISION}])
def test_bf16_is_close(name, reference, drive, prompts):
    """In prompts and in decodes, where a device may run programs of native operators: about as close to float32 as the
    same precision in transformers. The choice of small experts turns with the last bit, so that some are twice as far
    off."""
    model, (prompt,) = reference(name), prompts(60)
    driver = drive(model.path, dtype="bfloat16")
    assert driver.info.dtype == "bfloat16"
    found = torch.from_numpy(scored(driver, prompt, [30, 1, 1, 1, 1, 20, *[1] * 6]))
    expected = model.logprobs(prompt)
    with torch.inference_mode():
        theirs = half_precision(model)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    ours_off, theirs_off = (found - expected).abs().mean(), (theirs - expected).abs().mean()
    assert ours_off < (1.3 if name in ("qwen3", "mistral", "qwen2") else 2.0) * theirs_off + 2e-3


@each_of(PUBLISHED)
def test_bf16_is_close_to_float32(name, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(60)
    driver = drive(model.path, dtype="bfloat16")
    found = torch.from_numpy(scored(driver, prompt, [30, 1, 1, 1, 1, 20, *[1] * 6]))
    assert (found - model.logprobs(prompt)).abs().mean() < 0.25
