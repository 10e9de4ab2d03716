"""Top-k and top-p filtering. Tokens are ordered by descending value, ties by ascending id.

Top-k: Fan et al., "Hierarchical Neural Story Generation", 2018. Top-p: Holtzman et al., "The Curious Case of Neural
Text Degeneration", 2020: the smallest set of most likely tokens whose probability reaches p, after top-k. Min-p is not
here: it only needs the row's maximum (Nguyen et al., "Turning Up the Heat", 2024).

With top-k, or on an accelerator, the kept tokens are sorted and the last one is the ``cut``. On a CPU, top-p alone
would sort the whole vocabulary; there the Gumbel-max argmax runs first, and ``outside`` checks whether its winner lies
outside the nucleus. If not, it is also the winner of the nucleus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.core.logit_blocks import accumulator, in_order, select, stable_sum, weights

__all__ = ["cut", "outside"]

_FEW_BLOCKS = 128


def cut(
    logits: Tensor,
    rows: Tensor,
    block_max: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    largest_k: int,
) -> tuple[Tensor, Tensor]:
    """Value float32 [n] and id int64 [n] of the last token kept by top-k and top-p in the ``rows`` of ``logits``.

    block_max float32 [n, blocks], row_max and temperature float32 [n], top_k int64 [n] (0: all), top_p [n], in the
    ``accumulator``'s dtype.
    ``largest_k``: top_k's maximum, known on the host. A row whose maximum is not finite gets an arbitrary cut.
    """
    if logits.device.type != "cpu" or largest_k == 0:
        values, ids = logits[rows].float().sort(dim=1, descending=True, stable=True)
    else:
        # The k-th greatest block maximum is at most the k-th greatest value.
        blocks = block_max.shape[1]
        maxima = block_max.topk(min(largest_k, blocks), dim=1).values
        kth = maxima.gather(1, top_k.clamp(1, maxima.shape[1])[:, None] - 1).squeeze(1)
        at_least = torch.where((top_k > 0) & (top_k <= blocks), kth, -torch.inf)
        at_least = torch.where(row_max.isfinite(), at_least, torch.nan)
        values, ids = in_order(len(rows), *select(logits, rows, block_max, at_least))
    rank = torch.arange(values.shape[1], device=values.device)
    within = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    weight = ((values - row_max[:, None]) / temperature[:, None]).exp().to(accumulator(values.device)) * within
    reached = weight.cumsum(-1)
    goal = torch.where(top_p < 1, top_p * weight.sum(-1), torch.inf)
    last = ((within & (reached - weight < goal[:, None])).sum(-1, keepdim=True) - 1).clamp(min=0)
    return values.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1)


def outside(
    logits: Tensor,
    rows: Tensor,
    block_max: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Whether each of ``tokens`` int64 [n] lies outside its row's nucleus: the tokens before it have probability p or
    more. bool [n].

    Shapes as in ``cut``. Waits for the device. False in rows whose maximum is not finite.
    """
    value = logits.view(-1)[rows * logits.shape[1] + tokens].float()
    result = torch.zeros_like(tokens, dtype=torch.bool)

    # Most winners are likely tokens: few tokens precede them, and the block maxima alone decide.
    some_total = ((block_max - row_max[:, None]) / temperature[:, None]).exp_().double().sum(-1)
    few = (block_max >= value[:, None]).sum(-1) <= _FEW_BLOCKS
    at, _, values = select(logits, rows, block_max, torch.where(few, value, torch.nan))
    weight = ((values - row_max[at]) / temperature[at]).exp_().double()
    ahead = torch.zeros_like(some_total).index_add_(0, at, weight)  # including the token and its ties
    doubtful = ~(few & (ahead < 0.999 * top_p * some_total)) & row_max.isfinite()

    rest = doubtful.nonzero().squeeze(1)
    id_ = torch.arange(logits.shape[1], device=logits.device)
    for part, values, weight in weights(logits, rows[rest], row_max[rest], temperature[rest]):
        of, token = value[rest[part], None], tokens[rest[part], None]
        total = stable_sum(weight)
        before = (values > of).logical_or_((values == of).logical_and_(id_ < token))
        result[rest[part]] = stable_sum(weight.mul_(before)) >= top_p[rest[part]] * total
    return result
