"""Attention of drafts on the CPU, by PyTorch's operators and by native ones, and what moves within the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.select import select_device
from tests.kits.native import compiled, needs_native
from tests.kits.verifying import made

__all__ = ["compiled"]

BF16 = torch.bfloat16


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture(params=["plain", "invariant", pytest.param("native", marks=needs_native)])
def platform(request):
    if request.param == "plain":
        return CpuDevice(threads=1)
    if request.param == "invariant":
        return select_device(RunnerConfig(model_path="", invariant=True, threads=1))
    request.getfixturevalue("compiled")
    platform = CpuDevice(threads=2)
    platform.select_dtype("bfloat16", None)
    return platform


def native(platform):
    return platform.native.current is not None


SHAPES = {
    "drafts": {"drafts": ((40, 6), (5, 6), (0, 6), (300, 6))},
    "counts": {"drafts": ((33, 7), (15, 1), (16, 2), (62, 7))},
    "one": {"drafts": ((130, 64),)},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (40, 30))},
    "drafting": {"drafts": ((45, 9), (16, 9), (0, 9)), "drafted": 5},
}


@pytest.mark.parametrize("window", [0, 4, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 4, 32), (20, 1, 64)])
def test_drafts_see_their_paths(shape, trees, window, heads, kv_heads, dim, platform, generator):
    dtype = BF16 if native(platform) else torch.float32
    case = made(
        platform, generator, dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim, page_size=16, window=window,
        trees=trees, **SHAPES[shape],
    )  # fmt: skip
    found = platform.attention.attend(case.queries, case.cache, platform.attention.plan(case.rows, window), 0.2)
    limit = {"atol": 2e-2, "rtol": 1e-2} if native(platform) else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(found.float(), case.expected, **limit)


@needs_native
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("heads", [4, 12, 20])
def test_a_draft_is_verified_with_the_bits_of_its_decode(heads, window, generator):
    """Tree or chain: of each node's path a decode finds the very same numbers, if in pieces of a sequence, too, which
    begin before the draft's tokens for some of them.
    """
    platform = CpuDevice(threads=1)
    platform.select_dtype("bfloat16", None)
    case = made(
        platform, generator, dtype=BF16, heads=heads, kv_heads=2, dim=64, page_size=16, window=window,
        drafts=((70, 11), (9, 11), (567, 11)), trees=True, fill=float("nan"),
    )  # fmt: skip
    rows = case.rows
    together = platform.attention.attend(case.queries, case.cache, platform.attention.plan(rows, window), 0.2)
    for row, start in enumerate(rows.starts.tolist()):
        for node in range(11):
            bits = int(rows.tree[row, node])
            path = [at for at in range(11) if bits >> at & 1]
            places = torch.from_numpy(rows.pages[row].astype(np.int64))
            ends = torch.tensor(path) + start, torch.arange(len(path)) + start
            cache = case.cache.clone()
            platform.cache.move(cache, *(places[at // 16] * 16 + at % 16 for at in ends))
            alone = AttentionRows(np.array([start + len(path) - 1]), np.array([1]), rows.pages[row : row + 1], 1)
            token = row * 11 + node
            plan = platform.attention.plan(alone, window)
            found = platform.attention.attend(case.queries[token : token + 1], cache, plan, 0.2)
            assert torch.equal(found[0], together[token]), (row, node)


def test_a_chain_needs_no_tree(platform, generator):
    dtype = BF16 if native(platform) else torch.float32
    case = made(
        platform, generator, dtype=dtype, heads=4, kv_heads=2, dim=32, page_size=16, window=0, trees=True,
        drafts=((20, 1), (33, 1)),
    )  # fmt: skip
    without = dataclasses.replace(case.rows, tree=None)
    one, other = (
        platform.attention.attend(case.queries, case.cache, platform.attention.plan(rows, 0), 0.2)
        for rows in (case.rows, without)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_moves_within_the_cache_is_read_first(dtype, generator):
    """Targets of some are the sources of others, and places that stay may be named again and again."""
    platform = CpuDevice(threads=1)
    (cache,) = platform.cache.make(1, 5, 16, 2, 8, dtype)
    cache.copy_(torch.randn(cache.shape, generator=generator))
    before = cache.clone().view(-1, 2, 2, 8)
    source, target = [70, 21, 22, 20, 0, 0], [20, 22, 21, 33, 0, 0]
    platform.cache.move(cache, torch.tensor(source), torch.tensor(target))
    expected = before.clone()
    for one, other in zip(source, target, strict=True):
        expected[other] = before[one]
    assert torch.equal(cache.view(-1, 2, 2, 8), expected)
