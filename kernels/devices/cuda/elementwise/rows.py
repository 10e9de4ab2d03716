"""Adds, copies and looks up rows, with kernels that start while the previous kernel ends.

torch's kernels do not support that (programmatic dependent launch), and so delay the next kernel: a product would wait
for the first bytes of its weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.devices.cuda.launch import overlapping

__all__ = ["add_rows", "look_up"]

_BLOCK = 1024  # numbers of a program


@triton.jit
def add_rows_kernel(
    x,
    y,
    out,
    x_stride,
    y_stride,
    out_stride,
    width,
    block: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = at < width
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + at, mask=here, other=0.0)
    if adds:
        value = value.to(tl.float32) + tl.load(y + row * y_stride + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def embedding_kernel(ids, table, out, stride, width, vocab, block: tl.constexpr, pdl: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    here = at < width
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(ids + row).to(tl.int64)
    known = (number >= 0) & (number < vocab)
    value = tl.load(table + number * stride + at, mask=here & known, other=0.0)
    tl.store(out + row * width + at, value, mask=here)


def add_rows(x: Tensor, y: Tensor | None, out: Tensor) -> None:
    """``out`` = ``x`` + ``y``, rounded once, or a copy of ``x``; all [tokens, width], each dense within its rows, which
    may be part of wider ones.
    """
    rows, width = x.shape
    pdl = overlapping(x.device)
    add_rows_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x,
        x if y is None else y,
        out,
        x.stride(0),
        x.stride(0) if y is None else y.stride(0),
        out.stride(0),
        width,
        _BLOCK,
        y is not None,
        pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """The rows ``ids`` int [tokens], dense, of ``table`` [vocab, width], its rows dense -> [tokens, width]; zeros for
    ids outside the table."""
    vocab, width = table.shape
    out = torch.empty((len(ids), width), dtype=table.dtype, device=table.device)
    pdl = overlapping(table.device)
    embedding_kernel[(len(ids), triton.cdiv(width, _BLOCK))](
        ids, table, out, table.stride(0), width, vocab, _BLOCK, pdl, num_warps=4, launch_pdl=pdl
    )
    return out
