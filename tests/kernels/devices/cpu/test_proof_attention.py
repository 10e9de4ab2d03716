"""The CPU's attention over pages, with caches of every dtype, beside float64; and what a cache keeps of its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.core.tree import tree_of
from kernels.devices.cpu.cache import CpuCache
from kernels.devices.cpu.cache_8bit import Pages8bit
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import write_latent
from kernels.devices.row_attention import CapAndSinks
from kernels.weights.quantization.cache import CACHE_DTYPES, LayerScales, max_value
from tests.kits.float64 import BF16, assert_near, bits, device, numbers, proof
from tests.kits.verifying import tree_parents

__all__ = ["device"]

HEADS = [(6, 2, 64), (8, 8, 32), (20, 1, 128), (7, 1, 96), (4, 2, 256), (3, 3, 64), (16, 4, 128)]
SCALES = ["dynamic", "static", "static by head", "static with offsets"]


@dataclass(frozen=True)
class Sequence:
    """``start``: its tokens in the cache before the step. ``parents``: of the step's, as a tree; None: a prompt's."""

    start: int
    count: int
    parents: list[int] | None = None

    def seen(self, query: int, window: int) -> list[int]:
        """The positions that a query of the step sees."""
        path, node = [], query
        while node >= 0:
            path.append(self.start + node)
            node = node - 1 if self.parents is None else self.parents[node]
        path = [*range(self.start), *path[::-1]]
        return path[-window:] if window else path


@dataclass(frozen=True)
class Step:
    rows: AttentionRows
    sequences: list[Sequence]
    places: list[Tensor]  # of each sequence's tokens in the cache
    queries: list[int]  # where each sequence's begin
    pages: int

    def only(self, row: int) -> AttentionRows:
        """The step of one sequence alone."""
        rows, draft = self.rows, row - self.rows.decodes
        verifies = int(0 <= draft < rows.verifies)
        part = slice(row, row + 1)
        tree = rows.tree[draft : draft + 1] if verifies and rows.tree is not None else None
        decodes = int(draft < 0)
        return AttentionRows(rows.starts[part], rows.counts[part], rows.pages[part], decodes, verifies, tree)


def step_of(
    generator: torch.Generator, page_size: int, starts: list[int], drafts: list[int], prompts: list[tuple[int, int]]
) -> Step:
    """``drafts``: starts of sequences with random trees."""
    sequences = [Sequence(start, 1) for start in starts]
    nodes = int(torch.randint(2, 12, (), generator=generator))
    for start in drafts:
        sequences.append(Sequence(start, nodes, tree_parents(generator, nodes)))
    sequences += [Sequence(start, count) for start, count in prompts]
    counts = np.array([one.count for one in sequences])
    firsts = np.array([one.start for one in sequences])
    needed = -(-(firsts + counts) // page_size)
    free = (torch.randperm(int(needed.sum()), generator=generator) + 1).tolist()
    tables, places = np.zeros((len(sequences), int(needed.max())), np.int32), []
    for row, (one, pages) in enumerate(zip(sequences, needed.tolist(), strict=True)):
        tables[row, :pages] = [free.pop() for _ in range(pages)]
        at = np.arange(one.start + one.count)
        places.append(torch.from_numpy(tables[row, at // page_size] * np.int64(page_size) + at % page_size))
    tree = None
    if drafts:
        parents = torch.tensor([one.parents for one in sequences if one.parents is not None])
        tree = tree_of(torch.zeros(len(drafts), nodes), parents).bits
    rows = AttentionRows(firsts, counts, tables, len(starts), len(drafts), tree)
    return Step(rows, sequences, places, (np.cumsum(counts) - counts).tolist(), int(needed.sum()) + 2)


def cache_of(device: CpuDevice, shape: tuple[int, int, int, int], name: str, scales: str, seed: int) -> CpuCache:
    """A cache of [pages, page_size, kv_heads, dim]."""
    pages, page_size, kv_heads, dim = shape
    device.cache.fits_native = True  # of an earlier cache
    device.cache.dtype = None if name == "bfloat16" else CACHE_DTYPES[name]
    fixed = None
    if device.cache.dtype is not None and scales != "dynamic":
        generator = torch.Generator().manual_seed(seed)
        each = (
            (torch.rand(2, kv_heads, 1 if "head" in scales else dim, generator=generator) + 1)
            * 4
            / max_value(device.cache.dtype)
        )
        offsets = torch.randint(-9, 9, (2, kv_heads, dim), generator=generator).float() if "off" in scales else None
        fixed = [LayerScales(each.expand(2, kv_heads, dim).contiguous(), offsets)]
    (cache,) = device.cache.make(1, pages, page_size, kv_heads, dim, torch.bfloat16, fixed)
    if isinstance(cache, Tensor):
        # Nothing is used of what no sequence has written; torch multiplies it with zeros.
        cache.fill_(1e4 if device.native.current is None else torch.nan)
    return cache


def attended(
    queries: Tensor, kept: Tensor, seen: Tensor, scale: float, slip: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of ``queries`` [queries, heads, dim], ``kept`` [tokens, 2, kv_heads, dim], ``seen`` [queries, tokens] and
    ``sinks`` [heads]: the values that are found [queries, heads * dim], and how far they may be off if each product of
    a score is wrong by ``slip`` of itself."""
    keys, values = kept.double().repeat_interleave(queries.shape[1] // kept.shape[2], 2).unbind(1)
    wide, hidden = queries.double() * scale, ~seen[:, None]
    scores = torch.einsum("qhd,thd->qht", wide, keys).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, -1, 1).expand(len(scores), -1, 1)), 2)
    weights = scores.softmax(-1)[..., : len(kept)]
    wrong = torch.einsum("qhd,thd->qht", wide.abs(), keys.abs()).masked_fill(hidden, 0).amax(2) * slip
    found = torch.einsum("qht,thd->qhd", weights, values)
    # A wrong score changes a weight by a factor, and so it does the sum of all.
    off = torch.einsum("qht,thd->qhd", weights, values.abs()) * torch.expm1(2 * wrong)[:, :, None]
    return found.flatten(1), off.flatten(1)


