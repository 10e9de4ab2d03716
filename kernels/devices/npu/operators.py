"""The operators around attention, by torch_npu's fused kernels where they exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.core.operators import Norm
from kernels.devices.elementwise import Elementwise
from kernels.devices.npu.soc import Soc

__all__ = [
    "NpuElementwise",
    "NpuLinear",
    "NpuNorm",
    "ascend_top_k_top_p",
    "make_linear",
    "rotate",
    "swiglu",
    "write_cache",
]

FRACTAL_NZ = 29
"""NZ, the storage format of the cube unit's right operand: tiles of 16 by 16, column blocks first."""

_TILE = 16


class NpuNorm:
    """RMS norm by npu_rms_norm, and with a residual by npu_add_rms_norm.

    ``weight``: [dim], or [heads, dim]. The kernel's gamma spans the normed dimensions, so a weight by head is
    multiplied separately.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.eps = eps
        self.gamma = weight if weight.ndim == 1 else torch.ones_like(weight[0])
        self.head_weight = None if weight.ndim == 1 else weight

    def __call__(self, x: Tensor) -> Tensor:
        normed: Tensor = torch_npu.npu_rms_norm(x.contiguous(), self.gamma, self.eps)[0]
        return normed if self.head_weight is None else normed.mul_(self.head_weight)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, self.gamma, self.eps)
        return normed, total


class NpuLinear:
    """``x @ weight.T + bias``. The weight is [outputs, inputs] in either format."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def make_linear(weight: Tensor, bias: Tensor | None, shared: bool, soc: Soc) -> NpuLinear:
    """Convert 16-bit weights to tiles once, instead of in every matrix product.

    A ``shared`` weight is not converted: embeddings cannot be looked up in tiles.
    """
    tiled = (
        soc.nz_weights
        and not shared
        and weight.dtype in (torch.bfloat16, torch.float16)
        and all(size % _TILE == 0 for size in weight.shape)
    )
    return NpuLinear(torch_npu.npu_format_cast(weight, FRACTAL_NZ) if tiled else weight, bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [tokens, heads, dim]; ``cos`` and ``sin`` [tokens, 1, dim]. The kernel takes [1, tokens, heads, dim]; it
    swaps the halves and negates the first one.
    """
    result: Tensor = torch_npu.npu_rotary_mul(x.unsqueeze(0).contiguous(), cos.unsqueeze(0), sin.unsqueeze(0))
    return result.squeeze(0)


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of [tokens, gate | up]."""
    result: Tensor = torch_npu.npu_swiglu(x, dim=-1)
    return result


class NpuElementwise(Elementwise):
    float_weights = False  # the kernel takes gamma in the dtype of its input

    def make_norm(self, weight: Tensor, eps: float) -> Norm:
        return NpuNorm(weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return swiglu(x)


def write_cache(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """``keys`` and ``values`` [tokens, kv_heads, dim] to ``slots`` int64 [tokens] of caches [pages, page, heads, dim].

    Slots must be distinct: duplicates have undefined contents. The kernel of A2 and A3 does not support float32.
    """
    wide = key_cache.shape[-1] - keys.shape[-1]
    dtype = key_cache.dtype
    if dtype == torch.float32:
        for cache, part in ((key_cache, keys), (value_cache, values)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, F.pad(part.to(dtype), (0, wide)))
        return
    new = [F.pad(part.to(dtype), (0, wide)) if wide else part.to(dtype).contiguous() for part in (keys, values)]
    torch_npu.npu_scatter_pa_kv_cache(*new, key_cache, value_cache, slots, cache_mode="Norm")


def ascend_top_k_top_p(
    logits: Tensor, rows: Tensor, row_max: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int
) -> tuple[Tensor, Tensor]:
    """The result of ``kernels.sampling.nucleus.cut``, by npu_top_k_top_p: the least value kept in each of the ``rows``.

    All ties at the border are kept, so the id is the size of the vocabulary.
    """
    values = logits[rows].float()
    scaled = (values - row_max[:, None]) / temperature[:, None]
    kept = torch_npu.npu_top_k_top_p(scaled, p=top_p.float(), k=top_k.to(torch.int32) if largest_k else None)
    floor = torch.where(kept == -torch.inf, torch.inf, values).amin(-1)
    return floor, torch.full_like(rows, logits.shape[1])
