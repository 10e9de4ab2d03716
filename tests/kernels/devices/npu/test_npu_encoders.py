"""Encoders on a simulated NPU: vectors and classes are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels.contract.tasks import Classify, Embed
from tests.kits.tiny_clip import END, make_tiny_clip
from tests.kits.tiny_encoder import make_tiny_encoder
from tests.kits.tiny_model import make_tiny_model
from tests.kits.tiny_modernbert import make_tiny_modernbert
from tests.kits.vectors import inputs, run


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("labels", [0, 3])
def test_an_encoder_gives_the_numbers_of_the_cpu(labels: int, dtype: str, close: float, tmp_path: Path) -> None:
    vocab, task = make_tiny_encoder(tmp_path, labels=labels).config.vocab_size, Classify() if labels else Embed()
    _, expected = run(tmp_path, inputs(vocab=vocab), task)
    info, found = run(tmp_path, inputs(vocab=vocab), task, device="npu", dtype=dtype, page_size=128)
    assert info.device.startswith("npu")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=close)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 6e-2)])
def test_a_decoder_attends_in_both_directions_as_on_the_cpu(dtype: str, close: float, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, architectures=["Qwen3Model"], is_causal=False)
    _, expected = run(tmp_path, inputs(), Embed())
    info, found = run(tmp_path, inputs(), Embed(), device="npu", dtype=dtype, page_size=128)
    assert info.pooling is not None
    assert info.pooling.encoder
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=close)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 6e-2)])
def test_clip_gives_the_vectors_of_the_cpu(dtype: str, close: float, tmp_path: Path) -> None:
    make_tiny_clip(tmp_path)
    prompts = [[*ids, END] for ids in inputs(vocab=END)]
    _, expected = run(tmp_path, prompts, Embed())
    _, found = run(tmp_path, prompts, Embed(), device="npu", dtype=dtype, page_size=128)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=close)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("labels", [0, 3])
def test_modernbert_gives_the_numbers_of_the_cpu(labels: int, dtype: str, close: float, tmp_path: Path) -> None:
    model, task = make_tiny_modernbert(tmp_path, labels=labels), Classify() if labels else Embed()
    prompts = inputs(vocab=model.config.vocab_size)
    _, expected = run(tmp_path, prompts, task)
    _, found = run(tmp_path, prompts, task, device="npu", dtype=dtype, page_size=128)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=close)
