"""Attention of draft trees, by npu_fused_infer_attention_score with a full mask.

A chain is causal and runs with the other rows of a step. No compressed mask describes a tree, and the TND layout takes
no other (sparse mode 9, tree masks, is for latent attention only). So trees are a separate call in the BSND layout,
padded to the largest tree, with sparse mode 0 and the full mask: [rows, 1, queries, keys], with at least as many keys
as a row of the page table holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.core.tree import MAX_NODES, unpack_bits, within_window
from kernels.devices.npu.fused_attention import LayerCache, with_sinks

__all__ = ["TreePart", "hidden_keys", "mask_keys", "plan_trees", "tree_attention"]

Put = Callable[[np.ndarray], Tensor]
"""Copies an array to the device."""


@dataclass(frozen=True)
class TreePart:
    """One call: the step's tokens ``begin .. end``, of rows of up to ``queries`` tokens each.

    ``places`` int64 [end - begin]: the index of each token in rows padded to ``queries``; None: no padding.
    ``lengths``: tokens of each row in the cache. ``pages`` int32 [rows, pages] and ``mask`` int8 [rows, 1, queries,
    keys], 1 where a key is masked, on the device.
    """

    begin: int
    end: int
    queries: int
    places: Tensor | None
    lengths: list[int]
    pages: Tensor
    mask: Tensor


def mask_keys(columns: int, page_size: int) -> int:
    """Keys of a mask for page tables of ``columns``: with room for a tree that starts at their last token."""
    return columns * page_size + MAX_NODES


def plan_trees(rows: AttentionRows, window: int, page_size: int, put: Put) -> TreePart:
    """The call for a step's trees."""
    some = slice(rows.decodes, rows.decodes + rows.verifies)
    counts, begin = rows.counts[some], int(rows.counts[: rows.decodes].sum())
    queries = int(counts.max())
    places = None
    if (counts != queries).any():
        first = np.repeat(np.arange(len(counts)) * queries - (np.cumsum(counts) - counts), counts)
        places = put(first + np.arange(len(first)))
    return TreePart(
        begin=begin,
        end=begin + int(counts.sum()),
        queries=queries,
        places=places,
        lengths=(rows.starts[some] + counts).tolist(),
        pages=put(rows.pages[some]),
        mask=hidden_keys(rows, queries, mask_keys(rows.pages.shape[1], page_size), window, put),
    )


def hidden_keys(rows: AttentionRows, queries: int, keys: int, window: int, put: Put) -> Tensor:
    """The mask on the device, int8 [verifies, 1, queries, keys]: 1 where a key is masked for a query of a tree.
    ``keys``: see ``mask_keys``. Padding queries have arbitrary masks.
    """
    assert rows.tree is not None
    bits = rows.tree[:, :queries]
    if bits.shape[1] < queries:
        bits = F.pad(bits, (0, queries - bits.shape[1]), value=1)
    given = rows.starts[rows.decodes : rows.decodes + rows.verifies] if rows.roots is None else rows.roots
    roots = put(given.astype(np.int64)).view(-1, 1, 1)
    seen = unpack_bits(within_window(bits, window), MAX_NODES)
    place = torch.arange(keys, device=bits.device).view(1, 1, -1) - roots
    hidden = (place >= 0).to(torch.int8).repeat(1, queries, 1)
    if window:
        hidden |= (place < seen.sum(-1, keepdim=True) - window).to(torch.int8)
    own = roots + torch.arange(MAX_NODES, device=bits.device)
    hidden.scatter_(2, own.repeat(1, queries, 1), (~seen).to(torch.int8))
    return hidden.unsqueeze(1)


def tree_attention(
    queries: Tensor, cache: LayerCache, part: TreePart, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """``queries`` [part's tokens, heads, dim] -> [part's tokens, heads, dim], in the queries' dtype. ``sinks``: as
    ``with_sinks``."""
    heads, dim = queries.shape[1:]
    pages, page_size, kv_heads, wide = cache.keys.shape
    given = queries.to(cache.keys.dtype)
    given = F.pad(given, (0, wide - dim)) if dim < wide else given.contiguous()
    if part.places is not None:
        padded = given.new_zeros(len(part.lengths) * part.queries, heads, wide)
        given = padded.index_copy_(0, part.places, given)
    # Lengths are keyword arguments and lists, as in kernels.devices.npu.fused_attention. Inner precision 2: padding
    # rows may have all keys masked.
    out, sums = torch_npu.npu_fused_infer_attention_score(
        given.view(len(part.lengths), part.queries, heads, wide),
        cache.keys.view(pages, page_size, kv_heads * wide),
        cache.values.view(pages, page_size, kv_heads * wide),
        atten_mask=part.mask,
        actual_seq_lengths_kv=part.lengths,
        block_table=part.pages,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scale,
        input_layout="BSND",
        block_size=page_size,
        sparse_mode=0,
        inner_precise=2,
        softmax_lse_flag=sinks is not None,
    )
    result: Tensor = out.view(-1, heads, wide)
    if sinks is not None:
        result = with_sinks(result, sums.transpose(1, 2).reshape(-1, heads, 1), sinks)
    result = result[..., :dim]
    if part.places is not None:
        result = result.index_select(0, part.places)
    return result.to(queries.dtype)
