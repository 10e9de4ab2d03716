"""From normed tokens to latent attention by npu_mla_prolog_v3: projections, norms, rotations, queries in the latent
space and the write to the cache in one operator.

Its documented sizes are those of DeepSeek V3 and of models like it. Tokens of long rows need queries outside of the
latent space, so steps with such rows run the projections one by one, on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.devices.latent_attention import LatentWeights
from kernels.devices.latent_cache import SplitLatent
from kernels.devices.npu.fused_attention import FusedPart
from kernels.devices.npu.latent_attention import DIM, RANK, ROPE, attend_rotated
from kernels.devices.npu.operators import FRACTAL_NZ, NpuNorm
from kernels.devices.npu.quantized import NpuInt8Linear
from kernels.devices.npu.soc import Soc
from kernels.weights.quantization.weights import Int8Weight, Projection

__all__ = ["NpuLatentPrologue", "fits_prolog"]

_HIDDEN, _QUERY_RANK, _HEADS = (6144, 7168, 7680), 1536, 128
_FLOATS, _INT8 = 0, 2  # weight_quant_mode


def fits_prolog(hidden: int, query_rank: int, heads: int, dims: tuple[int, int, int, int]) -> bool:
    """Whether the operator documents such sizes; ``dims`` as in ``Attention.fits_prologue``."""
    documented = hidden in _HIDDEN and query_rank == _QUERY_RANK and heads <= _HEADS and heads & (heads - 1) == 0
    return documented and dims == (DIM, ROPE, DIM, RANK)


class _FloatLinear:
    """``x @ values``, with the weight [inputs, outputs] in tiles."""

    def __init__(self, weight: Tensor) -> None:
        self.values: Tensor = torch_npu.npu_format_cast(weight.t().contiguous(), FRACTAL_NZ)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.values)


class NpuLatentPrologue:
    """``LatentPrologue``. ``part``: the one attention call of a step, None where it needs more."""

    def __init__(self, weights: LatentWeights, part: Callable[[ForwardBatch], FusedPart | None], soc: Soc) -> None:
        query_norm, norm = weights.query_norm, weights.norm
        assert isinstance(query_norm, NpuNorm)
        assert isinstance(norm, NpuNorm)
        self.heads, self.soc, self._part = weights.heads, soc, part

        def make(weight: Projection) -> NpuInt8Linear | _FloatLinear:
            if isinstance(weight, Int8Weight):
                return NpuInt8Linear(weight, None, soc)
            assert isinstance(weight, Tensor)
            return _FloatLinear(weight)

        self._down, self._up, self._vectors = (make(each) for each in (weights.down, weights.up, weights.vectors))
        self._quantized = isinstance(self._down, NpuInt8Linear)
        self._query_norm, self._norm = query_norm, norm
        self._options: dict[str, object] = {"weight_quant_mode": _INT8 if self._quantized else _FLOATS}
        for name, linear in (("dq", self._down), ("uq_qr", self._up), ("dkv_kr", self._vectors)):
            if isinstance(linear, NpuInt8Linear):
                self._options[f"dequant_scale_w_{name}"] = linear.scales.float().view(1, -1)

    @staticmethod
    def fits(weights: LatentWeights) -> bool:
        """Whether the operator takes such weights: all in bfloat16, or all in int8 for tokens that are quantized."""
        every = weights.down, weights.up, weights.vectors
        floats = all(isinstance(each, Tensor) and each.dtype == torch.bfloat16 for each in every)
        int8 = all(isinstance(each, Int8Weight) and NpuInt8Linear.fits(each) for each in every)
        norms = isinstance(weights.query_norm, NpuNorm) and isinstance(weights.norm, NpuNorm)
        return norms and (floats or int8) and weights.heads.keys.dtype == torch.bfloat16

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: object, batch: ForwardBatch, scale: float
    ) -> Tensor | None:
        """As ``LatentPrologue``."""
        part = self._part(batch) if isinstance(cache, SplitLatent) else None
        if part is None or not isinstance(cache, SplitLatent):
            return None
        options, tokens = self._options, x
        if self._quantized:
            tokens, scales = torch_npu.npu_dynamic_quant(x)
            options = options | {"dequant_scale_x": scales.view(-1, 1)}
        plain, rotated, *_ = torch_npu.npu_mla_prolog_v3(
            tokens,
            self._down.values,
            self._up.values,
            self.heads.keys,
            self._vectors.values,
            self._query_norm.gamma,
            self._norm.gamma,
            sin.view(-1, ROPE),
            cos.view(-1, ROPE),
            cache.latent.unsqueeze(2),
            cache.rotated.unsqueeze(2),
            cache_index=batch.cache_index,
            rmsnorm_epsilon_cq=self._query_norm.eps,
            rmsnorm_epsilon_ckv=self._norm.eps,
            cache_mode="PA_BSND",
            **options,
        )
        return attend_rotated(plain, rotated, cache, part, self.heads, scale, self.soc)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As ``LatentPrologue``."""
        return self._down(x), self._vectors(x)

    def queries(self, compressed: Tensor) -> Tensor:
        """As ``LatentPrologue``."""
        both = self._up(compressed).view(len(compressed), len(self.heads.keys), -1)
        rotated = both[..., -ROPE:].unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        return torch.cat((both[..., :-ROPE], rotated), 2).flatten(1)
