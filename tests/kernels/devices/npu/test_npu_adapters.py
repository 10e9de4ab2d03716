"""Requests of several adapters run in one batch on a simulated NPU, in captured graphs and without them."""

from __future__ import annotations

import pytest
import torch

import kernels.devices.npu.low_rank
from kernels.core.layer_context import LayerContext
from kernels.devices.low_rank import LowRankDelta
from kernels.devices.npu.low_rank import NpuLowRankDelta
from tests.kits.adapters import assert_rows_use_their_adapters, end_modules
from tests.kits.tiny_model import make_tiny_model


@pytest.mark.parametrize(("graphs", "dtype", "atol"), [(False, "float32", 1e-3), (True, "bfloat16", 1.0)])
def test_rows_use_their_adapters(graphs, dtype, atol, simulator, drive, prompts, tmp_path, monkeypatch):
    """Graphs are captured of the fused operator for attention, and of grouped products, which take 16 bits."""
    for limit in ("_COLUMNS", "_ROWS"):
        monkeypatch.setattr(kernels.devices.npu.low_rank, limit, 1)
    before = _grouped(simulator)
    path = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    vocab = drive(path).info.vocab_size
    options = {"device": "npu", "page_size": 128, "max_slots": 5, "max_step_tokens": 64, "dtype": dtype}
    options |= {"disable_graphs": not graphs, "max_total_tokens": 16 * 128}
    options["more"] = end_modules(path)
    driver = assert_rows_use_their_adapters(path, tmp_path, drive, prompts, vocab, atol, steps=3, **options)
    assert bool(driver.info.graph_rows) == graphs
    assert (_grouped(simulator) > before) == graphs


def _grouped(simulator):
    """Grouped products so far."""
    return simulator.engine.calls.get("npu.npu_grouped_matmul.default", 0)


def test_many_rows_are_grouped_by_place(simulator, monkeypatch):
    """Where all places together have many columns; a place without rows, and rows without an adapter, among them."""
    monkeypatch.setattr(kernels.devices.npu.low_rank, "_COLUMNS", 64)
    monkeypatch.setattr(kernels.devices.npu.low_rank, "_ROWS", 20)
    places, rank, inputs, sizes = 5, 16, 48, (32, 16)
    generator, dtype = torch.Generator().manual_seed(1), torch.float16

    def random(*shape):
        return torch.randn(shape, generator=generator).div(4).to(dtype)

    down, up = random(places, 2 * rank, inputs), random(places, rank, sum(sizes))
    down[0] = up[0] = 0
    of_row = torch.tensor([0, 3, 1, 4])[torch.randint(0, 4, (30,), generator=generator)]
    x, outputs, context = random(30, inputs), random(30, sum(sizes)), LayerContext(None, torch.device("cpu"))
    context._rows = of_row
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), outputs.float())
    context = LayerContext(None, torch.device("npu"))
    context._rows = of_row.npu()
    delta, before = NpuLowRankDelta(context, down.npu(), up.npu(), sizes), _grouped(simulator)
    found = delta(x.npu(), outputs.npu())
    torch.testing.assert_close(found.cpu().float(), wanted, atol=0.02, rtol=0.01)
    assert _grouped(simulator) == before + 3
    context._rows = of_row[:19].npu()
    delta(x[:19].npu(), outputs[:19].npu())
    assert _grouped(simulator) == before + 3
