"""Families whose attention or experts are unlike Llama's on a GPU, by Triton's interpreter where there is none: their
logits are transformers', or the published formulas'. ``test_cuda_platform.py`` compares all families on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from tests.kernels.devices.cuda.interpreted import install
from tests.kits.families import UNLIKE
from tests.kits.parity import scored

OPTIONS = {"device": "cuda", "page_size": 16, "max_slots": 3, "max_total_tokens": 512}

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", [*UNLIKE, "longcat-flash", "step3p5"])
def test_logits_match_in_prompts_and_decodes(name, device, reference, drive, prompts, monkeypatch):
    if device.type == "cpu":
        install(monkeypatch)
    model, (prompt,) = reference(name), prompts(36)
    driver = drive(model.path, **OPTIONS | {"max_step_tokens": 24, "disable_graphs": True})
    assert not driver.runner._loaded.model.reads_rows
    assert not driver.runner._loaded.device.experts.reads_back
    result = scored(driver, prompt, [22, 12, 1, 1])
    np.testing.assert_allclose(result, model.logprobs(prompt).numpy(), atol=5e-4, rtol=2e-4)


@on_a_gpu
@pytest.mark.parametrize("name", [*UNLIKE, "gemma2", "gpt-oss"])
@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3"])
def test_a_cache_of_8_bits_is_near(name, kept, reference, drive, prompts):
    model, (prompt,) = reference(name), prompts(90)
    result = scored(drive(model.path, **OPTIONS, kv_cache_dtype=kept), prompt, [50, 1, 30, 9])
    exact = scored(drive(model.path, **OPTIONS), prompt, [50, 1, 30, 9])
    expected = model.logprobs(prompt).numpy()
    spread = np.abs(expected - expected.mean(1, keepdims=True)).mean()
    assert 0 < np.abs(result - exact).mean() < (0.2 if kept == "int8" else 0.5) * spread


@on_a_gpu
@pytest.mark.parametrize("name", [*UNLIKE, "gemma2", "gpt-oss"])
def test_draft_tokens_are_verified(name, reference, drive, prompts):
    model, texts = reference(name), prompts(20, 90)
    settings = SpeculativeSettings("NGRAM", num_draft_tokens=8)
    driver = drive(model.path, **OPTIONS | {"max_total_tokens": 2048, "max_slots": 5}, speculation=settings)
    for slot, text in enumerate((*texts, model.greedy(texts[0], 60)), start=1):  # whose suffixes were seen
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 7, 2: 7})
    assert len(driver.tokens[1]) > 33
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))
