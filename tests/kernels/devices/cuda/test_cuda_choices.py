"""Ways of a product measured on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from kernels.devices.cuda.matmul.autotune import Choices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="times of a GPU")


def test_a_host_that_launches_slowly_is_not_timed():
    """As a loaded one does: the kernels of a way would be there one after the other, and the device wait for them."""
    x = torch.rand(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def times(products, pause):
        def way():
            for _ in range(products):
                found = x @ x
                time.sleep(pause)
            return found

        return way

    ways = {"ten": times(10, 0.0), "two": times(2, 0.005)}
    assert Choices(x.device).name(("plain", 1024), lambda: ways) == "two"
