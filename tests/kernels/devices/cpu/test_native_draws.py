"""Sampling by one native operator says what the sampler's own transforms say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.step import SlotSampling
from kernels.core.noise import exponential_noise, keys_at
from kernels.core.operators import DRAWS
from kernels.devices.cpu.device import CpuDevice
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import Sampler
from tests.kits.native import needs_native

pytestmark = needs_native

ROWS = 48
KINDS = {
    "all": {},
    "hot": {"temperature": 5.0},
    "top-p": {"top_p": 0.7},
    "small top-p": {"top_p": 0.05, "temperature": 1.5},
    "top-k": {"top_k": 7},
    "one of two": {"top_k": 2, "top_p": 0.9, "temperature": 3.0},
    "both": {"top_k": 40, "top_p": 0.8},
    "many": {"top_k": 200},
    "min-p": {"min_p": 0.2, "temperature": 2.0},
    "greedy": {"temperature": 0.0},
    "everything": {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def platform():
    platform = CpuDevice(1)
    platform.select_dtype("bfloat16", None)
    if (
        platform.sampling.draw(torch.zeros(0, 32, dtype=torch.bfloat16), np.empty(0, DRAWS), torch.zeros(0), None, 32)
        is None
    ):
        pytest.skip("the native operators are not compiled yet")
    return platform


@pytest.mark.parametrize("vocab", [211, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_samplers(kind, vocab, platform):
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)).mul_(2).to(torch.bfloat16)
    logits[5, 7], logits[6, 20], logits[7] = torch.nan, torch.inf, -torch.inf
    logits[8, :-1] = -torch.inf
    positions = torch.arange(ROWS) * 37
    slots, history = torch.arange(ROWS), torch.zeros(ROWS, 4, dtype=torch.int32)
    native, own = Sampler(vocab, ROWS, own_draw=platform.sampling.draw), Sampler(vocab, ROWS)
    for slot in range(ROWS):
        how = SlotSampling(**{"temperature": 1.0, "seed": slot * 977} | (KINDS[kind] if slot % 5 else {}))
        native.admit(slot, how, 1)
        own.admit(slot, how, 1)
    found = native.sample(logits, slots, positions, history)
    expected = own.sample(logits.float(), slots, positions, history)
    assert found.nonfinite.tolist() == expected.nonfinite.tolist() == [slot in (5, 6, 7) for slot in range(ROWS)]
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("vocab", [211, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_draws_are_the_samplers(kind, vocab, platform):
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(3)).mul_(2).to(torch.bfloat16)
    bits = np.random.default_rng(vocab).integers(-(2**31), 2**31, (ROWS, -(-vocab // 32))).astype(np.int32)
    bits[:4], bits[4:8] = -1, 0
    bits[4:8, -1] = 1  # one token
    slots, positions, history = torch.arange(ROWS), torch.arange(ROWS) * 37, torch.zeros(ROWS, 4, dtype=torch.int32)
    sampler = Sampler(vocab, ROWS)
    for slot in range(ROWS):
        sampler.admit(slot, SlotSampling(**{"temperature": 1.0, "seed": slot * 977} | KINDS[kind]), 1)
    masks = RowMasks(np.arange(ROWS), bits, torch.from_numpy)
    expected = sampler.sample(logits.float(), slots, positions, history, masks=masks)
    draws = sampler.draws(tuple(range(ROWS)), greedy=True)
    tokens, nonfinite = platform.sampling.draw(logits, draws, positions, None, vocab, bits)
    assert not nonfinite.any()
    assert tokens.tolist() == expected.tokens.tolist()


def test_some_rows_of_the_logits_are_drawn(platform):
    logits = torch.randn(ROWS, 211, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    bits = np.random.default_rng(4).integers(-(2**31), 2**31, (3, 7)).astype(np.int32)
    sampler, some = Sampler(211, ROWS), np.array([5, 0, 2])
    for slot in range(ROWS):
        sampler.admit(slot, SlotSampling(temperature=1.0, seed=slot), 1)
    draws, positions = sampler.draws(tuple(some.tolist())), torch.tensor([9, 4, 6])
    expected = platform.sampling.draw(logits[some], draws, positions, None, 211, bits)
    found = platform.sampling.draw(logits, draws, positions, None, 211, bits, some)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == [False] * 3


def test_a_reduced_vocabulary_uses_the_noise_of_the_original_tokens(platform):
    ids = torch.randperm(4096, generator=torch.Generator().manual_seed(1))[:1500]
    logits = torch.randn(ROWS, len(ids), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    sampler = Sampler(4096, ROWS)
    for slot in range(ROWS):
        sampler.admit(slot, SlotSampling(temperature=0.8, seed=slot), 1)
    slots = tuple(range(ROWS))
    positions = torch.arange(ROWS) + 3
    found = platform.sampling.draw(logits, sampler.draws(slots), positions, ids, 4096)
    keys = keys_at(sampler.noise(slots).keys, positions)
    scores = logits.float() / 0.8 - exponential_noise(keys[:, None], ids.to(torch.int32)).log()
    assert found[0].tolist() == scores.argmax(-1).tolist()
