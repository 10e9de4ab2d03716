"""Models of transformers' modeling code give transformers' results, and others are refused by name.

``test_fallback_matrix`` runs all architectures.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kernels.contract.errors import ConfigError, LoadError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.execution.runner import ModelRunner
from kernels.models.fallback.model import CodeDecoder
from tests.kernels.distributed.ranks import run_ranks
from tests.kits.fallback import drive_code, greatest_difference
from tests.kits.tiny_architectures import VOCAB, save_tiny

Models = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A small model of a type by transformers, and where it is saved."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            path = tmp_path_factory.mktemp(kind)
            made[kind] = save_tiny(kind, path), path
        return made[kind]

    return get


def distribution(ids: bytes, logprobs: bytes) -> Any:
    """Log-probabilities [vocab] of a result that lists every token."""
    found = np.empty(VOCAB, dtype=np.float32)
    found[np.frombuffer(ids, dtype=np.int32)] = np.frombuffer(logprobs, dtype=np.float32)
    return found


def model_of(runner: ModelRunner) -> Any:
    return runner._loaded.model


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "mistral", "mixtral", "phi"])
def test_logits_and_tokens_are_transformers(kind: str, tiny: Models) -> None:
    """Unequal heads, caps, sinks, learned positions, partial rotation, windows and experts."""
    model, path = tiny(kind)
    assert greatest_difference(model, drive_code(path)) < 1e-3


def test_tokens_equal_those_of_the_native_family(tiny: Models) -> None:
    _, path = tiny("qwen2")
    prompt = list(range(5, 40))
    found = []
    for choice in ("native", "transformers"):
        driver = drive_code(path, model_impl=choice)
        driver.admit(1, prompt)
        found.append(driver.generate(1, 60))
    assert found[0] == found[1]


def test_shared_pages_serve_another_request(tiny: Models) -> None:
    _, path = tiny("gpt_neox")
    driver = drive_code(path)
    prompt = list(range(5, 36))
    driver.admit(1, prompt)
    first = driver.generate(1, 40)
    pages = driver.release(1, keep_pages=True)
    driver.admit(2, prompt, shared=pages[:3])
    assert driver.generate(2, 40) == first


def test_auto_takes_the_family_first_and_logs_otherwise(tiny: Models, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="troupe.kernels"):
        assert not isinstance(model_of(drive_code(tiny("qwen2")[1], model_impl="auto").runner), CodeDecoder)
        assert not caplog.records
        assert isinstance(model_of(drive_code(tiny("phi")[1], model_impl="auto").runner), CodeDecoder)
    assert "PhiForCausalLM runs by transformers' modeling code" in caplog.text


def test_native_refuses_what_is_no_family(tiny: Models) -> None:
    with pytest.raises(ConfigError, match="no supported architecture"):
        drive_code(tiny("phi")[1], model_impl="native")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jamba", "keep states"),
        ("mpt", "takes no positions"),
        ("gpt_neox_japanese", "computes with the mask itself"),
        ("falcon", "with another attention"),
        ("roberta", "counts positions from those of padding"),
        ("openai-gpt", "without transformers' registry"),
    ],
)
def test_what_the_cache_cannot_hold_is_refused(kind: str, reason: str, tiny: Models) -> None:
    with pytest.raises(ConfigError, match=reason):
        drive_code(tiny(kind)[1])


def test_auto_names_both_reasons(tiny: Models) -> None:
    with pytest.raises(
        ConfigError, match=r"no supported architecture.*nor can transformers.*takes no positions.*; supported"
    ):
        drive_code(tiny("mpt")[1], model_impl="auto")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"speculation": SpeculativeSettings("NGRAM")}, "--speculative-algorithm"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype"),
        ({"fp32_head": True}, "--enable-fp32-lm-head"),
        ({"invariant": True}, "--enable-deterministic-inference"),
    ],
)
def test_options_that_it_lacks_are_refused_by_name(options: dict[str, Any], name: str, tiny: Models) -> None:
    with pytest.raises(ConfigError, match=name):
        drive_code(tiny("phi")[1], **options)


@pytest.mark.parametrize("kind", ["gpt_neox", "mixtral", "phi"])
def test_two_ranks_compute_what_one_does(kind: str, tiny: Models) -> None:
    """Fused heads, experts, biases that are added once."""
    path, prompts = tiny(kind)[1], [list(range(5, 28)), list(range(40, 47))]
    job = {"model": str(path), "prompts": prompts, "length": 40, "options": {"model_impl": "transformers"}}
    first, second = run_ranks([job])
    expected = []
    for prompt in prompts:
        driver = drive_code(path)
        driver.admit(1, prompt)
        expected.append(driver.generate(1, 40))
    assert first[0]["tokens"] == second[0]["tokens"] == expected
    assert first[0]["weight_bytes"] < 0.8 * 4 * first[0]["parameters"]


@pytest.mark.parametrize(
    ("kind", "size", "reason"),
    [
        ("gpt2", 2, "has no plan for tensor parallelism"),
        ("mistral", 4, "key heads|cannot be run"),
        ("phi", 3, "which 3 ranks do not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(kind: str, size: int, reason: str, tiny: Models) -> None:
    with pytest.raises(ConfigError, match=reason):
        drive_code(tiny(kind)[1], tp_size=size)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_layers_are_as_exact_as_a_native_familys(kind: str, tiny: Models) -> None:
    _, path = tiny("qwen2")
    prompt, found = list(range(5, 40)), []
    for choice, quantization in (("native", kind), ("transformers", kind), ("native", "")):
        driver = drive_code(path, model_impl=choice, quantization=quantization)
        driver.admit(1, prompt, sampling=SlotSampling(temperature=0.0, logprobs=VOCAB))
        result = driver.step([(1, len(prompt))])
        found.append(distribution(result.top_ids, result.top_logprobs))
    native, ours, exact = found
    assert 0 < np.abs(ours - exact).mean() < 1.5 * np.abs(native - exact).mean()


def test_quantization_without_linear_layers_is_refused(tiny: Models) -> None:
    with pytest.raises(ConfigError, match="no linear layers of torch, which --quantization int8 needs"):
        drive_code(tiny("gpt2")[1], quantization="int8")


def test_missing_and_misshapen_tensors_are_named(tiny: Models, tmp_path: Path) -> None:
    _, path = tiny("phi")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.fc1.weight"] = tensors["model.layers.1.mlp.fc1.weight"][:3].clone()
    del tensors["model.layers.0.self_attn.dense.bias"]
    tensors["model.layers.0.self_attn.extra.weight"] = tensors["lm_head.bias"].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(LoadError) as found:
        drive_code(tmp_path)
    assert "layers.0.self_attn.dense.bias is missing" in str(found.value)
    assert "layers.1.mlp.fc1.weight has shape [3, 64]" in str(found.value)
    assert "layers.0.self_attn.extra.weight is in the checkpoint and not in the model" in str(found.value)


def test_made_up_weights_need_no_file(tiny: Models, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny("phi")[1] / "config.json").read_text())
    driver = drive_code(tmp_path, load_format="dummy")
    driver.admit(1, [3, 4, 5])
    assert len(driver.generate(1, 9)) == 9


def test_another_class_than_transformers_builds_is_refused(tiny: Models, tmp_path: Path) -> None:
    config = json.loads((tiny("phi")[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["PhiForTokens"]}))
    with pytest.raises(ConfigError, match="transformers builds PhiForCausalLM"):
        drive_code(tmp_path)
