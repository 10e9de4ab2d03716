"""What the CPU's operators should find, in float64, and how far from it rounding may lead them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.native import library
from tests.kits.native import MISSING

__all__ = ["BF16", "NORMAL", "ROWS", "assert_near", "bits", "device", "numbers", "proof", "same_alone"]

BF16 = 2.0**-8
"""The most that rounding to bf16 changes a number, relative to it: half of the last of 8 bits."""

NORMAL = 2.0**-126
"""Smaller numbers may be zero: operators of bf16 flush them."""

ROWS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129]), st.integers(1, 180)
)
"""Rows of a step: each number at which an operator begins to work in another way, and others."""


@pytest.fixture(scope="module", params=[1, 3], ids=["alone", "team"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A CPU of one or three threads in bf16, by native operators where this level has any."""
    if not MISSING:
        library.build()
    before = torch.get_num_threads()
    found = CpuDevice(threads=request.param)
    found.select_dtype("bfloat16", None)
    found.bind_thread()
    assert (found.native.current is None) == bool(MISSING)
    yield found
    torch.set_num_threads(before)


def proof(examples: int) -> Callable[..., object]:
    """Settings of a test over random shapes: the same examples in each run, or one of ``TROUPE_PROOF_SHARE``."""
    return settings(
        max_examples=max(1, examples // int(os.environ.get("TROUPE_PROOF_SHARE", "1"))),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def numbers(generator: torch.Generator, *shape: int, wild: bool = False) -> Tensor:
    """Random bf16. ``wild``: rows of very different sizes, with zeros, rows of zeros, and a number far above others."""
    found = torch.randn(*shape, generator=generator)
    if wild and found.numel():
        rows = found.view(-1, shape[-1])
        rows *= torch.randint(-30, 31, (len(rows), 1), generator=generator).float().exp2()
        rows[:, 0] *= 64
        rows[torch.rand(rows.shape, generator=generator) < 0.1] = 0
        rows[torch.rand(len(rows), generator=generator) < 0.1] = 0
    return found.bfloat16()


def assert_near(found: Tensor, exact: Tensor, noise: Tensor | float) -> None:
    """``found`` bf16 is ``exact`` float64, rounded once, but for ``noise`` float64."""
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    over = (found.double() - exact).abs() - ((exact.abs() + noise) * BF16 + noise + NORMAL)
    assert bool((over <= 0).all()), f"{over.max().item()} more than rounding explains, at {int(over.argmax())}"


def bits(x: Tensor) -> Tensor:
    """bf16 as integers: a NaN equals itself, and zeros of different signs differ."""
    return x.contiguous().view(torch.int16)


def same_alone(call: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor) -> None:
    """``call`` finds for some rows of ``x`` the bits that are in ``whole``, where it found them for all rows."""
    rows = len(x)
    for first, count in {(0, 1), (rows - 1, 1), (rows // 2, 2), (rows // 3, 7), (1, 40)}:
        part = slice(max(first, 0), first + count)
        assert torch.equal(bits(call(x[part].clone())), bits(whole[part])), (first, count)
