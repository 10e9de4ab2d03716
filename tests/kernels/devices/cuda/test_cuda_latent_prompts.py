"""Prompts over a latent cache, with keys and values that are made of its vectors, against plain torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.devices.cuda.attention import latent_prompts, prefill_warp_specialized
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent_prompts import attend_latent_rows, plan_latent
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


@pytest.mark.parametrize("pieces", [False, True], ids=["all heads", "heads in turn"])
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
        monkeypatch.setattr(latent_prompts, "_MAX_NUMBERS", 1)
    # Attention in the latent space reads whole pages, and masks what it does not see.
    rows, cache = step(starts, counts, decodes, torch.nan if made == len(starts) else 1e4, device)
    heads = LatentHeads(
        *((each / RANK**0.5).to(device) for each in (numbers(HEADS, DIM, RANK), numbers(HEADS, RANK, DIM)))
    )
    queries = numbers(sum(counts), HEADS * (DIM + ROPE) + 8).to(device)[:, :-8].unflatten(1, (HEADS, -1))

    def put(array):
        return torch.from_numpy(array.copy()).to(device)

    plan = plan_latent(plan_attention(rows, 0, 1, put), heads, ROPE, put)
    assert (0 if plan.made is None else len({int(row) for row in plan.made.lines[:, 0]})) == made
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
    assert (plan_latent(step, heads, 64, torch.from_numpy).made is not None) == made
