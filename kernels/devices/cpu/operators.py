"""The native operators and what each of them takes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.layer_context import LayerContext
from kernels.core.operators import Draws, Masks
from kernels.devices.cpu.matmul import HeadWeights, MatmulOps, NativeWeight, products
from kernels.devices.cpu.native.library import Op, Step
from kernels.devices.cpu.native_blocks import NativeBlocks, NativeRows
from kernels.devices.cpu.native_experts import ExpertTable, NativeChoice
from kernels.devices.cpu.native_fp8 import NativeFp8
from kernels.devices.cpu.native_grouped import NativeGrouped
from kernels.devices.cpu.native_int8 import NativeInt8
from kernels.devices.cpu.recording import OperatorRunner
from kernels.devices.experts import Routing
from kernels.weights.quantization.cache import LayerScales

__all__ = ["LOW_RANK", "Cache8bit", "LowRankPlaces", "Native", "NativeWeight"]

_EMBED, _ANGLES, _NORM = range(3)
_ROTARY, _WRITE, _ATTENTION, _SILU, _EXPERTS, _GREEDY, _ADD = range(4, 11)
_WRITE_8BIT, _FAKE_QUANTIZE, _NORM_ROPE_CACHE, _DRAW = range(14, 18)
_PLACES, _LOW_RANK, _PLACE_LATENT, _HEADS = range(19, 23)
_CACHE_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
_HEAD_DIMS = (32, 64, 96, 128, 256)


@dataclass(frozen=True, eq=False)
class Cache8bit:
    """A layer's keys and values of 8 bits. ``values`` [pages, page_size, 2, kv_heads, dim]; ``scales`` bf16 [pages,
    page_size, 2, kv_heads], each token's, or ``fixed``; ``by_head`` f32 [2, kv_heads]: where all dims share one.
    """

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None
    by_head: Tensor | None


LOW_RANK = 16
"""What ranks, and outputs of modules, are multiples of for ``Native.add_low_rank``."""


@dataclass(frozen=True, eq=False)
class LowRankPlaces:
    """The matrices of adapters of a layer, in the order of LOW_RANK of program.h: ``down`` [places,
    modules * rank, inputs], ``up`` [places, rank, outputs]. ``ends`` int64 [modules]: of the modules' outputs.
    ``context``: of the rows' places."""

    context: LayerContext
    down: Tensor
    up: Tensor
    ends: npt.NDArray[np.int64]


