"""Persistent decode attention: against float64, and when it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention import decode_persistent
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.launch import copying
from tests.kernels.devices.cuda.compiled import compiling, empty, put
from tests.kernels.devices.cuda.plain import spread_in_triton
from tests.kits.cuda.attention import reference_attention

MULTIPROCESSOR = 228 << 10
"""Bytes of shared memory of compute capability 9.0, of which each block takes 1 KiB more than it has (CUDA programming
guide, technical specifications)."""


@pytest.fixture(scope="module")
def spreads(tmp_path_factory):
    return decode_persistent if torch.cuda.is_available() else spread_in_triton(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "window", "programs"),
    [
        (6, 2, 64, 64, 0, 1),  # one program goes from row to row
        (6, 2, 64, 64, 0, 7),  # a row is cut into parts, of which a program may have no more than one
        (2, 2, 128, 128, 100, 3),
        (9, 1, 64, 64, 70, 9),  # more programs than there are blocks
    ],
)
def test_rows_in_equal_ranges(device, spreads, heads, kv_heads, dim, page_size, window, programs):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    lengths = torch.tensor([1, 64, 300, 81], dtype=torch.int32)
    columns = -(-300 // page_size)
    cache = torch.randn(1 + 4 * columns, 2, kv_heads, page_size, dim).half()
    state = torch.cat((lengths[:, None], 1 + torch.randperm(4 * columns).view(4, columns)), 1).int()
    for row, length in enumerate(lengths.tolist()):  # whole pieces that no token of a row is in are not read
        begin = -(-length // 16) * 16
        last = state[row, 1 + (length - 1) // page_size]
        if begin % page_size:
            cache[last, :, :, begin % page_size : -(-length // 64) * 64] = torch.nan
    every = torch.randn(4, heads + 2 * kv_heads, dim).half().to(device)
    cache, state, scale = cache.to(device), state.to(device), dim**-0.5
    queries, given = every[:, :heads], (cache, state[:, 1:], state[:, 0], window, scale)
    found, scratch = torch.full((2, 4, heads, dim), torch.nan, device=device).half(), DecodeScratch(device)
    for out in found:
        spreads.attend_many(queries, *given, scratch, out, programs)
        assert not scratch.room(programs, 1, 1, 1, 1)[2].any()  # what programs left for others was taken
    assert torch.equal(*found)
    right = reference_attention(queries, *given)
    assert (found[0].double() - right).norm() <= 2e-3 * right.norm()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize(
    ("capability", "rows", "heads", "dim", "page_size", "dtype", "kernel"),
    [
        (90, 8, 4, 64, 64, torch.bfloat16, "decode_attention_persistent_kernel"),
        (90, 7, 4, 64, 64, torch.bfloat16, "decode_attention_kernel"),
        (90, 256, 4, 64, 128, torch.bfloat16, "decode_attention_kernel"),
        (90, 256, 8, 64, 128, torch.float16, "decode_attention_persistent_kernel"),
        (90, 8, 32, 128, 64, torch.float16, "decode_attention_persistent_kernel"),
        (90, 8, 34, 64, 64, torch.bfloat16, "decode_attention_kernel"),
        (90, 8, 4, 96, 64, torch.bfloat16, "decode_attention_kernel"),
        (90, 8, 4, 64, 32, torch.bfloat16, "decode_attention_kernel"),
        (90, 8, 4, 64, 64, torch.float32, "decode_attention_kernel"),
        (80, 8, 4, 64, 64, torch.bfloat16, "decode_attention_kernel"),
    ],
)
def test_many_rows_use_the_persistent_kernel_if_supported(
    capability, rows, heads, dim, page_size, dtype, kernel, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    table = np.ones((rows, 2), dtype=np.int32)
    plan = plan_attention(AttentionRows(np.full(rows, 40), np.ones(rows, dtype=np.int64), table, rows), 0, 2, put)
    with compiling(monkeypatch, capability) as found:
        cache = empty(9, 2, 2, page_size, dim, dtype=dtype)
        attention(empty(rows, heads, dim, dtype=dtype), cache, plan, 0.1, DecodeScratch(torch.device("meta")))
    assert [each.kernel for each in found] == [kernel]
    if kernel == "decode_attention_persistent_kernel":
        assert 2 * (found[0].shared + (1 << 10)) <= MULTIPROCESSOR
        assert not found[0].spilled


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_steps_in_graphs_and_others_take_one_kernel(monkeypatch, tmp_path):
    """So that a step without a graph does not wait for it to be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cache, queries, scratch = empty(9, 2, 2, 64, 128), empty(8, 6, 128), DecodeScratch(torch.device("meta"))
    with compiling(monkeypatch, 90) as found:
        for begin in (0, 2, 4):
            state = empty(8, begin + 3, dtype=torch.int32)[:, begin:]
            decode_persistent.attend_many(queries, cache, state[:, 1:], state[:, 0], 0, 0.1, scratch, empty(8, 6, 128))
    assert len(found) == 1
