"""Mixture of experts as two grouped products without a read by the host, so that a graph can capture them.

Pairs of a token and one of its experts are sorted by expert. A program multiplies some rows of one expert's weight with
a block of its pairs, and finds its expert itself. So an expert's weight is read once for every block of its pairs, and
not at all if no token chose it. Weights of 8 and 4 bits are dequantized in registers; inputs are not quantized.

An integer n becomes a 16-bit float by its bits alone: 0x4300 | n is 128 + n in bfloat16, for n of 4 bits, and
0x6400 | n is 1024 + n in float16 (Kim et al., arXiv 2211.10017, section 3.2). The difference to its zero point is
exact, so that a group's scale multiplies sums. An e2m1 number becomes a float whose exponent is too small by the
difference of their biases, which a power of two corrects, so that subnormal ones need no case of their own; the powers
of two that MXFP4 has for 32 inputs multiply weights, as all products are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.core.operators import Linear
from kernels.devices.cuda.elementwise.activation import clamped_swiglu, swiglu
from kernels.devices.cuda.launch import attempted, has_gluon, has_large_shared_memory
from kernels.devices.cuda.moe.routing import RoutedPairs, choose_experts, route, route_places, sum_experts
from kernels.devices.experts import (
    ClampedGate,
    ExpertInputs,
    ExpertLayers,
    Experts,
    ExpertWeights,
    Routing,
    StackedExperts,
    unbiased_refusal,
)
from kernels.weights.quantization.mxfp4 import Mxfp4Weight
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CudaExpertLayers", "CudaExperts"]

_FEW_TOKENS = 4  # up to which each pair reads its expert by itself
_MIN_INPUTS = 16  # inputs of the matrix unit's product


@dataclass(frozen=True)
class _Tile:
    """What a program multiplies: ``rows`` outputs of an expert with ``pairs`` of its pairs, ``block`` inputs at a time,
    of which ``stages`` are on their way."""

    pairs: int
    rows: int = 64
    block: int = 64
    warps: int = 4
    stages: int = 3


# By the mean pairs of an expert from which they are the fastest (H100, 128 experts of 2048 by 768 and 64 of 2048 by
# 1408). A weight is read once for each block of pairs.
_SMALL_TILES = ((32, _Tile(64)), (0, _Tile(16)))
_FEW_PAIRS = ((32, _Tile(64)), (16, _Tile(32, block=128)), (0, _Tile(16, block=128, stages=4)))
_TILES = ((192, _Tile(256, rows=128, warps=8, stages=4)), (96, _Tile(128, rows=128, warps=8)), *_FEW_PAIRS)
# Each block of inputs is scaled by itself, in registers.
_GROUPED_TILES = ((192, _Tile(128)), *_FEW_PAIRS)
_BLOCK_TILES = ((192, _Tile(128, block=128)), *_FEW_PAIRS)


def _choose_tile(mean_pairs: float, group: int, bits: int, large: bool) -> _Tile:
    """``group``: inputs that share a scale, 0 for all. ``bits``: of a weight. ``large``: large tiles fit shared
    memory."""
    grouped = _BLOCK_TILES if bits == 8 and group % 128 == 0 else _GROUPED_TILES
    tiles = _SMALL_TILES if not large else grouped if group else _TILES
    return next(tile for least, tile in tiles if mean_pairs >= least)


@triton.jit
def _less(n, zero, bits: tl.constexpr, like: tl.constexpr):
    """``n - zero`` for integers."""
    if like == tl.float16:
        number = (n.to(tl.int16) | 0x6400).to(like, bitcast=True) - (1024.0 + zero).to(like)
    elif like == tl.bfloat16 and bits == 4:
        number = (n.to(tl.int16) | 0x4300).to(like, bitcast=True) - (128.0 + zero).to(like)
    else:
        number = (n.to(tl.float32) - zero).to(like)
    return number


@triton.jit
def _from_e2m1(n, like: tl.constexpr):
    """The numbers of 4-bit codes ``n``."""
    if like == tl.float16:
        low = (((n & 7).to(tl.int16) << 9) | ((n & 8).to(tl.int16) << 12)).to(like, bitcast=True) * 16384.0
    elif like == tl.bfloat16:
        low = (((n & 7).to(tl.int16) << 6) | ((n & 8).to(tl.int16) << 12)).to(like, bitcast=True) * 8.507059173023462e37
    else:
        low = (((n & 7).to(tl.int32) << 22) | ((n & 8).to(tl.int32) << 28)).to(like, bitcast=True)
        low = low * 8.507059173023462e37
    return low.to(like)


@triton.jit
def moe_gemm_kernel(
    x,
    weight,
    scales,
    zeros,
    biases,
    order,
    counts,
    out,
    outputs,
    count_experts,
    each: tl.constexpr,
    inputs: tl.constexpr,
    experts: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pairs: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    tall: tl.constexpr,
    zeroed: tl.constexpr,
    scaled: tl.constexpr,
    micro: tl.constexpr,
    biased: tl.constexpr,
):
    """``out`` [pairs, outputs] of ``x`` [pairs / each, inputs] and ``weight`` [experts, outputs, inputs], or half as
    many bytes for 4 ``bits``. ``order``: the pairs sorted by expert; each expert has ``counts`` pairs.

    ``scales``: with ``group`` [experts, outputs / tall, inputs / group], else if ``scaled`` [experts, outputs].
    ``zeros`` like the scales, if ``zeroed``, for unsigned integer weights. ``micro``: weights are e2m1, and scales the
    exponents of two for ``group`` inputs, of which a block has several. ``biases`` [experts, outputs], if ``biased``.
    """
    number = tl.program_id(1)
    every = tl.arange(0, experts)
    count = tl.load(counts + every, mask=every < count_experts, other=0)
    blocks = (count + pairs - 1) // pairs
    ends = tl.cumsum(blocks, 0)
    if number >= tl.sum(blocks, 0):
        return
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    mine = every == expert
    at = (number - tl.sum(tl.where(mine, ends - blocks, 0), 0)) * pairs + tl.arange(0, pairs)
    here = at < tl.sum(tl.where(mine, count, 0), 0)
    first = tl.sum(tl.where(every < expert, count, 0), 0)
    pair = tl.load(order + first + at, mask=here, other=0).to(tl.int64)
    output = tl.program_id(0) * rows + tl.arange(0, rows)
    known = tl.minimum(output, outputs - 1)
    row = expert.to(tl.int64) * outputs + known
    if group > 0:
        groups: tl.constexpr = (inputs + group - 1) // group
        factor = (expert.to(tl.int64) * tl.cdiv(outputs, tall) + known // tall) * groups
    total = tl.zeros([rows, pairs], tl.float32)
    for begin in tl.range(0, inputs, block):
        column = begin + tl.arange(0, block)
        inside = column < inputs
        values = x + (pair // each)[:, None] * inputs + column[None, :]
        v = tl.load(values, mask=here[:, None] & inside[None, :], other=0.0)
        if bits == 4:
            byte = begin // 2 + tl.arange(0, block // 2)
            two = tl.load(
                weight + row[:, None] * (inputs // 2) + byte[None, :], mask=(byte < inputs // 2)[None, :], other=0
            )
            w = tl.interleave(two & 15, two >> 4)
        else:
            w = tl.load(weight + row[:, None] * inputs + column[None, :], mask=inside[None, :], other=0.0)
        if micro:
            part = begin // group + tl.arange(0, block // group)
            power = tl.load(scales + factor[:, None] + part[None, :], mask=(part < groups)[None, :], other=127)
            times = tl.exp2(power.to(tl.float32) - 127.0).to(v.dtype)
            apart = tl.reshape(_from_e2m1(w, v.dtype), (rows, block // group, group))
            wide = tl.reshape(apart * times[:, :, None], (rows, block))
        elif w.dtype == tl.uint8:
            if zeroed:
                zero = tl.load(zeros + factor + begin // group).to(tl.float32)
            else:
                zero = tl.full([rows], 8.0 if bits == 4 else 128.0, tl.float32)
            wide = _less(w, zero[:, None], bits, v.dtype)
        else:
            wide = w.to(v.dtype)
        if group > 0 and not micro:
            scale = tl.load(scales + factor + begin // group).to(tl.float32)
            total += tl.dot(wide, tl.trans(v), input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(wide, tl.trans(v), total, input_precision="ieee")
    if scaled:
        total *= tl.load(scales + row)[:, None]
    if biased:
        total += tl.load(biases + row).to(tl.float32)[:, None]
    place = out + pair[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=here[None, :] & (output < outputs)[:, None])


@dataclass(frozen=True)
class _Stack:
    """The weights of all experts. ``values`` [experts, outputs, inputs] in floats, int8, fp8, or uint8 with two 4-bit
    values (``bits``) a byte. ``scales``: [experts, outputs], or one for ``group`` inputs of ``tall`` outputs, [experts,
    outputs / tall, inputs / group]; ``zeros`` uint8 like these. ``micro``: MXFP4, whose scales are uint8 exponents.
    """

    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 16
    group: int = 0
    tall: int = 1
    before: ExpertInputs | None = None
    micro: bool = False


class CudaExperts(StackedExperts[_Stack]):
    """MoE layers in floats, int8, fp8 (with a scale an output, or in blocks), MXFP4, or 4 and 8 bits in groups.
    ``gate``, ``identities``: as ``ExpertLayers.make_in_turn``."""

    def __init__(
        self,
        router: Callable[[Tensor], Tensor],
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: Linear | None = None,
        identities: int = 0,
    ) -> None:
        super().__init__(router, experts, routing)
        self._gate, self._identities = gate, identities
        self._gate_up_bias = _stacked([expert.gate_up_bias for expert in experts])
        self._down_bias = _stacked([expert.down_bias for expert in experts])

    @staticmethod
    def kind(weight: Tensor | QuantizedWeight, capability: tuple[int, int]) -> tuple[object, ...] | None:
        """The kind that all experts of a layer must share; None if the kernel does not take it on a device of that
        compute capability."""
        if isinstance(weight, Tensor):
            return (Tensor, weight.dtype)
        prepared = weight.clip is not None, weight.dtype
        if isinstance(weight, Int8Weight):
            return (Int8Weight, *prepared) if weight.activation in ("dynamic", None) else None
        if isinstance(weight, Fp8Weight):
            fits = capability >= (8, 9) and (weight.block is None or _block(weight.block[1]) >= _MIN_INPUTS)
            return (Fp8Weight, weight.block, *prepared) if fits and weight.activation in ("dynamic", None) else None
        if isinstance(weight, GroupedWeight) and _block(weight.group) >= _MIN_INPUTS:
            form = weight.bits, weight.group, weight.zeros is None, weight.order is None, weight.activation
            return (GroupedWeight, weight.scales.dtype, *form, *prepared)
        if isinstance(weight, Mxfp4Weight):
            return (Mxfp4Weight, *prepared)
        return None

    def stack(self, weights: Sequence[Projection]) -> _Stack:
        floats = [weight for weight in weights if isinstance(weight, Tensor)]
        if floats:
            return _Stack(torch.stack(floats))
        before = ExpertInputs.from_weights(weights)
        grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
        if grouped:
            zeros = [weight.zeros for weight in grouped if weight.zeros is not None]
            return _Stack(
                torch.stack([weight.values for weight in grouped]),
                torch.stack([weight.scales for weight in grouped]),
                torch.stack(zeros) if zeros else None,
                grouped[0].bits,
                grouped[0].group,
                before=before,
            )
        blocks = [weight.pieces[0] for weight in weights if isinstance(weight, Mxfp4Weight)]
        if blocks:  # a block is its exponent and 16 bytes
            values = torch.stack([piece.data[:, :, 1:].flatten(1) for piece in blocks])
            scales = torch.stack([piece.data[:, :, 0] for piece in blocks])
            return _Stack(values, scales, None, 4, blocks[0].kind.block, before=before, micro=True)
        narrow = [weight for weight in weights if isinstance(weight, Int8Weight | Fp8Weight)]
        values = torch.stack([weight.values for weight in narrow])
        scales = torch.stack([weight.scales.float() for weight in narrow])
        tall, group = (isinstance(narrow[0], Fp8Weight) and narrow[0].block) or (1, 0)
        return _Stack(values, scales, None, 8, group, tall, before)

    def weights(self, number: int) -> list[Tensor]:
        result: list[Tensor | None] = [self._gate_up_bias, self._down_bias]
        for stack in (self.gate_up, self.down):
            result += [stack.values, stack.scales, stack.zeros]
            if stack.before is not None:
                result += [stack.before.orders, stack.before.clips]
        return [tensor[number] for tensor in result if tensor is not None]

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_few(x):
            result = attempted(self._few, x)
            if result is not None:
                return result
        return self._run(x, route(self.router(x), self.routing))

    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        return self._run(x, route_places(weights, places, self.routing, self.count))

    def _run(self, x: Tensor, routed: RoutedPairs) -> Tensor:
        chosen = self.routing.chosen
        rows, each, weights = x.contiguous(), chosen, routed.weights
        if self.gate_up.before is not None or self.routing.on_inputs:
            rows, each = x.repeat_interleave(chosen, 0), 1
        if self.routing.on_inputs:
            rows, weights = rows * weights.view(-1, 1).to(x.dtype), torch.ones_like(weights)
        if self.gate_up.before is not None:
            rows = self.gate_up.before(rows, self._owners(routed))
        both = self._product(rows, self.gate_up, self._gate_up_bias, routed, each)
        inner = self._activated(both)
        if self.down.before is not None:
            inner = self.down.before(inner, self._owners(routed))
        results = self._product(inner, self.down, self._down_bias, routed, 1)
        if self.routing.local is not None:
            return sum_experts(results, weights, routed.experts, self.count)
        if not self._identities:
            return sum_experts(results, weights)
        identical = routed.experts >= self.count  # no product wrote their results
        total = sum_experts(results.masked_fill_(identical.view(-1, 1), 0.0), weights)
        return total if self._identities < 0 else total + x * (weights * identical).sum(1, keepdim=True).to(x.dtype)

    def _owners(self, routed: RoutedPairs) -> Tensor:
        """The expert of each pair; of pairs whose expert is elsewhere, any."""
        owners = routed.experts.flatten()
        return owners if self.routing.local is None else owners.clamp(max=self.count - 1)

    def _activated(self, both: Tensor) -> Tensor:
        if self._gate is None:
            return swiglu(both)
        return clamped_swiglu(both, self._gate) if isinstance(self._gate, ClampedGate) else self._gate(both)

    def _is_few(self, x: Tensor) -> bool:
        """Whether ``kernels.devices.cuda.moe.gemv_mxfp4`` supports the layer and is faster."""
        return (
            len(x) <= _FEW_TOKENS
            and self.gate_up.micro
            and self.down.micro
            and isinstance(self._gate, ClampedGate)
            and not self._identities
            and self.routing.local is None
            and not self.routing.on_inputs
            and self.gate_up.before is self.down.before is None
            and x.element_size() == 2
            and x.device.type == "cuda"
            and has_gluon("moe.gemv_mxfp4")
        )

    def _few(self, x: Tensor) -> Tensor:
        from kernels.devices.cuda.moe.gemv_mxfp4 import multiply

        weights, chosen = choose_experts(self.router(x), self.routing)
        experts, up, down, gate = chosen.flatten(), self.gate_up, self.down, self._gate
        assert isinstance(gate, ClampedGate), "_is_few asks for it"
        assert up.scales is not None, "MXFP4 has scales"
        assert down.scales is not None, "MXFP4 has scales"
        inner = multiply(x.contiguous(), up.values, up.scales, self._gate_up_bias, experts, gate, self.routing.chosen)
        return sum_experts(multiply(inner, down.values, down.scales, self._down_bias, experts, None, 1), weights)

    def _product(self, x: Tensor, weight: _Stack, bias: Tensor | None, routed: RoutedPairs, each: int) -> Tensor:
        values, scales, order, counts = weight.values, weight.scales, routed.order, routed.counts
        pairs, outputs, inputs = len(order), values.shape[1], x.shape[1]
        large = x.element_size() <= 2 and has_large_shared_memory(x.device)
        tile = _choose_tile(pairs / routed.total, weight.group, weight.bits, large)
        out = x.new_empty((pairs, outputs))
        max_blocks = min(pairs, pairs // tile.pairs + min(self.count, pairs))  # for any routing
        moe_gemm_kernel[(triton.cdiv(outputs, tile.rows), max_blocks)](
            x,
            values,
            values if scales is None else scales,
            values if weight.zeros is None else weight.zeros,
            x if bias is None else bias,
            order,
            counts,
            out,
            outputs,
            self.count,
            each,
            inputs,
            triton.next_power_of_2(self.count),
            tile.rows,
            _block(weight.group, tile.block) if weight.group and not weight.micro else tile.block,
            tile.pairs,
            weight.bits,
            weight.group,
            weight.tall,
            weight.zeros is not None,
            scales is not None and not weight.group,
            weight.micro,
            bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out


def _stacked(biases: Sequence[Tensor | None]) -> Tensor | None:
    """[experts, outputs]; None if there are none."""
    some = [bias for bias in biases if bias is not None]
    return torch.stack(some) if some else None


def _block(group: int, block: int = 64) -> int:
    """Inputs multiplied at a time, all of one group, at most ``block``."""
    return min(block, group & -group)


class CudaExpertLayers(ExpertLayers):
    def make(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: ClampedGate | None = None,
    ) -> Experts:
        return self.make_routed(self.make_router(router, bias, routing), experts, routing, gate)

    def make_routed(
        self,
        router: Linear,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: Linear | None = None,
        *,
        identities: int = 0,
    ) -> Experts:
        device = self.linear.elementwise.torch_device
        kind = partial(CudaExperts.kind, capability=torch.cuda.get_device_capability(device))
        experts = self.stackable(experts, kind)
        reason = unbiased_refusal(experts, kind)
        if reason is not None:
            return self.make_in_turn(router, experts, routing, reason, gate, identities=identities)
        return CudaExperts(router, experts, routing, gate, identities)
