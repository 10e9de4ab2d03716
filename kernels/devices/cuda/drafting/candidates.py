"""The best tokens of each row of logits with their log-probabilities, in two passes: parts of a row, then the row.

A candidate is one int64 with its logit in the upper half and its id in the lower, so that one reduction finds the next
best of a part, and the lowest id among equals. A part also stores its share of the softmax's normalizer (Milakov and
Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["MAX_CANDIDATES", "Parts", "candidates", "find_parts", "merged", "ranked", "value_of"]

MAX_CANDIDATES = 8
"""The most candidates of a row. Each costs one more round over a part."""
_SMALL, _LARGE = 1024, 4096  # logits of a part: many parts fill the device, few are merged fast
_WIDE = 1 << 15  # logits from which large parts are used


@triton.jit
def ranked(x, number):
    """int64 keys ordered by ``x`` float32 without NaN, ties by descending ``number`` int32."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def value_of(key):
    """The inverse of ``ranked``: ``x`` and ``number``."""
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def candidate_parts_kernel(
    logits,
    keys,
    sums,
    stride,
    vocab,
    parts,
    top_k: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * block + tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    key = ranked(tl.where(x == x, x, -float("inf")), at)
    top = tl.max(x, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(sums + (row * parts + part) * 2, top)
    tl.store(sums + (row * parts + part) * 2 + 1, tl.sum(tl.exp(x - safe), 0))
    for index in tl.static_range(top_k):
        best = tl.max(key, 0)
        tl.store(keys + (row * parts + part) * top_k + index, best)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def merged(
    keys,
    sums,
    row,
    there,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    top_k: tl.constexpr,
    top_block: tl.constexpr,
    keys_block: tl.constexpr,
    lines: tl.constexpr,
):
    """The best candidates of the valid (``there``) keys ``row`` int64 [lines]: log-probabilities, at most 0, and ids,
    [lines, top_block] each, of which the first ``top_k`` are used."""
    every = tl.arange(0, keys_block)
    here = there[:, None] & (every < parts * top_k)[None, :]
    key = tl.load(keys + row[:, None] * (parts * top_k) + every[None, :], mask=here, other=-0x7FFFFFFFFFFFFFFF)
    part = tl.arange(0, parts_block)
    here = there[:, None] & (part < parts)[None, :]
    place = sums + (row[:, None] * parts + part[None, :]) * 2
    top = tl.load(place, mask=here, other=-float("inf"))  # requested before the candidates are processed
    share = tl.load(place + 1, mask=here, other=0.0)
    column = tl.arange(0, top_block)
    result = tl.full([lines, top_block], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for index in tl.static_range(top_k):
        best = tl.max(key, 1)
        result = tl.where((column == index)[None, :], best[:, None], result)
        key = tl.where(key == best[:, None], -0x7FFFFFFFFFFFFFFF, key)
    above = tl.max(top, 1)
    above = tl.where(above == -float("inf"), 0.0, above)
    total = tl.log(tl.sum(share * tl.exp(top - above[:, None]), 1)) + above
    value, number = value_of(result)
    score = value - total[:, None]
    return tl.where(score == score, tl.minimum(score, 0.0), -float("inf")), number


@triton.jit
def candidates_kernel(
    keys,
    sums,
    ids,
    scores,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    top_k: tl.constexpr,
    top_block: tl.constexpr,
    keys_block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    score, number = merged(keys, sums, row, row >= 0, parts, parts_block, top_k, top_block, keys_block, 1)
    column = tl.arange(0, top_block)[None, :]
    place = row[:, None] * top_k + column
    tl.store(ids + place, number.to(tl.int64), mask=column < top_k)
    tl.store(scores + place, score, mask=column < top_k)


class Parts:
    """The first pass's results for each row: ``keys`` int64 [rows, count * most], ``sums`` float32 [rows, count, 2]."""

    def __init__(self, keys: Tensor, sums: Tensor, count: int, top_k: int) -> None:
        self.keys, self.sums, self.count, self.top_k = keys, sums, count, top_k

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Numbers of parts and candidates, as arguments of ``merged``."""
        return (
            self.count,
            triton.next_power_of_2(self.count),
            self.top_k,
            triton.next_power_of_2(self.top_k),
            triton.next_power_of_2(self.count * self.top_k),
        )


def find_parts(logits: Tensor, top_k: int) -> Parts:
    """Run the first pass. ``logits`` [rows, vocab] with contiguous rows; ``top_k`` is at most MAX_CANDIDATES and the
    vocabulary."""
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    rows, vocab = logits.shape
    if not 0 < top_k <= min(MAX_CANDIDATES, vocab):
        raise ValueError(
            f"{top_k} candidates of {vocab} logits: there are up to {MAX_CANDIDATES}, and no more than logits"
        )
    block = _SMALL if vocab <= _WIDE else _LARGE
    count = triton.cdiv(vocab, block)
    keys = torch.empty((rows, count * top_k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, count, 2), dtype=torch.float32, device=logits.device)
    pdl = overlapping(logits.device)
    candidate_parts_kernel[(rows, count)](
        logits, keys, sums, logits.stride(0), vocab, count, top_k, block, pdl, num_warps=4, launch_pdl=pdl
    )
    return Parts(keys, sums, count, top_k)


def candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """``logits`` [rows, vocab] -> the ``top_k`` best ids int64 and their log-probabilities float32, at most 0 (a NaN
    counts as -inf), [rows, most] each, the best first, ties by the lowest id.
    """
    rows, vocab = logits.shape
    top_k = min(top_k, vocab)
    if top_k > MAX_CANDIDATES:
        values, chosen = logits.topk(top_k)
        return chosen, values.float() - logits.float().logsumexp(-1, keepdim=True)
    result, pdl = find_parts(logits, top_k), overlapping(logits.device)
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    scores = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    candidates_kernel[(rows,)](result.keys, result.sums, ids, scores, *result.sizes, pdl, num_warps=4, launch_pdl=pdl)
    return ids, scores
