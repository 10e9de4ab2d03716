"""What adapters add to linear layers, by kernels: as the plain operators do, for any mix of rows."""

from __future__ import annotations

import pytest
import torch

from kernels.core.layer_context import LayerContext
from kernels.devices.cuda.invariant import InvariantCudaLinearLayers
from kernels.devices.cuda.matmul.low_rank import CudaLowRankDelta, make_up
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.invariant.capabilities import InvariantElementwise
from kernels.devices.linear import LinearLayers
from kernels.devices.low_rank import LowRankDelta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "rank", "inputs", "sizes"),
    [
        (1, 4, 100, (40,)),
        (19, 16, 1100, (130, 20, 20)),
        (300, 40, 160, (129,)),
        (3, 300, 64, (40, 8)),
        (1, 16, 64, (1,)),  # what weighs an expert that all tokens take
        (70, 16, 64, (1,)),
    ],
)
def test_kernels_add_what_plain_operators_add(rows, rank, inputs, sizes, dtype, device):
    torch.manual_seed(rows)
    places, count = 5, len(sizes)
    context = LayerContext(None, device)
    context._rows = torch.randint(0, places, (rows,)).mul((torch.arange(rows) != 3).long()).to(device)
    down = torch.randn(places, count * rank, inputs).to(device, dtype)
    up = make_up((1, places, rank, sum(sizes)), dtype, device)[0]
    up.copy_(torch.randn(places, rank, sum(sizes)) / 10)
    down[0] = up[0] = 0
    x, wide = torch.randn(rows, inputs).to(device, dtype), torch.randn(rows, sum(sizes) + 7).to(device, dtype)
    outputs = wide[:, : sum(sizes)]  # a view of wider rows
    wanted = LowRankDelta(context, down.float(), up.float(), sizes)(x.float(), outputs.float().clone())
    none, beside = outputs[context.rows == 0].clone(), wide[:, sum(sizes) :].clone()
    delta = CudaLowRankDelta(context, down, up, sizes)
    own = outputs.float() + delta.alone(x).float()
    found = delta(x, outputs)
    exact = dtype is torch.float32
    torch.testing.assert_close(found.float(), wanted, atol=1e-3 if exact else 0.5, rtol=1e-4 if exact else 0.02)
    torch.testing.assert_close(own, wanted, atol=1e-3 if exact else 0.5, rtol=1e-4 if exact else 0.02)
    assert torch.equal(outputs[context.rows == 0], none)
    assert torch.equal(wide[:, sum(sizes) :], beside)


def test_what_a_row_gets_is_the_same_among_any_others(device):
    """Bit by bit, with --enable-deterministic-inference."""
    sizes, rows, places, rank, inputs = (130, 20), 300, 4, 16, 1100
    generator, dtype, fallbacks = torch.Generator().manual_seed(1), torch.float32, Fallbacks()
    context, elementwise = LayerContext(None, device), InvariantElementwise(device)
    layers = InvariantCudaLinearLayers(elementwise, fallbacks, LinearLayers(elementwise, fallbacks))

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    of_row = torch.randint(0, places, (rows,), generator=generator).to(device)
    (up,) = layers.make_up((1, places, rank, sum(sizes)), dtype, device)
    up.copy_(random(*up.shape))
    delta = layers.make_delta(context, random(places, 2 * rank, inputs), up, sizes)
    x, outputs = random(rows, inputs), random(rows, sum(sizes))
    context._rows = of_row
    whole = delta(x, outputs.clone())
    assert not torch.equal(whole, outputs)
    for first, count in ((0, 1), (299, 1), (5, 3), (17, 40), (30, 260)):
        some = slice(first, first + count)
        context._rows = of_row[some]
        assert torch.equal(delta(x[some], outputs[some].clone()), whole[some])
