"""Prompts over a latent cache, with keys and values that are made of its vectors, against plain torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention import latent_prompts, prefill_warp_specialized
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent_prompts import MadeRows, attend_latent_rows, plan_latent
from kernels.devices.cuda.attention.plan import plan_attention
from kernels.devices.cuda.launch import copying
from kernels.devices.latent_attention import LatentHeads
from tests.kernels.devices.cuda.plain import specialized_in_triton

HEADS, RANK, ROPE, DIM, PAGE = 3, 48, 64, 128, 64
SCALE = 0.05


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return (
        prefill_warp_specialized
        if torch.cuda.is_available()
        else specialized_in_triton(tmp_path_factory.mktemp("plain"))
    )


def numbers(*shape):
    return torch.randn(*shape).half()


def step(starts, counts, decodes, behind, device):
    """Rows, and a cache that has ``behind`` where no row has tokens."""
    starts, counts = np.array(starts), np.array(counts)
    columns = int(-(-(starts + counts).max() // PAGE)) + 1
    pages = 1 + torch.randperm(len(starts) * columns).view(-1, columns).numpy().astype(np.int32)
    cache = numbers(1 + pages.size, PAGE, RANK + ROPE)
    cache[0] = behind
    for row, end in enumerate((starts + counts).tolist()):
        cache[int(pages[row, end // PAGE]), end % PAGE :] = behind
    return AttentionRows(starts, counts, pages, decodes), cache.to(device)


def expected(queries, cache, rows, heads):
    found, first = [], 0
    for start, count, pages in zip(rows.starts.tolist(), rows.counts.tolist(), rows.pages, strict=True):
        vectors = cache[torch.from_numpy(pages).to(cache.device).long()].double().flatten(0, 1)[: start + count]
        plain = torch.einsum("tr,hdr->htd", vectors[:, :RANK], heads.keys.double())
        keys = torch.cat((plain, vectors[None, :, RANK:].expand(HEADS, -1, -1)), 2)
        values = torch.einsum("tr,hrd->htd", vectors[:, :RANK], heads.values.double())
        query = queries[first : first + count].double().transpose(0, 1)
        seen = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
        scores = (query @ keys.transpose(1, 2) * SCALE).masked_fill(~seen.to(cache.device), -torch.inf)
        found.append((scores.softmax(-1) @ values).transpose(0, 1))
        first += count
    return torch.cat(found)


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in turn"])
@pytest.mark.parametrize(
    ("starts", "counts", "decodes", "faster", "made"),
    [
        ([70, 5, 0], [1, 1, 140], 2, 1e9, 1),  # decodes beside a prompt
        ([100, 0], [130, 127], 0, 1e9, 2),
        ([200, 60, 0], [1, 3, 200], 1, 4.0, 1),  # a short row stays in the latent space
        ([200, 0], [3, 4], 0, 2.0, 0),
    ],
)
def test_rows_with_keys_of_their_own_equal_torch(
    device, prompts, monkeypatch, pieces, starts, counts, decodes, faster, made
):
    if device.type == "cuda" and not copying(device):
        pytest.skip("of compute capability 9.0")
    torch.manual_seed(3)
    monkeypatch.setattr(prefill_warp_specialized, "attend_made", prompts.attend_made)
    monkeypatch.setattr(latent_prompts, "_FASTER", faster)
    if pieces:
        monkeypatch.setattr(latent_prompts, "_MAX_LINES", 256)
    # Attention in the latent space reads whole pages, and masks what it does not see.
    rows, cache = step(starts, counts, decodes, torch.nan if made == len(starts) else 1e4, device)
    heads = LatentHeads(
        *((each / RANK**0.5).to(device) for each in (numbers(HEADS, DIM, RANK), numbers(HEADS, RANK, DIM)))
    )
    queries = numbers(sum(counts), HEADS * (DIM + ROPE) + 8).to(device)[:, :-8].unflatten(1, (HEADS, -1))

    def put(array):
        return torch.from_numpy(array.copy()).to(device)

    plan = plan_latent(plan_attention(rows, 0, 1, put), heads, ROPE, put)
    assert [len({int(row) for row in part.lines[:, 0]}) for part in plan.made] == (
        [1] * made if pieces else [made][:made]
    )
    if pieces:  # a head at a time
        monkeypatch.setattr(latent_prompts, "_MAX_NUMBERS", 2 * 256 * DIM)
    found = attend_latent_rows(queries, cache, plan, heads, SCALE, DecodeScratch(device))
    right = expected(queries, cache, rows, heads)
    assert (found.double() - right).norm() <= 4e-3 * right.norm()


@pytest.mark.parametrize(
    ("rows", "start", "count", "made"),
    [(1, 0, 1024, True), (1, 30000, 2048, True), (1, 4096, 16, True), (64, 4096, 16, False), (64, 0, 8, False)],
)
def test_the_form_of_a_row_depends_on_what_fills_the_device(rows, start, count, made):
    heads = LatentHeads(torch.empty(16, 128, 512, device="meta"), torch.empty(16, 512, 128, device="meta"))
    starts, counts = np.full(rows, start), np.full(rows, count)
    step = plan_attention(
        AttentionRows(starts, counts, np.zeros((rows, 600), dtype=np.int32), 0), 0, 1, torch.from_numpy
    )
    assert bool(plan_latent(step, heads, 64, torch.from_numpy).made) == made


def planned(starts, count):
    heads = LatentHeads(torch.empty(16, 128, 512, device="meta"), torch.empty(16, 512, 128, device="meta"))
    pages = np.zeros((len(starts), 6000), dtype=np.int32)
    step = plan_attention(
        AttentionRows(np.array(starts), np.full(len(starts), count), pages, 0), 0, 1, torch.from_numpy
    )
    return plan_latent(step, heads, 64, torch.from_numpy)


def test_the_tokens_that_are_gathered_at_a_time_are_bounded():
    """However many rows stand behind long contexts; what a step allocates does not depend on them."""
    plan = planned([30_000] * 40, 512)
    assert sorted(row for part in plan.made for row in set(part.lines[:, 0].tolist())) == list(range(40))
    assert len(plan.made) > 1
    assert max(len(part.lines) for part in plan.made) * 128 <= latent_prompts._MAX_LINES
    blocks = torch.cat([part.blocks for part in plan.made])
    assert len(blocks) == len(torch.unique(blocks[:, 1])) == 40 * 4
    assert not planned([latent_prompts._MAX_LINES], 4096).made
    assert planned([latent_prompts._MAX_LINES - 4096], 4096).made


def test_gathered_tokens_have_room_for_the_longest(device):
    rows = MadeRows(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1, 4), (1, 9), (1, 3), 1)))
    for part in latent_prompts.gather(numbers(2, PAGE, RANK + ROPE).to(device), rows, RANK):
        assert len(part) == 128
        assert part.untyped_storage().nbytes() == latent_prompts._MAX_LINES * part.shape[1] * 2


@pytest.mark.parametrize(("count", "sizes"), [(16, {16, 8, 4, 2}), (20, {20, 4, 2}), (3, {3, 1}), (2, {2}), (1, {1})])
def test_heads_at_once_are_few_numbers_that_divide_all(count, sizes):
    assert latent_prompts._head_counts(count, DIM) == sizes
    limits = [latent_prompts._MAX_NUMBERS // (2 * lines * DIM) for lines in range(128, latent_prompts._MAX_LINES, 128)]
    assert {latent_prompts._heads_at_once(count, limit) for limit in limits} <= sizes
    assert all(count % size == 0 for size in sizes)


def test_kernels_for_all_numbers_of_heads_are_ready_after_a_step(device, monkeypatch):
    """None is compiled when a long context comes."""
    monkeypatch.setattr(prefill_warp_specialized, "attend_made", lambda queries, *_: seen.append(queries.shape[1]))
    monkeypatch.setattr(latent_prompts, "_ready", set())
    monkeypatch.setattr(latent_prompts, "gather", lambda cache, rows, rank: cache[0].split((RANK, ROPE), 1))
    seen, heads = [], LatentHeads(numbers(16, DIM, RANK), numbers(16, RANK, DIM))
    rows = MadeRows(*(torch.zeros(shape, dtype=torch.int32) for shape in ((1, 4), (1, 9), (1, 3), 1)))
    queries, out, cache = numbers(128, 16, DIM + ROPE), numbers(128, 16, DIM), numbers(1, 128, RANK + ROPE)
    for expected in ([2, 4, 8, 16, 16], [16]):
        seen.clear()
        latent_prompts._attend_made(queries, cache, (rows,), heads, SCALE, out)
        assert sorted(seen) == expected
