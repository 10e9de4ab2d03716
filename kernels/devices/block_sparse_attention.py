"""Attention to the blocks of tokens that an indexer chooses, over keys and values in pages, in plain torch (Qwen 4,
MiniMax M3).

    score(query, block) = sum over index heads h of  relu(q[h] @ k[block])

A query attends to the blocks before it with the highest scores, of equal ones to the first, and to the tokens after
the last whole block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.core.attention_rows import AttentionRows
from kernels.devices.latent_attention import row_pages, row_vectors
from kernels.devices.latent_cache import Vectors
from kernels.devices.sparse_attention import Chosen, highest

__all__ = ["attend_chosen_heads", "choose_blocks", "choose_blocks_of_groups"]

_NUMBERS = 1 << 25
"""Most numbers of scores, or of gathered keys and values, that are held at a time."""
_CPU_NUMBERS = 1 << 20
"""The same on a CPU, where they stay in its caches (decision 0122)."""


def choose_blocks(
    queries: Tensor, keys: Vectors, rows: AttentionRows, size: int, top_k: int, compress: Callable[[Tensor], Tensor]
) -> Chosen | None:
    """The tokens that each query attends to: those of at most ``top_k`` blocks of ``size``, and the last ones; None:
    all queries see no more than that.

    queries: [tokens, heads, dim]. keys: a cache [pages, page_size, dim] with those of the queries' tokens.
    compress: the keys of a row's first blocks [blocks, size, dim] -> one of each [blocks, dim].
    """
    ends = rows.starts + rows.counts
    if int(ends.max()) // size <= top_k:
        return None
    device, result, begin = queries.device, Chosen(), 0
    for row, (end, count) in enumerate(zip(ends.tolist(), rows.counts.tolist(), strict=True)):
        own = slice(begin, begin + count)
        begin += count
        blocks = end // size
        if blocks <= top_k:
            result.append(None)
            continue
        held = row_vectors(keys, rows, row, device)[: blocks * size]
        compressed, best = compress(held.unflatten(0, (blocks, size))).float().t(), []
        step = max(1, _numbers(device) // (blocks * queries.shape[1]))
        for low in range(0, count, step):
            some = queries[own][low : low + step]
            scores = torch.mm(some.float().flatten(0, 1), compressed).relu_().view(len(some), -1, blocks).sum(1)
            seen = torch.arange(end - count + low + 1, end - count + low + 1 + len(some), device=device)
            whole = torch.div(seen, size, rounding_mode="floor").unsqueeze(1)
            scores.masked_fill_(torch.arange(blocks, device=device) >= whole, -torch.inf)
            found = highest(scores, top_k)
            tokens = found.unsqueeze(2) * size + torch.arange(size, device=device)
            tokens.masked_fill_((found >= whole).unsqueeze(2), -1)
            last = whole * size + torch.arange(size - 1, device=device)
            best.append(torch.cat((tokens.flatten(1), last.masked_fill_(last >= seen.unsqueeze(1), -1)), 1))
        result.append(torch.cat(best))
    return result


def choose_blocks_of_groups(
    queries: Tensor, keys: Vectors, rows: AttentionRows, size: int, top_k: int, local: int
) -> Chosen | None:
    """``choose_blocks`` of each index head alone, for as many groups of attention's heads: the tokens of the last
    ``local`` blocks up to a query's, and of the blocks in which a key's product with it is highest, ``top_k`` in all.

        score(query, head, block) = max over the block's tokens t up to the query's of  q[head] @ k[t]

    Each row's tokens are int64 [queries, heads, top_k * size].
    """
    ends = rows.starts + rows.counts
    if int(ends.max()) <= top_k * size:
        return None
    device, heads, result, begin = queries.device, queries.shape[1], Chosen(), 0
    for row, (end, count) in enumerate(zip(ends.tolist(), rows.counts.tolist(), strict=True)):
        own = slice(begin, begin + count)
        begin += count
        if end <= top_k * size:
            result.append(None)
            continue
        blocks, best = -(-end // size), []
        held = row_vectors(keys, rows, row, device)[:end].float().t()
        step = max(1, _numbers(device) // (blocks * size * heads))
        for low in range(0, count, step):
            some = queries[own][low : low + step]
            at = torch.arange(end - count + low, end - count + low + len(some), device=device)[:, None, None]
            scores = some.new_full((len(some), heads, blocks * size), -torch.inf, dtype=torch.float32)
            scores[..., :end] = torch.mm(some.float().flatten(0, 1), held).unflatten(0, (len(some), heads))
            scores.masked_fill_(torch.arange(blocks * size, device=device) > at, -torch.inf)
            scores, last = scores.unflatten(2, (blocks, size)).amax(3), torch.div(at, size, rounding_mode="floor")
            number = torch.arange(blocks, device=device)
            scores.masked_fill_((number <= last) & (number > last - local), torch.inf)
            found = highest(scores.flatten(0, 1), top_k).unflatten(0, (len(some), heads))
            tokens = (found.unsqueeze(3) * size + torch.arange(size, device=device)).flatten(2)
            best.append(tokens.masked_fill_(tokens > at, -1))
        result.append(torch.cat(best))
    return result


def attend_chosen_heads(
    queries: Tensor,
    gather: Callable[[Tensor], Tensor],
    rows: AttentionRows,
    page_size: int,
    scale: float,
    chosen: Chosen,
    whole: Callable[[Tensor, AttentionRows], Tensor],
) -> Tensor:
    """Attention of ``queries`` [tokens, heads, dim] over the ``chosen`` tokens of their rows -> [tokens, heads * dim].
    These are of all heads, or [queries, kv_heads, chosen].

    gather: the keys and values of places int64 [n] in the cache, [n, 2, kv_heads, dim or more]. whole: attention of the
    queries of a row over all tokens before them, -> [tokens, heads * dim].
    """
    heads, dim = queries.shape[1:]
    out, begin = queries.new_empty(len(queries), heads * dim), 0
    for row, count in enumerate(rows.counts.tolist()):
        own, best = slice(begin, begin + count), chosen[row]
        begin += count
        if best is None:
            part = slice(row, row + 1)
            alone = AttentionRows(rows.starts[part], rows.counts[part], rows.pages[part], 0)
            out[own] = whole(queries[own], alone)
            continue
        pages = row_pages(rows, row, page_size, queries.device)
        step = max(1, _numbers(queries.device) // (best[0].numel() * (2 * dim + heads)))
        for low in range(0, count, step):
            some, tokens = queries[own][low : low + step], best[low : low + step]
            at = tokens.clamp(min=0)
            places = pages[torch.div(at, page_size, rounding_mode="floor")] * page_size + at % page_size
            if places.ndim == 2:
                both = gather(places.flatten())[..., :dim].to(queries.dtype).unflatten(0, tokens.shape)
                keys, values = both.permute(2, 0, 3, 1, 4)  # [queries, kv_heads, tokens, dim] each
                hidden = (tokens < 0)[:, None, None]
            else:
                groups = (gather(part.flatten())[:, :, head, :dim] for head, part in enumerate(places.unbind(1)))
                both = torch.stack([part.to(queries.dtype).unflatten(0, (len(some), -1)) for part in groups], 1)
                keys, values = both.unbind(3)
                hidden = (tokens < 0).unsqueeze(2)
            grouped = some.unflatten(1, (keys.shape[1], -1))
            scores = torch.matmul(grouped, keys.transpose(2, 3)).float().mul_(scale)
            shares = scores.masked_fill_(hidden, -torch.inf).softmax(-1).to(values.dtype)
            out[own][low : low + step] = torch.matmul(shares, values).flatten(1)
    return out


def _numbers(device: torch.device) -> int:
    return _CPU_NUMBERS if device.type == "cpu" else _NUMBERS
