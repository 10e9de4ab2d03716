"""What adapters add to linear layers, by kernels: as the plain operators do, for any mix of rows."""

from __future__ import annotations

import pytest
import torch

from kernels.core.layer_context import LayerContext
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta
from kernels.devices.low_rank import LowRankDelta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "rank", "inputs", "sizes"),
    [(1, 4, 100, (40,)), (19, 16, 1100, (130, 20, 20)), (300, 40, 160, (129,)), (3, 300, 64, (40, 8))],
)
def test_kernels_add_what_plain_operators_add(rows, rank, inputs, sizes, dtype, device):
    torch.manual_seed(rows)
    places, count = 5, len(sizes)
    context = LayerContext(None, device)
    context._rows = torch.randint(0, places, (rows,)).mul((torch.arange(rows) != 3).long()).to(device)
    down = torch.randn(places, count * rank, inputs).to(device, dtype)
    up = (torch.randn(places, rank, sum(sizes)) / 10).to(device, dtype)
    down[0] = up[0] = 0
    x, wide = torch.randn(rows, inputs).to(device, dtype), torch.randn(rows, sum(sizes) + 7).to(device, dtype)
    outputs = wide[:, : sum(sizes)]  # a view of wider rows
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), outputs.float().clone())
    none, beside = outputs[context.rows == 0].clone(), wide[:, sum(sizes) :].clone()
    found = CudaLowRankDelta(context, down, up, sizes)(x, outputs)
    exact = dtype is torch.float32
    torch.testing.assert_close(found.float(), wanted, atol=1e-3 if exact else 0.5, rtol=1e-4 if exact else 0.02)
    assert torch.equal(outputs[context.rows == 0], none)
    assert torch.equal(wide[:, sum(sizes) :], beside)
