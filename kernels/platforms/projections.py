"""Linear layers, tables and experts of weights of any kind, made of what a device has kernels for."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layers.experts import ExpertsInTurn, ExpertWeights
from kernels.layers.stacked_experts import may_be_dense, refusal
from kernels.platforms.operators import Linear, Lookup, Norm, Unadded
from kernels.quantization.tokens import clip_tokens, settle_tokens
from kernels.quantization.weights import GroupedWeight, Projection, QuantizedWeight

__all__ = ["BehindNorm", "Clipped", "IntoStream", "Projections", "Settled", "SideBySide", "TableLookup", "norm_of_sum"]

_log = logging.getLogger("troupe.kernels")


class SideBySide:
    """Linear layers of several weights, ``pieces``, whose outputs follow one another, so many ``rows`` of each."""

    def __init__(self, platform: Projections, pieces: Sequence[Linear], rows: Sequence[int]) -> None:
        self.platform = platform
        self.pieces = tuple(pieces)
        *self.firsts, self.width = (sum(rows[:index]) for index in range(len(rows) + 1))

    def __call__(self, x: Tensor) -> Tensor:
        out = self.platform.empty_rows(len(x), self.width, x.dtype)
        for piece, begin, end in zip(self.pieces, self.firsts, (*self.firsts[1:], self.width), strict=True):
            self.platform.add_rows(piece(x), None, out[:, begin:end])
        return out


class BehindNorm:
    """A linear layer, or what has its form, of what a norm gives."""

    def __init__(self, norm: Norm, linear: Linear) -> None:
        self.norm = norm
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))

    def add(self, x: Unadded, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; the layer of the norm of s, and s. May overwrite both inputs."""
        normed, total = norm_of_sum(self.norm, x, residual)
        return self.linear(normed), total


def norm_of_sum(norm: Norm, x: Unadded, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As ``Norm.add``."""
    return norm.add(x, residual) if isinstance(x, Tensor) else (norm(residual), residual)


class IntoStream:
    """A linear layer, or what has its form, whose result is added to the residual stream. ``following``: the norm that
    reads the stream next, where it is known.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.following: Norm | None = None

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Unadded, Tensor]:
        """``residual`` [tokens, hidden]: the stream. -> what is still to be added to it, and the stream."""
        return self.linear(x), residual


@dataclass(frozen=True, eq=False)
class TableLookup:
    """Rows of ``table`` [vocab, hidden], as ``embed`` finds them."""

    table: Tensor
    embed: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, ids: Tensor) -> Tensor:
        return self.embed(ids, self.table)


@dataclass(frozen=True)
class Clipped:
    """A linear layer whose tokens are held within ``share`` [1] of their largest, by ``clip``, first."""

    linear: Linear
    share: Tensor
    clip: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.clip(x))


@dataclass(frozen=True)
class Settled:
    """A linear layer whose tokens are rounded to 8 bits, and brought back to floats, by ``settle`` first."""

    linear: Linear
    settle: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.settle(x))


