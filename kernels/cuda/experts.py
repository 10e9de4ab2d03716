"""Layers of experts, all in two products: nothing is read back, so that a graph can hold them.

Pairs of a token and an expert that it takes are put in the order of the experts; a program multiplies some rows of one
expert's weight with a block of its pairs, and finds out by itself whose block it has. So an expert's weight is read
once for every block of its pairs, and not at all when nobody takes it. Weights of 8 bits are widened in registers and
inputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.activation import swiglu
from kernels.layers.experts import ExpertWeights, choose
from kernels.quantization.weights import Fp8Weight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CudaExperts"]

_ROWS = 64
_BLOCK = 64
_FEW, _MANY = 16, 64  # pairs of a block


@triton.jit
def _multiply(
    x,
    weight,
    scales,
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
    scaled: tl.constexpr,
):
    """``out`` [pairs, outputs] of ``x`` [pairs / each, inputs] and ``weight`` [experts, outputs, inputs]. ``order``:
    the pairs in the order of their experts, of which each has ``counts``."""
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
    row = expert.to(tl.int64) * outputs + tl.minimum(output, outputs - 1)
    total = tl.zeros([rows, pairs], tl.float32)
    for begin in tl.range(0, inputs, block):
        column = begin + tl.arange(0, block)
        inside = column < inputs
        w = tl.load(weight + row[:, None] * inputs + column[None, :], mask=inside[None, :], other=0.0)
        values = x + (pair // each)[:, None] * inputs + column[None, :]
        v = tl.load(values, mask=here[:, None] & inside[None, :], other=0.0)
        total = tl.dot(w.to(v.dtype), tl.trans(v), total, input_precision="ieee")
    if scaled:
        total *= tl.load(scales + row)[:, None]
    place = out + pair[None, :] * outputs + output[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=here[None, :] & (output < outputs)[:, None])


class CudaExperts:
    """[tokens, hidden] -> [tokens, hidden]. ``router``: to a logit for each expert."""

    def __init__(
        self, router: Callable[[Tensor], Tensor], experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> None:
        self.router = router
        self.count = len(experts)
        self.chosen = chosen
        self.normalized = normalized
        self._gate_up = _stacked([expert.gate_up for expert in experts])
        self._down = _stacked([expert.down for expert in experts])

    @staticmethod
    def fits(experts: Sequence[ExpertWeights], capability: tuple[int, int]) -> bool:
        """Whether the kernel takes them on a device of that compute capability."""
        if any(expert.gate_up_bias is not None or expert.down_bias is not None for expert in experts):
            return False
        weights = [weight for expert in experts for weight in (expert.gate_up, expert.down)]
        kinds = {type(weight) for weight in weights}
        if len(kinds) > 1 or (kinds == {Fp8Weight} and capability < (8, 9)):
            return False
        return all(isinstance(weight, Tensor) or _widens(weight) for weight in weights)

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts = choose(self.router(x), self.chosen, self.normalized)
        flat = experts.flatten()
        order = flat.argsort(stable=True).to(torch.int32)
        counts = torch.zeros(self.count, dtype=torch.int32, device=x.device)
        counts.index_add_(0, flat, torch.ones_like(order))
        inner = swiglu(self._product(x.contiguous(), self._gate_up, order, counts, self.chosen))
        found = self._product(inner, self._down, order, counts, 1).view(len(x), self.chosen, -1)
        return (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)

    def _product(
        self, x: Tensor, weight: tuple[Tensor, Tensor | None], order: Tensor, counts: Tensor, each: int
    ) -> Tensor:
        values, scales = weight
        pairs, (_, outputs, inputs) = len(order), values.shape
        size = _FEW if pairs <= _FEW * self.count else _MANY
        out = x.new_empty((pairs, outputs))
        most = min(pairs, pairs // size + min(self.count, pairs))  # blocks, however the pairs are divided
        _multiply[(triton.cdiv(outputs, _ROWS), most)](
            x,
            values,
            values if scales is None else scales,
            order,
            counts,
            out,
            outputs,
            self.count,
            each,
            inputs,
            triton.next_power_of_2(self.count),
            _ROWS,
            _BLOCK,
            size,
            scales is not None,
            num_warps=4,
            num_stages=3,
        )
        return out


def _widens(weight: Projection) -> bool:
    if isinstance(weight, Fp8Weight):
        return weight.block is None and weight.activation in ("dynamic", None) and weight.clip is None
    return isinstance(weight, Int8Weight) and weight.activation in ("dynamic", None) and weight.clip is None


def _stacked(weights: Sequence[Projection]) -> tuple[Tensor, Tensor | None]:
    """[experts, outputs, inputs], and the scales [experts, outputs] of 8 bits."""
    narrow = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not narrow:
        return torch.stack([weight for weight in weights if isinstance(weight, Tensor)]), None
    values = [weight.values for weight in narrow if isinstance(weight, Int8Weight | Fp8Weight)]
    scales = [weight.scales for weight in narrow if isinstance(weight, Int8Weight | Fp8Weight)]
    return torch.stack(values), torch.stack(scales)