def own_scale(cache: Pages8bit) -> bool:
    """Whether fixed scales are one for each head."""
    return cache.kept is not None and cache.kept.by_head is not None


LENGTHS = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 319, 320, 321, 575, 600]))


@pytest.mark.parametrize("name", CACHE_DTYPES)
@proof(24)
@given(data=st.data())
def test_attention_is_that_of_float64(name: str, device: CpuDevice, data: st.DataObject) -> None:
    heads, kv_heads, dim = data.draw(st.sampled_from(HEADS), "heads")
    page_size, window = (
        data.draw(st.sampled_from([16, 32]), "page"),
        data.draw(st.sampled_from([0, 0, 1, 40, 300]), "window"),
    )
    starts = data.draw(st.lists(LENGTHS, max_size=4), "decodes")
    drafts = data.draw(st.lists(LENGTHS, max_size=2), "drafts")
    counts = st.one_of(st.integers(2, 60), st.sampled_from([48, 49, 64, 65, 130]))
    prompts = data.draw(st.lists(st.tuples(LENGTHS, counts), max_size=2, min_size=not (starts or drafts)), "prompts")
    prompts.sort(key=lambda one: one[1])
    kind = data.draw(st.sampled_from(SCALES), "scales")
    steep = data.draw(st.sampled_from([0.0, 0.1, 1.0, 8.0]), "steep")  # scores that are equal, usual, or far apart
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    step = step_of(generator, page_size, starts, drafts, prompts)
    cache = cache_of(device, (step.pages, page_size, kv_heads, dim), name, kind, 7)
    native = device.native.current is not None and device.cache.fits_native
    for places in step.places:
        device.cache.write(cache, places, numbers(generator, len(places), 2 * kv_heads, dim))
    queries = numbers(generator, sum(one.count for one in step.sequences), heads, dim) * steep
    scale = dim**-0.5
    sinks = None
    if native and data.draw(st.booleans(), "sinks"):  # plain torch rounds scores to bf16
        sinks = torch.randn(heads, generator=generator) * data.draw(st.sampled_from([1.0, 40.0]), "deep")
        sinks[0] = -torch.inf

    def attend(queries: Tensor, rows: AttentionRows) -> Tensor:
        plan = device.attention.plan(rows, window)
        if sinks is None:
            return device.attention.attend(queries.clone(), cache, plan, scale)
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = ForwardBatch(nothing, nothing, nothing, {window: plan})
        return device.attention.attend_capped(queries, cache, batch, window, scale, CapAndSinks(sinks=sinks))

    found = attend(queries, step.rows)
    for row, (one, places, begin) in enumerate(zip(step.sequences, step.places, step.queries, strict=True)):
        kept = device.cache.gather(cache, places)
        short = one.count == 1 or one.parents is not None or one.count <= 48
        # Decodes and drafts: float32, where a dot product of 256 adds up 2^-24 for each dim; int8 keys meet queries of
        # 16 bits. Else: weights are rounded to bf16. Keys and values that are made of a cache of 8 bits are rounded to
        # bf16 for prompts, and where the dims of a head have scales of their own.
        tight = native and short
        rounded = isinstance(cache, Pages8bit) and not (tight and (cache.fixed is None or own_scale(cache)))
        slip = BF16 if rounded else 2.0**-14 if tight and name == "int8" else 2.0**-18
        seen = torch.zeros(one.count, len(places), dtype=torch.bool)
        for query in range(one.count):
            seen[query, one.seen(query, window)] = True
        rows = slice(begin, begin + one.count)
        exact, off = attended(queries[rows], kept, seen, scale, slip, sinks)
        values = kept[:, 1].double().abs().amax()
        assert_near(found[rows], exact, off + values * ((2.0**-14 if tight else 2 * BF16) + rounded * BF16))
        if native:
            alone = attend(queries[rows], step.only(row))
            assert torch.equal(bits(alone), bits(found[rows])), row


