"""Steps of rows without adapters run captures that leave them out: whole steps, and passes of a pipeline's stage."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.core.layer_context import LayerContext
from kernels.devices.prepared import CapturedPasses, CapturedSteps
from kernels.execution.captures import Passes
from kernels.execution.executor_list import make_executors


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


def run_in_stage(used, skips, idle_rows):
    """What a stage's captured passes were captured for, in the order in which a step of four rows tries them."""
    adapters, runs, batch = LayerContext(None, torch.device("cpu")), [], SimpleNamespace(cache_index=None, verifying=())

    def decodes(request):
        idle = adapters.idle

        def run(batch):
            runs.append("without" if idle else "with")
            return None if idle and idle_rows < 4 else torch.zeros(4, 3)

        return CapturedPasses((idle_rows if idle else 4,), run)

    device = SimpleNamespace(
        capture=SimpleNamespace(decodes=decodes),
        linear=SimpleNamespace(skips_adapters=skips),
        drafting=None,
        sampling=SimpleNamespace(greedy=None),
    )
    loaded = SimpleNamespace(
        config=RunnerConfig("model"),
        device=device,
        model=SimpleNamespace(rows=adapters, reads_rows=False, stage=SimpleNamespace(size=2, is_first=True)),
        caches=[],
        slots=SimpleNamespace(pages=torch.zeros(2, 3), tokens=torch.zeros(2, 9)),
        windows=[0],
        agree=bool,
        groups=SimpleNamespace(is_captured=True, bounded=(), has_latent=False),
        shared=None,
        speculator=None,
    )
    executors, rows = make_executors(SimpleNamespace(loaded=loaded))
    assert rows == (4,)
    assert not adapters.idle
    adapters.used = used
    ones = np.ones(4, dtype=np.int64)
    step = SimpleNamespace(
        form=lambda: SimpleNamespace(verifies=0, decodes=4, counts=ones, slots=ones),
        receive=lambda into: batch,
        begin=lambda: None,
        send=lambda result: None,
        prepare=lambda: SimpleNamespace(),
        complete_pass=lambda result: result,
    )
    _, *captured, _ = executors  # steps without rows, and eager ones
    assert any(executor.execute(step) is not None for executor in captured)
    return runs


@pytest.mark.parametrize(
    ("used", "skips", "idle_rows", "runs"),
    [
        (False, True, 4, ["without"]),
        (True, True, 4, ["with"]),
        (False, False, 4, ["with"]),
        (False, True, 2, ["without", "with"]),
    ],
)
def test_stages_run_passes_that_were_captured_without_adapters(used, skips, idle_rows, runs):
    assert run_in_stage(used, skips, idle_rows) == runs
