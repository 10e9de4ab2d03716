"""A quantized cache of keys and values on a GPU; attention dequantizes it in registers.

A token's scale multiplies the products with its key and the weight of its value, so that 8-bit numbers go directly into
16-bit tiles. Static scales of a layer multiply the queries and the result. Offsets of keys add the same number to all
products of a query; offsets of values add one number to the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.weights.quantization.cache import LayerScales, round_fixed, round_tokens, widen

__all__ = ["Cache8bit", "bits", "scale_found", "scale_queries"]


@dataclass(frozen=True, eq=False)
class Cache8bit:
    """One layer. ``values`` [pages, 2, kv_heads, page_size, dim]; dynamic ``scales`` [pages, 2, kv_heads, page_size] of
    tokens, or static scales ``fixed``, or neither for 16 bits."""

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None

    def write(self, index: Tensor, keys_values: Tensor) -> None:
        """As ``KvCaches.write``."""
        both, kept, page_size = keys_values.unflatten(1, (2, -1)), self.values.dtype, self.values.shape[3]
        page, offset = index // page_size, index % page_size
        if self.scales is not None:
            both, scales = round_tokens(both, kept, self.scales.dtype)
            self.scales[page, :, :, offset] = scales
        else:
            both = both.to(kept) if self.fixed is None else round_fixed(both, self.fixed, kept)
        bits(self.values)[page, :, :, offset] = bits(both)

    def gather(self, places: Tensor) -> Tensor:
        """As ``KvCaches.gather``, in float32."""
        page_size = self.values.shape[3]
        page, offset = torch.div(places, page_size, rounding_mode="floor"), places % page_size
        values = bits(self.values)[page, :, :, offset].view(self.values.dtype)
        scales = None if self.scales is None else self.scales[page, :, :, offset]
        return widen(values, scales, self.fixed, torch.float32)

    def move(self, source: Tensor, target: Tensor) -> None:
        """As ``KvCaches.move``."""
        page_size = self.values.shape[3]
        for part in (bits(self.values), self.scales):
            if part is not None:
                moved = part[source // page_size, :, :, source % page_size]
                part[target // page_size, :, :, target % page_size] = moved

    def clear(self, pages: list[int]) -> None:
        """As ``KvCaches.clear``."""
        bits(self.values)[pages] = 0
        if self.scales is not None:
            self.scales[pages] = 0


def bits(values: Tensor) -> Tensor:
    """8-bit numbers viewed as a dtype that every operator can copy."""
    return values.view(torch.int8) if values.element_size() == 1 else values


def scale_queries(queries: Tensor, fixed: LayerScales) -> Tensor:
    """``queries`` [tokens, heads, dim] scaled for keys that stay quantized."""
    keys = fixed.scales[0]
    scaled: Tensor = (queries.unflatten(1, (len(keys), -1)) * keys.unsqueeze(1)).to(queries.dtype).flatten(1, 2)
    return scaled


def scale_found(found: Tensor, fixed: LayerScales) -> Tensor:
    """Dequantize the result of attention [tokens, heads, dim] over values that stay quantized."""
    values = fixed.scales[1].unsqueeze(1)
    wide: Tensor = found.unflatten(1, (len(values), -1)).float()
    if fixed.offsets is not None:
        wide = wide - fixed.offsets[1].unsqueeze(1)
    return (wide * values).to(found.dtype).flatten(1, 2)
