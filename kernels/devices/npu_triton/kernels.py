"""The kernels, in the part of Triton that Triton-Ascend documents: loads, stores, elementwise arithmetic, reductions
and a running sum, without what is particular to GPUs.

A vector core has 192 KB of memory: tiles are small, and ``split_norm_rope_cache`` runs one program a core, in a loop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["draw", "split_norm_rope_cache"]

_TILE = 4096  # numbers of half heads at a time
_VOCAB = 2048  # logits at a time
_LANES = tl.constexpr(32)  # token ids that share a first exponential: kernels.core.noise.BLOCK


@triton.jit
def _turned_heads(
    qkv,
    weight,
    at,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    eps,
    first,
    heads,
    dim: tl.constexpr,
    half_block: tl.constexpr,
    block: tl.constexpr,
    normed: tl.constexpr,
):
    """Heads ``first .. first + block`` of the token at ``at``, those below ``heads``: normed and rotated halves."""
    half: tl.constexpr = dim // 2
    head, lane = first + tl.arange(0, block), tl.arange(0, half_block)
    mask = (head < heads)[:, None] & (lane < half)[None, :]
    place = head[:, None] * dim + lane[None, :]
    low = tl.load(qkv + at + place, mask=mask, other=0.0)
    high = tl.load(qkv + at + place + half, mask=mask, other=0.0)
    dtype = low.dtype
    x, y = low.to(tl.float32), high.to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / dim + eps)[:, None]
        x = x * scale * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + place + half, mask=mask, other=0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    low = (x * cos_low[None, :] - y * sin_low[None, :]).to(dtype)
    high = (y * cos_high[None, :] + x * sin_high[None, :]).to(dtype)
    return low, high, mask


@triton.jit(do_not_specialize=["tokens"])
def split_norm_rope_cache_kernel(
    qkv,
    weight,
    cos,
    sin,
    queries,
    key_cache,
    value_cache,
    index,
    eps,
    tokens,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    half_block: tl.constexpr,
    block: tl.constexpr,
    kv_block: tl.constexpr,
    normed: tl.constexpr,
):
    half: tl.constexpr = dim // 2
    every: tl.constexpr = heads + 2 * kv_heads
    lane = tl.arange(0, half_block)
    there = lane < half
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = token * (every * dim)
        cos_low = tl.load(cos + token * dim + lane, mask=there, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + token * dim + half + lane, mask=there, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + token * dim + lane, mask=there, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + token * dim + half + lane, mask=there, other=0.0).to(tl.float32)
        for first in tl.static_range(0, heads, block):
            low, high, mask = _turned_heads(
                qkv,
                weight,
                at,
                cos_low,
                cos_high,
                sin_low,
                sin_high,
                eps,
                first,
                heads,
                dim,
                half_block,
                block,
                normed,
            )
            place = (first + tl.arange(0, block))[:, None] * dim + lane[None, :]
            tl.store(queries + token * (heads * dim) + place, low, mask=mask)
            tl.store(queries + token * (heads * dim) + place + half, high, mask=mask)
        line = tl.load(index + token).to(tl.int64) * (kv_heads * width)
        for first in tl.static_range(0, kv_heads, kv_block):
            low, high, mask = _turned_heads(
                qkv,
                weight,
                at,
                cos_low,
                cos_high,
                sin_low,
                sin_high,
                eps,
                heads + first,
                heads + kv_heads,
                dim,
                half_block,
                kv_block,
                normed,
            )
            head = first + tl.arange(0, kv_block)
            place = head[:, None] * width + lane[None, :]
            tl.store(key_cache + line + place, low.to(key_cache.dtype.element_ty), mask=mask)
            tl.store(key_cache + line + place + half, high.to(key_cache.dtype.element_ty), mask=mask)
            value = qkv + at + (heads + kv_heads + head)[:, None] * dim + lane[None, :]
            low, high = tl.load(value, mask=mask, other=0.0), tl.load(value + half, mask=mask, other=0.0)
            tl.store(value_cache + line + place, low.to(value_cache.dtype.element_ty), mask=mask)
            tl.store(value_cache + line + place + half, high.to(value_cache.dtype.element_ty), mask=mask)


def split_norm_rope_cache(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index: Tensor,
    heads: int,
    programs: int,
) -> Tensor:
    """As ``reference.split_norm_rope_cache``, by at most ``programs`` programs. All tensors are contiguous."""
    tokens, every, dim = qkv.shape
    kv_heads = (every - heads) // 2
    half_block = triton.next_power_of_2(dim // 2)
    largest = max(1, _TILE // half_block)
    queries = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    split_norm_rope_cache_kernel[(min(tokens, programs),)](
        qkv,
        qkv if weight is None else weight,
        cos,
        sin,
        queries,
        key_cache,
        value_cache,
        index,
        eps,
        tokens,
        heads,
        kv_heads,
        dim,
        key_cache.shape[3],
        half_block,
        min(triton.next_power_of_2(heads), largest),
        min(triton.next_power_of_2(kv_heads), largest),
        weight is not None,
    )
    return queries


@triton.jit
def _mix(h):
    """kernels.core.noise: int32 that wraps; shifts keep the sign."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _exponential(h):
    """Exp(1) of a hash: -log1p(-u), with a logarithm alone. The rounding of 1 - u is taken out again."""
    u = tl.minimum(((h & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    rest = 1.0 - u
    gone = 1.0 - rest
    exact = gone == 0.0
    return tl.where(exact, u, -tl.log(rest) * (u / tl.where(exact, 1.0, gone)))


@triton.jit
def _order(x, shift: tl.constexpr):
    """Integers in the order of floats; of bfloat16 (``shift`` 16) the upper half of them."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: both zeros are one number
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def _logits(row, at, vocab):
    """Logits as float32, -inf behind the last; NaN becomes infinity, which fails the row."""
    x = tl.load(row + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _largest(row, vocab, block: tl.constexpr):
    """The greatest logit and its lowest id."""
    best, token = -float("inf"), 0
    for start in tl.range(0, vocab, block):
        at = start + tl.arange(0, block)
        x = _logits(row, at, vocab)
        here = tl.max(x, 0)
        id_ = tl.min(tl.where(x == here, at, 2147483647), 0)
        token = tl.where(here > best, id_, token)
        best = tl.maximum(best, here)
    return best, token


@triton.jit
def _kth(row, vocab, top_k, best, shift: tl.constexpr, block: tl.constexpr):
    """The ``_order`` of the k-th greatest logit, and how many are greater: halves the interval that it lies in."""
    low, high, above = tl.full((), -2147483648, tl.int32), _order(best, shift), tl.full((), 0, tl.int32)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.full((), 0, tl.int32)
        for start in tl.range(0, vocab, block):
            at = start + tl.arange(0, block)
            greater = (_order(_logits(row, at, vocab), shift) > middle) & (at < vocab)
            count += tl.sum(greater.to(tl.int32), 0)
        fewer = count < top_k
        high = tl.where(fewer, middle, high)
        above = tl.where(fewer, count, above)
        low = tl.where(fewer, low, middle + 1)
    return high, above


@triton.jit
def _top_k(row, vocab, top_k, best, temperature, shift: tl.constexpr, block: tl.constexpr):
    """Value and id of the last of the k tokens, and the weight of all of them."""
    border, above = _kth(row, vocab, top_k, best, shift, block)
    left = top_k - above
    floor, floor_id, total = -float("inf"), tl.full((), -1, tl.int32), 0.0
    for start in tl.range(0, vocab, block):
        at = start + tl.arange(0, block)
        x = _logits(row, at, vocab)
        order = _order(x, shift)
        tied = (order == border) & (at < vocab)
        rank = tl.cumsum(tied.to(tl.int32), 0)
        chosen = tied & (rank <= left)
        left -= tl.sum(tied.to(tl.int32), 0)
        floor = tl.maximum(floor, tl.max(tl.where(tied, x, -float("inf")), 0))
        floor_id = tl.maximum(floor_id, tl.max(tl.where(chosen, at, -1), 0))
        weight = tl.exp((x - best) / temperature)
        total += tl.sum(tl.where((order > border) | chosen, weight, 0.0), 0)
    return floor, floor_id, total


@triton.jit
def _weight_before(row, vocab, value, token, best, temperature, block: tl.constexpr):
    """The weight of the tokens before one, in descending order, ties by id."""
    total = 0.0
    for start in tl.range(0, vocab, block):
        at = start + tl.arange(0, block)
        x = _logits(row, at, vocab)
        before = ((x > value) | ((x == value) & (at < token))) & (at < vocab)
        total += tl.sum(tl.where(before, tl.exp((x - best) / temperature), 0.0), 0)
    return total


@triton.jit
def _choose(row, vocab, first_key, second_key, best, temperature, least, floor, floor_id, block: tl.constexpr):
    """The token of the greatest score, and its logit."""
    top, token, value = -float("inf"), tl.full((), 0, tl.int32), -float("inf")
    members: tl.constexpr = block // _LANES
    lane = tl.arange(0, _LANES)[None, :]
    for start in tl.range(0, vocab, block):
        group = start // _LANES + tl.arange(0, members)[:, None]
        at = group * _LANES + lane
        x = _logits(row, at, vocab)
        h = _mix(_mix(first_key - 1 - group) + second_key)  # -1 - group: the bits of group, inverted
        owner = _mix(h ^ 1540483477) & (_LANES - 1)
        waits = _exponential(_mix(_mix(first_key + at) + second_key))
        noise = _exponential(h) * 0.03125 + tl.where(lane == owner, 0.0, waits)
        score = (x - best) / temperature - tl.log(noise)
        kept = ((x > floor) | ((x == floor) & (at <= floor_id))) & (x >= least) & (at < vocab)
        score = tl.where(kept, score, -float("inf"))
        here = tl.max(tl.max(score, 1), 0)
        winner = tl.where(kept & (score == here), at, 2147483647)
        id_ = tl.min(tl.min(winner, 1), 0)
        its = tl.max(tl.max(tl.where(at == id_, x, -float("inf")), 1), 0)
        token = tl.where(here > top, id_, token)
        value = tl.where(here > top, its, value)
        top = tl.maximum(top, here)
    return token, value


@triton.jit
def draw_kernel(logits, draws, floats, positions, tokens, nonfinite, vocab, shift: tl.constexpr, block: tl.constexpr):
    """One program a row. Top-p needs no order of the logits: a token is drawn from all, and again from those before it
    while the weight of these reaches p, which leaves the distribution and the token as if the others were cut."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * vocab
    best, token = _largest(row, vocab, block)
    temperature = tl.load(floats + number * 6 + 2)
    if temperature > 0.0:
        at = tl.load(positions + number).to(tl.int32)
        first_key = tl.load(draws + number * 6) + at * -1640531527
        second_key = tl.load(draws + number * 6 + 1) + at * 2146121005
        least = best + temperature * tl.load(floats + number * 6 + 3)
        top_p, top_k = tl.load(floats + number * 6 + 4), tl.load(draws + number * 6 + 5)
        floor, floor_id, total = -float("inf"), vocab + 0, 0.0
        if top_k > 0:
            floor, floor_id, total = _top_k(row, vocab, top_k, best, temperature, shift, block)
        elif top_p < 1.0:
            total = _weight_before(row, vocab, -float("inf"), vocab, best, temperature, block)
        searching = 1
        while searching > 0:
            token, value = _choose(row, vocab, first_key, second_key, best, temperature, least, floor, floor_id, block)
            searching = 0
            if top_p < 1.0:
                before = _weight_before(row, vocab, value, token, best, temperature, block)
                if (before > 0.0) & (before >= top_p * total):
                    searching = 1
                    floor = value
                    floor_id = token - 1
    fails = (best == float("inf")) | (best == -float("inf"))
    tl.store(tokens + number, tl.where(fails, 0, token).to(tl.int64))
    tl.store(nonfinite + number, fails.to(tl.int8))


def draw(logits: Tensor, draws: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.draw``. All tensors are contiguous."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    nonfinite = torch.empty(rows, dtype=torch.int8, device=logits.device)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    draw_kernel[(rows,)](logits, draws, draws.view(torch.float32), positions, tokens, nonfinite, vocab, shift, _VOCAB)
    return tokens, nonfinite.view(torch.bool)
