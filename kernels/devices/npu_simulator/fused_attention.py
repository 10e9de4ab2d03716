"""Fused inference attention, both versions: layouts TND, BSND, BSH and BNSD, paged or not.

Scores, softmax and the weighted sum are float32 here, and the result is rounded once to the query's dtype; the device
also rounds its probabilities. Rope parts (latent attention) are simulated for concatenated queries: with
heads of 128 and keys of the step, and with latent vectors of 512 in pages. Position shifts, shared prefixes, and
quantized caches other than int8 for one query a request are not simulated and raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require, same_dtype

__all__ = ["Attention"]

LAYOUTS = ("TND", "TND_NTD", "BSND", "BSH", "BNSD")
MASK = 2048
TND_HEAD_DIMS = (128, 192, 256)
MAX_ENTRIES = 4096
MAX_RATIO = 64
MAX_HEADS = 256
MAX_HEAD_DIM = 512
LATENT_DIM, ROPE_DIM, LATENT_HEADS, LATENT_QUERIES = 512, 64, 128, 16


@dataclass(frozen=True)
class Attention:
    """One call, with the argument names of the first version."""

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    blocks: Tensor | None
    sink: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    layout: str
    sparse: int
    precise: int
    block_size: int
    lse: bool
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    modes: tuple[int, int] = (0, 0)
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None

    # ---- rules: shapes, dtypes and host values ----

    def need(self, holds: Any, argument: str, rule: str) -> None:
        require(holds, self.operator, argument, rule)

    @property
    def latent(self) -> bool:
        """Whether keys and values are latent vectors."""
        return self.query_rope is not None and self.head_dim == LATENT_DIM

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1] // self.heads if self.layout == "BSH" else self.query.shape[-1]

    def check(self) -> None:
        name = self.operator
        self.need(self.layout in LAYOUTS, "input_layout", f"{self.layout!r} is not simulated: use {', '.join(LAYOUTS)}")
        contiguous(name, query=self.query, key=self.key, value=self.value, atten_mask=self.mask)
        contiguous(name, block_table=self.blocks)
        dtypes(name, (torch.float16, torch.bfloat16), query=self.query)
        if self.key.dtype == torch.int8:
            self.check_whole_numbers()
        else:
            same_dtype(name, query=self.query, key=self.key, value=self.value)
            self.need(self.key_scale is None, "key_antiquant_scale", "is for keys of int8")
        dims = {"TND": 3, "TND_NTD": 3, "BSH": 3, "BSND": 4, "BNSD": 4}[self.layout]
        self.need(self.query.dim() == dims, "query", f"{self.layout} has {dims} dimensions, not {self.query.dim()}")
        self.need(0 < self.heads <= MAX_HEADS, "num_heads", f"{self.heads} must be 1 to {MAX_HEADS}")
        axis = {"TND": 1, "TND_NTD": 1, "BSND": 2, "BNSD": 1}.get(self.layout)
        if axis is not None:
            found = self.query.shape[axis]
            self.need(found == self.heads, "num_heads", f"{self.heads} must be the query's {found}")
        else:
            width = self.query.shape[-1]
            self.need(width % self.heads == 0, "num_heads", f"{self.heads} must divide the query's width {width}")
        ratio = self.heads / self.kv_heads
        whole = ratio == int(ratio) and ratio <= (LATENT_HEADS if self.latent else MAX_RATIO)
        rule = f"{self.heads} query heads over {self.kv_heads} must be a whole number up to {MAX_RATIO}"
        self.need(whole, "num_key_value_heads", rule)
        self.need(self.head_dim <= MAX_HEAD_DIM, "query", f"head dim {self.head_dim} is above {MAX_HEAD_DIM}")
        if self.query_rope is not None or self.key_rope is not None or self.layout == "TND_NTD":
            self.check_rope()
        elif self.layout == "TND":
            dtypes(name, (torch.bfloat16,), query=self.query)  # the documentation's TND is bf16 only
            rule = f"TND takes head dims {TND_HEAD_DIMS}, not {self.head_dim}: use BSND or pad the heads"
            self.need(self.head_dim in TND_HEAD_DIMS, "query", rule)
        self.check_lengths()
        self.check_cache()
        self.check_mask()

    def check_rope(self) -> None:
        """Facts 2.6: heads of 128 beside keys of as many heads that are not paged; or latent vectors of 512, one key
        head in pages, for 1, 2, 4 .. 128 query heads and up to 16 queries a request. Rope parts have 64 numbers."""
        name, query_rope, key_rope = self.operator, self.query_rope, self.key_rope
        given = query_rope is not None and key_rope is not None
        self.need(given, "query_rope", f"query_rope and key_rope come together, and {self.layout} is for them")
        assert query_rope is not None
        assert key_rope is not None
        same_dtype(name, query=self.query, query_rope=query_rope, key_rope=key_rope)
        contiguous(name, query_rope=query_rope, key_rope=key_rope)
        self.need(self.tnd, "input_layout", f"{self.layout} with rope parts is not simulated: use TND or TND_NTD")
        rule = f"must be {(*self.query.shape[:2], ROPE_DIM)}, is {tuple(query_rope.shape)}"
        self.need(tuple(query_rope.shape) == (*self.query.shape[:2], ROPE_DIM), "query_rope", rule)
        self.need(not self.lse or self.layout == "TND", "softmax_lse_flag", "is simulated with TND only")
        if not self.latent:
            dims = self.head_dim == 128 and self.value.shape[-1] == 128
            self.need(dims, "query", f"head dim {self.head_dim} with a rope part must be 128 or {LATENT_DIM}")
            self.need(self.layout == "TND", "input_layout", "TND_NTD is for latent vectors")
            self.need(self.blocks is None, "block_table", "heads of 128 with a rope part are simulated without pages")
            shape = (*self.key.shape[:2], ROPE_DIM)
            self.need(tuple(key_rope.shape) == shape, "key_rope", f"must be {shape}, is {tuple(key_rope.shape)}")
            return
        powers = [1 << power for power in range(8)]
        self.need(self.heads in powers, "num_heads", f"{self.heads} must be a power of 2 up to {LATENT_HEADS}")
        self.need(self.kv_heads == 1, "num_key_value_heads", f"{self.kv_heads} must be 1 for latent vectors")
        self.need(self.blocks is not None, "block_table", "latent vectors must be in pages")
        shape = (*self.key.shape[:2], ROPE_DIM)
        self.need(tuple(key_rope.shape) == shape, "key_rope", f"must be {shape}, is {tuple(key_rope.shape)}")
        ends = [0, *(self.lengths or ())]
        most = max((end - begin for begin, end in pairwise(ends)), default=0)
        self.need(most <= LATENT_QUERIES, "actual_seq_lengths", f"{most} queries a request, {LATENT_QUERIES} at most")
        rule = f"sparse_mode {self.sparse}: one query a request takes 0 without a mask, more take 3"
        self.need(self.sparse == (3 if most > 1 else 0) or (self.sparse == 3 and most == 1), "sparse_mode", rule)

    @property
    def tnd(self) -> bool:
        """Whether queries are concatenated."""
        return self.layout in ("TND", "TND_NTD")

    def check_whole_numbers(self) -> None:
        """Keys and values of int8 (vendor: "pseudo quantization", scales of keys and values apart), paged, for one
        query a request. Modes 0, a scale for each number of each head, and 5, for each token and head,
        beside the pages."""
        name = self.operator
        same_dtype(name, key=self.key, value=self.value)
        self.need(self.layout in ("BSH", "BSND"), "input_layout", "int8 keys are simulated for BSH and BSND")
        self.need(self.query_tokens() == 1, "query", "int8 keys of this layout are for one query a request (Q_S 1)")
        self.need(self.blocks is not None, "block_table", "int8 keys are simulated in pages only")
        rule = f"{self.modes} must be equal, 0 or 5: others are not simulated"
        self.need(self.modes in ((0, 0), (5, 5)), "key_antiquant_mode", rule)
        self.need(self.sparse == 0 and self.mask is None, "sparse_mode", "int8 keys with one query take no mask")
        self.need(self.head_dim % 32 == 0, "query", f"head dim {self.head_dim} of int8 keys must be a multiple of 32")
        pages, dim = self.key.shape[0], self.head_dim
        per_token = (pages, self.kv_heads, self.block_size)
        shapes: tuple[tuple[int, ...], ...] = (per_token,)
        if self.modes == (0, 0):
            shapes = ((1, self.kv_heads, 1, dim), (1, self.kv_heads, dim), (1, self.kv_heads * dim))
        for argument, scale in (("key_antiquant_scale", self.key_scale), ("value_antiquant_scale", self.value_scale)):
            self.need(scale is not None, argument, "int8 keys and values need it")
            assert scale is not None
            contiguous(name, **{argument: scale})
            dtypes(name, (self.query.dtype if self.modes == (0, 0) else torch.float32,), **{argument: scale})
            rule = f"must be one of {shapes}, is {tuple(scale.shape)}"
            self.need(tuple(scale.shape) in shapes, argument, rule)

    def check_lengths(self) -> None:
        for argument, values in (("actual_seq_lengths", self.lengths), ("actual_seq_lengths_kv", self.kv_lengths)):
            if values is not None:
                whole = all(type(value) is int and value >= 0 for value in values)
                self.need(whole, argument, f"must be a list of host integers of 0 or more, is {list(values)[:8]}")
        if self.tnd:
            total = self.query.shape[0]
            self.need(self.lengths, "actual_seq_lengths", "TND needs the cumulative query lengths")
            assert self.lengths is not None
            ends = list(self.lengths)
            self.need(ends == sorted(ends), "actual_seq_lengths", f"must be cumulative (no leading 0), is {ends[:8]}")
            rule = f"queryT must be equal to last actualSeqQ: {total} tokens, last entry {ends[-1]} (561002)"
            self.need(ends[-1] == total, "actual_seq_lengths", rule)
            rule = f"{len(ends)} entries, {MAX_ENTRIES} are the most"
            self.need(len(ends) <= MAX_ENTRIES, "actual_seq_lengths", rule)
            self.need(self.kv_lengths, "actual_seq_lengths_kv", "TND needs the key lengths")
        elif self.lengths is not None:
            batch, longest = self.query.shape[0], self.query_tokens()
            self.need(
                len(self.lengths) == 1 or len(self.lengths) >= batch,
                *("actual_seq_lengths", f"needs 1 or {batch} entries, has {len(self.lengths)}"),
            )
            rule = f"entries must be at most the query's {longest} tokens"
            self.need(max(self.lengths) <= longest, "actual_seq_lengths", rule)
        entries = self.entries()
        if self.kv_lengths is not None:
            count = len(self.kv_lengths)
            enough = count == entries or (not self.tnd and (count == 1 or count > entries))
            self.need(enough, "actual_seq_lengths_kv", f"needs {entries} entries, one per request, has {count}")

    def entries(self) -> int:
        """Requests."""
        return len(self.lengths or ()) if self.tnd else self.query.shape[0]

    def query_tokens(self) -> int:
        return self.query.shape[{"BSND": 1, "BSH": 1, "BNSD": 2}[self.layout]]

    def check_cache(self) -> None:
        if self.blocks is None:
            self.need(self.key.dim() == self.query.dim(), "key", f"must be {self.layout} like the query")
            shapes = self.key.shape[:-1] == self.value.shape[:-1]
            self.need(shapes, "value", "must have the key's shape up to the head dim")
            if self.tnd and self.kv_lengths:
                ends, total = list(self.kv_lengths), self.key.shape[0]
                self.need(ends == sorted(ends), "actual_seq_lengths_kv", "without block_table: cumulative")
                rule = f"without block_table the last entry must be the keys' {total}, is {ends[-1]}"
                self.need(ends[-1] == total, "actual_seq_lengths_kv", rule)
            return
        dtypes(self.operator, (torch.int32,), block_table=self.blocks)
        self.need(self.kv_lengths is not None, "actual_seq_lengths_kv", "a paged cache needs the key lengths")
        assert self.kv_lengths is not None
        entries = self.entries()
        self.need(self.blocks.dim() == 2, "block_table", f"must be [requests, pages], is {tuple(self.blocks.shape)}")
        rows = f"must have a row for each of {entries} requests, has {self.blocks.shape[0]}"
        self.need(self.blocks.shape[0] == entries, "block_table", rows)
        size = self.block_size
        rule = f"{size} must be 128, 256, 384 or 512: others are rejected or silently wrong"
        self.need(size and size % 128 == 0 and size <= 512, "block_size", rule)
        for argument, cache in (("key", self.key), ("value", self.value)):
            flat = cache.dim() == 3 and cache.shape[1] == size and cache.shape[2] % self.kv_heads == 0
            deep = (
                cache.dim() == 4 and cache.shape[1:3] == (self.kv_heads, size) and (self.tnd or self.layout == "BNSD")
            )
            self.need(
                flat or deep,
                argument,
                f"a paged cache is [blocks, {size}, heads * dim], or [blocks, {self.kv_heads}, {size}, dim] for a TND "
                f"or BNSD query; this one is {tuple(cache.shape)}",
            )
            if flat:
                width = cache.shape[2]
                rule = f"heads * dim is {width}, above 65535: use [blocks, heads, {size}, dim]"
                self.need(width <= 65535, argument, rule)
                dim = width // self.kv_heads
            else:
                dim = cache.shape[3]
            rule = f"head dim {dim} must be the query's {self.head_dim}"
            self.need(argument == "value" or dim == self.head_dim, argument, rule)
        pages = -(-max(self.kv_lengths, default=0) // size)
        rule = f"has {self.blocks.shape[1]} pages a request, the longest needs {pages}"
        self.need(self.blocks.shape[1] >= pages, "block_table", rule)

    def check_mask(self) -> None:
        self.need(self.sparse in (0, 1, 2, 3, 4), "sparse_mode", f"{self.sparse} is not simulated: use 0, 1, 2, 3 or 4")
        if self.mask is not None:
            dtypes(self.operator, (torch.bool, torch.int8, torch.uint8), atten_mask=self.mask)
        if self.sparse in (2, 3, 4):
            rule = f"sparse_mode {self.sparse} needs the {MASK} x {MASK} mask (1 above the diagonal)"
            self.need(self.mask is not None and self.mask.shape[-2:] == (MASK, MASK), "atten_mask", rule)
            assert self.mask is not None
            self.need(self.mask.numel() == MASK * MASK, "atten_mask", rule)
        if self.sparse == 1:
            self.need(self.mask is not None, "atten_mask", "sparse_mode 1 needs the whole mask")
        if self.mask is not None and self.sparse in (0, 1) and not self.tnd:
            self.check_whole_mask()
        if self.tnd and self.sparse in (0, 1):
            self.need(self.mask is None, "atten_mask", f"TND with sparse_mode {self.sparse} takes no mask here")
        if self.sink is not None:
            self.need(self.layout == "TND", "learnable_sink", "is for TND only")
            dtypes(self.operator, (torch.bfloat16,), learnable_sink=self.sink)
            shape = tuple(self.sink.shape)
            self.need(shape == (self.heads,), "learnable_sink", f"must be [{self.heads}], is {shape}")

    def check_whole_mask(self) -> None:
        """(1, Q, KV), (B, 1, Q, KV), (1, 1, Q, KV), (Q, KV), for one query (B, KV); each may be longer, padded."""
        assert self.mask is not None
        shape, batch, queries = tuple(self.mask.shape), self.query.shape[0], self.query_tokens()
        keys = self.blocks.shape[1] * self.block_size if self.blocks is not None else self.kv_tokens()
        rule = f"sparse_mode {self.sparse} takes [1 or {batch}, 1, {queries}, {keys}] or a longer one, not {shape}"
        leading = {2: (), 3: ((1,),), 4: ((1, 1), (batch, 1))}.get(len(shape))
        fits = leading is not None and (not leading or shape[:-2] in leading)
        rows = batch if queries == 1 and len(shape) == 2 else queries
        self.need(fits and shape[-2] >= rows and shape[-1] >= keys, "atten_mask", rule)

    def kv_tokens(self) -> int:
        return self.key.shape[{"BSND": 1, "BSH": 1, "BNSD": 2}[self.layout]]

    # ---- values ----

    def compute(self) -> tuple[Tensor, Tensor]:
        """Output like the query (value's head dim) and the logarithms of the softmax sums ((0,) unless asked for)."""
        if self.sparse in (2, 3, 4) and self.mask is not None:
            self.check_mask_values()
        keys = self.unpaged(self.key, "key") if self.blocks is None else None
        values = self.unpaged(self.value, "value") if self.blocks is None else None
        outputs, sums = [], []
        rows = self.query_rows()
        for request, query in enumerate(rows):
            kv = self.kv_length(request)
            if keys is None or values is None:
                key = self.paged(self.key, request, kv, self.key_scale)
                value = self.paged(self.value, request, kv, self.value_scale)
            else:
                key, value = keys[request][:kv], values[request][:kv]
            rope = None if self.query_rope is None else self.rope_scores(request, kv)
            out, lse = self.attend(query, key, value, request, rope)
            outputs.append(out)
            sums.append(lse)
        return self.assemble(outputs, sums)

    def check_mask_values(self) -> None:
        assert self.mask is not None
        mask = self.mask.view(MASK, MASK)
        corners = (mask[0, 0], mask[0, 1], mask[1, 0], mask[-1, -1], mask[-1, 0], mask[0, -1])
        upper = [bool(corner) for corner in corners] == [False, True, False, False, False, True]
        self.need(upper, "atten_mask", "must be 1 above the diagonal and 0 elsewhere (torch.triu(ones, 1))")

    def query_rows(self) -> list[Tensor]:
        """[tokens, heads, dim] of each request, its padding cut off."""
        if self.tnd:
            ends = list(self.lengths or ())
            return [self.query[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        whole = self.split_heads(self.query, self.heads)
        lengths = self.each(self.lengths, whole.shape[0], whole.shape[1])
        return [row[:length] for row, length in zip(whole, lengths, strict=False)]

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """A BSND, BSH or BNSD tensor as [batch, tokens, heads, dim]."""
        if self.layout == "BNSD":
            return x.transpose(1, 2)
        return x if self.layout == "BSND" else x.unflatten(-1, (heads, -1))

    def each(self, lengths: Sequence[int] | None, batch: int, whole: int) -> list[int]:
        if lengths is None:
            return [whole] * batch
        return list(lengths) * batch if len(lengths) == 1 else list(lengths)[:batch]

    def unpaged(self, x: Tensor, argument: str) -> list[Tensor]:
        """Keys or values [tokens, heads, dim] of each request."""
        if self.tnd:
            ends = list(self.kv_lengths or ())
            return [x[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return list(self.split_heads(x, self.kv_heads))

    def kv_length(self, request: int) -> int:
        if self.blocks is None and self.tnd:
            ends = [0, *(self.kv_lengths or ())]
            return ends[request + 1] - ends[request]
        if self.kv_lengths is None:
            return self.key.shape[{"BSND": 1, "BSH": 1, "BNSD": 2}[self.layout]]
        return self.kv_lengths[0] if len(self.kv_lengths) == 1 else self.kv_lengths[request]

    def paged(self, cache: Tensor, request: int, length: int, scale: Tensor | None) -> Tensor:
        """[length, heads, dim] of a request. The device does not check page numbers; here a bad one raises."""
        assert self.blocks is not None
        pages = self.blocks[request, : -(-length // self.block_size)].long()
        if pages.numel():
            low, high = int(pages.min()), int(pages.max())
            rule = f"request {request}: pages {low} to {high} must be in 0 to {cache.shape[0] - 1}"
            self.need(low >= 0 and high < cache.shape[0], "block_table", rule)
        held = cache[pages]
        held = held.transpose(1, 2) if cache.dim() == 4 else held.unflatten(-1, (self.kv_heads, -1))
        result = held.reshape(-1, self.kv_heads, held.shape[-1])
        if scale is not None:
            paged = self.modes == (5, 5)
            scales = scale[pages].transpose(1, 2).reshape(-1, self.kv_heads, 1) if paged else scale.float()
            result = result.float() * scales.view(-1 if paged else 1, self.kv_heads, 1 if paged else self.head_dim)
        return result[:length]

    def rope_scores(self, request: int, length: int) -> Tensor:
        """Products of the rope parts of a request, [kv heads, heads of each, tokens, length]."""
        assert self.query_rope is not None
        assert self.key_rope is not None
        ends = [0, *(self.lengths or ())]
        query = self.query_rope[ends[request] : ends[request + 1]].float()
        if self.blocks is None:
            key = self.unpaged(self.key_rope, "key_rope")[request]
        else:
            key = self.paged(self.key_rope, request, length, None)
        grouped = query.view(len(query), self.kv_heads, self.heads // self.kv_heads, -1)
        return torch.einsum("tkgd,skd->kgts", grouped, key.float())

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, request: int, rope: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[tokens, heads, value dim] and [tokens, heads] in float32. A row that sees nothing yields zeros."""
        tokens, seen, group = query.shape[0], key.shape[0], self.heads // self.kv_heads
        q = query.float().view(tokens, self.kv_heads, group, -1)
        scores = torch.einsum("tkgd,skd->kgts", q, key.float())
        scores = (scores if rope is None else scores + rope) * self.scale
        hidden = self.hidden(tokens, seen, request)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        lse = torch.logsumexp(scores, -1) if seen else scores.new_full(scores.shape[:-1], float("-inf"))
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.float().view(self.kv_heads, group, 1))
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
        out = torch.einsum("kgts,skd->tkgd", weights, value.float()).flatten(1, 2)
        return out, lse.flatten(0, 1).t()

    def hidden(self, tokens: int, seen: int, request: int) -> Tensor | None:
        """True where a query does not see a key, [tokens, seen] or None."""
        if self.sparse in (0, 1):
            if self.mask is None:
                return None
            mask = self.mask.bool()
            if mask.dim() == 2 and self.query_tokens() == 1:
                return mask[request, :seen].view(1, seen)
            mask = mask.view(-1, *mask.shape[-2:])
            return mask[min(request, mask.shape[0] - 1), :tokens, :seen]
        i = torch.arange(tokens).unsqueeze(1)
        j = torch.arange(seen).unsqueeze(0)
        if self.sparse == 2:
            return j > i
        shift = seen - tokens
        if self.sparse == 3:
            return j > i + shift
        return (j > i + shift + self.after) | (j < i + shift - self.before)

    def assemble(self, outputs: list[Tensor], sums: list[Tensor]) -> tuple[Tensor, Tensor]:
        empty = torch.empty(0, dtype=torch.float32)
        if self.layout == "TND_NTD":
            return torch.cat(outputs).to(self.query.dtype).transpose(0, 1).contiguous(), empty
        if self.layout == "TND":
            out = torch.cat(outputs).to(self.query.dtype)
            return out, torch.cat(sums).unsqueeze(-1).contiguous() if self.lse else empty
        batch, longest, dim = len(outputs), self.query_tokens(), outputs[0].shape[-1]
        whole = torch.zeros(batch, longest, self.heads, dim)
        total = torch.full((batch, self.heads, longest, 1), float("inf"))
        for request, (out, lse) in enumerate(zip(outputs, sums, strict=True)):
            whole[request, : out.shape[0]] = out
            total[request, :, : out.shape[0], 0] = lse.t()
        whole = whole.to(self.query.dtype)
        if self.layout == "BNSD":
            whole = whole.transpose(1, 2).contiguous()
        elif self.layout == "BSH":
            whole = whole.flatten(2)
        return whole, total if self.lse else empty
