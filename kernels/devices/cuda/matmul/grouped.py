"""Linear layers of 4-bit and 8-bit weights in groups: ``gemm_small_quantized`` for a few tokens, cuBLAS for more.

For cuBLAS the weight is first dequantized to 16 bits, in memory that all layers share.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.devices.cuda.elementwise.activation import swiglu
from kernels.devices.cuda.elementwise.norm_rope_cache import RopeCacheEpilogue
from kernels.devices.cuda.elementwise.norms import Before
from kernels.devices.cuda.launch import attempted
from kernels.devices.cuda.matmul import gemm_small_quantized, packing
from kernels.devices.cuda.matmul.autotune import Choices, Shape, Way, in_a_row, spare
from kernels.devices.cuda.matmul.gemm_small_quantized import Tiles, single_suits
from kernels.devices.cuda.matmul.norm_then_linear import Fused
from kernels.weights.quantization.weights import GroupedWeight

__all__ = ["GroupedLinear", "WideWeight"]

_MIN_INPUTS = 256
_FEW = 16


class WideWeight:
    """Memory for the largest weight of a model in 16 bits. Memory that was returned earlier is kept, because graphs use
    it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._max_numbers = 0
        self._held: list[Tensor] = []

    def reserve(self, numbers: int) -> None:
        """Reserve memory for a weight with ``elements`` elements."""
        self._max_numbers = max(self._max_numbers, numbers)

    def room(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized [outputs, inputs]."""
        size = outputs * inputs
        if not self._held or len(self._held[-1]) < size:
            self._held.append(torch.empty(max(size, self._max_numbers), dtype=torch.int16, device=self._device))
        return self._held[-1][:size].view(dtype).view(outputs, inputs)


class GroupedLinear:
    """``x @ weight.T + bias``, or ``gated`` as in ``CudaLinear``; ``x`` bfloat16 or float16, not quantized. ``room``:
    memory that all layers share.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        bias: Tensor | None,
        room: WideWeight,
        choices: Choices | None = None,
        gated: bool = False,
    ) -> None:
        self._form, self._words = packing.pack(weight), packing.tile_words(weight)
        self._shape, self._order, self._gated = weight.shape, weight.order, gated
        self.bias = bias
        self._room, self._choices = room, choices
        self._arrived = gemm_small_quantized.counters(weight.shape[0], weight.values.device)
        room.reserve(weight.shape[0] * weight.shape[1])

    @staticmethod
    def fits(weight: GroupedWeight) -> bool:
        """Whether the kernels support the weight."""
        outputs, inputs = weight.shape
        dense = weight.dtype in (torch.bfloat16, torch.float16)
        return dense and outputs % 2 == 0 and inputs >= _MIN_INPUTS and packing.tile_words(weight) > 0

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        x = x.contiguous()
        if len(x) > gemm_small_quantized.MAX_TOKENS:
            return self._wide(x)
        ways = self._ways(x)
        if self._choices is None:
            return next(iter(ways.values()))()
        block = 1 if len(x) == 1 else gemm_small_quantized.token_block(len(x))
        return self._choices.run(("in a row", *self.shape, block, x.dtype), ways, lambda: self._trial(x))

    def _trial(self, x: Tensor) -> dict[str, Way]:
        return in_a_row([layer._ways(x) for layer in (self, *self.copies())], lambda: swiglu(x))

    def _ways(self, x: Tensor) -> dict[str, Way]:
        """Implementations for a few tokens, by name."""
        few, more = Tiles(64, self._words, 6, 4), Tiles(128, self._words, 4, 8)
        if len(x) > _FEW:
            return {"tiles of 128": lambda: self._few(x, more), "made wide": lambda: self._wide(x)}
        ways: dict[str, Way] = {"tiles of 64": lambda: self._few(x, few), "tiles of 128": lambda: self._few(x, more)}
        if len(x) == 1 and single_suits(self._form, x):
            from kernels.devices.cuda.matmul import gemv_quantized

            ways |= gemv_quantized.ways(x, self._form, self.bias, self._gated, self._words)
        return ways

    def copies(self) -> list[GroupedLinear]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        result = []
        for _ in range(spare(self._form.words)):
            twin = copy(self)
            twin._form = replace(self._form, words=self._form.words.clone())
            result.append(twin)
        return result

    def _few(self, x: Tensor, tiles: Tiles) -> Tensor:
        return gemm_small_quantized.multiply(x, self._form, self.bias, self._arrived, self._gated, tiles)

    @property
    def shape(self) -> Shape:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        kind = f"{self._form.kind} gated" if self._gated else f"{self._form.kind}"
        return (kind, *self._shape, self._words, self._form.slots)

    def fused_with_norm(self, x: Tensor, before: Before) -> dict[str, Fused]:
        """See ``kernels.devices.cuda.matmul.norm_then_linear``."""
        if before.residual is None or self._order is not None or len(x) > 1 or not single_suits(self._form, x):
            return {}
        from kernels.devices.cuda.matmul import gemv_quantized

        return gemv_quantized.fused(x, self._form, self.bias, self._gated, self._words, before)

    def project_heads(
        self, x: Tensor, before: Before, name: str, epilogue: RopeCacheEpilogue
    ) -> tuple[Tensor, Tensor] | None:
        """Implementation ``name`` of ``fused_with_norm`` that also rotates the heads and writes the cache; returns the
        queries and the sum, or None if it cannot."""
        from kernels.devices.cuda.matmul import gemv_quantized

        tiling = gemv_quantized.tilings(self._form, self._gated).get(name)
        if tiling is None or not epilogue.suits(tiling.rows):
            return None
        return attempted(
            gemv_quantized.multiply, x, self._form, self.bias, False, self._words, tiling, before, epilogue
        )

    def _wide(self, x: Tensor) -> Tensor:
        weight = self._room.room(*self._shape, x.dtype)
        packing.widen(self._form, self._words, weight)
        result = F.linear(x, weight, self.bias)
        return swiglu(result) if self._gated else result
