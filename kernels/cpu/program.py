"""Native operators: run one by one, or recorded into a program that runs a whole forward pass in one call.

While a program is recorded, operators compute nothing: they give their output a place in memory and note themselves
down. A place is given to another output once nobody holds it any more, exactly as it will be free when the program
runs in the same order. The number of rows is the step's, so one program serves all steps of up to the rows it was
recorded for.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cpu.kept_pages import kept_pages
from kernels.cpu.large_pages import empty_large
from kernels.cpu.native.library import Library, Op, Step
from kernels.cpu.native_blocks import NativeBlocks, NativeRows
from kernels.cpu.native_grouped import NativeGrouped
from kernels.cpu.native_int8 import NativeInt8
from kernels.platforms.rows import AttentionRows, DecodeTokens
from kernels.quantization.cache import LayerScales

__all__ = ["Native", "NativeWeight", "NotNative", "Program", "step_of"]

_EMBED, _ANGLES, _NORM, _LINEAR, _ROTARY, _WRITE, _ATTENTION, _SILU, _PREFILL, _GREEDY, _ADD = range(11)
_LINEAR8, _GROUPED, _BLOCKS, _WRITE_NARROW, _WIDEN, _SETTLE, _PLACE = range(11, 18)
_NARROW = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_MANY_ROWS = 64  # whose outputs an allocator would give back to the system
_HEAD_DIMS = (32, 64, 96, 128, 256)


class NotNative(RuntimeError):
    """Something in a forward pass has no native operator, so that no program can be made of it."""


class NativeWeight:
    """A weight in the layout of the native products."""

    def __init__(self, native: Native, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
        self.memory = empty_large(native.library.packed(self.outputs, self.inputs), torch.bfloat16)
        source = weight.contiguous()
        native.library.pack(source.data_ptr(), self.outputs, self.inputs, self.memory.data_ptr())


class Native:
    """The native operators, on ``threads`` threads. bf16 tensors whose last dimension is contiguous.

    An operator that does not fit its arguments must not be called: see the ``fits`` of each.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self.library = library
        engine = library.open(threads)
        self._engine = engine
        self._close = weakref.finalize(self, library.close, engine)
        self._recording: _Recording | None = None
        self._arena = _Arena()

    @property
    def recording(self) -> bool:
        return self._recording is not None

    @contextmanager
    def record(self, rows: int) -> Iterator[_Recording]:
        """Record what is called meanwhile."""
        self._recording = recording = _Recording(rows)
        try:
            yield recording
        finally:
            self._recording = None

    def run(self, ops: Any, count: int, step: Step) -> None:
        self.library.run(self._engine, ops, count, step)

    def _call(self, op: Op, step: Step, *kept: Tensor | None) -> None:
        if self._recording is not None:
            self._recording.add(op, kept)
        else:
            self.library.run(self._engine, ctypes.byref(op), 1, step)

    def _empty(self, rows: int, width: int) -> Tensor:
        if self._recording is not None:
            return self._recording.empty(rows, width)
        if rows < _MANY_ROWS:
            return torch.empty((rows, width), dtype=torch.bfloat16)
        return self._arena.empty(rows, width)

    def embed(self, table: Tensor, rows: int) -> Tensor:
        """Of the step's token ids. Only while recording."""
        width = table.shape[1]
        out = self._empty(rows, width)
        op = Op(kind=_EMBED, a=table.data_ptr(), out=out.data_ptr(), stride_out=width, i0=width)
        self._call(op, Step(rows), table)
        return out

    def lookup(self, ids: Tensor, weight: NativeWeight | NativeRows) -> Tensor:
        """Rows ``ids`` int [tokens] of a weight, bit by bit; while recording, of the step's token ids. IndexError."""
        rows, width = len(ids), weight.inputs
        out = self._empty(rows, width)
        op = Op(kind=_EMBED, a=weight.memory.data_ptr(), out=out.data_ptr(), stride_out=width, i0=width)
        op.i1 = 2 if isinstance(weight, NativeRows) else 1
        given = ids.to(torch.int32).contiguous()
        if rows and not 0 <= int(given.min()) <= int(given.max()) < weight.outputs:
            raise IndexError(f"an id is not one of the {weight.outputs} rows; look up these alone")
        self._call(op, Step(rows, given.data_ptr()), weight.memory)
        return out

    def angles(self, frequencies: Tensor, scale: float, rows: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the step's positions. Only while recording."""
        dim = len(frequencies)
        cos, sin = self._empty(rows, dim), self._empty(rows, dim)
        op = Op(kind=_ANGLES, a=frequencies.data_ptr(), b=sin.data_ptr(), out=cos.data_ptr(), i0=dim, f0=scale)
        self._call(op, Step(rows), frequencies)
        return cos.view(rows, 1, dim), sin.view(rows, 1, dim)

    @staticmethod
    def fits_norm(weight: Tensor) -> bool:
        return weight.shape[-1] % 16 == 0

    def norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of ``residual`` [rows, dim] or [rows, heads, dim], to which ``x`` is added first.

        ``weight`` float32 [dim] or [heads, dim].
        """
        rows, dim = len(residual), weight.shape[-1]
        out = self._empty(rows, weight.numel())
        op = Op(
            kind=_NORM,
            a=None if x is None else x.data_ptr(),
            b=residual.data_ptr(),
            c=weight.data_ptr(),
            out=out.data_ptr(),
            stride_a=0 if x is None else x.stride(0),
            stride_b=residual.stride(0),
            stride_out=weight.numel(),
            i0=dim,
            i1=weight.numel() // dim,
            f0=eps,
        )
        self._call(op, Step(rows), weight)
        return out.view(residual.shape)

    @staticmethod
    def fits_linear(weight: Tensor) -> bool:
        return weight.shape[1] % 32 == 0

    @staticmethod
    def fits_gated(outputs: int) -> bool:
        return outputs % 64 == 0

    def linear(self, x: Tensor, weight: NativeWeight, bias: Tensor | None, gated: bool = False) -> Tensor:
        """``gated``: the weight's outputs are gates and as many others; the result is ``silu(gates) * others``."""
        rows = len(x)
        out = self._empty(rows, weight.outputs // 2 if gated else weight.outputs)
        op = Op(
            kind=_LINEAR,
            a=x.data_ptr(),
            b=weight.memory.data_ptr(),
            c=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=out.shape[1],
            i0=weight.inputs,
            i1=weight.outputs,
            gated=gated,
        )
        self._call(op, Step(rows), weight.memory, bias)
        return out

    def linear_int8(self, x: Tensor, weight: NativeInt8, bias: Tensor | None, gated: bool = False) -> Tensor:
        """As ``linear``, of tokens that are rounded to whole numbers."""
        out = self._empty(len(x), weight.outputs // 2 if gated else weight.outputs)
        op = Op(
            kind=_LINEAR8,
            a=x.data_ptr(),
            b=weight.memory.data_ptr(),
            c=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=out.shape[1],
            i0=weight.inputs,
            i1=weight.outputs,
            i2=weight.offset,
            f0=weight.scale,
            gated=gated,
        )
        self._call(op, Step(len(x)), weight.memory, bias)
        return out

    def linear_grouped(self, x: Tensor, weight: NativeGrouped, bias: Tensor | None) -> Tensor:
        """As ``linear``, with a weight of whole numbers of which groups share a scale."""
        out = self._empty(len(x), weight.outputs)
        op = Op(
            kind=_GROUPED,
            a=x.data_ptr(),
            b=weight.memory.data_ptr(),
            c=None if bias is None else bias.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=weight.outputs,
            i0=weight.inputs,
            i1=weight.outputs,
            i2=weight.group,
            i3=weight.bits,
            i4=0 if weight.order is None else weight.order.data_ptr(),
        )
        self._call(op, Step(len(x)), weight.memory, bias, weight.order)
        return out

    def linear_blocks(self, x: Tensor, weight: NativeBlocks, bias: Tensor | None) -> Tensor:
        """As ``linear``, with a weight in blocks."""
        out = self._empty(len(x), weight.outputs)
        for rows in weight.rows:
            op = Op(
                kind=_BLOCKS,
                a=x.data_ptr(),
                b=rows.memory.data_ptr(),
                c=None if bias is None else bias[rows.first :].data_ptr(),
                out=out[:, rows.first :].data_ptr(),
                stride_a=x.stride(0),
                stride_out=weight.outputs,
                i0=rows.inputs,
                i1=rows.outputs,
            )
            self._call(op, Step(len(x)), rows.memory, bias)
        return out

    @staticmethod
    def fits_rotary(x: Tensor) -> bool:
        return x.shape[-1] % 32 == 0

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
        """``x`` and ``out`` [rows, heads, dim] with their heads one after the other."""
        rows, heads, dim = x.shape
        op = Op(
            kind=_ROTARY,
            a=x.data_ptr(),
            b=cos.data_ptr(),
            c=sin.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=out.stride(0),
            i0=dim,
            i1=heads,
        )
        self._call(op, Step(rows))

    def write(self, cache: Tensor, index: Tensor, keys_values: Tensor) -> None:
        """``keys_values`` [rows, 2 * kv_heads, dim] to ``index`` int64; while recording, to the step's."""
        width = math.prod(keys_values.shape[1:])
        op = Op(kind=_WRITE, a=keys_values.data_ptr(), out=cache.data_ptr(), stride_a=keys_values.stride(0), i0=width)
        self._call(op, Step(len(keys_values), index=index.data_ptr()), cache)

    def write_narrow(
        self, values: Tensor, scales: Tensor | None, fixed: LayerScales | None, index: Tensor, keys_values: Tensor
    ) -> None:
        """``write`` to a cache of 8 bits; its dimension must be a multiple of 16. ``scales``, or else ``fixed``."""
        op = Op(
            kind=_WRITE_NARROW,
            a=keys_values.data_ptr(),
            out=values.data_ptr(),
            stride_a=keys_values.stride(0),
            i0=keys_values.shape[2],
            i1=keys_values.shape[1],
            i2=_NARROW[values.dtype],
        )
        self._call(_scaled(op, scales, fixed), Step(len(keys_values), index=index.data_ptr()), values, scales)

    def widen(
        self, values: Tensor, scales: Tensor | None, fixed: LayerScales | None, pages: Tensor, out: Tensor
    ) -> None:
        """What ``pages`` int64 of a cache of 8 bits hold, one after the other; while recording, the step's."""
        op = Op(
            kind=_WIDEN,
            a=values.data_ptr(),
            out=out.data_ptr(),
            i0=values.shape[4],
            i1=values.shape[2] * values.shape[3],
            i2=_NARROW[values.dtype],
            i3=values.shape[1],
        )
        step = Step(kept=pages.data_ptr(), kept_count=len(pages))
        self._call(_scaled(op, scales, fixed), step, values, scales, out)

    @staticmethod
    def fits_place(dim: int) -> bool:
        return dim in _HEAD_DIMS

    def place(
        self,
        qkv: Tensor,
        heads: int,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        index: Tensor,
    ) -> None:
        """Norm and rotate the queries of ``qkv`` [rows, heads + 2 * kv_heads, dim] in place, and the keys on their way
        to the cache, where values follow them; while recording to the step's index.

        ``norm``: its weight float32 [heads + kv_heads, dim] and eps.
        """
        rows, every, dim = qkv.shape
        kv_heads = (every - heads) // 2
        weight, eps = norm or (None, 0.0)
        op = Op(
            kind=_PLACE,
            a=qkv.data_ptr(),
            b=cos.data_ptr(),
            c=sin.data_ptr(),
            out=cache.data_ptr(),
            stride_a=qkv.stride(0),
            i0=dim,
            i1=heads + kv_heads,
            i2=kv_heads,
            i4=0 if weight is None else weight.data_ptr(),
            f0=eps,
        )
        self._call(op, Step(rows, index=index.data_ptr()), cache, weight)

    @staticmethod
    def fits_attention(page_size: int, dim: int) -> bool:
        return page_size % 16 == 0 and dim in _HEAD_DIMS

    def attention(self, queries: Tensor, cache: Tensor, step: Step, window: int, scale: float, out: Tensor) -> None:
        """``queries`` [rows, heads, dim] over the pages of ``step``; ``out`` [rows, heads * dim]."""
        _, heads, dim = queries.shape
        op = Op(
            kind=_ATTENTION,
            a=queries.data_ptr(),
            b=cache.data_ptr(),
            out=out.data_ptr(),
            stride_a=queries.stride(0),
            stride_out=out.stride(0),
            i0=dim,
            i1=heads,
            i2=cache.shape[3],
            i3=window,
            i4=cache.shape[1],
            f0=scale,
        )
        self._call(op, step, cache)

    def prefill(
        self,
        queries: Tensor,
        cache: Tensor,
        pages: npt.NDArray[np.int32],
        start: int,
        window: int,
        scale: float,
        out: Tensor,
    ) -> None:
        """``queries`` [tokens, heads, dim] of one row at positions from ``start`` on, whose pages are ``pages``."""
        tokens, heads, dim = queries.shape
        op = Op(
            kind=_PREFILL,
            a=queries.data_ptr(),
            b=cache.data_ptr(),
            c=pages.ctypes.data,
            out=out.data_ptr(),
            stride_a=queries.stride(0),
            stride_b=start,
            stride_out=out.stride(0),
            i0=dim,
            i1=heads,
            i2=cache.shape[3],
            i3=window,
            i4=cache.shape[1],
            f0=scale,
        )
        self._call(op, Step(tokens))

    @staticmethod
    def fits_add(width: int) -> bool:
        return width % 16 == 0

    def empty_rows(self, rows: int, width: int) -> Tensor:
        """Where the results of ``add`` go."""
        return self._empty(rows, width)

    def add(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        """``out`` [rows, width] = ``x`` + ``y``, or a copy of ``x``."""
        op = Op(
            kind=_ADD,
            a=x.data_ptr(),
            b=None if y is None else y.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_b=0 if y is None else y.stride(0),
            stride_out=out.stride(0),
            i0=x.shape[1],
        )
        self._call(op, Step(len(x)))

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest ids int64 [rows] of ``logits`` [rows, vocab], and whether a row's are not to be used."""
        tokens, broken = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
        op = Op(
            kind=_GREEDY,
            a=logits.data_ptr(),
            b=broken.data_ptr(),
            out=tokens.data_ptr(),
            stride_a=logits.stride(0),
            i0=logits.shape[1],
        )
        self._call(op, Step(len(logits)), tokens, broken)
        return tokens, broken

    def empty_attention(self, queries: Tensor) -> Tensor:
        """Where the result of ``attention`` goes."""
        return self._empty(len(queries), queries.shape[1] * queries.shape[2])

    @staticmethod
    def fits_silu(x: Tensor) -> bool:
        return x.shape[1] % 32 == 0

    @staticmethod
    def fits_settle(x: Tensor) -> bool:
        return x.shape[1] % 16 == 0

    def settle(self, x: Tensor) -> Tensor:
        """Each token of ``x`` rounded to 255 steps up to its largest."""
        rows, width = x.shape
        out = self._empty(rows, width)
        op = Op(kind=_SETTLE, a=x.data_ptr(), out=out.data_ptr(), stride_a=x.stride(0), stride_out=width, i0=width)
        self._call(op, Step(rows))
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        rows, inner = x.shape[0], x.shape[1] // 2
        out = self._empty(rows, inner)
        op = Op(kind=_SILU, a=x.data_ptr(), out=out.data_ptr(), stride_a=x.stride(0), stride_out=inner, i0=inner)
        self._call(op, Step(rows))
        return out


class _Arena:
    """Memory for outputs, used again once nobody holds it any more: what is new to a process is dear to write to."""

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint16]]] = {}

    def empty(self, rows: int, width: int) -> Tensor:
        free = self._free.setdefault(width, [])
        memory = free.pop() if free else None
        if memory is None or len(memory) < rows * width + 32:
            memory = np.zeros(rows * width + 32, dtype=np.uint16)  # taken from the system as rows are first written
        start = -(memory.ctypes.data // 2) % 32  # a cache line's
        place = memory[start : start + rows * width]
        weakref.finalize(place, free.append, memory)  # the tensors of this memory hold it, views too
        return torch.from_numpy(place).view(torch.bfloat16).view(rows, width)


class _Recording:
    """Operators, the tensors they need for good, and memory for their outputs."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ops: list[Op] = []
        self.kept: list[object] = []
        self._arena = _Arena()
        self.kept.append(self._arena)

    def add(self, op: Op, kept: tuple[Tensor | None, ...]) -> None:
        self.ops.append(op)
        self.kept.extend(kept)

    def empty(self, rows: int, width: int) -> Tensor:
        if rows != self.rows:
            raise NotNative(f"an operator ran {rows} rows of {self.rows}")
        return self._arena.empty(rows, width)


@dataclass(frozen=True)
class Program:
    """A recorded forward pass of decodes and drafts. ``out`` [tokens, hidden]: its result, overwritten by the next
    step."""

    native: Native
    ops: Any
    count: int
    out: Tensor
    states: Tensor | None
    kept: list[object]
    page_size: int = 0  # of a cache of 8 bits, whose pages it widens; 0: none

    @classmethod
    def of(cls, native: Native, recording: _Recording, out: Tensor, states: Tensor | None) -> Program:
        """``states``: where those of a batch were while it was recorded."""
        ops = recording.ops
        size = next((op.i3 for op in ops if op.kind == _WIDEN), 0)
        return cls(native, (Op * len(ops))(*ops), len(ops), out, states, recording.kept, size)

    def run_decodes(self, rows: DecodeTokens) -> None:
        """What the recorded operators leave behind is the result."""
        count, pages = len(rows.lengths), np.ascontiguousarray(rows.pages)
        step = Step(
            len(rows.ids),
            rows.ids.ctypes.data,
            rows.positions.ctypes.data,
            rows.index.ctypes.data,
            pages.ctypes.data,
            pages.shape[1],
            rows.lengths.ctypes.data,
            sequences=count,
            decodes=count if rows.offsets is None else 0,
        )
        if rows.offsets is not None:
            step.offsets = rows.offsets.ctypes.data
        if rows.bits is not None:
            step.bits, step.bits_stride = rows.bits.ctypes.data, rows.bits.shape[1]
        held = self._keep(step, pages, rows.lengths)
        self.native.run(self.ops, self.count, step)
        del held

    def run(self, batch: ForwardBatch, rows: AttentionRows) -> Tensor | None:
        count = len(batch.token_ids)
        if count > len(self.out) or rows.decodes + rows.verifies < len(rows.starts):
            return None
        if self.states is not None and batch.states is not None:
            self.states[:count].copy_(batch.states)
        step, held = step_of(rows, len(rows.starts))
        ids = batch.token_ids if batch.token_ids.dtype == torch.int32 else batch.token_ids.to(torch.int32)
        step.rows = count
        step.ids = ids.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.index = batch.cache_index.data_ptr()
        pages = self._keep(step, rows.pages, rows.starts + rows.counts)
        self.native.run(self.ops, self.count, step)
        del held, pages
        return self.out[:count]

    def _keep(self, step: Step, pages: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64]) -> object:
        """Tell which pages are to be widened; returns what must live until they were."""
        if not self.page_size:
            return None
        table, kept = kept_pages(pages, lengths, self.page_size)
        step.pages, step.kept, step.kept_count = table.ctypes.data, kept.ctypes.data, len(kept)
        return table, kept


def _scaled(op: Op, scales: Tensor | None, fixed: LayerScales | None) -> Op:
    if scales is not None:
        op.b = scales.data_ptr()
    elif fixed is not None:
        op.c = fixed.scales.data_ptr()
        op.i4 = 0 if fixed.offsets is None else fixed.offsets.data_ptr()
    return op


def step_of(rows: AttentionRows, count: int) -> tuple[Step, object]:
    """What attention needs to know of the first ``count`` rows, decodes and drafts; and what must live until it ran."""
    lengths = rows.starts[:count] + rows.counts[:count]
    pages = np.ascontiguousarray(rows.pages)
    step = Step(
        count,
        pages=pages.ctypes.data,
        pages_stride=pages.shape[1],
        lengths=lengths.ctypes.data,
        sequences=count,
        decodes=rows.decodes,
    )
    if count <= rows.decodes:
        return step, (lengths, pages)
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(rows.counts[:count], out=offsets[1:])
    step.offsets = offsets.ctypes.data
    tree, roots = rows.tree, rows.roots
    if tree is not None:
        tree = tree if tree.stride(1) == 1 else tree.contiguous()
        step.bits, step.bits_stride = tree.data_ptr(), tree.stride(0)
        if roots is not None:
            roots = np.ascontiguousarray(roots)
            step.roots = roots.ctypes.data
    return step, (lengths, pages, offsets, tree, roots)
