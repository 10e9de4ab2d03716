"""Attention of the drafts of few rows: against plain torch, what it reads early, and where it is used."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton

from kernels.devices.cuda.attention import verify_sm90
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_draft
from kernels.devices.cuda.attention.verify_sm90 import VerifySplit, verify_split
from kernels.devices.cuda.launch import copying
from tests.kernels.devices.cuda.compiled import SHARED, compiling, empty
from tests.kernels.devices.cuda.plain import drafts_in_triton
from tests.kits.cuda.caches import Caches
from tests.kits.verifying import made

DRAFTS = ((40, 6), (0, 6), (300, 6), (122, 5), (60, 6))
"""In one block, from the first token on, in the last of several, up to near the end of a block and over one."""


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return verify_sm90 if torch.cuda.is_available() else drafts_in_triton(tmp_path_factory.mktemp("plain"))


def case_of(device, trees, window, heads, kv_heads, dim, page_size, **options):
    generator = torch.Generator().manual_seed(3)
    return made(
        Caches(device), generator, dtype=torch.float16, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size,
        window=window, trees=trees, put=lambda tensor: tensor.to(device), **options,
    )  # fmt: skip


def rows_of(case, device):
    """State and bits, as ``attend_drafts`` has them."""
    rows = case.rows
    state = np.empty((len(rows.counts), 4 + rows.pages.shape[1]), dtype=np.int32)
    state[:, 0] = np.cumsum(rows.counts) - rows.counts
    state[:, 1] = rows.counts
    state[:, 2] = rows.starts if rows.tree is None or rows.roots is None else rows.roots
    state[:, 3] = rows.starts + rows.counts
    state[:, 4:] = rows.pages
    return torch.from_numpy(state).to(device), rows.tree, int(rows.counts.max())


@pytest.mark.parametrize(
    ("cut", "heads", "kv_heads", "dim", "page_size", "window", "trees"),
    [
        (None, 8, 2, 64, 64, 0, True),
        (None, 6, 2, 128, 128, 0, False),  # lines that are of no query
        (VerifySplit(splits=3, min_blocks=1), 8, 2, 64, 64, 0, False),  # parts; blocks made at once that are not there
        (VerifySplit(splits=8, min_blocks=1, together=1, stages=2), 6, 2, 64, 64, 0, True),
        (VerifySplit(splits=1, together=1, stages=2), 6, 2, 128, 64, 0, True),  # places in which a second block comes
        (VerifySplit(splits=2, together=2, stages=4), 16, 1, 64, 64, 4, False),
        (VerifySplit(splits=8, min_blocks=2), 8, 2, 64, 128, 70, True),
    ],
)
def test_few_drafts_see_their_paths(device, few, cut, heads, kv_heads, dim, page_size, window, trees):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    case = case_of(device, trees, window, heads, kv_heads, dim, page_size, drafts=DRAFTS)
    found, scratch = torch.full((2, *case.queries.shape), torch.nan, device=device).half(), DecodeScratch(device)
    cut = cut and few.VerifySplit(*cut)
    for out in found:
        few.attend_few(case.queries, case.cache, *rows_of(case, device), window, 0.2, scratch, out, False, cut)
        assert not scratch.room(1, 1, 1, 1, 1)[2].any()  # parts were counted from nothing again
    assert torch.equal(*found)
    expected = case.expected.double()
    assert (found[0].flatten(1).double().cpu() - expected).norm() <= 2e-3 * expected.norm()


def test_nodes_of_earlier_passes_are_seen(device, few):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    case = case_of(device, True, 0, 4, 2, 64, 64, drafts=((45, 9), (62, 9), (0, 9)), drafted=5)
    out = torch.empty_like(case.queries)
    few.attend_few(case.queries, case.cache, *rows_of(case, device), 0, 0.2, DecodeScratch(device), out)
    expected = case.expected.double()
    assert (out.flatten(1).double().cpu() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter can tell")
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("parts", [1, 3])
def test_few_drafts_read_early_what_was_there_before_the_step(window, parts, monkeypatch, tmp_path):
    few = drafts_in_triton(tmp_path)
    case = case_of(torch.device("cpu"), True, window, 4, 2, 64, 64, drafts=DRAFTS)
    state, bits, tokens = rows_of(case, "cpu")
    cache, original, reported, seen = case.cache.clone(), case.queries.clone(), state.clone(), bits.clone()
    begun, early = [], []

    def begin() -> None:
        """A program does: what the step writes is not there yet."""
        begun.append(None)
        state.copy_(reported)
        bits.copy_(seen)
        case.queries.fill_(torch.nan)
        for row, (start, count) in enumerate(zip(case.rows.starts, case.rows.counts, strict=True)):
            for at in range(start, start + count):
                case.cache[case.rows.pages[row, at // 64], :, :, at % 64] = torch.nan

    def wait() -> None:
        early.append(brought[0])
        case.cache.copy_(cache)
        case.queries.copy_(original)
        state[:, :4] = -1  # was read
        bits.fill_(0)

    brought, copy = [0], few.tma.async_copy_global_to_shared

    def copied(described, place, bar, to, pred) -> None:
        brought[0] += int(bool(pred))
        copy(described, place, bar, to, pred)
        assert not (pred and np.isnan(to.value).any())

    monkeypatch.setattr(few, "copying", lambda _: True)
    monkeypatch.setattr(few, "gdc_launch_dependents", begin)
    monkeypatch.setattr(few, "gdc_wait", wait)
    monkeypatch.setattr(few.tma, "async_copy_global_to_shared", staticmethod(copied))
    out, cut = torch.empty_like(case.queries), few.VerifySplit(splits=parts, min_blocks=1)
    few.attend_few(
        case.queries, case.cache, state, bits, tokens, window, 0.2, DecodeScratch(cache.device), out, True, cut
    )
    assert (out.flatten(1).double() - case.expected.double()).norm() <= 2e-3 * case.expected.double().norm()
    assert early[-1] > 0  # blocks that were not waited for
    assert parts == 1 or len(early) < len(begun)  # programs with nothing to do have gone


def test_few_drafts_are_cut_into_as_many_programs_as_run_at_once():
    assert verify_split(1, 16, 4, 8, True) == VerifySplit(splits=8)
    assert verify_split(1, 4, 4, 8, True).splits == 32
    assert verify_split(2, 16, 4, 8, True).splits == 4
    assert verify_split(1, 3, 1, 7, True).splits == 32
    assert verify_split(300, 16, 4, 8, True).splits == 1
    assert verify_split(1, 4, 4, 8, False) == VerifySplit(splits=32, min_blocks=6, stages=6)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize(
    ("capability", "rows", "tokens", "pages", "heads", "dim", "page_size", "dtype", "few"),
    [
        (90, 1, 16, 132, 8, 128, 64, torch.bfloat16, True),
        (90, 1, 16, 9, 8, 64, 128, torch.float16, True),
        (90, 8, 2, 9, 2, 128, 64, torch.bfloat16, True),
        (90, 5, 16, 9, 8, 128, 64, torch.bfloat16, False),
        (90, 1, 16, 133, 8, 128, 64, torch.bfloat16, False),
        (90, 1, 16, 9, 34, 64, 64, torch.bfloat16, False),
        (90, 1, 16, 9, 8, 96, 64, torch.bfloat16, False),
        (90, 1, 16, 9, 8, 128, 32, torch.bfloat16, False),
        (90, 1, 16, 9, 8, 128, 64, torch.float32, False),
        (80, 1, 16, 9, 8, 128, 64, torch.bfloat16, False),
    ],
)
def test_few_short_rows_have_a_kernel_of_their_own_where_the_device_can(
    capability, rows, tokens, pages, heads, dim, page_size, dtype, few, monkeypatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compiled anew, also what an earlier run compiled
    starts, table = empty(rows, dtype=torch.int64), empty(rows, pages, dtype=torch.int64)
    plan, cache = (
        plan_draft(starts, table, tokens, None, None, 0, page_size),
        empty(99, 2, 2, page_size, dim, dtype=dtype),
    )
    queries, scratch = empty(rows * tokens, heads, dim, dtype=dtype), DecodeScratch(torch.device("meta"))
    assert plan.drafts is not None
    with compiling(monkeypatch, capability) as found:
        for early in (False, True):
            drafts = dataclasses.replace(plan.drafts, early=early)
            attention(queries, cache, dataclasses.replace(plan, drafts=drafts), 0.1, scratch)
    assert {each.kernel for each in found} - {"verify_attention_combine_kernel"} == {
        "verify_attention_sm90_kernel" if few else "verify_attention_kernel"
    }
    assert not few or [each.spilled for each in found] == [0, 0]
    assert all(each.shared <= SHARED[capability] for each in found)
