"""Layers of experts by the NPU's grouped products: tokens are put in the order of their experts by one operator, and
all experts multiply theirs in one. Nothing is read back, so that a graph can hold it (facts 4.2 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from kernels.layers.experts import ExpertWeights
from kernels.quantization.weights import GroupedWeight, Int8Weight, Projection

__all__ = ["NpuExperts"]

_MOST = 65535
"""The largest dimension of npu_grouped_matmul."""
_HALVES = (torch.bfloat16, torch.float16)
_MIDDLE = 8
_GROUPS = 32
"""What sizes of groups must be divisible by."""


class NpuExperts:
    """[tokens, hidden] -> [tokens, hidden], of experts in 16-bit floats, in int8 with tokens that are rounded one by
    one, or in 4 bits (in groups or not) or 8 with tokens as they are. Weights are [experts, inputs, outputs], in rows.
    """

    def __init__(
        self, router: Callable[[Tensor], Tensor], experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> None:
        self.router = router
        self.count = len(experts)
        self.chosen = chosen
        self.normalized = normalized
        self.gate_up = _stack([expert.gate_up for expert in experts])
        self.down = _stack([expert.down for expert in experts])

    @staticmethod
    def fits(experts: Sequence[ExpertWeights]) -> bool:
        """Whether the operators take them."""
        if any(expert.gate_up_bias is not None or expert.down_bias is not None for expert in experts):
            return False
        parts = [expert.gate_up for expert in experts], [expert.down for expert in experts]
        kinds = [{_kind(weight) for weight in part} for part in parts]  # down may be of another
        return all(len(found) == 1 and found != {None} for found in kinds)

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(self.router(x).float(), None, self.chosen)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        rows, index, counts, scales = torch_npu.npu_moe_init_routing_v2(
            x.contiguous(),
            experts,
            active_num=len(x) * self.chosen,
            expert_num=self.count,
            expert_tokens_num_type=1,  # counts
            expert_tokens_num_flag=True,
            quant_mode=-1 if self.gate_up.scales is None else 1,
            active_expert_range=[0, self.count],
        )
        inner = torch_npu.npu_swiglu(_multiply(rows, scales, self.gate_up, counts, x.dtype))
        if self.down.scales is not None:
            inner, scales = torch_npu.npu_dynamic_quant(inner)
        out = _multiply(inner, scales, self.down, counts, x.dtype)
        found = out.index_select(0, index).view(len(x), self.chosen, -1)
        return (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


@dataclass(frozen=True)
class _Stack:
    """The weights of all experts. ``values`` [experts, inputs, outputs] in floats or int8, or eight of 4 bits to an
    int32 along the outputs. ``scales`` f32 [experts, outputs]: of int8 by int8. ``factors``: what whole numbers are
    multiplied with by inputs in floats, after ``offsets`` were added: [experts, outputs], or with groups [experts,
    groups, outputs], in the inputs' dtype.
    """

    values: Tensor
    scales: Tensor | None = None
    factors: Tensor | None = None
    offsets: Tensor | None = None


def _multiply(rows: Tensor, scales: Tensor, weight: _Stack, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows`` [tokens, inputs] in the order of their experts, of which each has ``counts`` int64 [experts]."""
    more: dict[str, object] = {}
    if weight.scales is not None:
        more = {"scale": [weight.scales], "per_token_scale": [scales], "output_dtype": dtype}
    if weight.factors is not None:
        more = {"antiquant_scale": [weight.factors], "antiquant_offset": [weight.offsets]}
    found: Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weight.values], split_item=2, group_type=0, group_list=counts, group_list_type=1, **more
    )[0]
    return found


def _stack(weights: Sequence[Projection]) -> _Stack:
    """Of one kind."""
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if floats:
        return _Stack(torch.stack([weight.t() for weight in floats]))
    whole = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if whole:
        values = torch.stack([weight.values.t() for weight in whole])
        scales = torch.stack([weight.scales for weight in whole])
        if whole[0].activation is not None:
            return _Stack(values, scales)
        factors = scales.to(whole[0].dtype)
        return _Stack(values, None, factors, torch.zeros_like(factors))
    return _stack_of_groups([weight for weight in weights if isinstance(weight, GroupedWeight)])


def _stack_of_groups(weights: Sequence[GroupedWeight]) -> _Stack:
    values, factors, offsets = [], [], []
    for weight in weights:
        whole = (weight.unpacked().to(torch.int32) - _MIDDLE).t().contiguous()
        values.append(torch_npu.npu_convert_weight_to_int4pack(whole))
        factor = weight.scales.t().to(weight.dtype)
        offset = torch.zeros_like(factor)
        if weight.zeros is not None:
            offset = _MIDDLE - weight.zeros.t().to(weight.dtype)
        apart = weight.group < weight.shape[1]
        factors.append(factor if apart else factor[0])
        offsets.append(offset if apart else offset[0])
    return _Stack(torch.stack(values), None, torch.stack(factors), torch.stack(offsets))


def _kind(weight: Projection) -> tuple[object, ...] | None:
    """What all experts of a layer must share; None: the operators do not take it."""
    if isinstance(weight, tuple) or max(weight.shape) > _MOST or weight.dtype not in _HALVES:
        return None
    if isinstance(weight, Tensor):
        return (Tensor,)
    if weight.clip is not None:
        return None
    if isinstance(weight, Int8Weight):
        return (Int8Weight, weight.activation) if weight.activation in ("dynamic", None) else None
    if isinstance(weight, GroupedWeight) and weight.bits == 4 and weight.activation is None and weight.order is None:
        apart = weight.group < weight.shape[1]
        fits = weight.shape[0] % 8 == 0 and (not apart or weight.group % _GROUPS == 0)
        return (GroupedWeight, weight.group if apart else None) if fits else None
    return None
