"""Loading of drafts: their files, platforms and quantization."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError, LoadError, UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.cpu.device import CpuDevice
from kernels.models.config_loader import read_config
from kernels.speculation.drafters.eagle import Eagle3Drafter, EagleDrafter, default_layers
from kernels.speculation.load import captured_layers, draft_device, draft_scheme
from kernels.weights.quantization.int8 import sums_are_exact
from tests.kits.quantized import fp8_rows, rewrite
from tests.kits.speculation.drafting import HIDDEN, Drafting, make_target, seeded, write
from tests.kits.speculation.layouts import EAGLE3, draft_map, eagle3_shapes, make_layout


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
    ("name", "change", "reported"),
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
        ("eagle3", replaced("d2t", OFFSETS[:-1].clone()), r"d2t .* of shape \[39\]; draft_vocab_size requires"),
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
def test_tensors_that_do_not_fit(name, change, reported, layout):
    with pytest.raises(LoadError, match=reported):
        layout(name, change)


@pytest.mark.parametrize(
    ("name", "config", "reported"),
    [
        ("eagle", {"hidden_size": 48}, "hidden_size 48, the target 32: it was made for another model"),
        ("eagle", {"quantization_config": {"bits": 4}}, "quantized"),
        ("eagle3", {"num_hidden_layers": 2}, "one layer, and this one has 2"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, "target's layers 0 to 5"),
        ("eagle3", {"eagle_config": [1]}, "eagle_config must be an object"),
        ("mimo", {"hidden_size": 64}, "the target 32"),
    ],
)
def test_configurations_that_do_not_fit(name, config, reported, layout):
    with pytest.raises((ConfigError, LoadError), match=reported):
        layout(name, config=config)


def test_heads_whose_norms_add_to_their_weights_are_refused(reference, drive):
    with pytest.raises(ConfigError, match=r"heads for later tokens of GemmaForCausalLM are not run, .* NGRAM"):
        drive(reference("gemma").path, speculation=SpeculativeSettings("MTP", num_steps=3, num_draft_tokens=4))


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
    """A benchmark's checkpoint: config.json alone."""
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SpeculativeSettings("NGRAM", attention_mode="decode"), "--speculative-attention-mode decode"),
        (
            SpeculativeSettings("EAGLE", draft_attention_backend="torch_native"),
            "--speculative-draft-attention-backend torch_native",
        ),
    ],
)
def test_kernels_of_an_npu_are_refused_elsewhere(settings: SpeculativeSettings, named: str) -> None:
    config = RunnerConfig(model_path="")
    platform = CpuDevice(config)
    assert draft_device(config, SpeculativeSettings("NGRAM"), platform, None) is platform
    with pytest.raises(UnsupportedError, match=f"{named} .* leave it out with --device cpu"):
        draft_device(config, settings, platform, None)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture
def load(reference, drive):
    def make(draft=None, draft_quantization="", **options):
        path = reference("qwen3").path
        settings = SpeculativeSettings("STANDALONE", str(draft or path), quantization=draft_quantization)
        return drive(path, speculation=settings, **options)

    return make


def accepted(driver, prompt):
    driver.admit(1, prompt)
    driver.step([(1, len(prompt))])
    found = []
    while len(driver.tokens[1]) < 90:
        found += np.frombuffer(driver.step([(1, 1)], {1: 3}).accepted, np.int32).tolist()
    return float(np.mean(found))


def test_a_draft_is_quantized_while_it_is_loaded(load, prompts):
    """By its own flag, or as the target is, unless it is reported not to be."""
    plain = load().info
    own = load(draft_quantization="int8").info
    assert own.weight_bytes == plain.weight_bytes
    most = 0.6 if sums_are_exact() else 0.9  # weights are kept twice where products would saturate
    assert own.draft_weight_bytes < most * plain.draft_weight_bytes
    both = load(quantization="int8").info
    assert both.weight_bytes == both.draft_weight_bytes == own.draft_weight_bytes
    floats = load(draft_quantization="unquant", quantization="int8").info
    assert (floats.weight_bytes, floats.draft_weight_bytes) == (both.weight_bytes, plain.draft_weight_bytes)
    (prompt,) = prompts(20)
    assert accepted(load(draft_quantization="int8"), prompt) > 2.0  # the same model but for its rounding


def test_a_draft_has_a_scheme_of_its_own(load, reference, prompts, tmp_path):
    draft = rewrite(reference("qwen3").path, tmp_path / "draft", fp8_rows, FP8)
    (prompt,) = prompts(20)
    for options in ({}, {"quantization": "int8"}, {"draft_quantization": "fp8"}):
        driver = load(draft, **options)
        assert accepted(driver, prompt) > 2.0
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-quantization, .* is quantized by fp8"):
        load(draft, draft_quantization="unquant")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mimo"])
def test_heads_are_quantized_too(name, tmp_path):
    drafter, algorithm, target, draft, width, _ = make_layout(name, tmp_path)
    settings = {"num_steps": 2, "num_draft_tokens": 3, "draft_model_path": str(draft or "")}
    sizes = [
        Drafting(
            drafter, target, width, algorithm=algorithm, quantization=draft_quantization, **settings
        ).drafter.weight_bytes
        for draft_quantization in ("", "int8")
    ]
    assert sizes[1] < sizes[0]


def test_a_block_s_draft_keeps_floats(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    settings = SpeculativeSettings("DFLASH", str(tmp_path))
    with pytest.raises(ConfigError, match="projects keys and values from weights in floats"):
        draft_scheme(tmp_path, RunnerConfig(""), settings)
