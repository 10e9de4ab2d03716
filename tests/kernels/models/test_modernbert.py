"""ModernBERT gives the vectors and classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kernels.contract.errors import ConfigError
from kernels.contract.tasks import Classify, Embed
from kernels.models.config_loader import parse_config
from kernels.models.pooling import read_pooling
from tests.kits.tiny_modernbert import make_tiny_modernbert
from tests.kits.vectors import inputs, run

LONG = [[number % 50 + 2 for number in range(start, start + 600)] for start in (0, 13)]
PROMPTS = [*inputs(vocab=60), *LONG, *([*range(2, 2 + length)] for length in (4, 5, 9, 10))]
"""Shorter than a window and much longer, some of one length; the last ones just fit where a token sees 3 or 8 on each
side, or are one longer."""
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}


def pool(directory: Path, mode: str) -> None:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


@torch.inference_mode()
def vectors(model: Any, mean: bool) -> list[np.ndarray]:
    """As transformers computes them, one after the other."""
    states = [model(torch.tensor([ids])).last_hidden_state[0].float() for ids in PROMPTS]
    return [(state.mean(0) if mean else state[0]).numpy() for state in states]


@torch.inference_mode()
def classes(model: Any) -> list[np.ndarray]:
    return [model(torch.tensor([ids])).logits[0].float().numpy() for ids in PROMPTS]


def in_bfloat16(directory: Path, name: str) -> Any:
    return getattr(transformers, name).from_pretrained(directory, dtype=torch.bfloat16).eval()


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-4)


def mean_error(some: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return float(np.abs(np.stack(some) - np.stack(expected)).mean())


@pytest.mark.parametrize("mode", ["", "cls_token", "mean_tokens"])
@pytest.mark.parametrize("sizes", [{}, BIASES | {"layer_types": ["sliding_attention", "full_attention"] * 2 + [
    "sliding_attention"], "local_attention": 7}])  # fmt: skip
def test_modernbert_embeds_as_transformers_does(tmp_path: Path, mode: str, sizes: dict[str, Any]) -> None:
    model = make_tiny_modernbert(tmp_path, **sizes)
    if mode:
        pool(tmp_path, mode)
    info, found = run(tmp_path, PROMPTS, Embed(normalize=False), chunk=20)
    assert (info.architecture, info.tasks, info.context_length) == ("ModernBertModel", ("embed",), 1024)
    assert_close(found, vectors(model, mode == "mean_tokens"))


@pytest.mark.parametrize("mean", [False, True])
def test_modernbert_in_bfloat16_is_as_close_as_transformers(tmp_path: Path, mean: bool) -> None:
    expected = vectors(make_tiny_modernbert(tmp_path), mean)
    rounded = vectors(in_bfloat16(tmp_path, "ModernBertModel"), mean)
    if mean:
        pool(tmp_path, "mean_tokens")
    _, found = run(tmp_path, PROMPTS, Embed(normalize=False), dtype="bfloat16")
    assert mean_error(found, expected) < 2 * mean_error(rounded, expected)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize(("labels", "sizes"), [(1, {}), (3, BIASES)])
def test_modernbert_classifies_as_transformers_does(
    tmp_path: Path, pooling: str, labels: int, sizes: dict[str, Any]
) -> None:
    model = make_tiny_modernbert(tmp_path, labels=labels, classifier_pooling=pooling, **sizes)
    expected = classes(model)
    info, found = run(tmp_path, PROMPTS, Classify(activate=False))
    assert (info.tasks, info.pooling is not None and info.pooling.mode) == (("classify",), pooling)
    assert_close(found, expected)
    rounded = classes(in_bfloat16(tmp_path, "ModernBertForSequenceClassification"))
    _, found = run(tmp_path, PROMPTS, Classify(activate=False), dtype="bfloat16")
    assert mean_error(found, expected) < 2 * mean_error(rounded, expected)


def test_modernbert_that_was_trained_to_fill_gaps_embeds(tmp_path: Path) -> None:
    model = make_tiny_modernbert(tmp_path, kind="ModernBertForMaskedLM")
    _, found = run(tmp_path, PROMPTS, Embed(normalize=False))
    assert_close(found, vectors(model.model, False))


def test_older_configs_of_modernbert_say_the_same(tmp_path: Path) -> None:
    """The bases of both rotations and the order of layers under the keys of transformers 4."""
    model = make_tiny_modernbert(tmp_path, global_rope_theta=500.0, local_rope_theta=30.0, global_attn_every_n_layers=2)
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 500.0
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    expected = vectors(model, False)
    _, found = run(tmp_path, PROMPTS, Embed(normalize=False))
    assert_close(found, expected)
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    older = {"global_rope_theta": 500.0, "local_rope_theta": 30.0, "global_attn_every_n_layers": 2}
    file.write_text(json.dumps(config | older))
    _, found = run(tmp_path, PROMPTS, Embed(normalize=False))
    assert_close(found, expected)


RAW = {
    "architectures": ["ModernBertModel"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def test_sizes_that_a_config_of_modernbert_leaves_out_are_the_defaults() -> None:
    config, expected = parse_config(RAW), transformers.ModernBertConfig()
    assert (config.max_positions, config.norm_eps) == (expected.max_position_embeddings, expected.norm_eps)
    assert (config.windows, sorted(config.ropes)) == ((0, 128, 128, 0), [1, 2])
    assert config.rope.theta == expected.rope_parameters["full_attention"]["rope_theta"]
    assert config.ropes[1].theta == expected.rope_parameters["sliding_attention"]["rope_theta"]
    assert parse_config(RAW | {"local_rope_theta": None}).ropes[1].theta == config.rope.theta
    pooling = read_pooling(Path(), RAW)
    assert pooling is not None
    assert (pooling.mode, pooling.max_tokens) == ("cls", 8192)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 50}, "hidden_size 50 is not a multiple"),
        ({"hidden_activation": "swish"}, "'swish' is not supported"),
        ({"classifier_activation": "relu"}, "classifier_activation 'relu' is not supported"),
        ({"local_attention": 1}, "local_attention must be at least 2"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be"),
        ({"layer_types": ["full_attention"]}, "layer_types must say"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is not supported"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters must be an object"),
        ({"global_rope_theta": -1}, "global_rope_theta must be"),
    ],
)
def test_wrong_sizes_of_modernbert_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_config(RAW | change)


def test_another_pooling_of_modernberts_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="classifier_pooling must be cls or mean, and is 'max'"):
        read_pooling(Path(), {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "max"})
