"""Warp-specialized prefill attention: against float64, and when it is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention import prefill_warp_specialized
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.attention.prefill import PrefillBlocks, plan_prefills
from kernels.devices.cuda.launch import copying
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty, put
from tests.kernels.devices.cuda.plain import specialized_in_triton


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return (
        prefill_warp_specialized
        if torch.cuda.is_available()
        else specialized_in_triton(tmp_path_factory.mktemp("plain"))
    )


def reference_attention(queries, cache, rows, scale):
    heads, dim, kv_heads = *queries.shape[1:], cache.shape[2]
    found, first = [], 0
    for start, count, pages in zip(rows.starts.tolist(), rows.counts.tolist(), rows.pages, strict=True):
        both = cache[torch.from_numpy(pages).to(cache.device).long()].double().permute(1, 2, 0, 3, 4)
        keys, values = both.reshape(2, kv_heads, -1, dim)[:, :, : start + count].repeat_interleave(heads // kv_heads, 1)
        query = queries[first : first + count].double().transpose(0, 1)
        seen = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
        scores = (query @ keys.transpose(1, 2) * scale).masked_fill(~seen.to(cache.device), -torch.inf)
        found.append((scores.softmax(-1) @ values).transpose(0, 1))
        first += count
    return torch.cat(found)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "starts", "counts", "programs"),
    [
        (2, 1, 64, 64, [0, 37], [130, 1], 1),  # one program has one tile after another
        (4, 2, 128, 64, [300, 0, 5], [129, 64, 200], 3),  # more tiles than programs, forth and back
        (3, 3, 64, 128, [64, 127], [65, 2], 100),
        (1, 1, 128, 192, [385], [140], None),  # its last block has a half without a page
    ],
)
def test_chunks_behind_cached_tokens(device, prompts, heads, kv_heads, dim, page_size, starts, counts, programs):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    torch.manual_seed(1)
    columns = -(-max(start + count for start, count in zip(starts, counts, strict=True)) // page_size)
    pages = np.zeros((len(starts), columns + 1), dtype=np.int32)
    pages[:, :columns] = 1 + torch.randperm(len(starts) * columns).view(-1, columns).numpy()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        pages[row, -(-(start + count) // page_size) :] = 0
    rows = AttentionRows(np.array(starts), np.array(counts), pages, 0)
    plan = plan_prefills(rows, 0, lambda array: torch.from_numpy(array.copy()).to(device))
    none = plan.blocks.new_zeros(2, 4)  # in a graph there is room for more
    plan = PrefillBlocks(torch.cat((plan.blocks, none)), plan.pages, plan.query_block, True)
    cache = torch.randn(1 + len(starts) * columns, 2, kv_heads, page_size, dim).half().to(device)
    cache[0] = torch.nan  # where a row has ended nothing is read
    every = torch.randn(sum(counts), heads + 2 * kv_heads, dim).half().to(device)
    found = torch.full((2, sum(counts), heads, dim), torch.nan, device=device).half()
    for out in found:
        prompts.attend_prompts(every[:, :heads], cache, plan, dim**-0.5, out, programs)
    assert torch.equal(*found)
    right = reference_attention(every[:, :heads], cache, rows, dim**-0.5)
    assert (found[0].double() - right).norm() <= 2e-3 * right.norm()


@pytest.mark.parametrize(
    ("heads", "starts", "counts", "programs"),
    [
        (2, [0, 37], [130, 1], 1),  # one program has one tile after another
        (3, [300, 0, 5], [129, 64, 200], 4),  # more tiles than programs, forth and back
        (1, [385], [140], None),
    ],
)
def test_keys_in_two_parts_of_rows_in_lines(device, prompts, heads, starts, counts, programs):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    torch.manual_seed(1)
    ends = np.add(starts, counts)
    bases = np.cumsum(-(-ends // 128) * 128) - -(-ends // 128) * 128
    lines = int(bases[-1] + -(-ends[-1] // 128) * 128)
    rows = AttentionRows(np.array(starts), np.array(counts), np.zeros((len(starts), 9), dtype=np.int32), 0)
    plan = plan_prefills(rows, 0, lambda array: torch.from_numpy(array.copy()).to(device))
    both = torch.randn(2, heads, lines, 128).half().to(device)
    rotated = torch.randn(lines, 64).half().to(device)
    every = torch.randn(sum(counts), heads + 1, 192).half().to(device)
    found = torch.full((2, sum(counts), heads + 1, 128), torch.nan, device=device).half()
    at = torch.from_numpy(bases.astype(np.int32)).to(device)
    for out in found:
        prompts.attend_made(every[:, 1:], both, rotated, at, plan.blocks, 0.07, out[:, 1:], programs)
    assert torch.equal(*found[:, :, 1:])
    expected, first = [], 0
    for base, start, count in zip(bases.tolist(), starts, counts, strict=True):
        some = slice(base, base + start + count)
        keys = torch.cat((both[0, :, some], rotated[None, some].expand(heads, -1, -1)), 2).double()
        query = every[first : first + count, 1:].double().transpose(0, 1)
        seen = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
        scores = (query @ keys.transpose(1, 2) * 0.07).masked_fill(~seen.to(device), -torch.inf)
        expected.append((scores.softmax(-1) @ both[1, :, some].double()).transpose(0, 1))
        first += count
    right = torch.cat(expected)
    assert (found[0, :, 1:].double() - right).norm() <= 2e-3 * right.norm()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_the_kernel_for_keys_in_two_parts_fits(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = plan_prefills(AttentionRows(np.zeros(1), np.array([300]), np.zeros((1, 5), dtype=np.int32), 0), 0, put)
    with compiling(monkeypatch, 90) as found:
        given = empty(300, 16, 192), empty(2, 16, 384, 128), empty(384, 64), empty(1, dtype=torch.int32)
        prefill_warp_specialized.attend_made(*given, plan.blocks, 0.1, empty(300, 16, 128))
    assert found[0].shared <= SHARED[90]
    assert not found[0].spilled


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize(
    ("capability", "counts", "dim", "page_size", "window", "dtype", "kernel"),
    [
        (90, [70, 60], 128, 64, 0, torch.bfloat16, "prefill_attention_sm90_kernel"),
        (90, [129], 128, 192, 0, torch.float16, "prefill_attention_sm90_kernel"),
        (90, [129, 1, 1, 1, 1], 128, 128, 0, torch.float16, "prefill_attention_sm90_kernel"),
        (90, [128], 128, 64, 0, torch.bfloat16, "prefill_attention_kernel"),
        (90, [70, 58], 128, 64, 0, torch.float16, "prefill_attention_kernel"),
        (90, [70, 60], 128, 32, 0, torch.bfloat16, "prefill_attention_kernel"),
        (90, [70, 60], 64, 64, 0, torch.bfloat16, "prefill_attention_kernel"),
        (90, [70, 60], 128, 64, 100, torch.bfloat16, "prefill_attention_kernel"),
        (90, [70, 60], 128, 64, 0, torch.float32, "prefill_attention_kernel"),
        (80, [70, 60], 128, 64, 0, torch.bfloat16, "prefill_attention_kernel"),
    ],
)
def test_full_blocks_use_the_specialized_kernel_if_supported(
    capability, counts, dim, page_size, window, dtype, kernel, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    table, starts = np.ones((len(counts), 5), dtype=np.int32), np.arange(len(counts))
    plan = plan_attention(AttentionRows(starts, np.array(counts), table, 0), window, 2, put)
    with compiling(monkeypatch, capability) as found:
        cache = empty(9, 2, 2, page_size, dim, dtype=dtype)
        attention(empty(sum(counts), 4, dim, dtype=dtype), cache, plan, 0.1, DecodeScratch(torch.device("meta")))
    assert [each.kernel for each in found] == [kernel]
    if kernel == "prefill_attention_sm90_kernel":
        assert found[0].shared <= SHARED[90]
        assert not found[0].spilled


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
def test_steps_in_graphs_and_others_take_one_kernel(monkeypatch, tmp_path):
    """Chunks of any length too: a step does not wait for it to be compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, 90) as found:
        for tokens, begin, columns in ((70, 0, 3), (2000, 2, 32), (128, 4, 1)):
            table = empty(1, begin + columns, dtype=torch.int32)[:, begin:]
            rows = AttentionRows(np.array([0]), np.array([tokens]), np.ones((1, columns), dtype=np.int32), 0)
            plan = plan_prefills(rows, 0, put)
            plan = PrefillBlocks(
                empty(begin + len(plan.blocks), 4, dtype=torch.int32)[begin:], table, plan.query_block, True
            )
            prefill_warp_specialized.attend_prompts(
                empty(tokens, 6, 128), empty(9, 2, 2, 64, 128), plan, 0.1, empty(tokens, 6, 128)
            )
    assert len(found) == 1


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([4000, 4000, 4000, 4000, 500], [0, 0, 1, 1, 2]),
        ([500, 18000, 16400, 17000], [0, 1, 2, 3]),  # none of these is near another
    ],
)
def test_blocks_of_rows_that_are_near_follow_one_another(counts, groups):
    counts = np.array(counts)
    table = np.ones((len(counts), int(counts.max()) // 64 + 1), dtype=np.int32)
    rows = AttentionRows(np.zeros_like(counts), counts, table, 0)
    row, first, count, position = plan_prefills(rows, 0, lambda array: torch.from_numpy(array.copy())).blocks.numpy().T
    near = np.array(groups)[row]
    assert (np.diff(near) >= 0).all()
    for number in range(groups[-1] + 1):  # the last block is short
        sign = -1 if (groups[-1] - number) % 2 == 0 else 1
        assert (np.diff(position[near == number]) * sign >= 0).all()
    order = np.argsort(first)
    assert (first[order] == np.concatenate(([0], np.cumsum(count[order])[:-1]))).all()
    assert count.sum() == counts.sum()
