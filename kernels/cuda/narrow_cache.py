"""A cache of keys and values in fewer bits, on a GPU: attention widens them in registers.

A token's scale is multiplied on the products with its key and on the weight of its value, so that 8-bit numbers go
straight into tiles of 16 bits. Scales of a layer are multiplied on the queries and on what is found; what offsets add
to a query's products is the same for every key, and of values it is one number for all of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantization.cache import LayerScales, round_fixed, round_tokens

__all__ = ["NarrowCache", "bits", "scale_found", "scale_queries"]


@dataclass(frozen=True, eq=False)
class NarrowCache:
    """One layer. ``values`` [pages, 2, kv_heads, page_size, dim]; ``scales`` [pages, 2, kv_heads, page_size], each
    token's, or ``fixed``, or neither where 16 bits are kept."""

    values: Tensor
    scales: Tensor | None
    fixed: LayerScales | None

    def write(self, index: Tensor, keys_values: Tensor) -> None:
        """As ``Platform.write_cache``."""
        both, kept, page_size = keys_values.unflatten(1, (2, -1)), self.values.dtype, self.values.shape[3]
        page, offset = index // page_size, index % page_size
        if self.scales is not None:
            both, scales = round_tokens(both, kept, self.scales.dtype)
            self.scales[page, :, :, offset] = scales
        else:
            both = both.to(kept) if self.fixed is None else round_fixed(both, self.fixed, kept)
        bits(self.values)[page, :, :, offset] = bits(both)

    def move(self, source: Tensor, target: Tensor) -> None:
        """As ``Platform.move_cache``."""
        page_size = self.values.shape[3]
        for part in (bits(self.values), self.scales):
            if part is not None:
                moved = part[source // page_size, :, :, source % page_size]
                part[target // page_size, :, :, target % page_size] = moved

    def clear(self, pages: list[int]) -> None:
        """As ``Platform.clear_pages``."""
        bits(self.values)[pages] = 0
        if self.scales is not None:
            self.scales[pages] = 0


def bits(values: Tensor) -> Tensor:
    """Numbers of 8 bits as such that every operator copies."""
    return values.view(torch.int8) if values.element_size() == 1 else values


def scale_queries(queries: Tensor, fixed: LayerScales) -> Tensor:
    """``queries`` [tokens, heads, dim] for keys that are left as they are kept."""
    keys = fixed.scales[0]
    return (queries.unflatten(1, (len(keys), -1)) * keys.unsqueeze(1)).to(queries.dtype).flatten(1, 2)


def scale_found(found: Tensor, fixed: LayerScales) -> Tensor:
    """What attention found [tokens, heads, dim] of values that were left as they are kept."""
    values = fixed.scales[1].unsqueeze(1)
    wide = found.unflatten(1, (len(values), -1)).float()
    if fixed.offsets is not None:
        wide = wide - fixed.offsets[1].unsqueeze(1)
    return (wide * values).to(found.dtype).flatten(1, 2)
