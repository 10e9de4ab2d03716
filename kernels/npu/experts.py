"""Layers of experts by the NPU's grouped products: tokens are put in the order of their experts by one operator, and
all experts multiply theirs in one. Nothing is read back, so that a graph can hold it (facts 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_npu
from torch import Tensor

from kernels.layers.experts import ExpertWeights
from kernels.quantization.weights import Int8Weight, Projection

__all__ = ["NpuExperts"]

_MOST = 65535
"""The largest dimension of npu_grouped_matmul."""
_HALVES = (torch.bfloat16, torch.float16)


class NpuExperts:
    """[tokens, hidden] -> [tokens, hidden], of experts in 16-bit floats, or in int8 with tokens that are rounded one by
    one. Weights are [experts, inputs, outputs], in rows."""

    def __init__(
        self, router: Callable[[Tensor], Tensor], experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> None:
        self.router = router
        self.count = len(experts)
        self.chosen = chosen
        self.normalized = normalized
        self.gate_up, self.gate_up_scales = _stacked([expert.gate_up for expert in experts])
        self.down, self.down_scales = _stacked([expert.down for expert in experts])

    @staticmethod
    def fits(experts: Sequence[ExpertWeights]) -> bool:
        """Whether the operators take them."""
        if any(expert.gate_up_bias is not None or expert.down_bias is not None for expert in experts):
            return False
        weights = [weight for expert in experts for weight in (expert.gate_up, expert.down)]
        return all(map(_floats, weights)) or all(map(_whole, weights))

    def __call__(self, x: Tensor) -> Tensor:
        weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(self.router(x).float(), None, self.chosen)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        rounds = self.gate_up_scales is not None
        rows, index, counts, scales = torch_npu.npu_moe_init_routing_v2(
            x.contiguous(),
            experts,
            active_num=len(x) * self.chosen,
            expert_num=self.count,
            expert_tokens_num_type=1,  # counts
            expert_tokens_num_flag=True,
            quant_mode=1 if rounds else -1,
            active_expert_range=[0, self.count],
        )
        inner = torch_npu.npu_swiglu(_multiply(rows, scales, self.gate_up, self.gate_up_scales, counts, x.dtype))
        if rounds:
            inner, scales = torch_npu.npu_dynamic_quant(inner)
        out = _multiply(inner, scales, self.down, self.down_scales, counts, x.dtype)
        found = out.index_select(0, index).view(len(x), self.chosen, -1)
        return (found.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


def _multiply(
    rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor | None, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """``rows`` [tokens, inputs] in the order of their experts, of which each has ``counts`` int64 [experts]."""
    more = {}
    if weight_scales is not None:
        more = {"scale": [weight_scales], "per_token_scale": [scales], "output_dtype": dtype}
    found: Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weight], split_item=2, group_type=0, group_list=counts, group_list_type=1, **more
    )[0]
    return found


def _stacked(weights: Sequence[Projection]) -> tuple[Tensor, Tensor | None]:
    """[experts, inputs, outputs], and the scales [experts, outputs] of whole numbers."""
    whole = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if whole:
        values = torch.stack([weight.values.t() for weight in whole])
        return values, torch.stack([weight.scales for weight in whole])
    return torch.stack([weight.t() for weight in weights if isinstance(weight, Tensor)]), None


def _floats(weight: Projection) -> bool:
    return isinstance(weight, Tensor) and weight.dtype in _HALVES and max(weight.shape) <= _MOST


def _whole(weight: Projection) -> bool:
    return (
        isinstance(weight, Int8Weight)
        and weight.activation == "dynamic"
        and weight.clip is None
        and weight.dtype in _HALVES
        and max(weight.shape) <= _MOST
    )