@proof(16)
@given(data=st.data())
def test_latent_attention_is_that_of_float64(device: CpuDevice, data: st.DataObject) -> None:
    """Of decodes, trees of drafts and chunks of prompts, of which only the long ones are torch's."""
    count, rank, rope = data.draw(
        st.sampled_from([(16, 512, 64), (3, 32, 32), (20, 96, 32), (40, 64, 64), (16, 64, 0)]), "heads"
    )
    page_size = data.draw(st.sampled_from([16, 32]), "page")
    starts, drafts = (data.draw(st.lists(LENGTHS, max_size=most), "starts") for most in (4, 2))
    prompts = data.draw(
        st.lists(st.tuples(LENGTHS, st.sampled_from([2, 48, 49, 70])), max_size=2, min_size=not (starts or drafts)),
        "prompts",
    )
    prompts.sort(key=lambda one: one[1])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    step, scale = step_of(generator, page_size, starts, drafts, prompts), (rank + rope) ** -0.5
    # What is not of the sequences has no effect.
    cache = torch.full((step.pages, page_size, rank + rope), torch.nan, dtype=torch.bfloat16)
    for places in step.places:
        write_latent(cache, places, numbers(generator, len(places), rank + rope))
    queries = numbers(generator, sum(one.count for one in step.sequences), count, rank + rope)
    queries *= data.draw(st.sampled_from([0.0, 1.0, 8.0]), "steep")
    same = torch.eye(rank, dtype=torch.bfloat16).expand(count, rank, rank).contiguous()
    heads, nothing = LatentHeads(same, same), torch.zeros(0, dtype=torch.int64)

    def attend(queries: Tensor, rows: AttentionRows) -> Tensor:
        batch = ForwardBatch(nothing, nothing, nothing, {}, rows=rows)
        return device.attention.attend_latent(queries, cache, batch, heads, scale)

    found = attend(queries, step.rows)
    for row, (one, places, begin) in enumerate(zip(step.sequences, step.places, step.queries, strict=True)):
        keys = cache.view(-1, rank + rope)[places].unsqueeze(1)
        kept = torch.stack((keys, torch.cat((keys[..., :rank], torch.zeros_like(keys[..., rank:])), -1)), 1)
        short = one.count == 1 or one.parents is not None or one.count <= 48
        tight = device.native.current is not None and short
        seen = torch.zeros(one.count, len(places), dtype=torch.bool)
        for query in range(one.count):
            seen[query, one.seen(query, 0)] = True
        rows = slice(begin, begin + one.count)
        exact, off = (
            x.view(one.count, count, -1)[..., :rank]
            for x in attended(queries[rows], kept, seen, scale, 2.0**-17 if tight else BF16, None)
        )
        values = keys.double().abs().amax()
        assert_near(found[rows], exact, off + values * (2.0**-13 if tight else 2 * BF16))
        if tight:
            alone = attend(queries[rows], step.only(row))
            assert torch.equal(bits(alone), bits(found[rows])), row


