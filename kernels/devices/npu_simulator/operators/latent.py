"""Operators of latent and sparse attention, computed in float32, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require, same_dtype
from kernels.devices.npu_simulator.operators.norms import normed
from kernels.devices.npu_simulator.operators.reference import reference
from kernels.devices.npu_simulator.operators.rotary import rotated

__all__: list[str] = []

HALVES = (torch.float16, torch.bfloat16)
RANK, ROPE, INDEX = 512, 64, 128
EMPTY = 1  # numbers of a result that means nothing, with the CANN that is simulated
FOREVER = 9223372036854775807


def kv_rules(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> None:
    """Facts 2.5: kv [B, 1, S, 576], gamma [512], cos and sin [B, 1, S, 64], index int64 [B * S]; caches in pages of
    [pages, tokens, 1, 64] and [pages, tokens, 1, 512], one dtype."""
    name = "npu_kv_rmsnorm_rope_cache"
    require(cache_mode in ("PA", "PA_BNSD"), name, "cache_mode", f"{cache_mode!r} is not simulated: use PA")
    given = {"k_rope_scale": k_rope_scale, "c_kv_scale": c_kv_scale, "k_rope_offset": k_rope_offset, "v": v}
    for argument, tensor in (given | {"c_kv_offset": c_kv_offset}).items():
        require(tensor is None, name, argument, "is not simulated: leave it out")
    dtypes(name, HALVES, kv=kv)
    same_dtype(name, kv=kv, gamma=gamma, cos=cos, sin=sin, k_cache=k_cache, ckv_cache=ckv_cache)
    contiguous(name, kv=kv, gamma=gamma, cos=cos, sin=sin, index=index, k_cache=k_cache, ckv_cache=ckv_cache)
    fits = kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == RANK + ROPE
    require(fits, name, "kv", f"must be [batch, 1, tokens, {RANK + ROPE}], is {tuple(kv.shape)}")
    require(kv.numel(), name, "kv", "must not be empty")
    require(tuple(gamma.shape) == (RANK,), name, "gamma", f"must be [{RANK}], is {tuple(gamma.shape)}")
    for argument, tensor in (("cos", cos), ("sin", sin)):
        shape = (*kv.shape[:3], ROPE)
        require(tuple(tensor.shape) == shape, name, argument, f"must be {shape}, is {tuple(tensor.shape)}")
    dtypes(name, (torch.int64,), index=index)
    tokens = kv.shape[0] * kv.shape[2]
    require(tuple(index.shape) == (tokens,), name, "index", f"must be [{tokens}], is {tuple(index.shape)}")
    for argument, cache, width in (("k_cache", k_cache, ROPE), ("ckv_cache", ckv_cache, RANK)):
        paged = cache.dim() == 4 and tuple(cache.shape[2:]) == (1, width)
        require(paged, name, argument, f"must be [pages, tokens, 1, {width}], is {tuple(cache.shape)}")
    require(k_cache.shape[:2] == ckv_cache.shape[:2], name, "ckv_cache", "must have the pages of k_cache")


@reference("npu_kv_rmsnorm_rope_cache", rules=kv_rules)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads the part to rotate in pairs of neighbors and writes halves (as npu_interleave_rope)."""
    name, size = "npu_kv_rmsnorm_rope_cache", k_cache.shape[0] * k_cache.shape[1]
    low, high = int(index.min()), int(index.max())
    require(low >= 0 and high < size, name, "index", f"slots {low} to {high} must be in 0 to {size - 1}")
    kept = index[index >= k_cache.shape[1]]
    require(kept.unique().numel() == kept.numel(), name, "index", "slots outside page 0 must differ")
    latent, _ = normed(kv[..., :RANK], gamma, epsilon)
    pairs = kv[..., RANK:]
    key = rotated(torch.cat((pairs[..., ::2], pairs[..., 1::2]), -1), cos, sin, "half")
    k_cache.view(-1, ROPE)[index] = key.view(-1, ROPE)
    ckv_cache.view(-1, RANK)[index] = latent.view(-1, RANK)
    return k_cache, ckv_cache, key, latent


