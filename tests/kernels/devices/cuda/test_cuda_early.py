"""What attention of decodes reads before the kernel in front has ended: neither queries nor the newest tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from kernels.devices.cuda.attention import decode, verify
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.plan import attention, plan_attention
from kernels.devices.cuda.attention.verify import HEADER
from tests.kernels.devices.cuda.plain import spread_in_triton
from tests.kits.cuda.attention import reference_attention
from tests.kits.cuda.caches import Caches
from tests.kits.verifying import made

if not triton.knobs.runtime.interpret:
    pytest.skip("only the interpreter can tell; TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize(
    ("lengths", "dim", "parts", "page_size", "window"),
    [
        ([200], 64, 1, 64, 0),  # one row, whole
        ([200], 64, 4, 16, 0),
        ([193], 64, 2, 64, 90),  # the newest is the only one of its block
        ([1], 64, 2, 64, 0),
        ([200], 24, 2, 64, 0),  # tokens share sectors of memory
        ([1, 64, 300, 81], 64, 5, 64, 0),  # several rows, in stretches
        ([65, 128, 129], 64, 2, 64, 70),
    ],
)
def test_what_the_kernel_in_front_writes_is_read_behind_it(
    lengths, dim, parts, page_size, window, monkeypatch, tmp_path
):
    torch.manual_seed(3)
    rows, heads, kv_heads = len(lengths), 4, 2
    columns = -(-max(lengths) // page_size)
    cache = torch.randn(1 + rows * columns, 2, kv_heads, page_size, dim).half()
    pages = 1 + torch.randperm(rows * columns).view(rows, columns)
    state = torch.cat((torch.tensor(lengths)[:, None], pages), 1).int()
    queries = torch.randn(rows, heads, dim).half()
    newest = state[:, 0].long() - 1
    place = pages[torch.arange(rows), newest // page_size], slice(None), slice(None), newest % page_size
    place = place if dim % 16 == 0 else (slice(None),)
    right = reference_attention(queries, cache, state[:, 1:], state[:, 0], window, 0.2)
    original, written, waits = queries.clone(), cache[place].clone(), []

    def begin() -> None:
        """A program does, as if it were the first."""
        queries.fill_(torch.nan)
        cache[place] = torch.nan

    def wait() -> None:
        waits.append(None)
        queries.copy_(original)
        cache[place] = written

    module = decode if rows == 1 else spread_in_triton(tmp_path)
    monkeypatch.setattr(module, "overlapping" if rows == 1 else "copying", lambda _: True)
    monkeypatch.setattr(module, "gdc_launch_dependents", begin)
    monkeypatch.setattr(module, "gdc_wait", wait)
    out, given = torch.empty_like(queries), (queries, cache, state[:, 1:], state[:, 0], window, 0.2)
    if rows == 1:
        decode.attend_decodes(*given, parts, DecodeScratch(cache.device), out)
    else:
        module.attend_many(*given, DecodeScratch(cache.device), out, parts)
    assert waits
    assert (out.double() - right).norm() <= 2e-3 * right.norm()


@pytest.mark.parametrize(
    ("lengths", "window", "parts"),
    [
        ([800], 0, [3]),  # 13 blocks of keys by 6 programs, of which each head has 3
        ([800], 300, [3]),
        ([800], 120, [3]),
        ([800, 64, 1], 0, [4, 1, 1]),  # 15 blocks by 9 programs, none of which has more than 4
        ([64, 800, 700], 120, [1, 2, 1]),  # six blocks by 9 programs
        ([800] * 9, 0, [7] * 9),  # many rows: as many parts as there is room for make equal ones of two blocks
    ],
)
def test_rows_have_no_more_parts_than_run_at_once(lengths, window, parts, monkeypatch):
    """Programs that have none leave nothing in their places."""
    torch.manual_seed(3)
    monkeypatch.setattr(decode, "multiprocessors", lambda _: 3)
    rows = len(lengths)
    cache, queries = torch.randn(1 + rows * 13, 2, 2, 64, 32).half(), torch.randn(rows, 4, 32).half()
    pages, counts = 1 + torch.randperm(rows * 13).view(rows, -1).int(), torch.tensor(lengths, dtype=torch.int32)
    out, scratch = torch.empty_like(queries), DecodeScratch(cache.device)
    stats = scratch.room(rows, 4, 2, 32, 8)[1].fill_(torch.nan)
    decode.attend_decodes(queries, cache, pages, counts, window, 0.2, 8, scratch, out)
    right = reference_attention(queries, cache, pages, counts, window, 0.2)
    assert (out.double() - right).norm() <= 2e-3 * right.norm()
    there = ~stats[: 2 * rows * 4 * 8].view(rows, 4, 8, 2).isnan()
    assert there.all(3).sum(2).tolist() == [[0 if count == 1 else count] * 4 for count in parts]


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_drafts_read_early_what_was_there_before_the_step(trees, window, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    case = made(
        Caches(torch.device("cpu")), generator, dtype=torch.float32, heads=4, kv_heads=2, dim=24, page_size=16,
        window=window, trees=trees, drafts=((0, 6), (37, 6), (150, 5)),
    )  # fmt: skip
    plan = plan_attention(case.rows, window, 2, lambda array: torch.from_numpy(array.copy()))
    drafts = dataclasses.replace(plan.drafts, context=300, early=True)
    cache, original, state = case.cache.clone(), case.queries.clone(), drafts.state.clone()
    bits = None if drafts.bits is None else drafts.bits.clone()
    programs, waits = [], []

    def begin() -> None:
        """A program does: what the step writes is not there yet."""
        programs.append(None)
        drafts.state.copy_(state)
        if bits is not None:
            drafts.bits.copy_(bits)
        case.cache.fill_(torch.nan)
        case.queries.fill_(torch.nan)

    def wait() -> None:
        waits.append(len(programs) - 1)
        case.cache.copy_(cache)
        case.queries.copy_(original)
        drafts.state[:, :HEADER] = -1  # was read
        if bits is not None:
            drafts.bits.fill_(0)

    monkeypatch.setattr(verify, "overlapping", lambda _: True)
    monkeypatch.setattr(verify, "gdc_launch_dependents", begin)
    monkeypatch.setattr(verify, "gdc_wait", wait)
    monkeypatch.setattr(verify, "_near", lambda *_: None)
    found = attention(
        case.queries, case.cache, dataclasses.replace(plan, drafts=drafts), 0.2, DecodeScratch(cache.device)
    )
    assert (found - case.expected).norm() <= 2e-5 * case.expected.norm()
    join = len(drafts.state) * drafts.tokens * 4  # the programs of the second kernel: all of them wait
    assert waits[-join:] == list(range(len(programs) - join, len(programs)))
    assert 0 < len(waits) - join < len(programs) - join  # in the first those without a part do not
