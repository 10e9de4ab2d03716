"""Whole decode steps in graphs, from one copy to the device to one copy back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from kernels.core.noise import keys_at
from kernels.core.operators import DRAWS
from kernels.devices.npu import capture
from kernels.devices.npu.drawing import TorchDraw, draws_at
from kernels.devices.npu.step_graphs import StepGraphs
from kernels.devices.npu_simulator.dispatch import Operator
from tests.kits.driver import GREEDY
from tests.kits.simulated_npu import SPEC

PAGE = 128
OPTIONS = {
    "device": "npu",
    "dtype": "bfloat16",
    "page_size": PAGE,
    "max_step_tokens": 256,
    "max_total_tokens": 16 * PAGE,
    "graph_rows": (4,),
}
WARM = SlotSampling(temperature=0.9)
SAMPLINGS = {
    "greedy": (GREEDY, GREEDY, GREEDY),
    "temperature": (WARM, GREEDY, SlotSampling(temperature=1.3)),
    "top-p": (SlotSampling(temperature=0.9, top_p=0.8), WARM, SlotSampling(temperature=1.1, min_p=0.05)),
    "top-k": (SlotSampling(temperature=0.9, top_k=5, top_p=0.9), GREEDY, SlotSampling(temperature=1.2, top_k=9)),
}
A5 = SPEC.upper().startswith("A5")


@pytest.fixture
def launched(monkeypatch, simulator):
    """The operators that are launched one by one."""
    names, call = [], Operator.__call__

    def counted(operator, *args, **kwargs):
        if not simulator.graphs._updates:
            names.append(operator.name)
        return call(operator, *args, **kwargs)

    monkeypatch.setattr(Operator, "__call__", counted)
    return names


def answers(driver, prompts, samplings, steps=6):
    for slot, (text, sampling) in enumerate(zip(prompts(3, 125, 60, seed=4), samplings, strict=True), start=1):
        driver.admit(slot, text, sampling=sampling)
        driver.step([(slot, len(text))])
    for _ in range(steps):
        assert not driver.step([(slot, 1) for slot in (1, 2, 3)]).failed
    return driver.tokens


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_step_brings_one_copy_and_takes_one(name, reference, drive, prompts, launched):
    """Tokens are those of steps without graphs, also where a page's end is passed and rows are filled up."""
    path, samplings = reference("qwen3").path, SAMPLINGS[name]
    eager = answers(drive(path, disable_graphs=True, **OPTIONS), prompts, samplings)
    driver = drive(path, **OPTIONS)
    assert answers(driver, prompts, samplings) == eager
    launched.clear()
    driver.step([(slot, 1) for slot in (1, 2, 3)])
    whole = name in ("greedy", "temperature") or not A5
    assert (launched == ["aten.copy_.default"] * 2) == whole


def test_rows_that_differ_in_form_are_sampled_behind_the_graph(reference, drive, prompts, launched):
    path, samplings = reference("qwen3").path, (WARM, SlotSampling(temperature=0.8, top_k=4), WARM)
    eager = answers(drive(path, disable_graphs=True, **OPTIONS), prompts, samplings)
    driver = drive(path, **OPTIONS)
    assert answers(driver, prompts, samplings) == eager
    launched.clear()
    assert driver.step([(slot, 1) for slot in (1, 2, 3)]).timing.graph_rows == 3
    assert len(launched) > 2


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_a_row_that_is_not_finite_fails_alone(sampling, reference, drive, prompts):
    driver = drive(reference("qwen3").path, **OPTIONS)
    answers(driver, prompts, (sampling,) * 3, steps=1)
    slots = driver.runner._loaded.slots
    cache = driver.runner._loaded.caches[0]
    with torch.inference_mode():
        cache.values[int(slots.pages[2, 0])].fill_(torch.nan)
    result = driver.step([(slot, 1) for slot in (1, 2, 3)])
    assert [error.slot for error in result.failed] == [2]
    assert np.frombuffer(result.accepted, np.int32).tolist() == [1, 0, 1]


def test_decodes_use_graphs_of_their_own_where_steps_have_none(reference, drive, monkeypatch):
    class NoSteps(StepGraphs):
        def __init__(self, *args):
            super().__init__(*args)
            self.sizes = []

    monkeypatch.setattr(capture, "StepGraphs", NoSteps)
    assert drive(reference("qwen3").path, **OPTIONS).info.graph_rows == (4,)


def test_packed_draws():
    draws = np.zeros(2, DRAWS)
    draws["keys"], draws["temperature"] = [(7, -9), (1 << 30, 5)], (0.5, 0.0)
    draws["log_min_p"], draws["top_p"], draws["top_k"] = (-np.inf, -1.0), (0.25, 1.0), (40, 0)
    positions = np.array([3, 1 << 20])
    packed = draws_at(draws, positions)
    keys = keys_at(torch.from_numpy(draws["keys"].copy()), torch.from_numpy(positions))
    np.testing.assert_array_equal(packed[:, :2], keys.numpy())
    expected = np.array([[0.5, -np.inf, 0.25], [0.0, -1.0, 1.0]], np.float32)
    np.testing.assert_array_equal(packed.view(np.float32)[:, 2:5], expected)
    assert packed[:, 5].tolist() == [40, 1]  # no k in a greedy row


def test_which_form_draws_a_batch():
    def form(cuts=True, **columns):
        draws = np.zeros(2, DRAWS)
        draws["temperature"], draws["top_p"], draws["log_min_p"] = 1.0, 1.0, -np.inf
        for name, values in columns.items():
            draws[name] = values
        return TorchDraw(cuts).form(draws)

    assert form() == form(cuts=False) == "all"
    assert form(top_p=(1.0, 0.5)) == form(log_min_p=(-np.inf, -2.0)) == "top-p"
    assert form(top_k=(3, 1024)) == form(top_k=(3, 0), temperature=(1.0, 0.0)) == "top-k"
    assert form(top_k=(3, 0)) is None
    assert form(top_k=(3, 1025)) is None
    assert form(cuts=False, top_p=(1.0, 0.5)) is None
    assert form(cuts=False, top_k=3) is None
