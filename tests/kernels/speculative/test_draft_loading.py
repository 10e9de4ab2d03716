"""Drafts that do not fit say which tensor or key is wrong, and what was expected."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.load_error import LoadError
from kernels.models.config import ConfigError, read_config
from kernels.speculative.eagle import EagleDrafter
from kernels.speculative.eagle3 import Eagle3Drafter, default_layers
from kernels.speculative.select import captured_layers
from kernels.speculative.settings import SpeculativeSettings
from tests.kernels.speculative.drafting import HIDDEN, Drafting, make_target, seeded, write
from tests.kernels.speculative.layouts import EAGLE3, draft_map, eagle3_shapes, make_layout


@pytest.fixture
def layout(tmp_path):
    """Makes one, lets ``change`` spoil its weights and ``config`` its keys, and loads it."""

    def load(name, change=lambda weights: None, config=None, **settings):
        drafter, algorithm, target, draft, width, _ = make_layout(name, tmp_path)
        path = target if draft is None else draft
        weights = load_file(path / "model.safetensors")
        change(weights)
        save_file(weights, path / "model.safetensors")
        raw = json.loads((path / "config.json").read_text()) | (config or {})
        (path / "config.json").write_text(json.dumps(raw))
        settings = {"num_steps": 2, "num_draft_tokens": 3, "draft_model_path": str(draft or "")} | settings
        return Drafting(drafter, target, width, algorithm=algorithm, **settings)

    return load


def without(name):
    return lambda weights: weights.pop(name)


def replaced(name, tensor):
    return lambda weights: weights.update({name: tensor})


OFFSETS = draft_map()[0]["d2t"]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("eagle", without("fc.weight"), "fc.weight is missing"),
        ("eagle", without("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
        (
            "eagle",
            replaced("fc.weight", torch.zeros(HIDDEN, HIDDEN)),
            r"fc.weight has shape \[32, 32\], config.json asks for \[32, 64\]",
        ),
        ("eagle3", without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (
            "eagle3",
            replaced("midlayer.self_attn.q_proj.weight", torch.zeros(64, HIDDEN)),
            r"midlayer.self_attn.q_proj.weight has shape \[64, 32\], config.json asks for \[64, 64\]",
        ),
        ("eagle3", without("lm_head.weight"), "lm_head.weight is missing"),
        ("eagle3", without("d2t"), "40 tokens of the target's 96, and no d2t"),
        ("eagle3", replaced("d2t", OFFSETS[:-1].clone()), r"d2t .* of shape \[39\]; draft_vocab_size asks for"),
        ("eagle3", replaced("d2t", OFFSETS.float()), "d2t in .* is torch.float32"),
        ("eagle3", replaced("d2t", OFFSETS + 60), "leads to token 61 to 139; the target has 0 to 95"),
        (
            "mimo",
            without("model.mtp_layers.0.final_layernorm.weight"),
            "mtp_layers.0.final_layernorm.weight is missing",
        ),
        ("mimo", without("model.mtp_layers.0.input_proj.weight"), "no head for tokens after the next"),
        ("deepseek", without("model.layers.6.shared_head.norm.weight"), "shared_head.norm.weight is missing"),
        (
            "deepseek",
            replaced("model.layers.6.extra.weight", torch.zeros(2)),
            "is in the checkpoint and not in the model",
        ),
    ],
)
def test_tensors_that_do_not_fit(name, change, told, layout):
    with pytest.raises(LoadError, match=told):
        layout(name, change)


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("eagle", {"hidden_size": 48}, "hidden_size 48, the target 32: it was made for another model"),
        ("eagle", {"quantization_config": {"bits": 4}}, "quantized"),
        ("eagle3", {"num_hidden_layers": 2}, "one layer, and this one has 2"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, "target's layers 0 to 5"),
        ("eagle3", {"eagle_config": [1]}, "eagle_config must be an object"),
        ("mimo", {"hidden_size": 64}, "the target 32"),
    ],
)
def test_configurations_that_do_not_fit(name, config, told, layout):
    with pytest.raises((ConfigError, LoadError), match=told):
        layout(name, config=config)


def test_settings_that_do_not_fit(layout):
    with pytest.raises(ConfigError, match="run 72 nodes through the draft, and at most 64 fit"):
        layout("eagle", num_steps=10, topk=8, num_draft_tokens=16)


def test_pickled_drafts_are_refused(layout, tmp_path):
    layout("eagle")
    (tmp_path / "draft" / "model.safetensors").rename(tmp_path / "draft" / "pytorch_model.bin")
    options = {"algorithm": "EAGLE", "draft_model_path": str(tmp_path / "draft")}
    with pytest.raises(LoadError, match="pickled weights only"):
        Drafting(EagleDrafter, tmp_path / "target", HIDDEN, **options)


def test_dummy_drafts_need_no_weights(tmp_path):
    """Of a benchmark: config.json alone."""
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(EAGLE3))
    settings = {"num_steps": 2, "num_draft_tokens": 3, "load_format": "dummy"}
    made = Drafting(
        Eagle3Drafter, target, 3 * HIDDEN, algorithm="EAGLE3", draft_model_path=str(tmp_path / "draft"), **settings
    )
    made.observe((0, 7))
    ((tokens, _),) = made.draft(0)
    assert len(tokens) == 3
    assert made.drafter.parameters == sum(map(math.prod, eagle3_shapes().values()))


def test_layers_that_are_captured(tmp_path):
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target")
    model = read_config(target)
    draft = write(tmp_path / "draft", EAGLE3, seeded(eagle3_shapes(), 1))
    assert captured_layers(SpeculativeSettings("EAGLE3", draft_model_path=str(draft)), model) == (0, 2, 5)
    own = SpeculativeSettings("EAGLE3", draft_model_path=str(draft), capture_layers=(1, 2, 3))
    assert captured_layers(own, model) == (1, 2, 3)
    write(tmp_path / "silent", EAGLE3 | {"eagle_config": None}, {})
    silent = SpeculativeSettings("EAGLE3", draft_model_path=str(tmp_path / "silent"))
    assert captured_layers(silent, model) == (1, 2, 2)
    assert default_layers(32) == (1, 15, 28)
    assert captured_layers(SpeculativeSettings("EAGLE", draft_model_path=str(draft)), model) == ()
