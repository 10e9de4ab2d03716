"""Draft tokens of models with latent attention on a GPU change no token; passes that verify and draft run in graphs."""

from __future__ import annotations

import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from kernels.contract.speculation import SpeculativeSettings
from tests.kits.executors import find_executor
from tests.kits.speculation.latent_heads import with_head

OPTIONS = {"device": "cuda", "dtype": "float32", "page_size": 16, "max_step_tokens": 256}
SETTINGS = {
    "chains": SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4),
    "trees": SpeculativeSettings("MTP", num_steps=3, topk=2, num_draft_tokens=6),
    "ngrams": SpeculativeSettings("NGRAM", num_draft_tokens=8),
}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafting_changes_no_token(name, graphs, device, reference, drive, prompts, tmp_path):
    if device.type == "cpu":
        pytest.skip("the interpreter is slow")
    model, texts = reference("deepseek-v3"), prompts(20, 150, seed=3)
    with_head(model, DeepseekV3DecoderLayer, tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=SETTINGS[name], disable_graphs=not graphs, **OPTIONS)
    assert (find_executor(driver.runner, "VerifyPass") is not None) == graphs
    answer = model.greedy(texts[0], 60)  # whose suffixes were seen
    for slot, text in enumerate((*texts, answer), start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    assert len(driver.tokens[1]) > 32
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))
