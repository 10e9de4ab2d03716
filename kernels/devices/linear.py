"""Linear layers and tables, made from weights of any kind with the kernels that a device has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Lookup, Norm, PendingResidual
from kernels.devices.elementwise import Elementwise
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.low_rank import LookupDelta, LowRankDelta
from kernels.weights.quantization.tokens import clip_tokens, fake_quantize_tokens
from kernels.weights.quantization.weights import GroupedWeight, Projection, QuantizedWeight

__all__ = [
    "ClippedLinear",
    "ConcatenatedLinear",
    "FakeQuantizedLinear",
    "LinearLayers",
    "NormThenLinear",
    "ResidualLinear",
    "TableLookup",
    "TorchLinear",
    "norm_of_sum",
]


class TorchLinear:
    """``x @ weight.T + bias`` in plain torch, ``weight`` [outputs, inputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ConcatenatedLinear:
    """Linear layers of several weights, ``pieces``, whose outputs follow one another; piece i has ``rows[i]`` outputs.

    ``firsts``: where each piece's outputs begin.
    """

    def __init__(self, elementwise: Elementwise, pieces: Sequence[Linear], rows: Sequence[int]) -> None:
        self._elementwise = elementwise
        self.pieces = tuple(pieces)
        *self.firsts, self.width = (sum(rows[:index]) for index in range(len(rows) + 1))

    def __call__(self, x: Tensor) -> Tensor:
        out = self._elementwise.empty_rows(len(x), self.width, x.dtype)
        for piece, begin, end in zip(self.pieces, self.firsts, (*self.firsts[1:], self.width), strict=True):
            self._elementwise.add_rows(piece(x), None, out[:, begin:end])
        return out


class NormThenLinear:
    """A linear layer, or anything that is called like one, applied to the result of a norm."""

    def __init__(self, norm: Norm, linear: Linear) -> None:
        self.norm = norm
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def add(self, x: PendingResidual, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns the layer of the norm of s, and s. May overwrite both inputs."""
        normed, total = norm_of_sum(self.norm, x, residual)
        return self.linear(normed), total


def norm_of_sum(norm: Norm, x: PendingResidual, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As ``Norm.add``, where nothing may be pending."""
    return norm.add(x, residual) if isinstance(x, Tensor) else (norm(residual), residual)


class ResidualLinear:
    """A linear layer, or anything that is called like one, whose result is added to the residual stream.

    ``next_norm``: the norm that reads the stream next, if it is known.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.next_norm: Norm | None = None

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[PendingResidual, Tensor]:
        """``residual`` [tokens, hidden]: the stream. -> its pending summand, and the stream."""
        return self.linear(x), residual


@dataclass(frozen=True, eq=False)
class TableLookup:
    """Rows of ``table`` [vocab, hidden], as ``embed`` finds them."""

    table: Tensor
    embed: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.table)


@dataclass(frozen=True)
class ClippedLinear:
    """A linear layer whose input tokens ``clip`` first clamps to ``share`` [1] of their largest magnitude."""

    linear: Linear
    share: Tensor
    clip: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.clip(x))


@dataclass(frozen=True)
class FakeQuantizedLinear:
    """A linear layer whose input tokens ``fake_quantize`` first rounds to 8 bits and turns back into floats."""

    linear: Linear
    fake_quantize: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.fake_quantize(x))


_NORM_ROWS = 4096  # whose squares exist at a time


class LinearLayers:
    """Makes linear layers; in plain torch, unless a device has kernels.

    A weight without a kernel is dequantized once, while it is loaded, and the log says so. ``dequantized_bytes``:
    memory that weights take beyond their stored size, dequantized or in two layouts. ``skips_adapters``: whether a pass
    that is captured while ``LayerContext.idle`` runs as if there were no adapters.
    """

    skips_adapters: bool = False

    def __init__(self, elementwise: Elementwise, fallbacks: Fallbacks) -> None:
        self.elementwise = elementwise
        self.fallbacks = fallbacks
        self.dequantized_bytes = 0

    def make_dense(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        """``weight`` [outputs, inputs]. The device may keep a packed copy and drop it, unless it is ``shared``."""
        return TorchLinear(weight, bias)

    def make_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        """A linear layer of a weight of any kind, ``bias`` [outputs] in the model's dtype."""
        if isinstance(weight, Tensor):
            return self.make_dense(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return self._make_rounding(weight, bias)
        rows = [piece.shape[0] for piece in weight]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        pieces = [self.make_projection(piece, part) for piece, part in zip(weight, biases, strict=True)]
        return ConcatenatedLinear(self.elementwise, pieces, rows)

    def make_gated(self, weight: Projection, bias: Tensor | None) -> Linear:
        """``silu(gate(x)) * up(x)``; ``weight`` [2 * outputs, inputs] of any kind is gate's, then up's."""
        linear = self.make_projection(weight, bias)
        return lambda x: self.elementwise.silu_and_mul(linear(x))

    def make_adapted(self, linear: Linear, delta: Delta) -> Linear:
        """``linear`` with what ``delta`` adds. It may differ from row to row, so no fused kernel takes the result:
        norms, activations and the residual stream are operators of their own around it."""
        self.fallbacks.log("linear layers with adapters are not fused with norms, activations and sums")
        return self.elementwise.compose(lambda x: delta(x, linear(x)), lambda x: x)

    def fuse_adapted(self, linear: Linear, delta: Delta, gated: bool) -> Linear:
        """``make_adapted`` of a layer whose rows are the pass's, so that kernels may take both. ``gated``: of
        ``silu(gate(x)) * up(x)``, where ``linear`` gives gate | up."""
        adapted = self.make_adapted(linear, delta)
        return (lambda x: self.elementwise.silu_and_mul(adapted(x))) if gated else adapted

    def make_up(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros [layers, places, rank, outputs] for the B of adapters, in the layout that ``make_delta`` prefers."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def make_delta(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> Delta:
        """What adapters add, from their places: see ``LowRankDelta``."""
        return LowRankDelta(context, down, up, sizes)

    def room_for_rank(self, rank: int, dtype: torch.dtype) -> int:
        """The rank that a place has room for, so that adapters of ``rank`` fit: rows beyond an adapter's are zeros."""
        return rank

    def order_adapter(self, down: Tensor, up: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """An adapter's ``down`` [modules * rank, inputs] and ``up`` [rank, outputs], of the same shapes, in the order
        in which this device's deltas read them."""
        return down, up

    def squared_norms(self, weight: Projection) -> Tensor:
        """float32 [outputs]: the sum of each output's squared weights."""
        pieces = weight if isinstance(weight, tuple) else (weight,)
        wide = (piece if isinstance(piece, Tensor) else self.dequantize(piece, torch.float32) for piece in pieces)
        return torch.cat([rows.float().square().sum(1) for piece in wide for rows in piece.split(_NORM_ROWS)])

    def make_lookup_delta(self, context: LayerContext, down: Tensor, up: Tensor) -> Delta:
        """What adapters add to embeddings, from their places: see ``LookupDelta``."""
        return LookupDelta(context, down, up)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """A linear layer that rounds its input as the weight's ``activation`` says, if the device has a kernel for the
        weight; else the weight is dequantized."""
        return self.make_dequantized(weight, bias, "there is no kernel for it on this device")

    def make_dequantized(self, weight: QuantizedWeight, bias: Tensor | None, reason: str) -> Linear:
        """A linear layer of the weight's values as floats; its input is not rounded. ``reason``: for the log."""
        kind = type(weight).__name__
        self.fallbacks.log("%s is dequantized to %s while it is loaded: %s", kind, weight.dtype, reason)
        constant = weight.constant()
        if constant is not None:
            bias = constant.to(weight.dtype) if bias is None else (bias.float() + constant).to(weight.dtype)
        return self.make_dense(self._dequantized(weight), bias)

    def make_float_head(self, weight: Projection, shared: bool) -> Linear:
        """``[rows, inputs] -> float32 [rows, outputs]``, all in float32. ``shared``: others hold the weight too."""
        pieces = weight if isinstance(weight, tuple) else (weight,)
        wide = torch.cat(
            [part.float() if isinstance(part, Tensor) else self.dequantize(part, torch.float32) for part in pieces]
        )
        self.dequantized_bytes += wide.nbytes - (0 if shared else sum(part.nbytes for part in pieces))
        return self.make_float_linear(wide)

    def make_float_linear(self, weight: Tensor) -> Linear:
        """``[rows, inputs] -> float32 [rows, outputs]`` of a float32 ``weight``."""
        return lambda x: F.linear(x.float(), weight)

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        """The lookup of rows of ``table`` [vocab, hidden], and the output layer that has it as its weight.

        The device may keep one copy for both, in a layout of its own.
        """
        if isinstance(table, QuantizedWeight):
            return self.make_tied(self._dequantized_table(table))
        return self.make_lookup(table), self.make_dense(table, None, shared=True)

    def make_lookup(self, table: Tensor | QuantizedWeight) -> Lookup:
        """The lookup of rows of ``table`` [vocab, hidden]."""
        if isinstance(table, QuantizedWeight):
            table = self._dequantized_table(table)
        return TableLookup(table, self.elementwise.embed)

    def make_norm_then_linear(self, norm: Norm, linear: Linear) -> NormThenLinear:
        """``linear`` applied to the result of ``norm``; one kernel if the device has one for both."""
        return NormThenLinear(norm, linear)

    def make_residual(self, linear: Linear) -> ResidualLinear:
        """``linear`` added to the residual stream; one kernel if the device has one for both."""
        return ResidualLinear(linear)

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """The weight's values as floats [outputs, inputs], on the device."""
        return weight.dequantize(dtype)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """``x`` [tokens, inputs], each token rounded to 8 bits and turned back into floats."""
        return fake_quantize_tokens(x)

    def _make_rounding(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """``make_quantized``, behind the steps that no device has a kernel for."""
        clip = weight.clip
        if clip is not None:
            clamp = self.elementwise.compose(lambda x: clip_tokens(x, clip), lambda x: x)
            return ClippedLinear(self._make_rounding(dataclasses.replace(weight, clip=None), bias), clip, clamp)
        if isinstance(weight, GroupedWeight) and weight.activation is not None:
            self.fallbacks.log(
                "weights of %d bits in groups are multiplied with inputs that are rounded to 8 bits and turned back "
                "into floats: no device has a kernel for both",
                weight.bits,
            )
            linear = self.make_quantized(dataclasses.replace(weight, activation=None), bias)
            return FakeQuantizedLinear(linear, self.fake_quantize)
        return self.make_quantized(weight, bias)

    def _dequantized_table(self, weight: QuantizedWeight) -> Tensor:
        self.fallbacks.log("the table of embeddings is dequantized to %s while it is loaded", weight.dtype)
        return self._dequantized(weight)

    def _dequantized(self, weight: QuantizedWeight) -> Tensor:
        dense = self.dequantize(weight, weight.dtype)
        self.dequantized_bytes += dense.nbytes - weight.nbytes
        return dense
