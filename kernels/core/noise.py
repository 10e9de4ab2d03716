"""The sampling noise: a counter-based function of (seed, position, token id) and of nothing else.

Sampling from softmax(s) is the Gumbel-max trick: with independent ``E_i ~ Exp(1)``, the token that maximises
``s_i - log E_i`` has probability ``softmax(s)_i`` (Gumbel 1954, Maddison et al., "A* Sampling", 2014, section 2;
``-log E_i`` is Gumbel noise). The noise comes from integer hashes, so a token's is the same in any batch, after any
restart and on any device.

The exponentials are made in blocks of 32 consecutive ids, from the top down: the earliest of a block is ``Exp(32)`` at
a uniformly drawn member, and the others follow it by fresh ``Exp(1)`` waits, because the exponential distribution has
no memory. The result is 32 independent exponentials again, but a whole block can be ruled out by one hash: see
``gumbel_argmax``.

The mixer is the finalizer of MurmurHash3 (A. Appleby, public domain), two rounds, each with 32 bits of key. All integer
arithmetic is int32 and wraps: accelerators that lack 64-bit integers compute the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "block_noise",
    "exponential_noise",
    "gumbel_argmax",
    "gumbel_argmax_over_all",
    "host_keys_at",
    "keys_at",
    "noise_over_all",
    "seed_key",
    "uniform",
]

BLOCK = 32  # token ids that share a first exponential; a power of two
BLOCK_BITS = 5

_MASK64 = (1 << 64) - 1
_SLACK = 1e-3  # of a score: covers a last-bit difference between two evaluations of the same logarithm


def _signed(value: int) -> int:
    """The low 32 bits of ``value`` as a signed integer."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def seed_key(seed: int) -> tuple[int, int]:
    """The two int32 round keys of a 64-bit seed: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, figure 16)."""
    z = (seed + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return _signed(z), _signed(z >> 32)


def keys_at(seed_keys: Tensor, positions: Tensor) -> Tensor:
    """Round keys of each row: int32 [rows, 2] from the seeds' keys int32 [rows, 2] and positions int64 [rows]."""
    at = positions.to(torch.int32)
    return seed_keys + torch.stack((at * _signed(0x9E3779B9), at * _signed(0x7FEB352D)), dim=1)


def host_keys_at(seed_keys: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """``keys_at`` of arrays."""
    steps = np.array([0x9E3779B9, 0x7FEB352D], np.uint32)
    return (seed_keys.view(np.uint32) + positions.astype(np.uint32)[:, None] * steps).view(np.int32)


def _mix(h: Tensor) -> Tensor:
    """MurmurHash3's fmix32, in place. Shifts of int32 keep the sign, so the bits it brings in are cut off."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    h.bitwise_xor_((h >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def _hash(keys: Tensor, counters: Tensor) -> Tensor:
    """int32 hashes; keys int32 [..., 2] whose leading dimensions broadcast against counters int32 [...]."""
    return _mix(_mix(counters + keys[..., 0]).add_(keys[..., 1]))


def _exponential(h: Tensor) -> Tensor:
    """Exp(1) in float32 from 31 bits: early times, the ones that win, keep their full precision."""
    u = (h & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_()


def block_noise(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The least exponential float32 of each block, and the hash it came from; keys [..., 2] broadcast against blocks
    [...]."""
    h = _hash(keys, torch.bitwise_not(blocks))  # negative counters: never a token's
    return _exponential(h).mul_(1.0 / BLOCK), h


def noise_over_all(keys: Tensor, vocab: int) -> Tensor:
    """``exponential_noise`` float32 [rows, vocab] of all ids, for keys int32 [rows, 2]; what the ids of a block share
    is computed once."""
    blocks = -(-vocab // BLOCK)
    ids = torch.arange(blocks * BLOCK, dtype=torch.int32, device=keys.device).view(blocks, BLOCK)
    first, block_hash = block_noise(keys[:, None], ids[:, 0] >> BLOCK_BITS)
    noise = _token_noise(keys[:, None, None], ids, first[..., None], block_hash[..., None])
    return noise.flatten(1)[:, :vocab]


def _token_noise(keys: Tensor, ids: Tensor, first: Tensor, block_hash: Tensor) -> Tensor:
    owner = _mix(block_hash ^ 0x5BD1E995).bitwise_and_(BLOCK - 1)
    return torch.where((ids & (BLOCK - 1)) == owner, first, first + _exponential(_hash(keys, ids)))


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """The exponential noise float32 of token ids int32 [...]; keys int32 [..., 2] broadcast against them. Always above
    0."""
    return _token_noise(keys, ids, *block_noise(keys, ids >> BLOCK_BITS))


def uniform(keys: Tensor) -> Tensor:
    """A number float32 [rows] in 0 .. 1 of each row's keys int32 [rows, 2] that no token's noise depends on."""
    counter = torch.full(keys.shape[:-1], 1 << 30, dtype=torch.int32, device=keys.device)
    return (_hash(keys, counter) & 0x7FFFFFFF).to(torch.float32).mul_(2.0**-31)


def _kept(values: Tensor, ids: Tensor, floor: Tensor, floor_id: Tensor, vocab: int) -> Tensor:
    return ((values > floor) | ((values == floor) & (ids <= floor_id))) & (ids < vocab)


def gumbel_argmax_over_all(
    logits: Tensor, rows: Tensor, row_max: Tensor, keys: Tensor, temperature: Tensor, floor: Tensor, floor_id: Tensor
) -> Tensor:
    """What ``gumbel_argmax`` returns, by looking at every token: fixed shapes and no wait for the device."""
    vocab = logits.shape[1]
    values = logits[rows].float()
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    scores = (values - row_max[:, None]) / temperature[:, None] - noise_over_all(keys, vocab).log_()
    scores.masked_fill_(~_kept(values, ids, floor[:, None], floor_id[:, None], vocab), -torch.inf)
    return scores.argmax(-1)


def gumbel_argmax(
    logits: Tensor,
    rows: Tensor,
    block_max: Tensor,
    row_max: Tensor,
    keys: Tensor,
    temperature: Tensor,
    floor: Tensor,
    floor_id: Tensor,
) -> Tensor:
    """One sampled token id int64 [n] for each of the ``rows`` int64 [n] of ``logits`` [all rows, vocab].

    block_max float32 [n, blocks]: maxima over blocks of 32 ids; row_max float32 [n]; keys int32 [n, 2]; temperature
    float32 [n], above 0. Tokens below ``floor`` float32 [n], and tokens equal to it with an id above ``floor_id`` int64
    [n], do not take part. A row whose maximum is not finite gets ``vocab``, which is no token.

    Exact, and cheap: no token of a block can beat ``block_max / temperature - log(least exponential)``, so only blocks,
    and in them tokens, whose bound reaches the score of a token already seen are looked at.
    """
    vocab, blocks = logits.shape[1], block_max.shape[1]
    flat = logits.reshape(-1)
    first, block_hash = block_noise(keys[:, None], torch.arange(blocks, dtype=torch.int32, device=logits.device))
    bound = ((block_max - row_max[:, None]) / temperature[:, None]).sub_(first.log())
    bound.masked_fill_(block_max < floor[:, None], -torch.inf)
    lanes = torch.arange(BLOCK, device=logits.device)

    # A good score to start from: the best of the block with the argmax and of the block with the best bound.
    near = torch.stack((block_max.argmax(-1), bound.argmax(-1)), dim=1)
    ids = (near[:, :, None] * BLOCK + lanes).flatten(1)
    values = flat[(rows[:, None] * vocab + ids.clamp(max=vocab - 1))].float()
    score = (values - row_max[:, None]) / temperature[:, None] - exponential_noise(keys[:, None], ids.int()).log_()
    score.masked_fill_(~_kept(values, ids, floor[:, None], floor_id[:, None], vocab), -torch.inf)
    reached = score.amax(-1) - _SLACK

    at, block = torch.nonzero(bound >= reached[:, None], as_tuple=True)
    ids = block[:, None] * BLOCK + lanes
    values = flat[rows[at, None] * vocab + ids.clamp(max=vocab - 1)].float()
    best = ((values - row_max[at, None]) / temperature[at, None]).sub_(first[at, block].log_()[:, None])
    open_ = _kept(values, ids, floor[at, None], floor_id[at, None], vocab) & (best >= reached[at, None])

    pair, lane = torch.nonzero(open_, as_tuple=True)
    at, block = at[pair], block[pair]
    ids = block * BLOCK + lane
    waits = _token_noise(keys[at], ids.int(), first[at, block], block_hash[at, block])
    score = ((values[pair, lane] - row_max[at]) / temperature[at]).sub_(waits.log_())
    winner = torch.full_like(row_max, -torch.inf).scatter_reduce_(0, at, score, "amax")
    tied = torch.where(score == winner[at], ids, vocab)
    return torch.full_like(rows, vocab).scatter_reduce_(0, at, tied, "amin")
