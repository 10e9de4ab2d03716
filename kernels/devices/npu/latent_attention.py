"""Latent and sparse attention by torch_npu's operators.

Rows of few tokens are attended to in the latent space, all in one call of npu_fused_infer_attention_score, whose keys
and values are the pages of latent vectors. Longer rows are attended to with keys and values that are made for them, so
many heads at a time as fit in memory. Limits of the operators: latent vectors of 512 numbers and 64 that are rotated,
pages of 128 tokens, a power of two of query heads up to 128 (others are padded), at most 16 queries a row in the latent
space, and heads of 128 outside of it.
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
from kernels.devices.latent_attention import LatentHeads
from kernels.devices.latent_cache import SplitLatent, read_latent
from kernels.devices.npu.fused_attention import MAX_ROWS, FusedPart
from kernels.devices.npu.operators import NpuNorm, rotate
from kernels.devices.npu.soc import Soc

__all__ = [
    "PAGE",
    "RANK",
    "ROPE",
    "LatentPlan",
    "attend_absorbed",
    "attend_expanded",
    "attend_rotated",
    "attend_sparse",
    "choose_tokens",
    "fits_expanded",
    "fits_heads",
    "fits_latent",
    "place_latent",
    "plan_latent",
]

RANK, ROPE, PAGE, DIM, INDEX = 512, 64, 128, 128, 128
_QUERIES = 16  # of a row in the latent space
_HEADS = 128  # the most
_INDEX_HEADS, _CHOSEN = 64, 2048
_NUMBERS = 1 << 27  # of keys and values that are made at a time
_CAUSAL = 3  # sparse_mode, aligned to the last query and the last key

Put = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class LatentPlan:
    """A step's rows. The first ``few`` have few tokens, ``tokens`` together.

    ``ends``, ``lengths``: where each row's queries end among those of its part, and its tokens in the cache; of the
    other rows ``later_ends`` and ``later_lengths``, where their tokens end among ``places`` int64, those of all of
    them in the cache. ``pages`` int32 [rows, pages]. ``device_ends``, ``device_lengths`` int32 [rows]: of all rows.
    """

    rows: AttentionRows
    few: int
    tokens: int
    ends: list[int]
    lengths: list[int]
    pages: Tensor
    later_ends: list[int]
    later_lengths: list[int]
    places: Tensor | None
    device_ends: Tensor
    device_lengths: Tensor

    def first_part(self, mask: Tensor) -> FusedPart:
        """The call of the rows of few tokens."""
        return FusedPart(0, self.tokens, self.ends, self.lengths, self.pages[: self.few], mask, 0)

    def later_rows(self) -> AttentionRows:
        """The rows of many tokens."""
        rows, few = self.rows, self.few
        return replace(rows, starts=rows.starts[few:], counts=rows.counts[few:], pages=rows.pages[few:], decodes=0)


def fits_heads(heads: LatentHeads) -> bool:
    """Whether operators in the latent space take such heads: so many, without sinks."""
    count = len(heads.keys)
    return count & (count - 1) == 0 and count <= _HEADS and heads.sinks is None


def fits_latent(cache: object, heads: LatentHeads) -> bool:
    """Whether the operator takes such heads in the latent space, maybe padded."""
    return isinstance(cache, SplitLatent) and len(heads.keys) <= _HEADS and heads.sinks is None


def fits_expanded(heads: LatentHeads) -> bool:
    """Whether operators take such heads outside of the latent space, for long rows."""
    return fits_heads(heads) and (heads.keys.shape[1], heads.values.shape[2]) == (DIM, DIM)


def plan_latent(rows: AttentionRows, put: Put) -> LatentPlan:
    """The calls for the rows of a step."""
    counts, lengths = rows.counts, rows.starts + rows.counts
    many = (counts > _QUERIES).nonzero()[0]
    few = min(int(many[0]) if len(many) else len(counts), MAX_ROWS)
    places = None
    if few < len(counts):
        columns = [np.arange(length) for length in lengths[few:].tolist()]
        held = [rows.pages[few + row, at // PAGE].astype(np.int64) * PAGE + at % PAGE for row, at in enumerate(columns)]
        places = put(np.concatenate(held))
    return LatentPlan(
        rows=rows,
        few=few,
        tokens=int(counts[:few].sum()),
        ends=np.cumsum(counts[:few]).tolist(),
        lengths=lengths[:few].tolist(),
        pages=put(rows.pages),
        later_ends=np.cumsum(counts[few:]).tolist(),
        later_lengths=np.cumsum(lengths[few:]).tolist(),
        places=places,
        device_ends=put(np.cumsum(counts).astype(np.int32)),
        device_lengths=put(lengths.astype(np.int32)),
    )


def place_latent(
    queries: Tensor, vectors: Tensor, norm: NpuNorm, cos: Tensor, sin: Tensor, cache: SplitLatent, index: Tensor
) -> Tensor:
    """As ``Attention.place_latent``; the numbers of ``vectors`` to rotate are pairs of neighbors."""
    tokens = len(vectors)
    queries[..., -ROPE:].copy_(rotate(queries[..., -ROPE:], cos, sin))
    torch_npu.npu_kv_rmsnorm_rope_cache(
        vectors.contiguous().view(tokens, 1, 1, RANK + ROPE),
        norm.gamma,
        cos.view(tokens, 1, 1, ROPE),
        sin.view(tokens, 1, 1, ROPE),
        index,
        cache.rotated.unsqueeze(2),
        cache.latent.unsqueeze(2),
        epsilon=norm.eps,
        cache_mode="PA",
    )
    return queries


def choose_tokens(queries: Tensor, weights: Tensor, keys: Tensor, plan: LatentPlan, top_k: int) -> Tensor | None:
    """The positions int32 [tokens, 1, most] that each query attends to, -1 behind the last; None if the operator does
    not take such an indexer."""
    _, heads, dim = queries.shape
    fits = dim == INDEX and heads <= _INDEX_HEADS and top_k <= _CHOSEN and keys.dtype == queries.dtype
    if not fits or queries.dtype not in (torch.float16, torch.bfloat16) or keys.shape[1] % 16:
        return None
    chosen: Tensor = torch_npu.npu_lightning_indexer(
        queries.contiguous(),
        keys.unsqueeze(2),
        weights.to(queries.dtype),
        actual_seq_lengths_query=plan.device_ends,
        actual_seq_lengths_key=plan.device_lengths,
        block_table=plan.pages,
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=top_k,
        sparse_mode=_CAUSAL,
    )[0]
    return chosen


def attend_sparse(
    queries: Tensor, cache: SplitLatent, plan: LatentPlan, heads: LatentHeads, scale: float, chosen: Tensor, soc: Soc
) -> Tensor:
    """As ``Attention.attend_chosen``."""
    plain, rotated = _absorb(queries, heads, soc)
    latent = cache.latent.unsqueeze(2)
    found: Tensor = torch_npu.npu_sparse_flash_attention(
        plain,
        latent,
        latent,
        chosen,
        scale,
        block_table=plan.pages,
        actual_seq_lengths_query=plan.device_ends,
        actual_seq_lengths_kv=plan.device_lengths,
        query_rope=rotated,
        key_rope=cache.rotated.unsqueeze(2),
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=_CAUSAL,
        attention_mode=2,
    )[0]
    expands = heads.identity or soc.generation == "A5"
    return heads.expand(found) if expands else _product(found, heads.values, turned=True)


def _absorb(queries: Tensor, heads: LatentHeads, soc: Soc) -> tuple[Tensor, Tensor]:
    """As ``LatentHeads.absorb``, both contiguous."""
    plain, rotated = queries[..., :-ROPE].contiguous(), queries[..., -ROPE:].contiguous()
    if heads.identity:
        return plain, rotated
    if soc.generation == "A5":  # without the operator
        return torch.bmm(plain.transpose(0, 1), heads.keys).transpose(0, 1).contiguous(), rotated
    return _product(plain, heads.keys, turned=True), rotated


def _product(x: Tensor, weight: Tensor, turned: bool) -> Tensor:
    """``x`` [heads, tokens, k], or ``turned`` [tokens, heads, k], times ``weight`` [heads, k, n] -> [tokens, heads, n],
    without a copy in another order."""
    order = (1, 0, 2) if turned else (0, 1, 2)
    result: Tensor = torch_npu.npu_transpose_batchmatmul(x, weight, perm_x1=order, perm_y=(1, 0, 2))
    return result


def attend_absorbed(
    queries: Tensor, cache: SplitLatent, part: FusedPart, heads: LatentHeads, scale: float, soc: Soc
) -> Tensor:
    """As ``Attention.attend_latent`` for the rows of ``part``, of at most 16 tokens each."""
    plain, rotated = _absorb(queries, heads, soc)
    return attend_rotated(plain, rotated, cache, part, heads, scale, soc)


def attend_rotated(
    plain: Tensor, rotated: Tensor, cache: SplitLatent, part: FusedPart, heads: LatentHeads, scale: float, soc: Soc
) -> Tensor:
    """``attend_absorbed`` of queries in the latent space [tokens, heads, 512] and their rotated parts."""
    count = plain.shape[1]
    padded = 1 << (count - 1).bit_length()
    if padded > count:
        plain, rotated = (F.pad(each, (0, 0, 0, padded - count)) for each in (plain, rotated))
    several = len(plain) > len(part.lengths)
    masking = {"sparse_mode": _CAUSAL, "atten_mask": part.mask} if several else {"sparse_mode": 0}
    # Lengths are keyword arguments and lists, so that a graph's call can be updated.
    result, _ = torch_npu.npu_fused_infer_attention_score(
        plain,
        cache.latent,
        cache.latent,
        query_rope=rotated,
        key_rope=cache.rotated,
        actual_seq_lengths=part.query_ends,
        actual_seq_lengths_kv=part.lengths,
        block_table=part.pages,
        num_heads=padded,
        num_key_value_heads=1,
        scale=scale,
        input_layout="TND_NTD",
        block_size=PAGE,
        **masking,
    )
    result = result[:count]
    if heads.identity:
        in_space: Tensor = result.transpose(0, 1)
        return in_space
    if soc.generation == "A5":
        return torch.bmm(result, heads.values).transpose(0, 1)
    return _product(result, heads.values, turned=False)


def attend_expanded(
    queries: Tensor, cache: SplitLatent, plan: LatentPlan, heads: LatentHeads, scale: float, mask: Tensor
) -> Tensor:
    """As ``Attention.attend_latent`` for the rows of ``plan`` that have many tokens."""
    assert plan.places is not None
    vectors = read_latent(cache, plan.places)
    latent, rotated = vectors[:, :RANK].contiguous(), vectors[:, RANK:].unsqueeze(1)
    tokens, count = len(latent), queries.shape[1]
    size = min(count, max(1, _NUMBERS // (tokens * (2 * DIM + ROPE))))
    result = []
    for first in range(0, count, size):
        some = slice(first, min(first + size, count))
        here = some.stop - first
        keys = torch.mm(latent, heads.keys[some].flatten(0, 1).t()).view(tokens, here, DIM)
        made = heads.values[some].transpose(0, 1).flatten(1)
        out, _ = torch_npu.npu_fused_infer_attention_score(
            queries[:, some, :DIM].contiguous(),
            keys,
            torch.mm(latent, made).view(tokens, here, DIM),
            query_rope=queries[:, some, DIM:].contiguous(),
            key_rope=rotated.expand(-1, here, -1).contiguous(),
            atten_mask=mask,
            actual_seq_lengths=plan.later_ends,
            actual_seq_lengths_kv=plan.later_lengths,
            num_heads=here,
            num_key_value_heads=here,
            scale=scale,
            input_layout="TND",
            sparse_mode=_CAUSAL,
        )
        result.append(out)
    return result[0] if len(result) == 1 else torch.cat(result, 1)
