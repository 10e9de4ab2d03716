"""Products of single tokens and their experts in MXFP4 against float64."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
import triton

from kernels.devices.cuda.moe import experts, gemv_mxfp4
from kernels.devices.cuda.moe.experts import CudaExperts
from kernels.devices.cuda.moe.gemv_mxfp4 import MicroTiling
from kernels.devices.experts import ClampedGate, ExpertWeights, Routing
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from tests.kernels.devices.cuda.compiled import compiling, empty
from tests.kernels.devices.cuda.plain import micro_in_triton


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    return gemv_mxfp4 if torch.cuda.is_available() else micro_in_triton(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("tokens", "each", "outputs", "blocks", "tiling"),
    [(1, 2, 24, 3, MicroTiling(8, 4)), (3, 1, 22, 40, MicroTiling(16, 4)), (1, 1, 8, 70, MicroTiling(8, 2))],
)
def test_tokens_times_their_experts(device, product, gated, tokens, each, outputs, blocks, tiling):
    torch.manual_seed(1)
    count = 3
    codes = torch.randint(0, 256, (count, outputs, blocks, 16), dtype=torch.uint8)
    powers = torch.randint(120, 128, (count, outputs, blocks), dtype=torch.uint8)
    powers[0, 0, 0] = 0
    x = torch.randn(tokens, blocks * 32) * torch.logspace(-3, 3, blocks).repeat_interleave(32)
    x[0, :32] = 0
    x, biases = x.half().to(device), torch.randn(count, outputs).half().to(device)
    chosen = torch.randint(0, count, (tokens * each,), dtype=torch.int32)
    gate = ClampedGate(1.7, 7.0) if gated else None
    values, scales = codes.flatten(2).to(device), powers.to(device)
    found = product.multiply(x, values, scales, biases, chosen.to(device), gate, each, tiling)
    dense = [
        Mxfp4Weight.from_blocks(codes[each], powers[each], torch.float32).dequantize(torch.float32) for each in range(3)
    ]
    weights = torch.stack(dense)[chosen.long()].double()
    right = torch.einsum("poi,pi->po", weights, x.cpu().double().repeat_interleave(each, 0))
    right += biases.cpu()[chosen.long()].double()
    right = gate(right) if gate else right
    assert (found.cpu().double() - right).norm() <= 2e-3 * right.norm()


def test_a_layer_of_few_tokens_equals_that_of_many(device, product, monkeypatch):
    torch.manual_seed(2)
    monkeypatch.setattr(gemv_mxfp4, "multiply", product.multiply)

    def weight(outputs):
        codes = torch.randint(0, 256, (outputs, 2, 16), dtype=torch.uint8)
        return Mxfp4Weight.from_blocks(codes, torch.randint(118, 122, (outputs, 2), dtype=torch.uint8), torch.float16)

    def expert():
        biases = torch.randn(128).half().to(device), torch.randn(64).half().to(device)
        return ExpertWeights(weight(128).to(device), biases[0], weight(64).to(device), biases[1])

    router = torch.randn(64, 5).half().to(device)
    layer = CudaExperts(lambda x: x @ router, [expert() for _ in range(5)], Routing(2, True), ClampedGate(1.7, 7.0))
    monkeypatch.setattr(experts, "_FEW_TOKENS", 0)
    x = torch.randn(3, 64).half().to(device)
    right = layer(x).double()
    assert (layer._few(x).double() - right).norm() <= 4e-3 * right.norm()


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_the_kernel_of_few_tokens_needs_both_products_in_mxfp4(part, monkeypatch):
    monkeypatch.setattr(experts, "has_gluon", lambda name: True)

    def weight(outputs, inputs):
        codes = torch.zeros((outputs, inputs // 32, 16), dtype=torch.uint8)
        return Mxfp4Weight.from_blocks(codes, torch.zeros((outputs, inputs // 32), dtype=torch.uint8), torch.float16)

    def layer(gate_up, down):
        expert = ExpertWeights(gate_up, None, down, None)
        return CudaExperts(lambda x: x, [expert] * 2, Routing(1, True), ClampedGate(1.7, 7.0))

    x = MagicMock()
    x.__len__.return_value, x.element_size.return_value, x.device.type = 1, 2, "cuda"
    both = {"gate_up": weight(128, 64), "down": weight(64, 64)}
    assert layer(**both)._is_few(x)
    assert not layer(**both | {part: torch.zeros(both[part].shape).half()})._is_few(x)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_the_product_of_gpt_oss_compiles_without_spills(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, 90) as kernels:
        values, scales = empty(32, 5760, 1440, dtype=torch.uint8), empty(32, 5760, 90, dtype=torch.uint8)
        gate, chosen = ClampedGate(1.7, 7.0), empty(4, dtype=torch.int32)
        gemv_mxfp4.multiply(empty(1, 2880), values, scales, empty(32, 5760), chosen, gate, 4, MicroTiling(16, 4))
    assert not kernels[0].spilled