def product_rules(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> None:
    """Facts 2.6: [batch, rows, K] (or [rows, batch, K] by perm_x1) times [batch, K, N] -> [rows, batch, N]; all sizes
    below 65536. The vendor's meta function checks the permutations."""
    name = "npu_transpose_batchmatmul"
    require(bias is None and scale is None, name, "bias", "bias and scale are not simulated: leave them out")
    require(batch_split_factor in (None, 1), name, "batch_split_factor", "is not simulated: leave it out")
    require(perm_x2 in (None, [0, 1, 2], (0, 1, 2)), name, "perm_x2", "is not simulated: leave it out")
    dtypes(name, (torch.float16, torch.bfloat16, torch.float32), input=input)
    same_dtype(name, input=input, weight=weight)
    contiguous(name, input=input, weight=weight)
    for argument, tensor in (("input", input), ("weight", weight)):
        require(tensor.dim() == 3, name, argument, f"must have 3 dimensions, has {tensor.dim()}")
        require(max(tensor.shape) < 65536, name, argument, f"sizes of {tuple(tensor.shape)} must be below 65536")
    batch = list(perm_x1 or (0, 1, 2)).index(0)
    fits = input.shape[batch] == weight.shape[0] and input.shape[2] == weight.shape[1]
    require(fits, name, "weight", f"{tuple(weight.shape)} does not fit {tuple(input.shape)} with perm_x1 {perm_x1}")


@reference("npu_transpose_batchmatmul", rules=product_rules, generations=("A2", "A3"))
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    rows = input.permute(*(perm_x1 or (0, 1, 2))).float()
    return torch.bmm(rows, weight.float()).to(input.dtype).transpose(0, 1).contiguous()


def paged_rules(
    name: str,
    queries: Tensor,
    ends: Tensor | None,
    lengths: Tensor | None,
    pages: Tensor | None,
    layouts: tuple[str, str],
    mode: int,
    names: tuple[str, str],
) -> None:
    """What both operators of sparse attention need: concatenated queries, paged keys, lengths int32 on the device."""
    require(layouts == ("TND", "PA_BSND"), name, "layout_query", f"{layouts} is not simulated: use TND and PA_BSND")
    require(mode == 3, name, "sparse_mode", f"{mode} is not simulated: use 3")
    require(queries.dim() == 3 and queries.numel(), name, "query", f"must be [tokens, heads, dim], {queries.shape}")
    rule = "is needed with TND and pages"
    require(ends is not None, name, names[0], rule)
    require(lengths is not None, name, names[1], rule)
    require(pages is not None, name, "block_table", rule)
    assert ends is not None
    assert lengths is not None
    assert pages is not None
    dtypes(name, (torch.int32,), **{names[0]: ends, names[1]: lengths, "block_table": pages})
    contiguous(name, **{names[0]: ends, names[1]: lengths, "block_table": pages})
    require(ends.shape == lengths.shape and ends.dim() == 1, name, names[1], "must have an entry for each request")
    require(pages.dim() == 2 and len(pages) == len(ends), name, "block_table", "must have a row for each request")


def requests(
    name: str, tokens: int, ends: Tensor, lengths: Tensor, pages: Tensor, cache: Tensor, argument: str
) -> list[tuple[int, int, int, Tensor]]:
    """Of each request: its first query and the one after its last, its length, and its places in the cache."""
    last = [0, *ends.tolist()]
    require(last == sorted(last), name, argument, f"must be cumulative, is {last[1:9]}")
    require(last[-1] == tokens, name, argument, f"the last entry {last[-1]} must be the {tokens} tokens")
    size, result = cache.shape[1], []
    for request, length in enumerate(lengths.tolist()):
        count = -(-length // size)
        require(count <= pages.shape[1], name, "block_table", f"request {request} needs {count} pages")
        held = pages[request, :count].long()
        inside = not held.numel() or (int(held.min()) >= 0 and int(held.max()) < cache.shape[0])
        require(inside, name, "block_table", f"request {request}: pages must be in 0 to {cache.shape[0] - 1}")
        rule = f"request {request} has {last[request + 1] - last[request]} queries and {length} keys"
        require(length >= last[request + 1] - last[request], name, argument, rule)
        places = (held.unsqueeze(1) * size + torch.arange(size)).flatten()[:length]
        result.append((last[request], last[request + 1], length, places))
    return result


def indexer_rules(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    return_value: bool = False,
) -> None:
    """Documented: query [tokens, up to 64 heads, 128], key [pages, tokens, 1, 128], weights [tokens, heads];
    1 to 2048 tokens are chosen."""
    name = "npu_lightning_indexer"
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    lengths = actual_seq_lengths_query, actual_seq_lengths_key, block_table
    paged_rules(name, query, *lengths, (layout_query, layout_key), sparse_mode, names)
    dtypes(name, HALVES, query=query)
    same_dtype(name, query=query, key=key, weights=weights)
    contiguous(name, query=query, key=key, weights=weights)
    require(query.shape[1] <= 64, name, "query", f"has {query.shape[1]} heads, 64 are the most")
    require(query.shape[2] == INDEX, name, "query", f"head dim {query.shape[2]} must be {INDEX}")
    paged = key.dim() == 4 and tuple(key.shape[2:]) == (1, INDEX)
    require(paged, name, "key", f"must be [pages, tokens, 1, {INDEX}], is {tuple(key.shape)}")
    require(key.shape[1] % 16 == 0, name, "key", f"pages of {key.shape[1]} tokens must be a multiple of 16")
    require(weights.shape == query.shape[:2], name, "weights", f"must be {tuple(query.shape[:2])}")
    require(0 < sparse_count <= 2048, name, "sparse_count", f"{sparse_count} must be 1 to 2048")
    require(not return_value, name, "return_value", "is not simulated: leave it out")


@reference("npu_lightning_indexer", rules=indexer_rules)
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """The positions with the highest scores, int32 [tokens, 1, sparse_count], -1 behind them where there are fewer."""
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_key is not None
    assert block_table is not None
    name = "npu_lightning_indexer"
    lengths = actual_seq_lengths_query, actual_seq_lengths_key, block_table
    result = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    for begin, end, length, places in requests(name, len(query), *lengths, key, "actual_seq_lengths_query"):
        held = key.view(-1, INDEX)[places].float()
        scores = torch.einsum("qhd,kd->qhk", query[begin:end].float(), held).relu()
        total = torch.einsum("qh,qhk->qk", weights[begin:end].float(), scores)
        at = torch.arange(length - (end - begin), length).unsqueeze(1)
        total.masked_fill_(torch.arange(length) > at, -torch.inf)
        best = total.topk(min(sparse_count, length), 1)
        result[begin:end, 0, : best.indices.shape[1]] = best.indices.masked_fill(best.values == -torch.inf, -1).int()
    return result, torch.empty(0, dtype=query.dtype)


def sparse_rules(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Documented: query [tokens, heads, 512] and [tokens, heads, 64], key and value the same latent vectors
    [pages, tokens, 1, 512], key_rope [pages, tokens, 1, 64], indices int32 [tokens, 1, n], attention_mode 2."""
    name = "npu_sparse_flash_attention"
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    lengths = actual_seq_lengths_query, actual_seq_lengths_kv, block_table
    paged_rules(name, query, *lengths, (layout_query, layout_kv), sparse_mode, names)
    require(attention_mode == 2, name, "attention_mode", f"{attention_mode} is not simulated: use 2")
    require(sparse_block_size == 1, name, "sparse_block_size", f"{sparse_block_size} is not simulated: use 1")
    require(value is not None, name, "value", "may be left out from CANN 9.2 on only")
    require(not return_softmax_lse and sinks is None, name, "sinks", "sinks and lse are not simulated")
    require(query_rope is not None and key_rope is not None, name, "query_rope", "attention_mode 2 needs both ropes")
    assert value is not None
    assert query_rope is not None
    assert key_rope is not None
    dtypes(name, HALVES, query=query)
    same_dtype(name, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    contiguous(name, query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    contiguous(name, sparse_indices=sparse_indices)
    heads = query.shape[1]
    require(heads in (1, 2, 4, 8, 16, 32, 64, 128), name, "query", f"{heads} heads must be a power of 2 up to 128")
    shape = (len(query), heads)
    require(query.shape[2] == RANK, name, "query", f"head dim {query.shape[2]} must be {RANK}")
    require(tuple(query_rope.shape) == (*shape, ROPE), name, "query_rope", f"must be {(*shape, ROPE)}")
    for argument, cache, width in (("key", key, RANK), ("value", value, RANK), ("key_rope", key_rope, ROPE)):
        paged = cache.dim() == 4 and tuple(cache.shape[2:]) == (1, width) and cache.shape[:2] == key.shape[:2]
        require(paged, name, argument, f"must be [pages, tokens, 1, {width}], is {tuple(cache.shape)}")
    dtypes(name, (torch.int32,), sparse_indices=sparse_indices)
    fits = sparse_indices.dim() == 3 and tuple(sparse_indices.shape[:2]) == (len(query), 1)
    require(fits, name, "sparse_indices", f"must be [{len(query)}, 1, n], is {tuple(sparse_indices.shape)}")


@reference("npu_sparse_flash_attention", rules=sparse_rules)
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = FOREVER,
    next_tokens: int = FOREVER,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query over the positions in its row of ``sparse_indices``, which end at the first -1."""
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_kv is not None
    assert block_table is not None
    assert query_rope is not None
    assert key_rope is not None
    name = "npu_sparse_flash_attention"
    lengths = actual_seq_lengths_query, actual_seq_lengths_kv, block_table
    out = torch.zeros(query.shape)
    for begin, end, length, places in requests(name, len(query), *lengths, key, "actual_seq_lengths_query"):
        latent, rope = key.view(-1, RANK)[places].float(), key_rope.view(-1, ROPE)[places].float()
        for token in range(begin, end):
            at = length - end + token
            given = sparse_indices[token, 0]
            count = int((given >= 0).sum())
            chosen = given[:count].long()
            valid = bool((chosen >= 0).all()) and (not count or int(chosen.max()) <= at)
            require(valid, name, "sparse_indices", f"those of token {token} must be 0 to {at}, then -1")
            scores = query[token].float() @ latent[chosen].t() + query_rope[token].float() @ rope[chosen].t()
            out[token] = (scores * scale_value).softmax(-1) @ latent[chosen]
    empty = torch.empty(0, dtype=torch.float32)
    return out.to(query.dtype), empty, empty.clone()


def prolog_rules(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **options: Any,
) -> None:
    """Documented, A2 and A3: bfloat16 (weight_quant_mode 0), or tokens and weights in int8, scales float32 (2); hidden
    sizes of 7168, 7680 and 6144, 1536 numbers of a query, a power of two of heads up to 128, of 128 and 64 numbers;
    vectors of 512 and 64 in pages of 16 or 128."""
    name, tokens = "npu_mla_prolog_v3", token_x.shape[0]
    mode = options.get("weight_quant_mode", 0)
    require(mode in (0, 2), name, "weight_quant_mode", f"{mode} is not simulated: use 0 or 2")
    known = {"weight_quant_mode", "cache_index", "cache_mode", "rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv"}
    scales = {"dequant_scale_x": (tokens, 1), "dequant_scale_w_dq": (1, weight_dq.shape[1])}
    scales["dequant_scale_w_uq_qr"] = (1, weight_uq_qr.shape[1])
    scales["dequant_scale_w_dkv_kr"] = (1, weight_dkv_kr.shape[1])
    for argument in set(options) - known - set(scales):
        require(False, name, argument, "is not simulated: leave it out")
    for argument, expected in scales.items():
        scale = options.get(argument)
        require((scale is not None) == (mode == 2), name, argument, "is for weight_quant_mode 2")
        if scale is not None:
            dtypes(name, (torch.float32,), **{argument: scale})
            fits = tuple(scale.shape) == expected
            require(fits, name, argument, f"must be {expected}, is {tuple(scale.shape)}")
    require(options.get("cache_mode", "PA_BSND") == "PA_BSND", name, "cache_mode", "is not simulated: use PA_BSND")
    quantized = (torch.int8,) if mode else (torch.bfloat16,)
    dtypes(
        name, quantized, token_x=token_x, weight_dq=weight_dq, weight_uq_qr=weight_uq_qr, weight_dkv_kr=weight_dkv_kr
    )
    floats = {"weight_uk": weight_uk, "rmsnorm_gamma_cq": rmsnorm_gamma_cq, "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv}
    floats |= {"rope_sin": rope_sin, "rope_cos": rope_cos, "kv_cache": kv_cache, "kr_cache": kr_cache}
    dtypes(name, (torch.bfloat16,), **floats)
    contiguous(name, token_x=token_x, weight_dq=weight_dq, weight_uq_qr=weight_uq_qr, weight_dkv_kr=weight_dkv_kr)
    contiguous(name, **floats)
    require(token_x.dim() == 2, name, "token_x", "three dimensions are not simulated: use [tokens, hidden]")
    hidden, heads = token_x.shape[1], weight_uk.shape[0]
    require(hidden in (7168, 7680, 6144), name, "token_x", f"a hidden size of {hidden} must be 7168, 7680 or 6144")
    require(heads in (1, 2, 4, 8, 16, 32, 64, 128), name, "weight_uk", f"{heads} heads must be a power of 2 up to 128")
    shapes = {
        "weight_dq": (weight_dq, (hidden, 1536)),
        "weight_uq_qr": (weight_uq_qr, (1536, heads * (128 + ROPE))),
        "weight_uk": (weight_uk, (heads, 128, RANK)),
        "weight_dkv_kr": (weight_dkv_kr, (hidden, RANK + ROPE)),
        "rmsnorm_gamma_cq": (rmsnorm_gamma_cq, (1536,)),
        "rmsnorm_gamma_ckv": (rmsnorm_gamma_ckv, (RANK,)),
        "rope_sin": (rope_sin, (tokens, ROPE)),
        "rope_cos": (rope_cos, (tokens, ROPE)),
        "kv_cache": (kv_cache, (*kv_cache.shape[:2], 1, RANK)),
        "kr_cache": (kr_cache, (*kv_cache.shape[:2], 1, ROPE)),
    }
    for argument, (tensor, expected) in shapes.items():
        fits = tuple(tensor.shape) == expected
        require(fits, name, argument, f"must be {expected}, is {tuple(tensor.shape)}")
    require(kv_cache.shape[1] in (16, 128), name, "kv_cache", f"pages of {kv_cache.shape[1]} must be of 16 or 128")
    index = options.get("cache_index")
    require(index is not None, name, "cache_index", "is needed with PA_BSND")
    assert index is not None
    dtypes(name, (torch.int64,), cache_index=index)
    require(tuple(index.shape) == (tokens,), name, "cache_index", f"must be [{tokens}], is {tuple(index.shape)}")


@reference("npu_mla_prolog_v3", rules=prolog_rules, generations=("A2", "A3"))
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Rotated numbers are read in pairs of neighbors and written in halves."""
    name, index = "npu_mla_prolog_v3", options["cache_index"]
    low, high, size = int(index.min()), int(index.max()), kv_cache.shape[0] * kv_cache.shape[1]
    require(low >= 0 and high < size, name, "cache_index", f"slots {low} to {high} must be in 0 to {size - 1}")

    def product(x: Tensor, scale: Tensor | None, weight: Tensor, scales: Tensor | None) -> Tensor:
        wide = torch.mm(x.float(), weight.float())
        return wide if scale is None or scales is None else wide * scale * scales

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin, "half")

    given = options.get("dequant_scale_x")
    compressed = product(token_x, given, weight_dq, options.get("dequant_scale_w_dq")).bfloat16()
    query = normed(compressed, rmsnorm_gamma_cq, options.get("rmsnorm_epsilon_cq", 1e-5))[0]
    scale = None
    if given is not None:
        scale = query.float().abs().amax(-1, keepdim=True) / 127
        query = (query.float() / scale).round().to(torch.int8)
    heads = product(query, scale, weight_uq_qr, options.get("dequant_scale_w_uq_qr")).bfloat16()
    heads = heads.view(len(token_x), len(weight_uk), -1)
    plain = torch.einsum("thd,hdr->thr", heads[..., :-ROPE].float(), weight_uk.float()).bfloat16().contiguous()
    turned_heads = turned(heads[..., -ROPE:], rope_cos.unsqueeze(1), rope_sin.unsqueeze(1))
    vectors = product(token_x, given, weight_dkv_kr, options.get("dequant_scale_w_dkv_kr")).bfloat16()
    latent = normed(vectors[:, :RANK], rmsnorm_gamma_ckv, options.get("rmsnorm_epsilon_ckv", 1e-5))[0]
    kv_cache.view(-1, RANK)[index] = latent
    kr_cache.view(-1, ROPE)[index] = turned(vectors[:, RANK:], rope_cos, rope_sin)
    nothing = torch.empty(EMPTY, dtype=torch.float32)
    return plain, turned_heads, nothing, torch.empty(EMPTY, dtype=weight_uq_qr.dtype), nothing.clone()
