"""Heads for the token after the next of Qwen3-Next and Qwen3.5: they compute their formulas, and drafting with them
changes no token of a model whose layers keep states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from tests.kits.speculation.gated_heads import LAYERS, nested, with_head

SETTINGS = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


@pytest.mark.parametrize("name", LAYERS)
def test_a_head_is_transformers_layer(name, reference, drive, tmp_path):
    model = reference(name)
    head = with_head(model, name, tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=SETTINGS)
    drafter = driver.runner._loaded.speculator.drafter._drafter
    tokens, states = torch.arange(20, 32), torch.randn(12, model.model.config.hidden_size)
    rows = AttentionRows(np.array([0]), np.array([12]), np.array([[3, 1]], dtype=np.int32), 0)
    positions = torch.arange(12)
    with torch.inference_mode():
        made = drafter._expansion._batch(tokens, positions, positions + 48, rows, states.clone())
        result = drafter._model.forward(made, states.clone(), drafter._expansion.caches)
        torch.testing.assert_close(result, head(tokens, states), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "images"), [*((name, False) for name in LAYERS), ("qwen3.5", True), ("qwen3.5-moe", True)]
)
def test_drafting_changes_no_token(name, images, reference, drive, prompts, tmp_path):
    """The draft tokens are those of the head, on from the model's last hidden states."""
    model, texts = reference(name), prompts(20, 150, seed=3)
    head = with_head(model, name, tmp_path / "model")
    if images:
        nested(tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=SETTINGS)
    drafter, drafted = driver.runner._loaded.speculator.drafter, []
    draft = drafter.draft

    def spy(rows):
        result = draft(rows)
        drafted.append((int(rows.roots[0]), int(result.tree.tokens[0, 1])))
        return result

    drafter.draft = spy
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))
    known = torch.tensor(driver.tokens[1])
    with torch.inference_mode():
        states = model.model.model(known[None]).last_hidden_state[0]
        logits = head(known[1:], states[:-1]) @ model.model.lm_head.weight.t()
    assert len(drafted) == 12
    assert [token for _, token in drafted] == [int(logits[root - 1].argmax()) for root, _ in drafted]


def test_trees_of_a_head_are_refused(reference, drive, tmp_path):
    with_head(reference("qwen3.5"), "qwen3.5", tmp_path / "model")
    settings = SpeculativeSettings("MTP", num_steps=3, topk=2, num_draft_tokens=6)
    with pytest.raises(ConfigError, match="follow a single chain of draft tokens"):
        drive(tmp_path / "model", speculation=settings)
