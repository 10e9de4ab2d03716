"""Which of our own kernels an NPU uses, and that models answer alike with them."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.environment import NPU_TRITON
from kernels.contract.errors import UnsupportedError
from kernels.contract.step import SlotSampling
from kernels.devices.npu.device import NpuDevice
from kernels.devices.npu.drawing import TorchDraw
from kernels.devices.npu_triton import reference as reference_of
from kernels.devices.npu_triton import selection
from kernels.devices.npu_triton.operators import REFERENCES
from kernels.devices.npu_triton.selection import select_kernels

DEVICE = torch.device("npu", 0)
EVERY = frozenset(REFERENCES)
PROJECTION = "split_norm_rope_cache"


@pytest.mark.parametrize(("value", "used"), [("", frozenset()), ("0", frozenset()), ("1", EVERY)])
def test_the_variable_chooses_on_a_simulated_npu(value, used, monkeypatch):
    monkeypatch.setenv(NPU_TRITON, value)
    assert select_kernels(DEVICE) == used


def test_values_that_cannot_be_obeyed_are_refused(monkeypatch):
    monkeypatch.setenv(NPU_TRITON, "yes")
    with pytest.raises(UnsupportedError, match=NPU_TRITON):
        select_kernels(DEVICE)
    monkeypatch.setenv(NPU_TRITON, "1")
    monkeypatch.setattr(selection, "registered", lambda name: False)
    with pytest.raises(UnsupportedError, match="npu-triton"):
        select_kernels(DEVICE)


def test_kernels_that_agree_with_torch_are_used(monkeypatch):
    """Here both are torch; ``npu_triton/test_own_kernels.py`` runs the kernels on the same inputs."""
    monkeypatch.delenv(NPU_TRITON, raising=False)
    monkeypatch.setattr(selection, "has_compiler", lambda: True)
    assert select_kernels(DEVICE) == EVERY


def _changed(case, qkv, *rest):
    queries = reference_of.split_norm_rope_cache(qkv, *rest)
    applies = {
        "later rounds": len(qkv) > selection._CORES,
        "half a block": qkv.shape[2] == 96,
        "float16": qkv.dtype == torch.float16,
    }
    return queries + applies[case]


def _drawn(case, logits, draws, positions):
    replaced = {"NaN": {"nan": 0.0}, "+inf": {"posinf": 0.0}, "-inf": {"neginf": 0.0}}
    if case in replaced:
        keep = {"nan": torch.nan, "posinf": torch.inf, "neginf": -torch.inf}
        logits = logits.nan_to_num(**(keep | replaced[case]))
    elif case == "ties":
        tied = (logits == 1).all(1, keepdim=True)
        logits = logits.float() + tied * torch.arange(logits.shape[1]) * 1e-6
    else:
        draws = draws.clone()
        draws.view(torch.float32)[:, 3] = -torch.inf
    return reference_of.draw(logits, draws, positions)


@pytest.mark.parametrize("case", ["later rounds", "half a block", "float16", "min-p", "NaN", "+inf", "-inf", "ties"])
def test_a_fault_in_one_case_alone_is_noticed(case, monkeypatch):
    name, compute = ("draw", _drawn) if case in ("min-p", "NaN", "+inf", "-inf", "ties") else (PROJECTION, _changed)
    monkeypatch.setitem(REFERENCES, name, partial(compute, case))
    assert selection.check_kernel(name, DEVICE) == "its results are not those of torch"


def test_a_kernel_that_computes_otherwise_is_reported(monkeypatch, caplog):
    def first(logits, draws, positions):
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits), dtype=torch.bool)

    def refuse(name, device):
        raise RuntimeError("cannot be lowered")

    monkeypatch.setattr(selection, "has_compiler", lambda: True)
    monkeypatch.setitem(REFERENCES, "draw", first)
    with caplog.at_level(logging.WARNING):
        assert select_kernels(DEVICE) == {"split_norm_rope_cache"}
    assert "draw is not used (its results are not those of torch)" in caplog.text
    monkeypatch.setattr(selection, "registered", lambda name: False)
    monkeypatch.setattr(selection, "_kernel", refuse)
    with caplog.at_level(logging.WARNING):
        assert select_kernels(DEVICE) == frozenset()
    assert "RuntimeError: cannot be lowered" in caplog.text


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_answers_are_those_without_them(name, cache, reference, drive, prompts, simulator, monkeypatch):
    first, second = prompts(40, 9)
    sampling = SlotSampling(temperature=1.0, top_k=30, top_p=0.9, min_p=0.01, seed=5)
    answers, calls = [], []
    for own in ("0", "1"):
        monkeypatch.setenv(NPU_TRITON, own)
        before = dict(simulator.engine.calls)
        options = {"device": "npu", "page_size": 128, "dtype": "bfloat16", "max_total_tokens": 16 * 128}
        driver = drive(reference(name).path, kv_cache_dtype=cache, **options)
        driver.admit(1, first)
        driver.admit(2, second, sampling=sampling)
        driver.step([(1, 40), (2, 9)])
        for _ in range(8):
            driver.step([(1, 1), (2, 1)])
        answers.append([driver.tokens[1], driver.tokens[2]])
        after = simulator.engine.calls
        calls.append({key for key in after if key.startswith("troupe") and after[key] != before.get(key)})
    assert answers[0] == answers[1]
    assert calls[0] == set()
    assert calls[1] == {"troupe.draw.default"} | ({"troupe.split_norm_rope_cache.default"} if not cache else set())


def test_kernels_that_another_rank_lacks_are_given_up(monkeypatch, caplog):
    monkeypatch.setenv(NPU_TRITON, "1")
    device = NpuDevice(RunnerConfig(model_path="", device="npu"))
    asked = []
    assert not device.agree(lambda value: asked.append(value) or value)
    assert device.sampling.draw is not None
    with caplog.at_level(logging.WARNING):
        assert device.agree(lambda value: asked.append(value) or value * (len(asked) % 2))
    assert asked == [1] * 4  # each rank asks for all, whichever it has
    assert "draw are not used: another rank does without" in caplog.text
    assert device.sampling.draw is None
    assert isinstance(device.capture._draw, TorchDraw)
    assert device.attention._own == {"split_norm_rope_cache"}
    assert not device.agree(lambda value: asked.append(value) or value)
    assert asked[4:] == [1, 0]


def test_ties_are_cut_alike_with_and_without_log_probabilities(reference, drive, prompts, monkeypatch):
    """All logits are equal: top-k keeps the lowest ids, in whatever way a row is sampled."""
    monkeypatch.setenv(NPU_TRITON, "1")
    options = {"device": "npu", "page_size": 128, "disable_graphs": True, "max_total_tokens": 2048}
    driver = drive(reference("qwen3").path, **options)
    model = driver.runner._loaded.model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: torch.zeros_like(logits(hidden)))
    (text,) = prompts(9)
    plain = {"temperature": 1.0, "top_k": 3, "seed": 5}
    for slot, more in enumerate(({}, {"logprobs": 0}, {"repetition_penalty": 1.0001}), start=1):
        driver.admit(slot, text, sampling=SlotSampling(**plain, **more))
        driver.generate(slot, 12)
    assert driver.tokens[1] == driver.tokens[2]
    for slot in (1, 3):
        assert set(driver.tokens[slot][len(text) :]) <= {0, 1, 2}
