"""Families with sinks, caps, chunks and heads of several sizes on a simulated NPU: drafts, and an int8 cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.npu.fused_attention import with_sinks
from tests.kits.parity import scored

PAGE = 128
OPTIONS = {"device": "npu", "page_size": PAGE, "max_step_tokens": 256, "max_total_tokens": 16 * PAGE}
CHUNKED = {"llama4": {"page_size": 32}}


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "llama4", "mimo-v2-flash"])
def test_draft_tokens_are_verified(name, reference, drive, prompts):
    model, texts = reference(name), prompts(20, 90)
    settings = SpeculativeSettings("NGRAM", num_draft_tokens=8)
    driver = drive(model.path, **OPTIONS | CHUNKED.get(name, {}), speculation=settings)
    said = model.greedy(texts[0], 60)
    for slot, text in enumerate((*texts, said, said[:30] + texts[1][:3]), start=1):  # whose suffixes were seen
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(8):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 7, 2: 7})
    assert len(driver.tokens[1]) > 29
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "mimo-v2-flash"])
def test_an_int8_cache_is_near(name, dtype, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(90)
    result = scored(drive(model.path, **OPTIONS, dtype=dtype, kv_cache_dtype="int8"), prompt, [50, 1, 30, 9])
    exact = scored(drive(model.path, **OPTIONS, dtype=dtype), prompt, [50, 1, 30, 9])
    spread = np.abs(exact - exact.mean(1, keepdims=True)).mean()
    assert 0 < np.abs(result - exact).mean() < (0.12 if dtype == "float32" else 0.3) * spread


def test_sinks_are_one_more_score_of_each_head():
    scores, values = torch.randn(5, 3, 7), torch.randn(7, 4)
    sinks = torch.tensor([-20.0, 0.5, 20.0])
    sums = scores.logsumexp(-1, keepdim=True)
    beside = torch.cat((scores, sinks.view(1, 3, 1).expand(5, 3, 1)), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(with_sinks(scores.softmax(-1) @ values, sums, sinks), beside @ values)


def test_heads_wider_than_the_operators_take_are_attended_in_torch(reference, drive, prompts):
    """Gemma 4's full attention has heads of 512."""
    model, (prompt,) = reference("gemma4-wide"), prompts(40)
    driver = drive(model.path, **OPTIONS, dtype="bfloat16")
    assert driver.info.graph_rows == ()
    result, expected = scored(driver, prompt, [30, 1, 9]), model.logprobs(prompt).numpy()
    spread = np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert np.abs(result - expected).mean() < 0.3 * spread
