"""Steps of rows without adapters run captures that leave them out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.core.layer_context import LayerContext
from kernels.devices.prepared import CapturedSteps
from kernels.execution.captures import Passes


def captured(skips, rows=((1, 4), (1, 4))):
    """The steps of a model with adapters, whose results say whether they were captured for none; and its rows."""
    adapters, left = LayerContext(None, torch.device("cpu")), list(rows)

    def steps(request):
        idle = adapters.idle
        return CapturedSteps(left.pop(0), lambda given: idle, lambda given: idle)

    device = SimpleNamespace(capture=SimpleNamespace(steps=steps), linear=SimpleNamespace(skips_adapters=skips))
    slots = SimpleNamespace(pages=torch.zeros(2, 3), tokens=torch.zeros(2, 9))
    model = SimpleNamespace(rows=adapters)
    passes = Passes(RunnerConfig("model"), device, model, [], slots=slots, windows=[0], agree=bool)
    return passes.capture_steps(4), adapters


@pytest.mark.parametrize("used", [False, True])
def test_steps_without_adapters_run_captures_without_them(used):
    steps, adapters = captured(True)
    adapters.used = used
    assert (steps.run(None), steps.prompts(None)) == (not used, not used)
    assert not adapters.idle


@pytest.mark.parametrize(("skips", "rows"), [(False, ((1, 4),)), (True, ((1, 4), (1,)))])
def test_one_capture_runs_all_steps_where_there_is_no_other(skips, rows):
    steps, _ = captured(skips, rows)
    assert steps.rows == (1, 4)
    assert steps.run(None) is False
