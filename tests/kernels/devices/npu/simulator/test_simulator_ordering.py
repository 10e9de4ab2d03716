"""A wait that the host forgets breaks here too, though everything runs when it is issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels.devices.npu_simulator.activate import Simulator
from kernels.devices.npu_simulator.constraints import ConstraintError


@pytest.fixture(autouse=True)
def nothing_in_flight(simulator: Simulator) -> Iterator[None]:
    torch.npu.synchronize()
    yield
    simulator.faults.clear()
    simulator.engine.order.host_waited()


def pinned(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def test_a_staging_buffer_that_is_filled_again_too_early() -> None:
    staging, x, y = pinned(1), torch.empty(4, device="npu"), torch.empty(4, device="npu")
    x.copy_(staging, non_blocking=True)
    staging.fill_(2)
    with pytest.raises(ConstraintError, match="used again before the host had waited"):
        y.copy_(staging, non_blocking=True)
    with pytest.raises(RuntimeError, match="used again before the host had waited"):
        torch.npu.synchronize()


@pytest.mark.parametrize("wait", [lambda event: event.synchronize(), lambda event: event.query()])
def test_an_event_behind_the_copy_makes_it_free(wait: Callable[[Any], Any]) -> None:
    staging, x = pinned(1), torch.empty(4, device="npu")
    x.copy_(staging, non_blocking=True)
    event = torch.npu.Event()
    event.record()
    wait(event)
    staging.fill_(2)
    x.copy_(staging, non_blocking=True)
    assert x.cpu().tolist() == [2] * 4


def test_an_event_before_the_copy_or_on_another_stream_does_not() -> None:
    staging, x, event = pinned(1), torch.empty(4, device="npu"), torch.npu.Event()
    x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    event.record()
    x.copy_(staging, non_blocking=True)
    event.synchronize()
    side = torch.npu.Stream()
    other = torch.npu.Event()
    other.record(side)
    other.synchronize()
    staging.fill_(3)
    with pytest.raises(RuntimeError, match="used again"):
        torch.npu.current_stream().synchronize()


def test_events_order_streams() -> None:
    staging, x, event, last = pinned(1), torch.empty(4, device="npu"), torch.npu.Event(), torch.npu.Event()
    x.copy_(staging, non_blocking=True)
    event.record()
    side = torch.npu.Stream()
    side.wait_event(event)
    last.record(side)
    last.synchronize()  # and so for the copy before it
    staging.fill_(3)
    torch.npu.synchronize()


def test_a_result_arrives_when_it_is_waited_for() -> None:
    x, here = torch.arange(4, dtype=torch.int32, device="npu"), torch.zeros(4, dtype=torch.int32).pin_memory()
    here.copy_(x, non_blocking=True)
    assert 0 not in here.tolist()
    event = torch.npu.Event()
    event.record()
    x.fill_(9)  # behind the copy
    event.synchronize()
    assert here.tolist() == [0, 1, 2, 3]


def test_waits_are_counted(simulator: Simulator) -> None:
    x, staging = torch.ones(4, device="npu"), pinned(1)
    before = simulator.waits
    x.copy_(staging, non_blocking=True)
    assert simulator.waits == before
    for wait in (x.cpu, torch.npu.synchronize, lambda: x.copy_(torch.ones(4), non_blocking=True), x.sum().item):
        before = simulator.waits
        wait()
        assert simulator.waits > before
