"""Attention over the paged cache by npu_fused_infer_attention_score, for prefills, decodes and both in one call.

All calls have the TND layout: concatenated queries [tokens, heads, dim] of all rows, with the ends of the rows' queries
and the lengths of their keys as lists on the host. From these the operator computes its tiling at launch. Its limits:

- TND takes heads of 128, 192 or 256 only. Smaller ones are padded with zeros, in the cache and in the queries, which
does not change products of queries and keys; the scale is that of the original dimension. This costs cache memory
(twice the bytes at 64) but needs only one call a step: the BSND layout takes any dimension but only one prefill row a
call.
- Pages have 128 tokens or a small multiple; smaller pages pass the checks but corrupt results.
- Causal masks are the upper triangle of 2048 x 2048, whatever the lengths, one for the device.
- A cache tensor has fewer than 2^31 elements, and one token's keys at most 65535.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.core.attention_rows import AttentionRows

__all__ = [
    "DIMS",
    "MASK_SIZE",
    "FusedPart",
    "LayerCache",
    "causal_mask",
    "check_cache",
    "fused_attention",
    "padded_dim",
    "plan_part",
    "with_sinks",
]

DIMS = (128, 192, 256)
"""Head dimensions of the TND layout."""

MASK_SIZE = 2048
PAGE_SIZES = (128, 256, 384, 512)
MAX_ROWS = 4096
MAX_TOKENS = 65536
_INT32 = (1 << 31) - 1
_KEY_ELEMENTS = 65535

_SUNK = 128
"""The largest heads with sinks of the operator's own."""
_CAUSAL, _BAND = 3, 4  # sparse_mode, aligned to the last query and the last key


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, each [pages, page_size, kv_heads, dim], dim as ``padded_dim`` says."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class FusedPart:
    """One call: tokens ``begin .. end`` of the step, in rows whose queries end at ``query_ends`` among them.

    ``lengths``: tokens of each row in the cache. ``pages`` int32 [rows, pages], on the device.
    ``window``: tokens that a query attends to, 0 for all.
    """

    begin: int
    end: int
    query_ends: list[int]
    lengths: list[int]
    pages: Tensor
    mask: Tensor
    window: int


def padded_dim(dim: int) -> int:
    """The padded head dimension in the cache. Raises UnsupportedError if the operator's largest is smaller."""
    for size in DIMS:
        if dim <= size:
            return size
    raise UnsupportedError(
        f"the fused attention takes heads of up to {DIMS[-1]}, not {dim}; use --attention-backend torch_native"
    )


def causal_mask(device: torch.device) -> Tensor:
    """int8 [2048, 2048], 1 where a key comes after its query: the compressed mask of all causal calls."""
    return torch.triu(torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8), diagonal=1).to(device)


def check_cache(pages: int, page_size: int, kv_heads: int, dim: int) -> None:
    """Raises UnsupportedError for a cache that the operator cannot read."""
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise UnsupportedError(
            f"the fused attention reads pages of {sizes} tokens, not {page_size}; use --page-size 128"
        )
    if kv_heads * dim > _KEY_ELEMENTS:
        raise UnsupportedError(
            f"{kv_heads} key heads of {dim} are more than the {_KEY_ELEMENTS} elements of a token that the fused "
            "attention reads; use --attention-backend torch_native"
        )
    max_pages = _INT32 // (page_size * kv_heads * dim)
    if pages > max_pages:
        raise UnsupportedError(
            f"{pages} pages make a layer's cache larger than the fused attention can address; "
            f"use --max-total-tokens {(max_pages - 1) * page_size}"
        )


def plan_part(
    rows: AttentionRows, first: int, last: int, window: int, mask: Tensor, put: Callable[[np.ndarray], Tensor]
) -> FusedPart:
    """The call for rows ``first .. last`` of a step. ``put``: copies an array to the device."""
    counts = rows.counts[first:last]
    lengths = rows.starts[first:last] + counts
    begin, tokens = int(rows.counts[:first].sum()), int(counts.sum())
    if last - first > MAX_ROWS or tokens > MAX_TOKENS:
        raise UnsupportedError(
            f"a step of {last - first} rows and {tokens} tokens is over the fused attention's {MAX_ROWS} and "
            f"{MAX_TOKENS}; lower --max-running-requests or --chunked-prefill-size"
        )
    return FusedPart(
        begin=begin,
        end=begin + tokens,
        query_ends=np.cumsum(counts).tolist(),
        lengths=lengths.tolist(),
        pages=put(rows.pages[first:last]),
        mask=mask,
        window=window,
    )


def fused_attention(
    queries: Tensor, cache: LayerCache, part: FusedPart, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """``queries`` [part's tokens, heads, dim] -> [part's tokens, heads, dim], in the queries' dtype. ``sinks`` [heads]:
    as ``with_sinks``; the second version of the operator takes them for heads of up to 128.

    float16 is converted to bfloat16, the only documented dtype of the TND layout.
    """
    heads, dim = queries.shape[1:]
    pages, page_size, kv_heads, wide = cache.keys.shape
    given = queries.to(cache.keys.dtype)
    given = F.pad(given, (0, wide - dim)) if dim < wide else given.contiguous()
    masking = (
        {"sparse_mode": _BAND, "pre_tokens": part.window - 1, "next_tokens": 0}
        if part.window
        else {"sparse_mode": _CAUSAL}
    )
    if sinks is not None and wide <= _SUNK:
        sunk, _ = torch_npu.npu_fused_infer_attention_score_v2(
            given,
            cache.keys.view(pages, page_size, kv_heads * wide),
            cache.values.view(pages, page_size, kv_heads * wide),
            atten_mask=part.mask,
            actual_seq_qlen=part.query_ends,
            actual_seq_kvlen=part.lengths,
            block_table=part.pages,
            learnable_sink=sinks.to(given.dtype),
            num_query_heads=heads,
            num_key_value_heads=kv_heads,
            softmax_scale=scale,
            input_layout="TND",
            block_size=page_size,
            **masking,
        )
        result: Tensor = sunk[..., :dim]
        return result.to(queries.dtype)
    # Lengths are keyword arguments and lists: otherwise captured calls cannot be updated (see
    # kernels.devices.npu.graphs).
    out, sums = torch_npu.npu_fused_infer_attention_score(
        given,
        cache.keys.view(pages, page_size, kv_heads * wide),
        cache.values.view(pages, page_size, kv_heads * wide),
        atten_mask=part.mask,
        actual_seq_lengths=part.query_ends,
        actual_seq_lengths_kv=part.lengths,
        block_table=part.pages,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="TND",
        block_size=page_size,
        softmax_lse_flag=sinks is not None,
        **masking,
    )
    result = out[..., :dim] if sinks is None else with_sinks(out, sums, sinks)[..., :dim]
    return result.to(queries.dtype)


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """The result [tokens, heads, dim] of attention where each head sees one more token, whose score is that of
    ``sinks`` float32 [heads] and whose value is 0. ``sums`` float32 [tokens, heads, 1]: the logarithms of the sums that
    ``out`` was divided by."""
    return out * torch.sigmoid(sums - sinks.view(-1, 1)).to(out.dtype)
