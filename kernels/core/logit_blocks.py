"""Finds a few tokens in wide logits, by the maxima of blocks of 32 consecutive ids.

Order is always by value, descending, and equal values by id, ascending. Results depend on a row's own logits only,
never on the rows around it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kernels.core.noise import BLOCK

__all__ = [
    "accumulator",
    "argmax",
    "block_maxima",
    "greedy_tokens",
    "in_order",
    "log_normalizer",
    "select",
    "stable_sum",
    "top",
    "weights",
]

_CHUNK = 1 << 20  # elements of a temporary


def block_maxima(logits: Tensor) -> Tensor:
    """Maxima float32 [rows, ceil(vocab / 32)] of logits [rows, vocab]. A NaN is a maximum."""
    vocab = logits.shape[1]
    whole = vocab - vocab % BLOCK
    maxima: Tensor = logits[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).amax(-1)
    if whole < vocab:
        maxima = torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=1)
    return maxima.float()


def argmax(logits: Tensor, rows: Tensor, block_max: Tensor) -> Tensor:
    """The most likely token id int64 [n] of the ``rows`` int64 [n] of ``logits``; block_max [n, blocks]."""
    vocab = logits.shape[1]
    ids = block_max.argmax(-1, keepdim=True) * BLOCK + torch.arange(BLOCK, device=logits.device)
    values = logits.reshape(-1)[rows[:, None] * vocab + ids.clamp(max=vocab - 1)]
    return ids.gather(1, values.argmax(-1, keepdim=True)).squeeze(1)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token ids int64 [rows] of ``logits`` [rows, vocab], and which rows are not finite: 0 in these."""
    wide = logits.float()
    blocks = block_maxima(wide)
    nonfinite = ~blocks.amax(-1).isfinite()
    return argmax(wide, torch.arange(len(wide)), blocks).masked_fill_(nonfinite, 0), nonfinite


def select(logits: Tensor, rows: Tensor, block_max: Tensor, at_least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens whose value reaches ``at_least`` float32 [n], one for each row, as one list by row and id.

    Returns the row's place in ``rows`` int64 [tokens], ids int64 [tokens] and values float32 [tokens]. How many there
    are depends on the data, so on an accelerator this waits for the device.
    """
    vocab = logits.shape[1]
    at, block = torch.nonzero(block_max >= at_least[:, None], as_tuple=True)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    values = logits.reshape(-1)[rows[at, None] * vocab + ids.clamp(max=vocab - 1)].float()
    pair, lane = torch.nonzero((values >= at_least[at, None]) & (ids < vocab), as_tuple=True)
    return at[pair], ids[pair, lane], values[pair, lane]


def in_order(count: int, at: Tensor, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens listed by ``select`` for ``count`` rows as values float32 and ids int64 [count, width], each row sorted.

    The width is the longest row's and at least 1; shorter rows are filled up with -inf.
    """
    counts = torch.bincount(at, minlength=count)
    width = max(1, int(counts.max())) if count else 1
    place = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at]
    padded = torch.full((count, width), -torch.inf, device=at.device)
    padded[at, place] = values
    padded_ids = torch.zeros((count, width), dtype=torch.int64, device=at.device)
    padded_ids[at, place] = ids
    padded, order = padded.sort(dim=1, descending=True, stable=True)
    return padded, padded_ids.gather(1, order)


def top(logits: Tensor, rows: Tensor, block_max: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values float32 [n, k] and ids int64 [n, k] of the k most likely tokens in order; k is cut to the vocabulary.

    A row with a NaN gets -inf and id 0.
    """
    k = min(k, logits.shape[1])
    if logits.device.type != "cpu":
        values, ids = logits[rows].float().sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    # The k-th greatest block maximum is at most the k-th greatest value.
    if k <= block_max.shape[1]:
        at_least = block_max.topk(k, dim=1).values[:, -1]
    else:
        at_least = torch.full_like(block_max[:, 0], -torch.inf)
    at_least = torch.where(block_max.isnan().any(-1), torch.nan, at_least)
    values, ids = in_order(len(rows), *select(logits, rows, block_max, at_least))
    missing = max(0, k - values.shape[1])
    return functional.pad(values, (0, missing), value=-torch.inf)[:, :k], functional.pad(ids, (0, missing))[:, :k]


def weights(
    logits: Tensor, rows: Tensor, row_max: Tensor, temperature: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """``exp((logits - row_max) / temperature)`` of the ``rows``, a few at a time: (which of them, logits, weights)."""
    step = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        values = logits[rows[part]].to(torch.float32)
        yield part, values, (values - row_max[part, None]).div_(temperature[part, None]).exp_()


def accumulator(device: torch.device) -> torch.dtype:
    """What long sums are taken in: float64, or float32 on an NPU, which has no float64 (a cast to it gives float32)."""
    return torch.float32 if device.type == "npu" else torch.float64


def stable_sum(values: Tensor) -> Tensor:
    """Sums [n], in the ``accumulator``'s dtype, of float32 [n, vocab]. First by 32: one long sum would be split
    differently in a small batch.
    """
    whole = values.shape[1] - values.shape[1] % BLOCK
    by_block: Tensor = values[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(-1)
    wide = accumulator(values.device)
    return by_block.to(wide).sum(-1) + values[:, whole:].to(wide).sum(-1)


def log_normalizer(logits: Tensor, rows: Tensor, row_max: Tensor) -> Tensor:
    """``logsumexp`` float32 [n] of the ``rows`` of ``logits``, whose maxima are ``row_max`` float32 [n]."""
    sums = torch.empty(len(rows), dtype=accumulator(logits.device), device=logits.device)
    for part, _, weight in weights(logits, rows, row_max, torch.ones_like(row_max)):
        sums[part] = stable_sum(weight)
    return (sums.log() + row_max).float()
