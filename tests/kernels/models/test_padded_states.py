"""Prompts of unequal lengths run together in layers with states, and leave what they would leave one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.core.batch import StateSegments
from kernels.devices.delta_rule import DeltaInputs, DeltaRule
from kernels.devices.state_cache import StateCache, advance_states, make_states, plan_segments
from kernels.devices.state_space import SpaceInputs, StateSpace
from kernels.models.layers import delta_net, mamba
from kernels.models.layers.recurrent import CausalConvolution

Segments = tuple[StateSegments, ...]
Run = Callable[[StateCache, Segments, Tensor], None]

COUNTS = np.array([70, 1, 100, 66, 3, 5, 130])
STARTS = np.array([0, 9, 5, 0, 0, 120, 0])
PAGES = 1 + np.arange(14, dtype=np.int32).reshape(7, 2)
TOKENS = int(COUNTS.sum())


def delta(decays: int) -> tuple[State, int, Run]:
    sizes = delta_net.DeltaConfig(2, 4, 12, 10, 4)
    convolution = CausalConvolution(torch.randn(sizes.channels, 1, sizes.taps))
    mixed = torch.randn(TOKENS, sizes.channels)
    inputs = DeltaInputs(mixed, mixed, torch.rand(TOKENS, 4), -torch.rand(TOKENS, 4, decays))

    def run(cache: StateCache, segments: Segments, out: Tensor) -> None:
        results = out.view(TOKENS, 4, 10)
        delta_net.run_segments(sizes, DeltaRule(), convolution, inputs, cache, segments, out=results)

    return sizes.state(), 40, run


def space() -> tuple[State, int, Run]:
    sizes = mamba.MambaConfig(6, 5, 2, 7, 4, 0)
    convolution = CausalConvolution(torch.randn(sizes.channels, 1, sizes.taps), torch.randn(sizes.channels))
    inputs = SpaceInputs(torch.randn(TOKENS, sizes.channels), torch.rand(TOKENS, 6), -torch.rand(6), torch.randn(6))

    def run(cache: StateCache, segments: Segments, out: Tensor) -> None:
        mamba.run_segments(sizes, StateSpace(), convolution, inputs, cache, segments, out=out)

    return sizes.state(), sizes.inner, run


def convolved() -> tuple[State, int, Run]:
    convolution = CausalConvolution(torch.randn(8, 1, 4), activate=False)
    mixed = torch.randn(TOKENS, 8)

    def run(cache: StateCache, segments: Segments, out: Tensor) -> None:
        def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
            results, after = convolution(segment.take(mixed), states[0], segment.lengths)
            segment.put(out, results)
            return [after]

        advance_states(cache, segments, advance)

    return State(((3, 8),)), 8, run


LAYERS: dict[str, Callable[[], tuple[State, int, Run]]] = {
    "delta": lambda: delta(1),
    "delta by channel": lambda: delta(12),
    "mamba": space,
    "convolution": convolved,
}


def plan(rows: slice) -> Segments:
    offsets: Any = np.cumsum(COUNTS) - COUNTS
    return plan_segments(STARTS[rows], COUNTS[rows], PAGES[rows], 128, torch.from_numpy, offsets[rows])


@pytest.mark.parametrize("name", LAYERS)
def test_prompts_of_unequal_lengths_leave_what_they_do_alone(name: str) -> None:
    """From the beginning and from states, within a page and beyond its end."""
    torch.manual_seed(3)
    spec, width, run = LAYERS[name]()
    together, alone = (make_states(spec, 15, torch.device("cpu")) for _ in range(2))
    for one, other in zip(together, alone, strict=True):
        one.normal_()
        other.copy_(one)
    mine, expected = (torch.full((TOKENS, width), torch.nan) for _ in range(2))
    segments = plan(slice(None))
    assert len(segments) < len(COUNTS)
    assert any(segment.lengths is not None for segment in segments)
    run(together, segments, mine)
    for row in range(len(COUNTS)):
        run(alone, plan(slice(row, row + 1)), expected)
    torch.testing.assert_close(mine, expected, atol=2e-5, rtol=2e-5)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
