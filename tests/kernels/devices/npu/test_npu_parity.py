"""Every model family on a simulated NPU against transformers, however the work is cut into steps.

In float32 attention is plain torch and everything else is the NPU's, so the numbers must agree closely and greedy
tokens exactly. In bfloat16 attention is the fused operator. Sums there are taken in another order than in transformers,
so log-probabilities are held to what bfloat16 itself costs transformers, and a greedy token may differ from the
reference's only where those two are nearer than that.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.speculation import SpeculativeSettings
from tests.kits.driver import FAMILIES, VOCAB
from tests.kits.families import COMPARED, NPU_GRAPHS, NPU_TRAFFIC, STATE_DRAFTS
from tests.kits.parity import half_precision, scored, traffic
from tests.kits.speculation.oracles import Oracle, draft_with

PAGE = 128
OPTIONS = {"device": "npu", "page_size": PAGE, "max_step_tokens": 256, "max_total_tokens": 16 * PAGE}
SIXTEEN_BITS = (
    "wide-deepseek-v3",
    "wide-kimi",
    "wide-deepseek-v3.2",
    "wide-mistral-large4",
    "gemma4-moe",
    "gpt-oss",
    "llama4-full",
)
CHUNKED = {"llama4": {"page_size": 32}}
"""Attention to chunks of 32 tokens: pages divide them."""


@pytest.mark.parametrize("name", COMPARED["npu"])
@pytest.mark.parametrize("chunks", [[181], [7, 140, 1, 1, 12, 20]], ids=["whole", "chunked"])
def test_float32_logits_match_at_every_position(name, chunks, reference, drive, prompts):
    model = reference(name)
    (prompt,) = prompts(181)
    driver = drive(model.path, **OPTIONS | CHUNKED.get(name, {}))
    assert driver.info.device.startswith("npu")
    np.testing.assert_allclose(scored(driver, prompt, chunks), model.logprobs(prompt).numpy(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *SIXTEEN_BITS])
@pytest.mark.parametrize("chunks", [[181], [7, 140, 1, 1, 12, 20]], ids=["whole", "chunked"])
def test_bfloat16_logits_are_as_close_as_those_of_transformers(name, chunks, reference, drive, prompts):
    model = reference(name)
    (prompt,) = prompts(181)
    driver = drive(model.path, dtype="bfloat16", **OPTIONS)
    found = torch.from_numpy(scored(driver, prompt, chunks))
    expected = model.logprobs(prompt)
    with torch.inference_mode():
        theirs = half_precision(model)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    ours_off, theirs_off = (found - expected).abs(), (theirs - expected).abs()
    assert ours_off.mean() < 1.3 * theirs_off.mean() + 1e-3
    assert ours_off.max() < 1.5 * theirs_off.max() + 1e-3


@pytest.mark.parametrize("name", NPU_TRAFFIC)
def test_float32_greedy_tokens_match_in_mixed_traffic(name, reference, drive, prompts):
    model = reference(name)
    driver = drive(model.path, **OPTIONS)
    texts, found = traffic(driver, prompts)
    for slot, text in enumerate(texts, start=1):
        assert found[slot] == model.greedy(text, len(text) + 12)


@pytest.mark.parametrize("name", STATE_DRAFTS)
def test_draft_tokens_change_no_token_of_states(name, reference, drive, prompts, monkeypatch):
    model, texts = reference(name), prompts(150, 40)
    oracle = Oracle(3, 1, lambda position: position % 5 > 0, VOCAB)
    draft_with(monkeypatch, oracle)
    driver = drive(model.path, speculation=SpeculativeSettings("STANDALONE", num_draft_tokens=4), **OPTIONS)
    oracle.truths = [model.greedy(text, len(text) + 40) for text in texts]
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(8):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    for slot, truth in enumerate(oracle.truths, start=1):
        assert driver.tokens[slot] == truth[: len(driver.tokens[slot])]
    assert sum(oracle.accepted) > 10


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", NPU_GRAPHS)
def test_bfloat16_greedy_tokens_are_among_the_top_tokens(name, graphs, reference, drive, prompts):
    """Each token is the reference's own, or one that bfloat16 cannot tell from it."""
    model = reference(name)
    driver = drive(model.path, dtype="bfloat16", disable_graphs=not graphs, **OPTIONS)
    assert bool(driver.info.graph_rows) == graphs
    texts, found = traffic(driver, prompts)
    half, behind = half_precision(model), []
    for slot, text in enumerate(texts, start=1):
        tokens = found[slot]
        expected = model.logprobs(tokens[:-1])[len(text) - 1 :]
        with torch.inference_mode():
            theirs = half(torch.tensor([tokens[:-1]])).logits[0, len(text) - 1 :].float().log_softmax(-1)
        taken = expected.gather(1, torch.tensor(tokens[len(text) :])[:, None])[:, 0]
        behind.append(expected.amax(-1) - taken)
        assert behind[-1].max() < 3 * (theirs - expected).abs().max()
    assert (torch.cat(behind) == 0).float().mean() > 0.85
