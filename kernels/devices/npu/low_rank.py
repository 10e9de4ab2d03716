"""What adapters add to a linear layer on an NPU: of many rows and large places by grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

from kernels.core.layer_context import LayerContext
from kernels.devices.low_rank import LowRankDelta

__all__ = ["NpuLowRankDelta"]

_COLUMNS = 1024
"""Columns of all places together from which a grouped product costs less than one with all of them, by calculation:
rows are copied twice for it, and B once for each fused module."""
_ROWS = 1024
_MAX_DIM = 65535
_HALVES = (torch.bfloat16, torch.float16)


class NpuLowRankDelta(LowRankDelta):
    """``LowRankDelta`` that sorts many rows by place, so that each is multiplied with its own place alone."""

    def __init__(self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int]) -> None:
        super().__init__(context, down, up, sizes)
        large = (len(down) - 1) * self.rank >= _COLUMNS
        self._grouped = large and down.dtype in _HALVES and max(down.shape[2], *sizes) <= _MAX_DIM

    def _many(self, x: Tensor, outputs: Tensor) -> Tensor:
        if not self._grouped or len(x) < _ROWS or x.dtype != self.down.dtype or outputs.dtype != x.dtype:
            return super()._many(x, outputs)
        count = len(self.down)
        rows, index, counts, _ = torch_npu.npu_moe_init_routing_v2(
            x.contiguous(),
            self.context.rows.to(torch.int32).unsqueeze(1),
            active_num=len(x),
            expert_num=count,
            expert_tokens_num_type=1,  # counts
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, count],
        )
        low = _multiply(rows, self.down.transpose(1, 2), counts)
        for number, (begin, end) in enumerate(self.columns):
            own = low[:, number * self.rank : (number + 1) * self.rank]
            more = _multiply(own.contiguous(), self.up[:, :, begin:end], counts)
            outputs[:, begin:end] += more.index_select(0, index)
        return outputs


def _multiply(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``rows`` [rows, inputs], sorted by place, by ``weight`` [places, inputs, outputs]; each place has ``counts``
    int64 [places] rows."""
    result: Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weight.contiguous()], split_item=2, group_type=0, group_list=counts, group_list_type=1
    )[0]
    return result
