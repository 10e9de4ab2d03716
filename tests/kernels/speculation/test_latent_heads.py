"""Heads for the tokens after the next of models with DeepSeek's layers: their layer is transformers', and drafting with
them changes no token.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices import latent_cache
from kernels.speculation import verify
from tests.kits.speculation.latent_heads import with_head

LAYERS = {"deepseek-v3": DeepseekV3DecoderLayer, "glm4-moe": Glm4MoeDecoderLayer}
if hasattr(transformers, "BailingHybridConfig"):
    LAYERS["ling3"] = transformers.models.bailing_hybrid.modeling_bailing_hybrid.BailingHybridDecoderLayer
DRAFTED = LAYERS | {"deepseek-v3.2": DeepseekV32DecoderLayer}
SETTINGS = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


def normed(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("name", LAYERS)
def test_a_head_is_transformers_layer(name, reference, drive, tmp_path):
    model = reference(name)
    head, layer = with_head(model, DRAFTED[name], tmp_path / "model")
    driver, inner = drive(tmp_path / "model", speculation=SETTINGS), model.model.model
    drafter = driver.runner._loaded.speculator.drafter._drafter
    tokens, states = torch.arange(20, 32), torch.randn(12, model.model.config.hidden_size)
    eps = model.model.config.rms_norm_eps
    with torch.inference_mode():
        both = normed(inner.embed_tokens(tokens), head["enorm"], eps), normed(states, head["hnorm"], eps)
        x = (torch.cat(both, -1) @ head["eh_proj"].t()).unsqueeze(0)
        places = inner.rotary_emb(x, torch.arange(12).unsqueeze(0))
        mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
        out = layer(x, attention_mask=mask, position_embeddings=places)
        expected = normed(out[0], head["shared_head.norm"], eps)
        pages = np.array([[3, 1]], dtype=np.int32)
        rows = AttentionRows(np.array([0]), np.array([12]), pages, 0)
        positions = torch.arange(12)
        made = drafter._expansion._batch(tokens, positions, positions + 48, rows, states.clone())
        assert isinstance(made, ForwardBatch)
        found = drafter._model.forward(made, states.clone(), drafter._expansion.caches)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DRAFTED)
def test_drafting_changes_no_token(name, reference, drive, prompts, tmp_path):
    model, texts = reference(name), prompts(20, 150, seed=3)
    with_head(model, DRAFTED[name], tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=SETTINGS)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_trees_of_a_head_change_no_token(name, reference, drive, prompts, tmp_path):
    model, texts = reference(name), prompts(20, 60, seed=3)
    with_head(model, DRAFTED[name], tmp_path / "model")
    settings = SpeculativeSettings("MTP", num_steps=3, topk=2, num_draft_tokens=6)
    driver = drive(tmp_path / "model", speculation=settings)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(8):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 5, 2: 5})
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "glm5", "hunyuan-v4", "mistral-large4"])
def test_accepted_ngrams_are_what_the_model_says(name, reference, drive, prompts, monkeypatch):
    """The suffixes of the answer were seen with other tokens behind them, too: accepted nodes stand beside wrong ones,
    and their vectors are moved."""
    model, (text, noise) = reference(name), prompts(30, 40, seed=3)
    answer = model.greedy(text, 50)[30:]
    seen = [
        part for place in range(2, 18, 2) for part in (*answer[place - 2 : place], *noise[2 * place : 2 * place + 2])
    ]
    moved = []
    real = latent_cache.move_latent
    monkeypatch.setattr(verify, "move_latent", lambda *given: (moved.append(given[1]), real(*given)))
    driver = drive(model.path, speculation=SpeculativeSettings("NGRAM", num_draft_tokens=8))
    for slot, prompt in enumerate((answer, seen, text), start=1):
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
    steps = 0
    while len(driver.tokens[3]) < 50:
        driver.step([(3, 1)], drafts={3: 7})
        steps += 1
    assert driver.tokens[3][:50] == [*text, *answer]
    assert steps < 12
    assert moved


def test_several_heads_are_refused(reference, drive, tmp_path):
    with_head(reference("deepseek-v3"), DeepseekV3DecoderLayer, tmp_path / "model")
    settings = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4, multi_layer=True)
    with pytest.raises(ConfigError, match="multi-layer-eagle"):
        drive(tmp_path / "model", speculation=settings)
