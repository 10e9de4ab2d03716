"""What the layers of a model are made of on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.cuda.behind import CudaBehindNorm, Fuses
from kernels.cuda.choosing import Choices
from kernels.cuda.experts import CudaExperts
from kernels.cuda.grouped import GroupedLinear, WideWeight
from kernels.cuda.linear import CudaLinear
from kernels.cuda.norms import CudaNorm, enter_both, norm_both
from kernels.cuda.projected import CudaHeads
from kernels.cuda.quantized import EightBitLinear
from kernels.cuda.rows import add_rows, look_up
from kernels.cuda.stream import CudaIntoStream
from kernels.layers.experts import ExpertWeights
from kernels.layers.rotary import RotaryEmbedding
from kernels.layers.stacked_experts import refusal
from kernels.parallel.layers import VocabularyEmbedding
from kernels.platforms.base import Platform
from kernels.platforms.heads import ProjectedHeads
from kernels.platforms.operators import Linear, Norm
from kernels.platforms.projections import BehindNorm, IntoStream
from kernels.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["CudaLayers"]


class CudaLayers(Platform):
    """A platform's linear layers, experts, norms and tables. ``device``: what they are made on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wide = WideWeight(device)
        self._choices = Choices(device)

    def make_linear(self, weight: Tensor, bias: Tensor | None, shared: bool = False) -> Linear:
        return CudaLinear(weight, bias, self._choices)

    def make_gated(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return CudaLinear(weight, bias, self._choices, gated=True)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self._quantized(weight, bias, gated=False) or super().make_quantized(weight, bias)

    def make_gated_projection(self, weight: Projection, bias: Tensor | None) -> Linear:
        found = self._quantized(weight, bias, gated=True)
        return found or super().make_gated_projection(weight, bias)

    def _quantized(self, weight: Projection, bias: Tensor | None, gated: bool) -> Linear | None:
        """None where there is no kernel for it."""
        if isinstance(weight, QuantizedWeight) and weight.clip is not None:
            return None
        if isinstance(weight, Int8Weight) and weight.activation is None:
            weight = weight.grouped()
        if isinstance(weight, GroupedWeight) and weight.activation is None and GroupedLinear.fits(weight):
            return GroupedLinear(weight, bias, self._wide, self._choices, gated)
        if isinstance(weight, Int8Weight | Fp8Weight) and EightBitLinear.fits(weight, self.device):
            return EightBitLinear(weight, bias, self._choices, gated)
        return None

    def make_experts(
        self, router: Tensor, bias: Tensor | None, experts: Sequence[ExpertWeights], chosen: int, normalized: bool
    ) -> Linear:
        kind = partial(CudaExperts.kind, capability=torch.cuda.get_device_capability(self.device))
        experts = self._stackable(experts, kind)
        reason = refusal(experts, kind)
        if reason is not None:
            return self._in_turn(router, bias, experts, chosen, normalized, reason)
        return CudaExperts(self.make_linear(router, bias), experts, chosen, normalized)

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return CudaNorm(weight, eps)

    def make_behind_norm(self, norm: Norm, linear: Linear) -> BehindNorm:
        if isinstance(norm, CudaNorm) and isinstance(linear, Fuses):
            return CudaBehindNorm(norm, linear, self._choices)
        return super().make_behind_norm(norm, linear)

    def make_heads(
        self, projection: BehindNorm, heads: int, kv_heads: int, dim: int, norm: Norm | None
    ) -> ProjectedHeads:
        return CudaHeads(self, projection, heads, kv_heads, dim, norm)

    def make_into_stream(self, linear: Linear) -> IntoStream:
        return CudaIntoStream(linear)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        dense = ids.ndim == 1 and ids.is_contiguous() and table.stride(1) == 1
        return look_up(ids, table) if dense else super().embed(ids, table)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        if x.ndim == 2 and all(rows.stride(1) == 1 for rows in (x, out, x if y is None else y)):
            return add_rows(x, y, out)
        super().add_rows(x, y, out)

    def enter_both(
        self,
        embed: VocabularyEmbedding,
        token_norm: Norm,
        states: Tensor,
        state_norm: Norm,
        rotary: RotaryEmbedding,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        table, ids = embed.table, batch.token_ids
        if (
            isinstance(token_norm, CudaNorm)
            and isinstance(state_norm, CudaNorm)
            and table is not None
            and table.dtype == states.dtype == rotary.dtype
            and table.shape[1] == states.shape[1]
            and table.stride(1) == states.stride(1) == 1
            and ids.is_contiguous()
        ):
            return enter_both(
                ids, table, token_norm, states, state_norm, batch.positions, rotary.frequencies, rotary.scale
            )
        return super().enter_both(embed, token_norm, states, state_norm, rotary, batch)

    def norm_both(self, first: Tensor, first_norm: Norm, second: Tensor, second_norm: Norm) -> Tensor:
        if isinstance(first_norm, CudaNorm) and isinstance(second_norm, CudaNorm) and first.shape == second.shape:
            return norm_both(first, first_norm, second, second_norm)
        return super().norm_both(first, first_norm, second, second_norm)
