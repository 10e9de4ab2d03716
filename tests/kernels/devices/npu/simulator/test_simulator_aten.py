"""Plain PyTorch operators on the simulated NPU: the CPU's results, on the NPU's memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.activate import Simulator
from kernels.devices.npu_simulator.aten import UnsimulatedOperator


def test_soc(simulator: Simulator) -> None:
    version = {"A2": range(220, 226), "A3": range(250, 256), "A5": range(260, 261)}[simulator.spec.generation]
    assert torch_npu.npu.get_soc_version() in version
    assert torch.npu.device_count() == simulator.spec.devices
    assert simulator.aten > 900


def test_operators_equal_the_cpu() -> None:
    x, w = torch.randn(5, 8), torch.randn(6, 8)

    def same(function) -> None:
        assert torch.equal(function(x.npu(), w.npu()).cpu(), function(x, w))

    same(F.linear)
    same(lambda a, b: torch.softmax(a @ b.t(), -1))
    same(lambda a, b: a[[3, 1]][:, 2:5].contiguous())
    same(lambda a, b: a.t().clone())
    same(lambda a, b: a.to(torch.bfloat16))
    same(lambda a, b: torch.cat((a, b)).view(-1, 4).sum(0))
    same(lambda a, b: F.embedding(torch.tensor([2, 0], device=a.device), b))
    same(lambda a, b: torch.where(a > 0, a, 0).topk(3, -1).values)
    same(lambda a, b: a.unflatten(-1, (2, 4)).flip(-2).view(5, 8))
    same(lambda a, b: torch.sort(a, -1).indices)


def test_writes_go_to_the_same_memory() -> None:
    x = torch.zeros(4, 3, device="npu")
    row = x[2]
    row.add_(5)
    x[:, 1].copy_(torch.arange(4.0))
    x.index_copy_(0, torch.tensor([0], device="npu"), torch.ones(1, 3, device="npu"))
    out = torch.empty(4, device="npu")
    torch.sum(x, 1, out=out)
    assert x.cpu().tolist() == [[1, 1, 1], [0, 1, 0], [5, 2, 5], [0, 3, 0]]
    assert out.cpu().tolist() == [3, 1, 12, 3]


def test_devices() -> None:
    x = torch.arange(3, device="npu:1")
    y = x + 1
    assert y.device.index == 1
    assert torch.ones(2, device="npu:1").device.index == 1
    assert torch.equal(y.to("npu:0").cpu(), torch.tensor([1, 2, 3]))
    with torch.npu.device(1):
        assert torch.zeros(1, device="npu").device.index == 1


def test_random_numbers_follow_the_seed() -> None:
    def draws() -> list[Tensor]:
        return [torch.rand(4, device="npu").cpu(), torch.empty(4, device="npu").exponential_().cpu()]

    torch.npu.manual_seed(7)
    first, other = draws(), draws()
    torch.npu.manual_seed(7)
    again = draws()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    own = torch.Generator(device="npu").manual_seed(3)
    assert not torch.equal(torch.rand(4, generator=own, device="npu").cpu(), torch.rand(4, device="npu").cpu())


def test_streams_and_events() -> None:
    side, start, end = torch.npu.Stream(), torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    x = torch.ones(3, device="npu")
    start.record()
    with torch.npu.stream(side):
        side.wait_stream(torch.npu.default_stream())
        y = x * 2
    end.record(side)
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert y.cpu().tolist() == [2, 2, 2]


def test_an_operator_without_simulation_is_refused(simulator: Simulator) -> None:
    with pytest.raises(UnsimulatedOperator, match=r"npu::npu_gelu_mul is not simulated"):
        torch_npu.npu_gelu_mul(torch.ones(2, 4, device="npu"))
    assert "npu_gelu_mul" not in simulator.simulated
