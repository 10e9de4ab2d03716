"""Elementwise operators on an NVIDIA GPU."""

from __future__ import annotations

from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.core.operators import Norm
from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.norms import CudaNorm, norm_embeddings_and_states, norm_pair
from kernels.devices.cuda.elementwise.rows import add_rows, look_up
from kernels.devices.elementwise import Elementwise, PositionAngles, TokenEmbedding

__all__ = ["CudaElementwise"]


class CudaElementwise(Elementwise):
    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return CudaNorm(weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        dense = ids.ndim == 1 and ids.is_contiguous() and table.stride(1) == 1
        return look_up(ids, table) if dense else super().embed(ids, table)

    def add_rows(self, x: Tensor, y: Tensor | None, out: Tensor) -> None:
        if x.ndim == 2 and all(rows.stride(1) == 1 for rows in (x, out, x if y is None else y)):
            return add_rows(x, y, out)
        super().add_rows(x, y, out)

    def norm_pair(self, first: Tensor, first_norm: Norm, second: Tensor, second_norm: Norm) -> Tensor:
        if isinstance(first_norm, CudaNorm) and isinstance(second_norm, CudaNorm) and first.shape == second.shape:
            return norm_pair(first, first_norm, second, second_norm)
        return super().norm_pair(first, first_norm, second, second_norm)

    def norm_embeddings_and_states(
        self,
        embed: TokenEmbedding,
        token_norm: Norm,
        states: Tensor,
        state_norm: Norm,
        angles: PositionAngles,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        table, ids = embed.table, batch.token_ids
        if (
            isinstance(token_norm, CudaNorm)
            and isinstance(state_norm, CudaNorm)
            and table is not None
            and table.dtype == states.dtype == angles.dtype
            and table.shape[1] == states.shape[1]
            and table.stride(1) == states.stride(1) == 1
            and ids.is_contiguous()
        ):
            return norm_embeddings_and_states(
                ids, table, token_norm, states, state_norm, batch.positions, angles.frequencies, angles.scale
            )
        return super().norm_embeddings_and_states(embed, token_norm, states, state_norm, angles, batch)
