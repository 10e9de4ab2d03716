"""Attention over a latent cache on a GPU against plain torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.core.attention_rows import AttentionRows
from kernels.devices.attention import Attention
from kernels.devices.cuda.attention.attention import CudaAttention
from kernels.devices.cuda.attention.decode import DecodeScratch
from kernels.devices.cuda.attention.latent import attend_latent
from kernels.devices.cuda.attention.plan import plan_attention
from kernels.devices.cuda.cache import CudaCaches
from kernels.devices.cuda.elementwise.norms import CudaNorm
from kernels.devices.memory import DeviceMemory, MemoryUsage
from tests.kits.cuda.caches import near
from tests.kits.driver import LATENT

_SCALE = 0.2


class Memory(DeviceMemory):
    def usage(self):
        return MemoryUsage(0, 0)


_STEPS = {
    "decodes": ([0, 63, 64, 300], [1, 1, 1, 1], 4, 0),
    "drafts": ([5, 130], [4, 3], 0, 2),
    "prompts": ([0, 40, 7], [70, 9, 1], 0, 0),
    "mixed": ([90, 20, 0, 33], [1, 5, 66, 12], 1, 1),
}
"""Starts, counts, decodes, verifies."""


def _case(device, dtype, step, heads, dim, rope, page_size, tree):
    generator = torch.Generator().manual_seed(7)
    starts, counts, decodes, verifies = _STEPS[step]
    starts, counts = np.array(starts), np.array(counts)
    columns = int(-(-(starts + counts).max() // page_size)) + 1
    order = torch.randperm(len(counts) * columns, generator=generator) + 1
    pages = order.view(len(counts), columns).numpy().astype(np.int32)
    tokens, width = int(counts.sum()), dim + rope
    cache = torch.randn(len(counts) * columns + 1, page_size, width, generator=generator).to(dtype)
    for row, end in enumerate(starts + counts):  # what lies behind a row's tokens is not read
        cache[int(pages[row, end // page_size]), end % page_size :] = 1e4
    queries = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    bits = None
    if tree:
        most = int(counts[decodes : decodes + verifies].max())
        bits = torch.ones(verifies, most, dtype=torch.int64)
        for node in range(1, most):  # every node but the root follows the root or the node before it
            bits[:, node] = bits[:, node - 1 if node % 2 else 0] | 1 << node
    expected = []
    begin = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        places = torch.from_numpy(pages[row]).long()
        keys = cache[places].flatten(0, 1)[: start + count].double()
        scores = torch.einsum("qhw,kw->hqk", queries[begin : begin + count].double(), keys) * _SCALE
        node = torch.arange(start + count) - start
        visible = node[None, :] <= torch.arange(count)[:, None]
        if bits is not None and decodes <= row < decodes + verifies:
            own = bits[row - decodes, :count, None] >> node.clamp(0, 63)[None, :] & 1
            visible = (node < 0)[None, :] | (own != 0)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqk,kd->qhd", weights, keys[:, :dim]))
        begin += count
    rows = AttentionRows(starts, counts, pages, decodes, verifies, None if bits is None else bits.to(device))
    plan = plan_attention(rows, 0, 1, lambda array: torch.from_numpy(array.copy()).to(device))
    return queries.to(device), cache.to(device), plan, torch.cat(expected).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize(("heads", "dim", "rope", "page_size"), [(4, 32, 8, 16), (5, 24, 16, 64), (16, 512, 64, 64)])
def test_latent_attention_on_a_gpu_equals_torch(device, dtype, tree, step, heads, dim, rope, page_size):
    if device.type == "cpu" and (dtype == torch.bfloat16 or dim == 512):
        pytest.skip("the interpreter is slow, and knows no bfloat16 products")
    if tree and not _STEPS[step][3]:
        pytest.skip("no drafts")
    queries, cache, plan, expected = _case(device, dtype, step, heads, dim, rope, page_size, tree)
    plain = queries[..., :dim].transpose(0, 1).contiguous().transpose(0, 1)  # as a product by heads leaves it
    near(attend_latent(plain, queries[..., dim:], cache, plan, _SCALE, DecodeScratch(device)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 32, 8), (40, 24, 12), (16, 512, 64)])
def test_heads_are_placed_as_by_torch(device, dtype, heads, rank, rope):
    generator, plain = torch.Generator().manual_seed(3), 16

    def numbers(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    memory = Memory(device)
    attention = CudaAttention(CudaCaches(memory, ""), memory, 16)
    every = numbers(5, heads * (plain + rope) + rank + rope)
    queries, vectors = every.split((heads * (plain + rope), rank + rope), 1)
    norm = CudaNorm(numbers(rank), 1e-6)
    cos, sin = numbers(2, 5, 1, rope)
    index = torch.tensor([3, 60, 17, 18, 40], device=device)
    made = []
    for place in (Attention.place_latent, CudaAttention.place_latent):
        cache = torch.zeros(4, 16, rank + rope, dtype=dtype, device=device)
        own = every.clone()
        queries, vectors = own.split((heads * (plain + rope), rank + rope), 1)
        rotated = place(attention, queries.view(5, heads, plain + rope), vectors, norm, cos, sin, cache, index)
        made.append((rotated, cache))
    for expected, found in zip(*made, strict=True):
        near(found, expected)


@pytest.mark.parametrize("name", LATENT)
def test_models_with_latent_vectors_run_in_graphs_on_a_gpu(device, name, reference, drive, prompts):
    if device.type == "cpu":
        pytest.skip("no GPU")
    model, texts = reference(name), prompts(5, 90, 200)
    driver = drive(model.path, device="cuda", dtype="float32")
    loaded = driver.runner._loaded
    eager = loaded.model.reads_rows or loaded.device.experts.reads_back  # an indexer, or experts that run in turn
    assert bool(driver.info.graph_rows) == (not eager)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text)
    driver.step([(slot, len(text)) for slot, text in enumerate(texts, start=1)])
    for slot, text in enumerate(texts, start=1):
        assert driver.generate(slot, len(text) + 16) == model.greedy(text, len(text) + 16)
