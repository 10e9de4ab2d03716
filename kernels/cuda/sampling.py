"""Greedy sampling: the likeliest token of each row of logits, in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.launch import overlapping

__all__ = ["likeliest"]

_BLOCK = 4096


@triton.jit
def _parts(logits, values, ids, vocab, parts, block: tl.constexpr, pdl: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * block + tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a NaN ends up as what fails the row
    best = tl.max(x, 0)
    tl.store(values + row * parts + part, best)
    tl.store(ids + row * parts + part, tl.min(tl.where(x == best, at, 2147483647), 0))


@triton.jit
def _whole(values, ids, tokens, broken, parts, block: tl.constexpr, pdl: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(values + row * parts + at, mask=at < parts, other=-float("inf"))
    id_ = tl.load(ids + row * parts + at, mask=at < parts, other=2147483647)
    best = tl.max(value, 0)
    fails = (best == float("inf")) | (best == -float("inf"))
    token = tl.min(tl.where(value == best, id_, 2147483647), 0)
    tl.store(tokens + row, tl.where(fails, 0, token).to(tl.int64))
    tl.store(broken + row, fails.to(tl.int8))


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``logits`` [rows, vocab] -> token ids int64 [rows], the lowest of equals, and bool [rows]: the row holds a NaN or
    +inf, or nothing but -inf; its token is then 0.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    broken = torch.empty(rows, dtype=torch.int8, device=logits.device)
    pdl = overlapping(logits.device)
    _parts[(rows, parts)](logits, values, ids, vocab, parts, _BLOCK, pdl, num_warps=8, launch_pdl=pdl)
    _whole[(rows,)](values, ids, tokens, broken, parts, triton.next_power_of_2(parts), pdl, num_warps=1, launch_pdl=pdl)
    return tokens, broken.view(torch.bool)
