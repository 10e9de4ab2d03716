"""What the kernels of this folder compute, in torch. The simulated NPU runs it in their place."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.logit_blocks import accumulator
from kernels.core.noise import gumbel_argmax_over_all, keys_at

__all__ = ["draw", "split_norm_rope_cache"]


def split_norm_rope_cache(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    index: Tensor,
    heads: int,
) -> Tensor:
    """Norm and rotate the queries and keys of ``qkv`` [tokens, heads + 2 * kv_heads, dim], and write keys and values.

    ``weight`` [heads + kv_heads, dim]: of a norm of each head, or none. ``cos``, ``sin`` [tokens, 1, dim]. ``index``
    int64 [tokens]: page * page_size + offset in ``key_cache`` and ``value_cache`` [pages, page_size, kv_heads, width],
    whose numbers from dim on stay as they are. -> the queries [tokens, heads, dim]. Each step is rounded to the dtype.
    """
    dtype, kv_heads, dim = qkv.dtype, (qkv.shape[1] - heads) // 2, qkv.shape[2]
    turned, values = qkv.split((heads + kv_heads, kv_heads), 1)
    wide = turned.float()
    if weight is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        wide = wide.to(dtype).float()
    low, high = wide.chunk(2, -1)
    result = (wide * cos.float() + torch.cat((-high, low), -1) * sin.float()).to(dtype)
    queries: Tensor = result[:, :heads].contiguous()
    for cache, new in ((key_cache, result[:, heads:]), (value_cache, values)):
        cache.view(-1, *cache.shape[2:])[index, :, :dim] = new.to(cache.dtype)
    return queries


def draw(logits: Tensor, draws: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One sampled token of each row of ``logits`` [rows, vocab]: ids int64 [rows], and bool [rows], whether the row
    contains NaN or +inf, or only -inf; its token is then 0.

    ``draws`` int32 [rows, 6]: two keys of the seed, the bits of temperature, log of min-p and top-p (float32), top-k;
    see ``core.operators.DRAWS``. ``positions`` int64 [rows].
    """
    values, floats = logits.float(), draws.view(torch.float32)
    row_max = values.amax(-1)
    nonfinite = ~row_max.isfinite()
    greedy = floats[:, 2] == 0
    temperature = torch.where(greedy, 1.0, floats[:, 2])
    floor, floor_id = _cut(values, row_max, temperature, draws[:, 5], floats[:, 4])
    min_logit = row_max + temperature * floats[:, 3]
    floor_id = torch.where(min_logit > floor, values.shape[1], floor_id)
    rows = torch.arange(len(values), device=values.device)
    keys = keys_at(draws[:, :2], positions)
    sampled = gumbel_argmax_over_all(
        values, rows, row_max, keys, temperature, torch.maximum(min_logit, floor), floor_id
    )
    tokens: Tensor = torch.where(greedy, values.argmax(-1), sampled).masked_fill_(nonfinite, 0)
    return tokens, nonfinite


def _cut(values: Tensor, row_max: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Value and id of the last token that top-k, and then top-p, keep, in descending order, ties by id."""
    order, ids = values.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(order.shape[1], device=order.device)
    within = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    weight = ((order - row_max[:, None]) / temperature[:, None]).exp().to(accumulator(order.device)) * within
    goal = torch.where(top_p < 1, top_p * weight.sum(-1), torch.inf)
    before = weight.cumsum(-1) - weight
    last = ((within & (before < goal[:, None])).sum(-1, keepdim=True) - 1).clamp(min=0)
    return order.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1)
