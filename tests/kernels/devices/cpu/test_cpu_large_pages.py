"""Memory that is read again and again asks for the system's large pages."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.large_pages import LARGE_PAGE, empty_large
from kernels.devices.cpu.native import library
from kernels.devices.cpu.operators import Native, NativeWeight
from tests.kits.native import needs_native

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")


def asks(address: int) -> bool:
    """Whether the mapping that holds ``address`` is marked for large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    return False


@pytest.mark.parametrize(("heads", "large"), [(8, True), (1, False)])
def test_caches_of_large_pages_ask_for_large_pages(heads, large):
    (cache,) = CpuDevice(1).cache.make(1, 32, 16, heads, 128, torch.bfloat16)
    assert asks(cache.data_ptr() + cache.nbytes // 2) == large
    assert not cache.any()
    cache[3] = 1
    assert cache[3].all()


def test_tiny_weights_come_from_the_allocator_and_large_ones_alone():
    tiny = empty_large(100, torch.bfloat16)
    assert tiny.shape == (100,)
    assert tiny.dtype == torch.bfloat16
    large = empty_large(3 * LARGE_PAGE + 3, torch.int8)
    large[-1] = 7
    assert large.data_ptr() % LARGE_PAGE == 0
    assert large.nbytes == 3 * LARGE_PAGE + 3


def test_weights_smaller_than_a_large_page_share_large_pages():
    """Experts have many of these. Each starts a cache line, and none overlaps another."""
    first = empty_large(1 << 16, torch.int8)  # that begins a mapping, or leaves room in one
    weights = [empty_large(size, torch.uint8) for size in [(1 << 19) + 7] * 140]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    assert all(
        weight.shape == ((1 << 19) + 7,) and bool((weight == number).all()) for number, weight in enumerate(weights)
    )
    addresses = [weight.data_ptr() for weight in weights]
    assert all(address % 64 == 0 and asks(address) for address in (first.data_ptr(), *addresses))
    apart = [second - first for first, second in itertools.pairwise(addresses)]
    assert apart.count((1 << 19) + 64) >= len(apart) - 3  # mappings of 32 MiB


@needs_native
def test_packed_weights_ask_for_large_pages():
    library.build()
    opened = library.open_library()
    assert opened is not None
    weight = NativeWeight(Native(opened, 1), torch.zeros(2048, 1024, dtype=torch.bfloat16))
    assert asks(weight.memory.data_ptr() + weight.memory.nbytes // 2)
    assert weight.memory.data_ptr() % LARGE_PAGE == 0  # all of it fills large pages
