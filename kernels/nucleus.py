"""Top-k and top-p as one cut a row: the last token that stays, in the order by (value descending, id ascending).

Top-k: Fan et al., "Hierarchical Neural Story Generation", 2018. Top-p: Holtzman et al., "The Curious Case of Neural Text
Degeneration", 2020: the smallest head whose probability reaches p, over what top-k left. Min-p needs no cut of its own:
it is a distance to the row's maximum (Nguyen et al., "Turning Up the Heat", 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.blocks import in_order, select, weight_sum

__all__ = ["cut"]

_BINS = 2048


def cut(
    logits: Tensor,
    rows: Tensor,
    block_max: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    largest_k: int,
    any_without_k: bool,
) -> tuple[Tensor, Tensor]:
    """Value float32 [n] and id int64 [n] of the last token that top-k and top-p keep in the `rows` of `logits`.

    block_max float32 [n, blocks], row_max and temperature float32 [n], top_k int64 [n] (0: all), top_p float64 [n].
    `largest_k` is top_k's maximum and `any_without_k` says whether it has a 0: known on the host, nothing waits for it.
    A row whose maximum is not finite gets an arbitrary cut.
    """
    if logits.device.type != "cpu":
        values, ids = logits[rows].float().sort(dim=1, descending=True, stable=True)
        return _cut_sorted(values, ids, row_max, temperature, top_k, top_p)
    if not any_without_k:
        return _cut_after_k(logits, rows, block_max, row_max, temperature, top_k, top_p, largest_k)
    if largest_k == 0:
        return _cut_by_mass(logits, rows, block_max, row_max, temperature, top_p)
    value, token = torch.empty_like(row_max), torch.empty_like(rows)
    for some, with_k in (((top_k > 0).nonzero().squeeze(1), True), ((top_k == 0).nonzero().squeeze(1), False)):
        few = (logits, rows[some], block_max[some], row_max[some], temperature[some])
        value[some], token[some] = (
            _cut_after_k(*few, top_k[some], top_p[some], largest_k) if with_k else _cut_by_mass(*few, top_p[some])
        )
    return value, token


def _cut_sorted(
    values: Tensor, ids: Tensor, row_max: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The cut where values [n, width] and ids hold, in order, at least the top_k of each row (all of it without)."""
    rank = torch.arange(values.shape[1], device=values.device)
    within = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    weights = ((values - row_max[:, None]) / temperature[:, None]).exp().double() * within
    reached = weights.cumsum(-1)
    goal = torch.where(top_p < 1, top_p * weights.sum(-1), torch.inf)
    last = ((within & (reached - weights < goal[:, None])).sum(-1, keepdim=True) - 1).clamp(min=0)
    return values.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1)


def _cut_after_k(
    logits: Tensor,
    rows: Tensor,
    block_max: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    largest_k: int,
) -> tuple[Tensor, Tensor]:
    blocks = block_max.shape[1]
    # The k-th greatest block maximum is at most the k-th greatest value.
    maxima = block_max.topk(min(largest_k, blocks), dim=1).values
    kth = maxima.gather(1, top_k.clamp(max=maxima.shape[1])[:, None] - 1).squeeze(1)
    at_least = torch.where(row_max.isfinite(), torch.where(top_k <= blocks, kth, -torch.inf), row_max)
    values, ids = in_order(len(rows), *select(logits, rows, block_max, at_least))
    return _cut_sorted(values, ids, row_max, temperature, top_k, top_p)


def _cut_by_mass(
    logits: Tensor, rows: Tensor, block_max: Tensor, row_max: Tensor, temperature: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Top-p alone, without sorting the vocabulary: a histogram finds the narrow band of values in which the cut lies.

    Tokens lighter than a ``vocab``-th of ``1 - p`` weigh less than ``1 - p`` together, so the cut lies above them.
    """
    count, vocab = len(rows), logits.shape[1]
    total = weight_sum(logits, rows, row_max, temperature)
    goal = top_p * total
    depth = (0.5 * (1.0 - top_p) * total / vocab).log().clamp(min=-1e4).float()  # of scaled logits, below 0
    at, ids, values = select(logits, rows, block_max, row_max + temperature * depth)
    scaled = (values - row_max[at]) / temperature[at]
    weights = scaled.exp().double()
    bins = (scaled / depth[at] * _BINS).long().clamp_(0, _BINS - 1)
    mass = torch.zeros(count * _BINS, dtype=torch.float64, device=logits.device)
    mass = mass.index_add_(0, at * _BINS + bins, weights).view(count, _BINS).cumsum(1)
    lightest = torch.zeros_like(rows).scatter_reduce_(0, at, bins, "amax")
    band = torch.minimum((mass < goal[:, None]).sum(1), lightest)
    before = torch.where(band > 0, mass.gather(1, (band - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)

    inside = bins == band[at]
    values, ids = in_order(count, at[inside], ids[inside], values[inside])
    weights = ((values - row_max[:, None]) / temperature[:, None]).exp().double()
    reached = before[:, None] + weights.cumsum(-1)
    last = (((reached - weights) < goal[:, None]) & (values > -torch.inf)).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return values.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1)
