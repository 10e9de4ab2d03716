"""The most likely token of each row of logits, in one pass over them, and masks that forbid tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["Largest", "best_of", "find_largest", "greedy_tokens", "mask_logits"]

_BLOCK = 4096


@triton.jit(do_not_specialize=["keeps"])  # so that it is compiled once
def argmax_parts_kernel(logits, kept, values, ids, vocab, parts, keeps, block: tl.constexpr, pdl: tl.constexpr):
    """``keeps``, 0 or 1: whether the logits are also copied to ``kept``."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * block + tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf"))
    tl.store(kept + row * vocab + at, x, mask=(at < vocab) & (keeps > 0))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN becomes infinity, which fails the row
    best = tl.max(x, 0)
    tl.store(values + row * parts + part, best)
    tl.store(ids + row * parts + part, tl.min(tl.where(x == best, at, 2147483647), 0))


@triton.jit
def best_of(values, ids, row, parts, block: tl.constexpr):
    """The token of a row of ``Largest``, and whether the row fails: see ``greedy_tokens``."""
    at = tl.arange(0, block)
    value = tl.load(values + row * parts + at, mask=at < parts, other=-float("inf"))
    id_ = tl.load(ids + row * parts + at, mask=at < parts, other=2147483647)
    best = tl.max(value, 0)
    fails = (best == float("inf")) | (best == -float("inf"))
    return tl.where(fails, 0, tl.min(tl.where(value == best, id_, 2147483647), 0)), fails


@triton.jit
def argmax_kernel(values, ids, tokens, nonfinite, parts, block: tl.constexpr, pdl: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token, fails = best_of(values, ids, row, parts, block)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(nonfinite + row, fails.to(tl.int8))


class Largest(NamedTuple):
    """The maximum of each part of a row of logits: ``values`` float32 [rows, parts], infinity for NaN, and ``ids``
    int32 [rows, parts], the lowest of ties."""

    values: Tensor
    ids: Tensor


def find_largest(logits: Tensor, kept: Tensor | None = None) -> Largest:
    """Compute it for ``logits`` [rows, vocab], contiguous; they are also copied to ``kept``, of the same shape, if
    given."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    pdl = overlapping(logits.device)
    argmax_parts_kernel[(rows, parts)](
        logits,
        logits if kept is None else kept,
        values,
        ids,
        vocab,
        parts,
        int(kept is not None),
        _BLOCK,
        pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return Largest(values, ids)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``logits`` [rows, vocab] -> token ids int64 [rows], the lowest of ties, and bool [rows]: whether the row contains
    NaN or +inf, or only -inf; its token is then 0.
    """
    values, ids = find_largest(logits.contiguous())
    rows, parts = values.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    nonfinite = torch.empty(rows, dtype=torch.int8, device=logits.device)
    pdl = overlapping(logits.device)
    argmax_kernel[(rows,)](
        values, ids, tokens, nonfinite, parts, triton.next_power_of_2(parts), pdl, num_warps=1, launch_pdl=pdl
    )
    return tokens, nonfinite.view(torch.bool)


@triton.jit
def mask_logits_kernel(logits, packed, vocab, stride, block: tl.constexpr):
    mask = packed + tl.program_id(0).to(tl.int64) * stride
    at = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(mask).to(tl.int64)
    word = tl.load(mask + 1 + at // 32, mask=at < vocab, other=-1)
    forbidden = (word >> (at % 32)) & 1 == 0
    tl.store(logits + row * vocab + at, -float("inf"), mask=(at < vocab) & forbidden)


def mask_logits(logits: Tensor, packed: Tensor) -> None:
    """Set forbidden tokens of ``logits`` [rows, vocab], contiguous, to -inf. ``packed`` int32 [n, 1 + words]: in each
    row the index of a row of logits, then a bit a token, the lowest first, set where it is allowed."""
    vocab = logits.shape[1]
    mask_logits_kernel[(len(packed), triton.cdiv(vocab, _BLOCK))](
        logits, packed, vocab, packed.shape[1], _BLOCK, num_warps=8
    )
