"""CLIP's text encoder gives the vectors of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError
from kernels.contract.tasks import Embed
from kernels.models.config_loader import parse_config
from kernels.models.pooling import read_pooling
from kernels.weights.wrapped import language_model
from tests.kits.tiny_clip import END, make_tiny_clip
from tests.kits.vectors import inputs, run

PROMPTS = [[*ids, END] for ids in inputs(vocab=209)] + [[5, 6, END, 208, END, END], [9, 208, 7, 208, 3]]
"""The last but one has padding behind its end, the last one has no end."""


def vectors(model: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    """As transformers computes them, one after the other."""
    result = []
    for ids in prompts:
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            if hasattr(model, "get_text_features"):
                vector = model.get_text_features(input_ids=tokens).pooler_output
            else:
                output = model(input_ids=tokens)
                vector = output.text_embeds if hasattr(output, "text_embeds") else output.pooler_output
        result.append(vector[0].float().numpy())
    return result


@pytest.mark.parametrize("end", [END, 2])
@pytest.mark.parametrize(
    ("name", "activation", "size"),
    [
        ("CLIPModel", "quick_gelu", 20),
        ("CLIPTextModelWithProjection", "gelu", 20),
        ("CLIPTextModel", "quick_gelu", 48),
    ],
)
def test_clip_embeds_as_transformers_does(tmp_path: Path, name: str, activation: str, size: int, end: int) -> None:
    """By both rules of where a text ends: the first token of this id, and 2, the largest id."""
    model = make_tiny_clip(tmp_path, name, eos_token_id=end, hidden_act=activation)
    info, found = run(tmp_path, PROMPTS, Embed(normalize=False), chunk=20)
    assert (info.architecture, info.context_length, info.cache_bytes) == (name, 77, 0)
    assert info.pooling is not None
    assert info.pooling.vector_size(info.hidden_size) == size
    expected = vectors(model, PROMPTS)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-4)
    _, found = run(tmp_path, PROMPTS, Embed())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other / np.linalg.norm(other), atol=2e-5)


def test_clip_in_bfloat16_is_close(tmp_path: Path) -> None:
    expected = vectors(make_tiny_clip(tmp_path), PROMPTS)
    _, found = run(tmp_path, PROMPTS, Embed(), dtype="bfloat16")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other / np.linalg.norm(other), atol=4e-2)


def test_the_names_of_older_files_are_read(tmp_path: Path) -> None:
    """``text_model.`` before the names of the encoder alone, and a table of position ids."""
    expected = vectors(make_tiny_clip(tmp_path, "CLIPTextModel"), PROMPTS)
    file = tmp_path / "model.safetensors"
    older = {f"text_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(older | {"text_model.embeddings.position_ids": torch.arange(77)[None]}, file)
    _, found = run(tmp_path, PROMPTS, Embed(normalize=False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-4)


def test_sizes_that_a_config_leaves_out_are_those_of_transformers() -> None:
    raw = {"architectures": ["CLIPModel"], "model_type": "clip", "text_config": {}, "vision_config": {}}
    config = parse_config(language_model(raw))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49408, 512, 2048)
    assert (config.layers, config.heads, config.max_positions, config.activation) == (12, 8, 77, "quick_gelu")
    pooling = read_pooling(Path(), raw)
    assert pooling is not None
    assert (pooling.mode, pooling.end_token, pooling.projected, pooling.max_tokens) == ("end", 49407, 512, 77)


def test_older_configs_of_clip_are_read_as_transformers_does() -> None:
    """``text_config_dict`` is over ``text_config``, and the projection has the size of the whole model's."""
    raw = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": 640,
        "text_config": {"projection_dim": 512, "hidden_size": 512, "eos_token_id": 2},
        "text_config_dict": {"projection_dim": 768, "hidden_size": 768, "num_attention_heads": 12},
        "vision_config": {},
    }
    whole = transformers.CLIPConfig(**raw)
    assert whole.text_config.hidden_size == 768
    for config in (raw, language_model(raw)):
        pooling = read_pooling(Path(), config)
        assert pooling is not None
        assert (pooling.projected, pooling.end_token) == (whole.projection_dim, whole.text_config.eos_token_id)
    assert parse_config(language_model(raw)).hidden_size == 768


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not supported"),
        ({"hidden_size": 50, "num_attention_heads": 4}, "hidden_size 50 is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
    ],
)
def test_wrong_sizes_of_clip_are_refused(change: dict[str, Any], reason: str) -> None:
    raw = {"architectures": ["CLIPTextModelWithProjection"], "model_type": "clip_text_model"} | change
    with pytest.raises(ConfigError, match=reason):
        parse_config(raw)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eos_token_id": [1, 2]}, "eos_token_id must be a token id"),
        ({"projection_dim": 0}, "projection_dim must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
    ],
)
def test_wrong_pooling_of_clip_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_pooling(Path(), {"architectures": ["CLIPTextModelWithProjection"]} | change)


def test_another_pooling_of_clip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pytest.raises(ConfigError, match="no other pooling is run"):
        read_pooling(tmp_path, {"architectures": ["CLIPTextModel"]})
