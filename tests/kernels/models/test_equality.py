"""Logits and greedy tokens are those of transformers, however the work is cut into steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from tests.kits.driver import DENSE, HYBRID, LATENT, ROUTED
from tests.kits.parity import half_precision, scored
from tests.kits.published import PUBLISHED

FAMILIES = [
    "llama2",
    "llama3.1",
    "llama-biased",
    "llama-linear",
    "llama-yarn",
    "mistral",
    "mistral-full",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "olmo2",
    "phi3",
    "phi3-full",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "qwen3-moe-some",
    "qwen3-moe-step",
    *DENSE,
    *HYBRID,
    *LATENT,
    *PUBLISHED,
    *ROUTED,
]
VOCAB = 211


def distribution(ids: bytes, logprobs: bytes, rows: int) -> np.ndarray:
    """All of the vocabulary's log-probabilities, [rows, vocab], from a result that lists every token."""
    found = np.full((rows, VOCAB), np.nan, dtype=np.float32)
    order = np.frombuffer(ids, dtype=np.int32).reshape(rows, VOCAB)
    np.put_along_axis(found, order, np.frombuffer(logprobs, dtype=np.float32).reshape(rows, VOCAB), axis=1)
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunks", [[61], [7, 16, 1, 1, 20, 16]], ids=["whole", "chunked"])
def test_logits_match_at_every_position(name, chunks, reference, drive, prompts):
    model = reference(name)
    driver = drive(model.path)
    (prompt,) = prompts(61)
    driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, logprobs=VOCAB, prompt_logprobs=VOCAB))
    parts, targets = [], []
    for count in chunks:
        result = driver.step([(1, count)])
        rows = int(np.frombuffer(result.prompt_counts, dtype=np.int32).sum())
        parts.append(distribution(result.prompt_top_ids, result.prompt_top_logprobs, rows))
        targets.append(np.frombuffer(result.prompt_logprobs, dtype=np.float32))
    parts.append(distribution(result.top_ids, result.top_logprobs, 1))
    expected = model.logprobs(prompt).numpy()
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(targets), expected[np.arange(60), prompt[1:]], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_match_in_mixed_traffic(name, reference, drive, prompts):
    """Requests come at different times, prefill in chunks beside the decodes of others, share prefixes, are preempted
    and come back, and take the slots of those that are gone."""
    model = reference(name)
    driver = drive(model.path, seed=3)
    page = driver.info.page_size
    first, *others = prompts(40, 3, 25, 1, 70, seed=5)
    texts = [first, *others, first[: 2 * page] + others[1][:9], first]
    goal = {index: len(text) + 14 for index, text in enumerate(texts)}
    expected = [model.greedy(text, goal[index]) for index, text in enumerate(texts)]
    generator = random.Random(11)
    waiting = {index: [] for index in range(len(texts))}  # output tokens of an earlier life
    running: dict[int, int] = {}  # slot -> index
    cached: list[int] = []  # pages that hold the first 2 * page tokens of `first`
    preempted = finished = 0
    while waiting or running:
        for index in list(waiting):
            slot = next((slot for slot in (1, 2, 3) if slot not in running), None)
            shares = texts[index][: 2 * page] == first[: 2 * page]
            if slot is None or (shares and index and not cached):
                continue
            driver.admit(slot, texts[index], waiting.pop(index), shared=cached if shares else ())
            running[slot] = index
        rows = [(slot, generator.randint(1, min(20, driver.pending(slot)))) for slot in running]
        assert not driver.step(rows).failed
        if not cached:
            slot = next(slot for slot, index in running.items() if index == 0)
            if driver.computed[slot] >= 2 * page:
                cached = driver.pages[slot][: 2 * page // page]
                driver.borrowed[slot] = 2
        for slot, index in list(running.items()):
            tokens = driver.tokens[slot]
            if len(tokens) >= goal[index]:
                assert tokens[: goal[index]] == expected[index]
                driver.release(slot)
                del running[slot]
                finished += 1
            elif preempted < 4 and len(tokens) > len(texts[index]) + 3 and generator.random() < 0.3:
                waiting[index] = tokens[len(texts[index]) :]
                driver.release(slot)
                del running[slot]
                preempted += 1
    assert finished == len(texts)
    assert preempted >= 2


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


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {*PUBLISHED, *ONE_PRECISION}])
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_bf16_is_close_to_float32(name, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(60)
    driver = drive(model.path, dtype="bfloat16")
    found = torch.from_numpy(scored(driver, prompt, [30, 1, 1, 1, 1, 20, *[1] * 6]))
    assert (found - model.logprobs(prompt)).abs().mean() < 0.25
