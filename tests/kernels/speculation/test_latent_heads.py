"""Heads for the tokens after the next of models with DeepSeek's layers: their layer is transformers', and drafting with
them changes no token.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch

LAYERS = {"deepseek-v3": DeepseekV3DecoderLayer, "glm4-moe": Glm4MoeDecoderLayer}
DRAFTED = LAYERS | {"deepseek-v3.2": DeepseekV32DecoderLayer}
SETTINGS = SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4)


def normed(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def with_head(model, name, path):
    """A copy of the checkpoint with a head behind its last layer, and the head's tensors and transformers' layer."""
    shutil.copytree(model.path, path)
    config, hidden = model.model.config, model.model.config.hidden_size
    torch.manual_seed(5)
    layer = DRAFTED[name](config, config.num_hidden_layers - 1).eval()
    for parameter in layer.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    layer.mlp.gate.e_score_correction_bias.normal_(0.0, 0.3)
    prefix, held = f"model.layers.{config.num_hidden_layers}", load_file(model.path / "model.safetensors")
    own = {"enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    head = {part: torch.randn(shape) * 0.3 + (len(shape) == 1) for part, shape in own.items()}
    held |= {f"{prefix}.{part}.weight": value for part, value in head.items()}
    for part, value in layer.state_dict().items():
        if not part.startswith("mlp.experts."):
            held[f"{prefix}.{part}"] = value
    for expert, (both, down) in enumerate(
        zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
    ):
        gate, up = both.data.chunk(2)
        for part, value in (("gate", gate), ("up", up), ("down", down.data)):
            held[f"{prefix}.mlp.experts.{expert}.{part}_proj.weight"] = value
    save_file({key: value.clone().contiguous() for key, value in held.items()}, path / "model.safetensors")
    return head, layer


@pytest.mark.parametrize("name", LAYERS)
def test_a_head_is_transformers_layer(name, reference, drive, tmp_path):
    model = reference(name)
    head, layer = with_head(model, name, tmp_path / "model")
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
    with_head(model, name, tmp_path / "model")
    driver = drive(tmp_path / "model", speculation=SETTINGS)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
        driver.step([(slot, len(text))])
    for _ in range(12):
        driver.step([(slot, 1) for slot in (1, 2)], drafts={1: 3, 2: 3})
    for slot, text in enumerate(texts, start=1):
        assert driver.tokens[slot] == model.greedy(text, len(driver.tokens[slot]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (SpeculativeSettings("MTP", num_steps=3, topk=2, num_draft_tokens=6), "leave --speculative-algorithm out"),
        (SpeculativeSettings("NGRAM"), "leave --speculative-algorithm out"),
        (SpeculativeSettings("MTP", num_steps=3, topk=1, num_draft_tokens=4, multi_layer=True), "multi-layer-eagle"),
    ],
)
def test_what_has_no_latent_form_is_refused(settings, says, reference, drive, tmp_path):
    with_head(reference("deepseek-v3"), "deepseek-v3", tmp_path / "model")
    with pytest.raises(ConfigError, match=says):
        drive(tmp_path / "model", speculation=settings)
