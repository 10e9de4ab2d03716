"""An int8 cache of keys and values on the NPU.

For decodes, npu_fused_infer_attention_score reads the quantized cache directly: with scales by token and key head
stored beside the pages ("per token and head, managed by page attention", antiquant mode 5), or with static scales of a
layer (mode 0, per channel). It supports such keys for one query a row only. For other rows and for windows, pages are
first dequantized to bfloat16. There is no fp8 cache: NPUs before A5 have no fp8 operators, and A5 needs scales of
another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.npu.fused_attention import FusedPart, LayerCache, with_sinks
from kernels.devices.npu.native_attention import NativePart
from kernels.devices.npu.tree_attention import TreePart
from kernels.weights.quantization.cache import LayerScales, round_fixed, widen

__all__ = ["ALIGNMENT", "DequantizedPart", "Int8Layer", "attend_int8", "compact", "make_int8_layer"]

ALIGNMENT = 32
"""Head dimensions are padded to a multiple of this."""

_CHANNEL, _TOKEN_AND_HEAD = 0, 5  # antiquant modes

Put = Callable[[np.ndarray], Tensor]
"""Copies an array to the device."""


@dataclass(frozen=True, eq=False)
class Int8Layer:
    """One layer's ``keys`` and ``values`` int8 [pages, page_size, kv_heads, dim], dim padded with zeros. Scales are
    float32 [pages, kv_heads, page_size], or static: ``fixed`` of [2, kv_heads, dim]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    fixed: LayerScales | None

    def write(self, index: Tensor, keys_values: Tensor) -> None:
        """As ``KvCaches.write``. Indices must be distinct except in page 0."""
        both = keys_values.unflatten(1, (2, -1))
        heads, dim = both.shape[2:]
        wide, page_size = self.keys.shape[3] - dim, self.keys.shape[1]
        if self.fixed is not None:
            whole = round_fixed(F.pad(both, (0, wide)), self.fixed, torch.int8)
        else:
            assert self.key_scales is not None
            assert self.value_scales is not None
            given = both if both.dtype in (torch.bfloat16, torch.float16) else both.to(torch.bfloat16)
            whole, scales = torch_npu.npu_dynamic_quant(given.contiguous())
            whole = F.pad(whole, (0, wide)) if wide else whole
            head = torch.arange(heads, device=index.device)
            place = ((index // page_size).unsqueeze(1) * heads + head) * page_size + (index % page_size).unsqueeze(1)
            for held, new in zip((self.key_scales, self.value_scales), scales.unbind(1), strict=True):
                held.view(-1).index_copy_(0, place.flatten(), new.reshape(-1))
        keys, values = (part.contiguous() for part in whole.unbind(1))
        torch_npu.npu_scatter_pa_kv_cache(keys, values, self.keys, self.values, index, cache_mode="Norm")

    def move(self, source: Tensor, target: Tensor) -> None:
        """As ``KvCaches.move``."""
        for part in (self.keys, self.values):
            tokens = part.view(-1, *part.shape[2:])
            tokens.index_copy_(0, target, tokens.index_select(0, source))
        page_size = self.keys.shape[1]
        for scales in (self.key_scales, self.value_scales):
            if scales is not None:
                moved = scales[source // page_size, :, source % page_size]
                scales[target // page_size, :, target % page_size] = moved

    def gather(self, places: Tensor) -> Tensor:
        """As ``KvCaches.gather``, in float32."""
        page_size = self.keys.shape[1]
        values = torch.stack(
            [part.view(-1, *part.shape[2:]).index_select(0, places) for part in (self.keys, self.values)], 1
        )
        scales = None
        if self.key_scales is not None and self.value_scales is not None:
            page, at = torch.div(places, page_size, rounding_mode="floor"), places % page_size
            scales = torch.stack([part[page, :, at] for part in (self.key_scales, self.value_scales)], 1)
        return widen(values, scales, self.fixed, torch.float32)

    def clear(self, index: Tensor) -> None:
        """As ``KvCaches.clear``."""
        for part in (self.keys, self.values, self.key_scales, self.value_scales):
            if part is not None:
                part.index_fill_(0, index, 0)

    def dequantized(self, pages: Tensor, dtype: torch.dtype, dim: int) -> LayerCache:
        """The contents of ``pages`` int64 as floats, with heads of ``dim``."""

        def floats(part: Tensor, scales: Tensor | None, which: int) -> Tensor:
            values = part.index_select(0, pages)
            if scales is not None:
                scales = scales.index_select(0, pages).transpose(1, 2)
            fixed = self.fixed
            if fixed is not None:
                offsets = None if fixed.offsets is None else fixed.offsets[which]
                fixed = LayerScales(fixed.scales[which], offsets)
            result = widen(values, scales, fixed, dtype)
            return F.pad(result, (0, dim - result.shape[-1])) if dim > result.shape[-1] else result.contiguous()

        return LayerCache(floats(self.keys, self.key_scales, 0), floats(self.values, self.value_scales, 1))


def make_int8_layer(
    pages: int, page_size: int, kv_heads: int, dim: int, fixed: LayerScales | None, device: torch.device
) -> Int8Layer:
    """Make a layer's cache. ``dim``: the padded head dimension."""

    def zeros() -> Tensor:
        return torch.zeros((pages, page_size, kv_heads, dim), dtype=torch.int8, device=device)

    if fixed is None:
        keys, values = (torch.zeros((pages, kv_heads, page_size), device=device) for _ in range(2))
        return Int8Layer(zeros(), zeros(), keys, values, None)
    wide = dim - fixed.scales.shape[-1]
    scales = F.pad(fixed.scales, (0, wide), value=1.0).to(torch.bfloat16).float()  # the operator's precision
    offsets = None if fixed.offsets is None else F.pad(fixed.offsets, (0, wide))
    return Int8Layer(zeros(), zeros(), None, None, LayerScales(scales, offsets))


@dataclass(frozen=True)
class DequantizedPart:
    """``part`` over a compact copy of the ``pages`` int64 that it reads."""

    part: FusedPart | TreePart | NativePart
    pages: Tensor


def compact(rows: AttentionRows, first: int, last: int, page_size: int, put: Put) -> tuple[AttentionRows, Tensor]:
    """Renumber the pages of rows ``first .. last`` by their order of use; returns the rows and the page ids used."""
    lengths = rows.starts[first:last] + rows.counts[first:last]
    read = np.zeros(rows.pages.shape, dtype=np.bool_)
    read[first:last] = np.arange(rows.pages.shape[1]) < -(-lengths // page_size)[:, None]
    pages, place = np.unique(rows.pages[read], return_inverse=True)
    table = np.zeros_like(rows.pages)
    table[read] = place
    return replace(rows, pages=table), put(pages.astype(np.int64))


def attend_int8(
    queries: Tensor, cache: Int8Layer, part: FusedPart, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of decodes: ``queries`` [rows, heads, dim], one per row -> the same shape and dtype. ``sinks``: as
    ``with_sinks``."""
    rows, heads, dim = queries.shape
    pages, page_size, kv_heads, wide = cache.keys.shape
    given = queries.to(torch.bfloat16)
    given = F.pad(given, (0, wide - dim)) if dim < wide else given.contiguous()
    fixed, key_scales, value_scales, mode = cache.fixed, cache.key_scales, cache.value_scales, _TOKEN_AND_HEAD
    if fixed is not None:
        mode = _CHANNEL
        key_scales, value_scales = (part.unsqueeze(0) for part in fixed.scales.to(torch.bfloat16).unbind(0))
    # Lengths are a keyword argument and a list: otherwise captured calls cannot be updated (see
    # kernels.devices.npu.graphs).
    out, sums = torch_npu.npu_fused_infer_attention_score(
        given.reshape(rows, 1, heads * wide),
        cache.keys.view(pages, page_size, kv_heads * wide),
        cache.values.view(pages, page_size, kv_heads * wide),
        actual_seq_lengths_kv=part.lengths,
        key_antiquant_scale=key_scales,
        value_antiquant_scale=value_scales,
        block_table=part.pages,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="BSH",
        block_size=page_size,
        inner_precise=1,
        key_antiquant_mode=mode,
        value_antiquant_mode=mode,
        softmax_lse_flag=sinks is not None,
    )
    result: Tensor = out.view(rows, heads, wide)
    if fixed is not None and fixed.offsets is not None:  # key offsets shift all scores of a query equally
        shift = (fixed.offsets[1] * fixed.scales[1]).repeat_interleave(heads // kv_heads, 0)
        result = result.float() - shift
    if sinks is not None:
        result = with_sinks(result, sums.view(rows, heads, 1), sinks)
    return result[..., :dim].to(queries.dtype)