class Projections(ABC):
    """What a platform makes of weights. ``widened_bytes``: what quantized weights that were dequantized take more than
    they did. ``captures``: whether what was made so far may be captured; an operator that reads something back may not.
    """

    device: torch.device
    widened_bytes: int = 0
    captures: bool = True

    @abstractmethod
    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        """``weight`` [outputs, inputs]. The platform may keep a packed copy and drop it, unless it is ``shared``."""

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``x`` [tokens, 2 * n] = gate | up -> [tokens, n]. May overwrite ``x``."""

    def make_tied(self, table: Tensor | QuantizedWeight) -> tuple[Lookup, Linear]:
        """Looks up rows of ``table`` [vocab, hidden], and the output layer of which it is the weight.

        The platform may keep one copy for both, in a layout of its own.
        """
        if isinstance(table, QuantizedWeight):
            return self.make_tied(self._dense(table))
        return self.make_lookup(table), self.make_linear(table, None, shared=True)

    def make_lookup(self, table: Tensor | QuantizedWeight) -> Lookup:
        """``embed`` of ``table``."""
        if isinstance(table, QuantizedWeight):
            table = self._dense(table)
        return TableLookup(table, self.embed)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows ``ids`` int [tokens] of ``table`` [vocab, hidden]."""
        return F.embedding(ids, table)

    def _dense(self, weight: QuantizedWeight) -> Tensor:
        self._tell("the table of embeddings is dequantized to %s while it is loaded", weight.dtype)
        dense = self.widen(weight, weight.dtype)
        self.widened_bytes += dense.nbytes - weight.nbytes
        return dense

    def widen(self, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """The floats [outputs, inputs] that a weight stands for, on the device."""
        return weight.dequantize(dtype)

    def make_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        """A linear layer of a weight of any kind, ``bias`` [outputs] in the model's dtype."""
        if isinstance(weight, Tensor):
            return self.make_linear(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return self._make_of_rounded(weight, bias)
        rows = [piece.shape[0] for piece in weight]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        pieces = [self.make_projection(piece, part) for piece, part in zip(weight, biases, strict=True)]
        return SideBySide(self, pieces, rows)

    def make_float_head(self, weight: Projection, shared: bool) -> Linear:
        """``[rows, inputs] -> float32 [rows, outputs]``, all in float32. ``shared``: others hold the weight too."""
        pieces = weight if isinstance(weight, tuple) else (weight,)
        wide = torch.cat(
            [part.float() if isinstance(part, Tensor) else self.widen(part, torch.float32) for part in pieces]
        )
        self.widened_bytes += wide.nbytes - (0 if shared else sum(part.nbytes for part in pieces))
        return self.linear_of_floats(wide)

    def linear_of_floats(self, weight: Tensor) -> Linear:
        """``[rows, inputs] -> float32 [rows, outputs]`` of a float32 ``weight``."""
        return lambda x: F.linear(x.float(), weight)

    def _make_of_rounded(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """``make_quantized``, after what no device has a kernel for."""
        clip = weight.clip
        if clip is not None:
            clipped = self.chain(lambda x: clip_tokens(x, clip), lambda x: x)
            return Clipped(self._make_of_rounded(dataclasses.replace(weight, clip=None), bias), clip, clipped)
        if isinstance(weight, GroupedWeight) and weight.activation is not None:
            self._tell(
                "weights of %d bits in groups are multiplied with inputs that are rounded to 8 bits and brought back "
                "to floats: no device has a kernel for both",
                weight.bits,
            )
            return Settled(self.make_quantized(dataclasses.replace(weight, activation=None), bias), self.settle)
        return self.make_quantized(weight, bias)

    def settle(self, x: Tensor) -> Tensor:
        """``settle_tokens``."""
        return settle_tokens(x)

    def chain(self, first: Linear, then: Linear) -> Linear:
        """``then(first(x))``, where ``first`` is of torch's operators."""
        return lambda x: then(first(x))

    def make_gated(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """``silu(gate(x)) * up(x)``; ``weight`` [2 * outputs, inputs] is gate's, then up's."""
        linear = self.make_linear(weight, bias)
        return lambda x: self.silu_and_mul(linear(x))

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        """``make_gated`` of a weight of any kind."""
        if isinstance(weight, Tensor):
            return self.make_gated(weight, bias)
        linear = self.make_projection(weight, bias)
        return lambda x: self.silu_and_mul(linear(x))

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """A linear layer that rounds its input as the weight's ``activation`` says, where the device has kernels for
        it; else the weight is dequantized once, and the log says so."""
        return self.make_dequantized(weight, bias, "there is no kernel for it on this device")

    def make_dequantized(self, weight: QuantizedWeight, bias: Tensor | None, reason: str) -> Linear:
        """A linear layer of what the weight's values stand for; its input is not rounded."""
        kind = type(weight).__name__
        self._tell("%s is dequantized to %s while it is loaded: %s", kind, weight.dtype, reason)
        constant = weight.constant()
        if constant is not None:
            bias = constant.to(weight.dtype) if bias is None else (bias.float() + constant).to(weight.dtype)
        dense = self.widen(weight, weight.dtype)
        self.widened_bytes += dense.nbytes - weight.nbytes
        return self.make_linear(dense, bias)

    def make_behind_norm(self, norm: Norm, linear: Linear) -> BehindNorm:
        """``linear`` of what ``norm`` gives; in one kernel where the platform has one for both."""
        return BehindNorm(norm, linear)

    def make_into_stream(self, linear: Linear) -> IntoStream:
        """``linear`` added to the residual stream; by its own kernel where the platform has one for both."""
        return IntoStream(linear)

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        """A layer of experts, of which each token takes ``chosen``: [tokens, hidden] -> [tokens, hidden].

        ``router`` [experts, hidden] and ``bias`` [experts] give a logit for each. ``normalized``: the weights of those
        that are chosen add up to one.
        """
        return self._in_turn(router, bias, experts, chosen, normalized, "there is no kernel for all at once")

    def _in_turn(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        chosen: int,
        normalized: bool,
        reason: str,
    ) -> ExpertsInTurn:
        self.captures = False
        self._tell(
            "experts are run one by one (%s), as the host is told which are chosen: decodes are not captured", reason
        )
        made = [
            (
                self.make_gated_projection(expert.gate_up, expert.gate_up_bias),
                self.make_projection(expert.down, expert.down_bias),
            )
            for expert in experts
        ]
        return ExpertsInTurn(self.make_linear(router, bias), made, chosen, normalized)

    def _stackable(
        self, experts: Sequence[ExpertWeights], kind: Callable[[Tensor | QuantizedWeight], object]
    ) -> list[ExpertWeights]:
        """Those with weights of no ``kind``, or of several, in floats, so that all can be multiplied at once; where
        that would not do, all as they are."""

        def floats(weight: Tensor | QuantizedWeight) -> Tensor:
            if isinstance(weight, Tensor):
                return weight
            self._tell(
                "experts in %s are dequantized to %s while they are loaded: no kernel of all experts takes them",
                type(weight).__name__,
                weight.dtype,
            )
            dense = self.widen(weight, weight.dtype)
            self.widened_bytes += dense.nbytes - weight.nbytes
            return dense

        def one(weight: Projection, dense: Callable[[Tensor | QuantizedWeight], Tensor]) -> Projection:
            pieces = weight if isinstance(weight, tuple) else (weight,)
            if not all(isinstance(piece, Tensor) or may_be_dense(piece) for piece in pieces):
                return weight
            if len(pieces) > 1:
                return torch.cat([dense(piece) for piece in pieces])
            return pieces[0] if kind(pieces[0]) is not None else dense(pieces[0])

        def every(dense: Callable[[Tensor | QuantizedWeight], Tensor]) -> list[ExpertWeights]:
            return [
                dataclasses.replace(expert, gate_up=one(expert.gate_up, dense), down=one(expert.down, dense))
                for expert in experts
            ]

        described = every(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
        return every(floats) if refusal(described, kind) is None else list(experts)

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] for ``add_rows`` to write to."""
        return torch.empty((rows, width), dtype=dtype, device=self.device)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        """``out`` = ``x`` + ``y``, or a copy of ``x``, all [tokens, width]; ``out`` may be columns of a wider one."""
        if y is None:
            out.copy_(x)
        else:
            torch.add(x, y, out=out)

    def sum_of(self, x: Unadded, residual: Tensor) -> Tensor:
        """The residual stream with what is left to add to it; ``residual`` itself where that is nothing."""
        if not isinstance(x, Tensor):
            return residual
        total = self.empty_rows(*residual.shape, residual.dtype)
        self.add_rows(x, residual, total)
        return total

    def add_unadded(self, x: Unadded, residual: Tensor, out: Tensor) -> None:
        """``add_rows`` of what is left to add to a residual stream."""
        self.add_rows(residual, x if isinstance(x, Tensor) else None, out)

    def add_weighted(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        """``x + sigmoid(logits) * y`` of [tokens, hidden] and ``logits`` [tokens, 1]. May overwrite ``x``."""
        return torch.addcmul(x, y, logits.sigmoid())

    def _tell(self, message: str, *values: object) -> None:
        """Log a fallback, once."""
        if (message, *values) not in self._told:
            self._told.add((message, *values))
            _log.warning(message, *values)

    @cached_property
    def _told(self) -> set[tuple[object, ...]]:
        """Fallbacks that were logged."""
        return set()
