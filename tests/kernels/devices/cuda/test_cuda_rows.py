"""Rows that are added, copied and looked up."""

from __future__ import annotations

import pytest
import torch

from kernels.devices.cuda.elementwise.elementwise import CudaElementwise
from kernels.devices.cuda.elementwise.rows import add_rows, look_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 1500])
def test_rows_are_added_and_copied_into_columns_of_wider_ones(device, dtype, width):
    x, y = (torch.randn(5, 2 * width, device=device).to(dtype)[:, begin : begin + width] for begin in (0, width))
    for more in (y, None):
        wide = torch.full((5, 3 * width), 7.0, device=device, dtype=dtype)
        add_rows(x, more, wide[:, width : 2 * width])
        exact = x if more is None else x + more
        error = (wide[:, width : 2 * width].float() - exact.float()).abs()
        assert bool((error <= 2**-7 * exact.float().abs() * (device.type == "cpu")).all())  # it cuts numbers off
        assert bool((wide[:, :width] == 7).all() & (wide[:, 2 * width :] == 7).all())


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_are_looked_up(device, kind):
    table = torch.randn(11, 2000, device=device).half()[:, :1500]
    ids = torch.tensor([10, 0, 3, 3, 11, -1], device=device, dtype=kind)
    found = look_up(ids, table)
    assert torch.equal(found[:4], table[ids[:4].long()])
    assert not found[4:].any()


def test_a_device_makes_them_with_kernels(device, monkeypatch):
    """torch's own would hold up what starts early."""
    elementwise = CudaElementwise(torch.device(device))
    x, y, table, ids = torch.randn(3, 40), torch.randn(3, 40), torch.randn(9, 40), torch.tensor([1, 8])
    x, y, table, ids = (tensor.to(device) for tensor in (x, y, table, ids))
    total, rows, out = x + y, table[ids], torch.empty_like(x)
    for name, place in (("add", torch), ("embedding", torch.nn.functional), ("copy_", torch.Tensor)):
        monkeypatch.setattr(place, name, None)
    elementwise.add_rows(x, y, out)
    found = elementwise.embed(ids, table)
    monkeypatch.undo()
    assert torch.allclose(out, total)
    assert torch.equal(found, rows)
