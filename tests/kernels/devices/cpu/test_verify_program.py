"""Drafts in a program of native operators, with the states that a draft model starts from."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.core.batch import ForwardBatch
from kernels.devices.capture import CaptureRequest
from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cpu.paged_attention import SHORT
from tests.kits.native import compiled, needs_native
from tests.kits.verifying import made

__all__ = ["compiled"]

pytestmark = [needs_native, pytest.mark.usefixtures("compiled")]

BF16 = torch.bfloat16
TOKENS, PROMPTS, HEADS, KV_HEADS, DIM = 5, 160, 4, 2, 32


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("window", [0, 40])
def test_a_program_serves_any_drafts_that_fit_it(trees, window):
    """Rows of any lengths, decodes and prompts among them, to the bit; more tokens than it has room for, not."""
    generator = torch.Generator().manual_seed(3)
    platform = CpuDevice(threads=1)
    platform.select_dtype("bfloat16", None)
    (cache,) = platform.cache.make(1, 60, 16, KV_HEADS, DIM, BF16)
    width = (HEADS + 2 * KV_HEADS) * DIM
    table = torch.randn(97, width, generator=generator).to(BF16)
    norm = platform.elementwise.make_norm(torch.ones(width, dtype=BF16), 1e-6)
    linear = platform.linear.make_dense(torch.randn(width, width, generator=generator).mul(0.1).to(BF16), None)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        assert batch.states is not None
        x = platform.elementwise.embed(batch.token_ids, table)
        qkv = linear(norm.add(x, batch.states)[0]).view(-1, HEADS + 2 * KV_HEADS, DIM)
        platform.cache.write(cache, batch.cache_index, qkv[:, HEADS:])
        return platform.attention.attend(qkv[:, :HEADS], cache, batch.plans[window], 0.2)

    program = platform.capture.decodes(
        CaptureRequest(
            forward,
            [window],
            4,
            8,
            lambda could: could,
            tokens=TOKENS,
            tree=trees,
            states=torch.zeros(1, width, dtype=BF16),
            prompts=PROMPTS,
        )
    )
    assert program is not None
    for counts in ([5, 5, 5, 5], [1, 1, 4, 2], [3], [1, 5, 5], [1, 5, 30, SHORT + 1, 64], [3, PROMPTS - 3]):
        decodes = next((row for row, count in enumerate(counts) if count > 1), len(counts))
        case = made(
            platform, generator, dtype=BF16, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, page_size=16, window=window,
            trees=trees, decodes=tuple(7 + 30 * row for row in range(decodes)),
            drafts=tuple((31 * row, count) for row, count in enumerate(counts[decodes:]) if count <= TOKENS),
            prefills=tuple((31 * row, count) for row, count in enumerate(counts[decodes:]) if count > TOKENS),
        )  # fmt: skip
        rows, tokens = case.rows, sum(counts)
        cache[: len(case.cache)] = case.cache
        at = np.concatenate([start + np.arange(count) for start, count in zip(rows.starts, counts, strict=True)])
        places = rows.pages[np.repeat(np.arange(len(counts)), counts), at // 16].astype(np.int64)
        states = torch.randn(tokens, width, generator=generator).to(BF16)
        batch = ForwardBatch(
            torch.randint(97, (tokens,), generator=generator),
            torch.from_numpy(at),
            torch.from_numpy(places * 16 + at % 16),
            {window: platform.attention.plan(rows, window)},
            states.clone(),
        )
        found = program.run(batch)
        assert found is not None
        found = found.clone()
        assert torch.equal(batch.states, states)  # the program has its own
        assert torch.equal(found, forward(batch))
    many = torch.zeros(PROMPTS + 1, dtype=torch.int64)
    assert program.run(dataclasses.replace(batch, token_ids=many)) is None
