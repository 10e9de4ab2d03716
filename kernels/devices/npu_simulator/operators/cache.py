"""Writing keys and values to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require, same_dtype
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []


def scatter_rules(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Vendor, second scenario: key [tokens, heads, dim], cache [blocks, block size, heads, dim], all contiguous, one
    dtype, of which A2 and A3 have 16-bit floats and int8; slots int32 or int64 [tokens]; nothing is empty."""
    name = "npu_scatter_pa_kv_cache"
    require(
        cache_mode in ("Norm", None),
        *(name, "cache_mode", f'{cache_mode!r} means NZ caches, which are not simulated: pass "Norm" (default: PA_NZ)'),
    )
    for argument, tensor in (("compress_lens", compress_lens), ("compress_seq_offsets", compress_seq_offsets)):
        require(tensor is None, name, argument, "is not simulated")
    require(seq_lens is None, name, "seq_lens", "is not simulated")
    contiguous(name, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    same_dtype(name, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    dtypes(name, (torch.float16, torch.bfloat16, torch.int8), key=key)
    require(key.numel(), name, "key", "must not be empty")
    dtypes(name, (torch.int32, torch.int64), slot_mapping=slot_mapping)
    for argument, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require(rows.dim() == 3, name, argument, f"must be [tokens, heads, dim], has shape {tuple(rows.shape)}")
        shape = f"must be [blocks, block size, {rows.shape[1]}, {rows.shape[2]}], has shape {tuple(cache.shape)}"
        require(cache.dim() == 4 and cache.shape[2:] == rows.shape[1:], name, f"{argument}_cache", shape)
    require(key.shape[:2] == value.shape[:2], name, "value", "must have the key's tokens and heads")
    require(key_cache.shape[:2] == value_cache.shape[:2], name, "value_cache", "must have the key cache's blocks")
    slots = f"must be [{key.shape[0]}], one per token, has shape {tuple(slot_mapping.shape)}"
    require(tuple(slot_mapping.shape) == (key.shape[0],), name, "slot_mapping", slots)


@reference("npu_scatter_pa_kv_cache", rules=scatter_rules)
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Vendor: slots in [0, blocks * block size - 1]. Slots must be distinct (otherwise "undefined"), except in block 0,
    the null page of padding tokens, whose contents are unused."""
    name = "npu_scatter_pa_kv_cache"
    slots = slot_mapping.long()
    size = key_cache.shape[0] * key_cache.shape[1]
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        require(low >= 0 and high < size, name, "slot_mapping", f"slots {low} to {high} must be in 0 to {size - 1}")
        kept = slots[slots >= key_cache.shape[1]]
        require(kept.unique().numel() == kept.numel(), name, "slot_mapping", "slots outside block 0 must differ")
    key_cache.view(-1, *key.shape[1:])[slots] = key
    value_cache.view(-1, *value.shape[1:])[slots] = value
