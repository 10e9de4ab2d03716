"""What attention of decodes reads before the kernel in front has ended: neither queries nor the newest tokens."""

from __future__ import annotations

import pytest
import torch
import triton

from kernels.cuda import decode
from kernels.cuda.decode import DecodeScratch
from tests.kernels.cuda.plain import spread_in_triton
from tests.kernels.cuda.test_cuda_spread import wanted

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
    right = wanted(queries, cache, state[:, 1:], state[:, 0], window, 0.2)
    asked, written, waits = queries.clone(), cache[place].clone(), []

    def begin() -> None:
        """A program does, as if it were the first."""
        queries.fill_(torch.nan)
        cache[place] = torch.nan

    def wait() -> None:
        waits.append(None)
        queries.copy_(asked)
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
