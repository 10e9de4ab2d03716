"""Drafts whose weights are quantized: by a scheme of their own, as they are loaded, or not while the target's are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernels.models.config import ConfigError
from kernels.quantization.int8 import sums_are_exact
from kernels.speculative.draft_scheme import draft_scheme
from kernels.speculative.settings import SpeculativeSettings
from kernels.step import RunnerConfig
from tests.kernels.speculative.drafting import Drafting
from tests.kernels.speculative.layouts import make_layout
from tests.quantized import fp8_rows, rewrite

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.fixture
def load(reference, drive):
    def make(draft=None, asked="", **options):
        path = reference("qwen3").path
        settings = SpeculativeSettings("STANDALONE", str(draft or path), quantization=asked)
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
    """By its own flag, or as the target is, unless it is told not to be."""
    plain = load().info
    own = load(asked="int8").info
    assert own.weight_bytes == plain.weight_bytes
    most = 0.6 if sums_are_exact() else 0.9  # weights are kept twice where products would saturate
    assert own.draft_weight_bytes < most * plain.draft_weight_bytes
    both = load(quantization="int8").info
    assert both.weight_bytes == both.draft_weight_bytes == own.draft_weight_bytes
    floats = load(asked="unquant", quantization="int8").info
    assert (floats.weight_bytes, floats.draft_weight_bytes) == (both.weight_bytes, plain.draft_weight_bytes)
    (prompt,) = prompts(20)
    assert accepted(load(asked="int8"), prompt) > 2.0  # the same model but for its rounding


def test_a_draft_has_a_scheme_of_its_own(load, reference, prompts, tmp_path):
    draft = rewrite(reference("qwen3").path, tmp_path / "draft", fp8_rows, FP8)
    (prompt,) = prompts(20)
    for options in ({}, {"quantization": "int8"}, {"asked": "fp8"}):
        driver = load(draft, **options)
        assert accepted(driver, prompt) > 2.0
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-quantization, .* is quantized by fp8"):
        load(draft, asked="unquant")


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mimo"])
def test_heads_are_quantized_too(name, tmp_path):
    drafter, algorithm, target, draft, width, _ = make_layout(name, tmp_path)
    settings = {"num_steps": 2, "num_draft_tokens": 3, "draft_model_path": str(draft or "")}
    sizes = [
        Drafting(drafter, target, width, algorithm=algorithm, quantization=asked, **settings).drafter.weight_bytes
        for asked in ("", "int8")
    ]
    assert sizes[1] < sizes[0]


def test_a_block_s_draft_keeps_floats(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    settings = SpeculativeSettings("DFLASH", str(tmp_path))
    with pytest.raises(ConfigError, match="projects keys and values from weights in floats"):
        draft_scheme(tmp_path, RunnerConfig(""), settings)
