"""A device without kernels of its own: all that it needs are caches and attention."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch

from kernels.devices.base import Device, DeviceTraits
from kernels.devices.capture import Capture, CaptureRequest
from kernels.devices.communication import Communication
from kernels.devices.cpu.cache import CpuCaches
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.memory import CpuMemory
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.elementwise import Elementwise
from kernels.devices.experts import ExpertLayers, ExpertWeights, Routing
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import InvariantAttention
from kernels.devices.linear import LinearLayers
from kernels.devices.sampling import SamplingKernels
from kernels.weights.quantization.weights import quantize_int8
from tests.kits.speculation.captures import decoder
from tests.kits.speculation.paged import Paged


class PlainDevice(Device):
    """The defaults of each capability, in plain torch."""

    name = "plain"

    def __init__(self):
        self.torch_device = torch.device("cpu")
        self.traits = DeviceTraits(memory_fraction=0.5)
        self.communication = Communication("gloo")
        self.memory = CpuMemory()
        fallbacks = Fallbacks()
        self.elementwise = Elementwise(self.torch_device)
        self.linear = LinearLayers(self.elementwise, fallbacks)
        self.experts = ExpertLayers(self.linear, fallbacks)
        self.cache = CpuCaches(NativeOperators(CpuDevice(1).native.isa, 1))
        self.attention = InvariantAttention(self.cache, self.cache, self.memory.put)
        self.sampling = SamplingKernels()
        self.capture = Capture()

    def bind_thread(self):
        return None

    def select_dtype(self, requested, stored):
        return torch.float32


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_a_device_of_defaults_runs_a_model(name, reference):
    """In chunks and with decodes, as the CPU does."""
    path, found = reference(name).path, []
    for device in (PlainDevice(), CpuDevice(1)):
        paged = Paged(platform=device)
        config, target = decoder(path, paged, ())
        caches, states = paged.caches(config), []
        for spans in ([(0, 0, 9), (1, 0, 4)], [(0, 9, 1), (1, 4, 1)], [(1, 5, 3)]):
            ids = np.concatenate([np.arange(start + 3, start + 3 + count) for _, start, count in spans])
            states.append(target.forward(paged.batch(spans, ids), caches))
        found.append(torch.cat(states))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_what_has_no_kernel_is_logged_once(caplog):
    device = PlainDevice()
    weight = dataclasses.replace(quantize_int8(torch.randn(8, 16)), dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "troupe.kernels"):
        layers = [device.linear.make_quantized(weight, None) for _ in range(3)]
    assert [record.message for record in caplog.records if "dequantized" in record.message] == [
        "Int8Weight is dequantized to torch.float32 while it is loaded: there is no kernel for it on this device"
    ]
    x = torch.randn(2, 16)
    torch.testing.assert_close(layers[0](x), x @ weight.dequantize(torch.float32).t())
    assert device.linear.dequantized_bytes > 0


def test_experts_that_read_back_forbid_captures():
    device = PlainDevice()
    expert = ExpertWeights(torch.randn(16, 8), None, torch.randn(8, 8), None)
    assert not device.experts.reads_back
    layer = device.experts.make(torch.randn(2, 8), None, [expert, expert], Routing(1, True))
    assert layer(torch.randn(3, 8)).shape == (3, 8)
    assert device.experts.reads_back
    assert device.capture.decodes(CaptureRequest(lambda batch: batch.states, [0], 1, 1, bool)) is None
    assert device.drafting is None
