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

__all__ = ["MOST", "Parts", "candidates", "find_parts", "merged", "ranked", "value_of"]

MOST = 8
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
    most: tl.constexpr,
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
    for index in tl.static_range(most):
        best = tl.max(key, 0)
        tl.store(keys + (row * parts + part) * most + index, best)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)


@triton.jit
def merged(
    keys,
    sums,
    row,
    there,
    parts: tl.constexpr,
    parts_block: tl.constexpr,
    most: tl.constexpr,
    most_block: tl.constexpr,
    keys_block: tl.constexpr,
    lines: tl.constexpr,
):
    """The best candidates of the valid (``there``) keys ``row`` int64 [lines]: log-probabilities, at most 0, and ids,
    [lines, most_block] each, of which the first ``most`` are used."""
    every = tl.arange(0, keys_block)
    here = there[:, None] & (every < parts * most)[None, :]
    key = tl.load(keys + row[:, None] * (parts * most) + every[None, :], mask=here, other=-0x7FFFFFFFFFFFFFFF)
    part = tl.arange(0, parts_block)
    here = there[:, None] & (part < parts)[None, :]
    place = sums + (row[:, None] * parts + part[None, :]) * 2
    top = tl.load(place, mask=here, other=-float("inf"))  # requested before the candidates are processed
    share = tl.load(place + 1, mask=here, other=0.0)
    column = tl.arange(0, most_block)
    result = tl.full([lines, most_block], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for index in tl.static_range(most):
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
    most: tl.constexpr,
    most_block: tl.constexpr,
    keys_block: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    score, number = merged(keys, sums, row, row >= 0, parts, parts_block, most, most_block, keys_block, 1)
    column = tl.arange(0, most_block)[None, :]
    place = row[:, None] * most + column
    tl.store(ids + place, number.to(tl.int64), mask=column < most)
    tl.store(scores + place, score, mask=column < most)


class Parts:
    """The first pass's results for each row: ``keys`` int64 [rows, count * most], ``sums`` float32 [rows, count, 2]."""

    def __init__(self, keys: Tensor, sums: Tensor, count: int, most: int) -> None:
        self.keys, self.sums, self.count, self.most = keys, sums, count, most

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Numbers of parts and candidates, as arguments of ``merged``."""
        return (
            self.count,
            triton.next_power_of_2(self.count),
            self.most,
            triton.next_power_of_2(self.most),
            triton.next_power_of_2(self.count * self.most),
        )


def find_parts(logits: Tensor, most: int) -> Parts:
    """Run the first pass. ``logits`` [rows, vocab] with contiguous rows; ``most`` is at most MOST and the
    vocabulary."""
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    rows, vocab = logits.shape
    if not 0 < most <= min(MOST, vocab):
        raise ValueError(f"{most} candidates of {vocab} logits: there are up to {MOST}, and no more than logits")
    block = _SMALL if vocab <= _WIDE else _LARGE
    count = triton.cdiv(vocab, block)
    keys = torch.empty((rows, count * most), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, count, 2), dtype=torch.float32, device=logits.device)
    pdl = overlapping(logits.device)
    candidate_parts_kernel[(rows, count)](
        logits, keys, sums, logits.stride(0), vocab, count, most, block, pdl, num_warps=4, launch_pdl=pdl
    )
    return Parts(keys, sums, count, most)


def candidates(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """``logits`` [rows, vocab] -> the ``most`` best ids int64 and their log-probabilities float32, at most 0 (a NaN
    counts as -inf), [rows, most] each, the best first, ties by the lowest id.
    """
    rows, vocab = logits.shape
    most = min(most, vocab)
    if most > MOST:
        values, chosen = logits.topk(most)
        return chosen, values.float() - logits.float().logsumexp(-1, keepdim=True)
    result, pdl = find_parts(logits, most), overlapping(logits.device)
    ids = torch.empty((rows, most), dtype=torch.int64, device=logits.device)
    scores = torch.empty((rows, most), dtype=torch.float32, device=logits.device)
    candidates_kernel[(rows,)](result.keys, result.sums, ids, scores, *result.sizes, pdl, num_warps=4, launch_pdl=pdl)
    return ids, scores