class Native(OperatorRunner):
    """The native operators, on ``threads`` threads. bf16 tensors whose last dimension is contiguous.

    An operator that does not fit its arguments must not be called: see the ``fits`` of each.
    """

    def embed(self, table: Tensor, rows: int) -> Tensor:
        """The embeddings of the step's token ids. Only while recording."""
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

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of ``positions`` int64 [rows]; while recording, of the step's."""
        rows, dim, at = len(positions), len(frequencies), positions.contiguous()
        cos, sin = self._empty(rows, dim), self._empty(rows, dim)
        op = Op(kind=_ANGLES, a=frequencies.data_ptr(), b=sin.data_ptr(), out=cos.data_ptr(), i0=dim, f0=scale)
        self._call(op, Step(rows, positions=at.data_ptr()), frequencies)
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
        return self._multiply(x, weight.outputs // 2 if gated else weight.outputs, products(weight, bias, gated))

    def linear_int8(self, x: Tensor, weight: NativeInt8, bias: Tensor | None, gated: bool = False) -> Tensor:
        """As ``linear``, of tokens that are rounded to whole numbers."""
        return self._multiply(x, weight.outputs // 2 if gated else weight.outputs, products(weight, bias, gated))

    def linear_grouped(
        self, x: Tensor, weight: NativeGrouped | NativeFp8, bias: Tensor | None, gated: bool = False
    ) -> Tensor:
        """As ``linear``, with a weight of whole numbers, or of e4m3, of which groups share a scale."""
        return self._multiply(x, weight.outputs // 2 if gated else weight.outputs, products(weight, bias, gated))

    def linear_blocks(self, x: Tensor, weight: NativeBlocks, bias: Tensor | None, gated: bool = False) -> Tensor:
        """As ``linear``, with a weight in blocks; ``gated``: in those of one type."""
        return self._multiply(x, weight.outputs // 2 if gated else weight.outputs, products(weight, bias, gated))

    def _multiply(self, x: Tensor, width: int, ops: MatmulOps) -> Tensor:
        out = self._empty(len(x), width)
        for op, first, kept in ops:
            op.a, op.stride_a = x.data_ptr(), x.stride(0)
            op.out, op.stride_out = out[:, first:].data_ptr(), width
            op.invariant = self.batch_invariant
            self._call(op, Step(len(x)), *kept)
        return out

    @staticmethod
    def fits_experts(x: Tensor) -> bool:
        return x.shape[1] % 16 == 0 and x.dtype == torch.bfloat16

    def experts(self, x: Tensor, router: Tensor | NativeChoice, table: ExpertTable, routing: Routing) -> Tensor:
        """A layer of experts. ``router``: logits [rows, experts] of a plain ``routing``, or what computes others."""
        rows, width = x.shape
        choice = None if isinstance(router, Tensor) else router
        given = router if isinstance(router, Tensor) else router.router
        out = self._empty(rows, width)
        op = Op(
            kind=_EXPERTS,
            a=x.data_ptr(),
            b=given.data_ptr(),
            c=table.address,
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_b=given.stride(0),
            stride_out=width,
            i0=width,
            i1=given.shape[0 if choice else 1],
            i2=routing.chosen,
            i3=table.inner,
            fixed=None if table.gate is None else ctypes.addressof(table.gate),
            i4=routing.normalized,
            i5=table.count,
            by_head=None if choice is None else choice.address,
        )
        dispatch = routing.dispatch
        if dispatch is not None:
            places = dispatch.table if dispatch.source is None else dispatch.table[dispatch.source].unsqueeze(0)
            op.offsets, op.i6 = places.data_ptr(), len(places)
        self._call(op, Step(rows), table, dispatch, choice)
        return out

    def experts_chosen(self, x: Tensor, weights: Tensor, experts: Tensor, table: ExpertTable) -> Tensor:
        """The same with the ``experts`` int64 [rows, chosen] that each token takes and their ``weights``."""
        rows, width = x.shape
        ids, order = experts.sort(-1)  # results are added in this order
        ids, weights = ids.to(torch.int32), weights.float().gather(1, order)
        out = self._empty(rows, width)
        op = Op(
            kind=_EXPERTS,
            a=x.data_ptr(),
            b=ids.data_ptr(),
            c=table.address,
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=width,
            i0=width,
            i1=table.count,
            i2=ids.shape[1],
            i3=table.inner,
            fixed=None if table.gate is None else ctypes.addressof(table.gate),
            scales=weights.data_ptr(),
            i5=table.count,
        )
        self._call(op, Step(rows), table, ids, weights)
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

    def write_8bit(self, cache: Cache8bit, index: Tensor, keys_values: Tensor) -> None:
        """``write`` to a cache of 8 bits; its dimension must be a multiple of 32."""
        op = Op(
            kind=_WRITE_8BIT,
            a=keys_values.data_ptr(),
            out=cache.values.data_ptr(),
            stride_a=keys_values.stride(0),
            i0=keys_values.shape[2],
            i1=keys_values.shape[1],
        )
        self._call(_of(op, cache), Step(len(keys_values), index=index.data_ptr()), *_held(cache))

    @staticmethod
    def fits_norm_rope_cache(dim: int) -> bool:
        return dim in _HEAD_DIMS

    def norm_rope_cache(
        self,
        qkv: Tensor,
        heads: int,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor | Cache8bit,
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
            kind=_NORM_ROPE_CACHE,
            a=qkv.data_ptr(),
            b=cos.data_ptr(),
            c=sin.data_ptr(),
            out=_values(cache).data_ptr(),
            stride_a=qkv.stride(0),
            i0=dim,
            i1=heads + kv_heads,
            i2=kv_heads,
            i4=0 if weight is None else weight.data_ptr(),
            f0=eps,
        )
        self._call(_of(op, cache), Step(rows, index=index.data_ptr()), *_held(cache), weight)

    @staticmethod
    def fits_attention(page_size: int, dim: int) -> bool:
        return page_size % 16 == 0 and dim in _HEAD_DIMS

    def attention(
        self,
        queries: Tensor,
        cache: Tensor | Cache8bit,
        step: Step,
        window: int,
        scale: float,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
    ) -> None:
        """``queries`` [rows, heads, dim] over the pages of ``step``; ``out`` [rows, heads * dim]. ``sinks`` float32
        [heads]: as ``CapAndSinks``."""
        _, heads, dim = queries.shape
        _, page_size, _, kv_heads, _ = _values(cache).shape
        op = Op(
            kind=_ATTENTION,
            a=queries.data_ptr(),
            b=_values(cache).data_ptr(),
            c=None if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
            stride_a=queries.stride(0),
            stride_out=out.stride(0),
            i0=dim,
            i1=heads,
            i2=kv_heads,
            i3=window,
            i4=page_size,
            f0=scale,
        )
        self._call(_of(op, cache), step, *_held(cache), sinks)

    @staticmethod
    def fits_latent(page_size: int, width: int, rank: int) -> bool:
        return page_size % 16 == 0 and width % 32 == 0 and rank % 32 == 0

    @staticmethod
    def is_latent(op: Op) -> bool:
        """Whether it is of ``attend_latent``."""
        return bool(op.kind == _ATTENTION and op.i5)

    def place_latent(
        self,
        queries: Tensor,
        vectors: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        index: Tensor,
    ) -> None:
        """As ``Attention.place_latent``, with queries in place; while recording to the step's index. ``norm``: its
        weight float32 [rank] and eps."""
        rows, heads, dim = queries.shape
        weight, eps = norm
        op = Op(
            kind=_PLACE_LATENT,
            a=queries.data_ptr(),
            b=vectors.data_ptr(),
            c=cos.data_ptr(),
            out=cache.data_ptr(),
            stride_a=queries.stride(0),
            stride_b=vectors.stride(0),
            i0=dim,
            i1=heads,
            i2=cos.shape[-1],
            i3=len(weight),
            i4=weight.data_ptr(),
            f0=eps,
            fixed=sin.data_ptr(),
        )
        self._call(op, Step(rows, index=index.data_ptr()), cache, weight)

    def multiply_heads(self, x: Tensor, weights: HeadWeights, trailing: int = 0) -> Tensor:
        """``x`` [rows, heads, inputs + trailing] -> [rows, heads, outputs + trailing]: the product of each head with
        its weight; trailing numbers are copied."""
        rows, heads, _ = x.shape
        width = weights.outputs + trailing
        out = self._empty(rows, heads * width)
        op = Op(
            kind=_HEADS,
            a=x.data_ptr(),
            b=weights.memory.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=heads * width,
            i0=weights.inputs,
            i1=weights.outputs,
            i2=heads,
            i3=x.stride(1),
            i4=width,
            i5=trailing,
        )
        self._call(op, Step(rows), weights.memory)
        return out.view(rows, heads, width)

    def attend_latent(self, queries: Tensor, cache: Tensor, step: Step, rank: int, scale: float) -> Tensor:
        """Causal attention of ``queries`` [tokens, heads, width] over the latent vectors of ``cache`` [pages,
        page_size, width] in the pages of ``step``, which has no prompts -> sums of their first ``rank`` numbers
        [tokens, heads, rank]."""
        tokens, heads, width = queries.shape
        out = self._empty(tokens, heads * rank)
        op = Op(
            kind=_ATTENTION,
            a=queries.data_ptr(),
            b=cache.data_ptr(),
            out=out.data_ptr(),
            stride_a=queries.stride(0),
            stride_out=out.stride(0),
            i0=width,
            i1=heads,
            i2=1,
            i4=cache.shape[1],
            i5=rank,
            f0=scale,
        )
        self._call(op, step, cache)
        return out.view(tokens, heads, rank)

    @staticmethod
    def fits_add(width: int) -> bool:
        return width % 16 == 0

    def empty_rows(self, rows: int, width: int) -> Tensor:
        """Where the results of ``add`` go."""
        return self._empty(rows, width)

    def add(self, x: Tensor, y: Tensor | None, out: Tensor, logits: Tensor | None = None) -> None:
        """``out`` [rows, width] = ``x`` + ``y``, or a copy of ``x``. ``logits`` [rows, 1]: of whose sigmoid ``y`` is
        multiplied with."""
        op = Op(
            kind=_ADD,
            a=x.data_ptr(),
            b=None if y is None else y.data_ptr(),
            c=None if logits is None else logits.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_b=0 if y is None else y.stride(0),
            stride_out=out.stride(0),
            i0=x.shape[1],
            i1=0 if logits is None else logits.stride(0),
        )
        self._call(op, Step(len(x)))

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely ids int64 [rows] of ``logits`` [rows, vocab], and whether a row's are not to be used."""
        tokens, nonfinite = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
        op = Op(
            kind=_GREEDY,
            a=logits.data_ptr(),
            b=nonfinite.data_ptr(),
            out=tokens.data_ptr(),
            stride_a=logits.stride(0),
            i0=logits.shape[1],
        )
        self._call(op, Step(len(logits)), tokens, nonfinite)
        return tokens, nonfinite

    def draw(
        self,
        logits: Tensor,
        draws: Draws,
        positions: Tensor,
        ids: Tensor | None,
        vocab: int,
        masks: Masks | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same, sampled as ``draws`` [rows] say; see ``kernels.core.operators.Draw``. Never recorded."""
        count = len(draws)
        tokens, nonfinite = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.bool_)
        op = self.drawing(logits, tokens, nonfinite)
        op.b, op.c, op.i1 = draws.ctypes.data, None if ids is None else ids.data_ptr(), vocab
        op.i2 = 0 if masks is None else masks.ctypes.data
        op.offsets = None if rows is None else rows.ctypes.data
        step = Step(count)
        step.positions = positions.data_ptr()
        self.library.run(self._engine, ctypes.byref(op), 1, step)
        return torch.from_numpy(tokens), torch.from_numpy(nonfinite)

    def drawing(self, logits: Tensor, tokens: npt.NDArray[np.int64], nonfinite: npt.NDArray[np.bool_]) -> Op:
        """To draw of ``logits`` [rows, vocab] to ``tokens`` and ``nonfinite`` [rows], but for how, which is its ``b``,
        and the address of masks, its ``i2``."""
        return Op(
            kind=_DRAW,
            a=logits.data_ptr(),
            out=tokens.ctypes.data,
            stride_a=logits.stride(0),
            i0=logits.shape[1],
            i1=logits.shape[1],
            i3=-(-logits.shape[1] // 32),
            i4=nonfinite.ctypes.data,
        )

    def empty_attention(self, queries: Tensor) -> Tensor:
        """Where the result of ``attention`` goes."""
        return self._empty(len(queries), queries.shape[1] * queries.shape[2])

    @staticmethod
    def fits_silu(x: Tensor) -> bool:
        return x.shape[1] % 32 == 0

    @staticmethod
    def fits_fake_quantize(x: Tensor) -> bool:
        return x.shape[1] % 16 == 0

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Each token of ``x`` rounded to 255 steps up to its largest."""
        rows, width = x.shape
        out = self._empty(rows, width)
        op = Op(
            kind=_FAKE_QUANTIZE, a=x.data_ptr(), out=out.data_ptr(), stride_a=x.stride(0), stride_out=width, i0=width
        )
        self._call(op, Step(rows))
        return out

    @staticmethod
    def fits_low_rank(inputs: int, rank: int, sizes: Sequence[int]) -> bool:
        return inputs % 4 == 0 and rank % LOW_RANK == 0 and not any(size % LOW_RANK for size in sizes)

    def add_low_rank(self, x: Tensor, adapted: LowRankPlaces, out: Tensor) -> None:
        """``out`` [rows, outputs] += ``x @ down[p].T @ up[p]`` of each row's place; while recording, of its page's."""
        rows, inputs = x.shape
        if self._recording is None:
            places = adapted.context.rows
            self._call(Op(kind=_PLACES, a=places.data_ptr(), i1=len(adapted.down)), Step(rows))
        else:
            pages, size = adapted.context.pages
            self._recording.add_once(Op(kind=_PLACES, a=pages.data_ptr(), i0=size, i1=len(adapted.down)), pages)
        op = Op(
            kind=_LOW_RANK,
            a=x.data_ptr(),
            b=adapted.down.data_ptr(),
            c=adapted.up.data_ptr(),
            out=out.data_ptr(),
            stride_a=x.stride(0),
            stride_out=out.stride(0),
            i0=inputs,
            i1=out.shape[1],
            i2=adapted.up.shape[1],
            i3=len(adapted.ends),
            i4=adapted.ends.ctypes.data,
        )
        self._call(op, Step(rows), adapted)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        rows, inner = x.shape[0], x.shape[1] // 2
        out = self._empty(rows, inner)
        op = Op(kind=_SILU, a=x.data_ptr(), out=out.data_ptr(), stride_a=x.stride(0), stride_out=inner, i0=inner)
        self._call(op, Step(rows))
        return out


def _values(cache: Tensor | Cache8bit) -> Tensor:
    return cache.values if isinstance(cache, Cache8bit) else cache


def _held(cache: Tensor | Cache8bit) -> tuple[Tensor | None, ...]:
    """Objects that a program refers to."""
    if not isinstance(cache, Cache8bit):
        return (cache,)
    fixed = (None, None) if cache.fixed is None else (cache.fixed.scales, cache.fixed.offsets)
    return cache.values, cache.scales, cache.by_head, *fixed


def _of(op: Op, cache: Tensor | Cache8bit) -> Op:
    """The operator with the parameters of a cache of 8 bits."""
    if isinstance(cache, Cache8bit):
        op.cache_type = _CACHE_TYPES[cache.values.dtype]
        parts = (None if part is None else part.data_ptr() for part in _held(cache))
        _, op.scales, op.by_head, op.fixed, op.offsets = parts
    return op