@pytest.mark.parametrize("name", CACHE_DTYPES)
@proof(10)
@given(data=st.data())
def test_a_draft_finds_what_its_decodes_find(name: str, device: CpuDevice, data: st.DataObject) -> None:
    """To the bit, also where it is the end of a prompt, and whatever other branches of its tree lie between."""
    if device.native.current is None:
        pytest.skip("torch's attention has no such promise")
    heads, kv_heads, dim = data.draw(st.sampled_from(HEADS), "heads")
    start, window = data.draw(LENGTHS, "start"), data.draw(st.sampled_from([0, 40]), "window")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    prompt = data.draw(st.booleans(), "prompt")
    step = step_of(generator, 16, [], [] if prompt else [start], [(start, 47)] if prompt else [])
    (one,), (places,) = step.sequences, step.places
    cache = cache_of(device, (2 * step.pages, 16, kv_heads, dim), name, data.draw(st.sampled_from(SCALES), "scales"), 7)
    keys_values = numbers(generator, len(places), 2 * kv_heads, dim)
    device.cache.write(cache, places, keys_values)
    queries = numbers(generator, one.count, heads, dim)
    found = device.attention.attend(queries, cache, device.attention.plan(step.rows, window), 0.2)
    free = np.arange(step.pages, 2 * step.pages, dtype=np.int32)[None]
    for query in range(one.count):
        path = one.seen(query, 0)
        at = torch.arange(len(path)) + step.pages * 16
        device.cache.write(cache, at, keys_values[path])
        decode = AttentionRows(np.array([len(path) - 1]), np.array([1]), free, 1)
        alone = device.attention.attend(queries[query : query + 1], cache, device.attention.plan(decode, window), 0.2)
        assert torch.equal(bits(alone[0]), bits(found[query])), query


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", CACHE_DTYPES)
@proof(6)
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 5),
    dim=st.sampled_from([32, 40, 64, 96, 256]),
    seed=st.integers(0, 99),
)
def test_a_cache_keeps_the_nearest_numbers(
    name: str, scales: str, device: CpuDevice, tokens: int, heads: int, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = cache_of(device, (8, 16, heads, dim), name, scales, seed)
    x = numbers(generator, tokens, 2 * heads, dim, wild=scales == "dynamic")
    index = torch.randperm(8 * 16, generator=generator)[:tokens]
    device.cache.write(cache, index, x)
    found, wide = device.cache.gather(cache, index).double(), x.double().unflatten(1, (2, heads))
    if name == "bfloat16":
        assert torch.equal(found, wide)
        return
    assert isinstance(cache, Pages8bit)
    kept, offset = cache.values.dtype, 0.0
    if cache.fixed is None:
        assert cache.scales is not None
        step = cache.scales.view(-1, 2, heads)[index].double()[..., None]
        # One of bf16 makes of the largest number the largest that there is, but for its rounding.
        largest = wide.abs().amax(-1, keepdim=True) / max_value(kept)
        assert bool(((step - largest).abs() <= largest * BF16 + 2.0**-126).all())
    else:
        step = cache.fixed.scales.double()
        offset = 0.0 if cache.fixed.offsets is None else cache.fixed.offsets.double()
    units = (wide / step + offset).clamp(-max_value(kept), max_value(kept))
    if kept == torch.int8:
        apart = torch.ones_like(units)
    else:  # 3 or 2 bits behind the first, and subnormal numbers
        behind, least = (3, -9) if kept == torch.float8_e4m3fn else (2, -16)
        apart = units.abs().log2().floor().sub(behind).clamp(min=least).exp2()
    # The quotient is rounded to float32 before, and to float16 on the way to fewer bits.
    assert bool(((found / step + offset - units).abs() <= apart * (0.5 + 2**-7) + units.abs() * 2**-22).all())
