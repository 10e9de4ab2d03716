"""The sampling noise: its distribution, what it depends on, and the argmax with it."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.core.logit_blocks import block_maxima
from kernels.core.noise import BLOCK, exponential_noise, gumbel_argmax, gumbel_argmax_over_all, keys_at, seed_key


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def keys(seed: int, position: int) -> torch.Tensor:
    return keys_at(torch.tensor([seed_key(seed)], dtype=torch.int32), torch.tensor([position]))


def noise(seed: int, position: int, count: int) -> torch.Tensor:
    return exponential_noise(keys(seed, position), torch.arange(count, dtype=torch.int32))


def by_definition(seed: int, position: int, token: int) -> float:
    """The noise in plain integers, as the module's text says it."""

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    z ^= z >> 31
    first = (z + position * 0x9E3779B9) % 2**32
    second = ((z >> 32) + position * 0x7FEB352D) % 2**32

    def hashed(counter: int) -> int:
        return mix((mix((counter + first) % 2**32) + second) % 2**32)

    def exponential(h: int) -> float:
        return -math.log1p(-min((h % 2**31 + 0.5) / 2**31, 1 - 2**-24))

    block = hashed(-1 - token // 32)
    earliest = exponential(block) / 32
    return earliest if mix(block ^ 0x5BD1E995) % 32 == token % 32 else earliest + exponential(hashed(token))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1234, 7), (2**64 - 1, 131071), (-1, 2**20), (2**63, 3)])
def test_the_noise_is_what_the_definition_says(seed, position):
    """Also on another device and in a later version: a restarted request relies on it."""
    ids = [0, 1, 31, 32, 33, 1000, 151935, 2**20]
    found = exponential_noise(keys(seed, position), torch.tensor(ids, dtype=torch.int32))
    assert found.tolist() == pytest.approx([by_definition(seed, position, token) for token in ids], rel=1e-5)
    if (seed, position) == (1234, 7):
        assert noise(1234, 7, 4).tolist() == pytest.approx([1.268339, 1.359572, 0.110491, 2.594293], abs=1e-5)


def test_noise_is_independent_exponentials():
    count = BLOCK * 4096
    sample = noise(5, 3, count).double()
    assert float(sample.min()) > 0
    # Kolmogorov and Smirnov's distance to 1 - exp(-x); 1.63 / sqrt(n) is passed by 1 % of true samples.
    ordered = sample.sort().values
    theory = 1 - torch.exp(-ordered)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((theory - steps).abs().max()) < 1.63 / math.sqrt(count)
    # Within a block the exponentials are uncorrelated although they are built from its first one.
    table = sample.view(-1, BLOCK)
    correlation = torch.corrcoef(table.T) - torch.eye(BLOCK)
    assert float(correlation.abs().max()) < 5.0 / math.sqrt(len(table))
    # The least one of a block is exponential with rate 32, at a uniform member.
    assert float(table.amin(-1).mean()) == pytest.approx(1 / BLOCK, rel=0.08)
    owners = torch.bincount(table.argmin(-1), minlength=BLOCK).double()
    expected = len(table) / BLOCK
    assert float(((owners - expected) ** 2 / expected).sum()) < 61.1  # chi-square, 31 degrees, 0.1 %


@pytest.mark.parametrize("other", [(5, 4), (6, 3), (5 + 2**32, 3), (5 + 2**63, 3), (-5, 3), (5, 3 + 2**20)])
def test_seed_and_position_change_the_noise(other):
    a, b = noise(5, 3, 4096), noise(*other, 4096)
    assert float((a == b).float().mean()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.08


def test_neighbouring_positions_do_not_shift_the_noise():
    a, b = noise(5, 100, 3000).exp(), noise(5, 101, 3000).exp()
    for shift in (1, 2, 31, 32, 33):
        assert float((a[shift:] == b[:-shift]).float().mean()) < 0.01


def test_a_token_has_the_same_noise_in_any_batch():
    ids = torch.tensor([900, 3, 31, 32, 77], dtype=torch.int32)
    row = keys(11, 4)
    together = exponential_noise(row, ids)
    alone = torch.stack([exponential_noise(row, ids[i : i + 1])[0] for i in range(len(ids))])
    everything = exponential_noise(row, torch.arange(1000, dtype=torch.int32))[ids.long()]
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(together, everything, rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab", [5, 32, 33, 1000, 4099])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 30.0])
def test_the_race_that_prunes_finds_the_winner_of_all(vocab, spread):
    generator = torch.Generator().manual_seed(vocab)
    count = 24
    logits = torch.randn(count, vocab, generator=generator) * spread
    logits[3, : vocab // 2] = -torch.inf
    blocks = block_maxima(logits)
    row_max = blocks.amax(-1)
    row_keys = torch.cat([keys(seed, 9) for seed in range(count)])
    temperature = torch.linspace(0.05, 3.0, count)
    rows = torch.arange(count)
    floor = torch.where(rows % 3 == 0, logits.median(-1).values, -torch.inf)
    floor_id = torch.where(rows % 2 == 0, vocab, vocab // 2)
    found = gumbel_argmax(logits, rows, blocks, row_max, row_keys, temperature, floor, floor_id)
    assert torch.equal(found, gumbel_argmax_over_all(logits, rows, row_max, row_keys, temperature, floor, floor_id))
    scores = (logits - row_max[:, None]) / temperature[:, None] - torch.stack(
        [noise(s, 9, vocab) for s in range(count)]
    ).log()
    kept = (logits > floor[:, None]) | ((logits == floor[:, None]) & (torch.arange(vocab) <= floor_id[:, None]))
    assert torch.equal(found, scores.masked_fill(~kept, -torch.inf).argmax(-1))
