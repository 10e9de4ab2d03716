"""Compressed attention (DeepSeek V4): a query reads the last tokens, and entries that each stand for ``rate`` tokens.

    c = norm(keys(x)), rotated;   q[h] = normed queries(norm(down(x))), rotated
    entry = rotate(norm(sum over its tokens of  softmax(gates(x) + bias) * values(x)))
    out[h] = rotate back(sum of softmax(q[h] @ [c of the window, entries, sink]) * [c of the window, entries, 0])

One vector of a token, or of an entry, is key and value of all heads. Entries are of two kinds:

- heavy: those of ``rate`` tokens each, and a query reads all of them;
- sparse: each also weighs the ``rate`` tokens before its own, by other values and gates; an indexer, with smaller
  entries of the same tokens, chooses the best ones for a query.

An entry is there when the last of its tokens is. Caches hold the vectors of the window, what values and gates gave for
the tokens whose entries are not all there, and the entries: in the page of their last token, divided over the places of
some tokens, so that pages may be shared by prefixes as others are. Attention is plain torch on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import Latent, Paged, Window
from kernels.core.arrays import Longs
from kernels.core.batch import BoundedRows, ForwardBatch
from kernels.core.operators import Linear
from kernels.devices.latent_cache import IndexedLatent, Vectors, page_size_of, read_latent, write_latent
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["CompressedAttention", "CompressedConfig", "CompressedSizes", "PassRows", "tensors"]

_SHARES = 16
"""Most tokens whose places an entry is divided over: a page holds a multiple of as many."""
_NUMBERS = 1 << 25
"""Most numbers of gathered vectors, or of scores, that are held at a time."""
_CPU_NUMBERS = 1 << 21
"""The same on a CPU."""

Rotate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""As ``RotaryEmbedding``."""
_Part = tuple[int, Callable[[slice], tuple[Tensor, Tensor]]]
"""How many vectors each token of a pass reads, and those of some of its tokens: the vectors [n, width, dim], and which
of them are hidden [n, width]."""


@dataclass(frozen=True)
class CompressedConfig:
    """The sizes that all layers share. ``dim``: of a head, whose last ``rope_dim`` numbers are rotated. ``query_rank``:
    of the vector that queries are made from. ``groups``: of heads, of which each is projected to ``group_rank``
    numbers; the whole model's, as ``heads``. ``window``: tokens that a query sees, itself among them. ``index_heads``,
    ``index_dim``, ``chosen``: of an indexer, and the most entries that it chooses.
    """

    heads: int
    dim: int
    rope_dim: int
    query_rank: int
    groups: int
    group_rank: int
    window: int
    index_heads: int
    index_dim: int
    chosen: int
    eps: float


@dataclass(frozen=True)
class CompressedSizes:
    """A layer's. ``rate``: tokens of an entry; 0: the layer has a window alone. ``sparse``: whether an entry reads the
    tokens of the one before it, too, and an indexer chooses entries."""

    shared: CompressedConfig
    rate: int = 0
    sparse: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of values, gates, and an indexer's values and gates of a token."""
        own, index = self.shared.dim, self.shared.index_dim
        return (2 * own, 2 * own, 2 * index, 2 * index) if self.sparse else (own, own)

    @property
    def shares(self) -> int:
        """Tokens whose places hold one entry."""
        return gcd(self.rate, _SHARES)

    @property
    def span(self) -> int:
        """Tokens that an entry reads."""
        return self.rate * (2 if self.sparse else 1)

    @property
    def window(self) -> Window:
        """What the layer caches of the last tokens; one vector is stored as a key and a value."""
        half = self.shared.dim // 2
        return Window(Paged(1, half, half), self.shared.window)

    @property
    def entries(self) -> tuple[Latent, Window]:
        """What it caches besides: its entries, and what they will be made from."""
        shared = self.shared
        size = gcd(*self.widths) // 2
        source = Window(Paged(sum(self.widths) // (2 * size), size, size), self.span)
        return Latent(shared.dim // self.shares, 0, shared.index_dim // self.shares if self.sparse else 0), source


def tensors(sizes: CompressedSizes, module: str, hidden: int) -> Iterator[TensorSpec]:
    """The layer's. Values and gates of entries stay in floats."""
    own = sizes.shared
    width, groups = own.heads * own.dim, (own.groups * own.group_rank, own.groups)
    yield from linear(f"{module}.q_a_proj", (own.query_rank, hidden))
    yield norm(f"{module}.q_a_norm", own.query_rank)
    yield from linear(f"{module}.q_b_proj", (width, own.query_rank), by_outputs((width, own.heads)))
    yield from linear(f"{module}.kv_proj", (own.dim, hidden))
    yield norm(f"{module}.kv_norm", own.dim)
    yield from linear(f"{module}.o_a_proj", (groups[0], width // own.groups), by_outputs(groups))
    yield from linear(f"{module}.o_b_proj", (hidden, groups[0]), by_inputs(*groups))
    yield TensorSpec(f"{module}.sinks", (own.heads,), Role.WIDE, by_outputs((own.heads, own.heads)))
    if sizes.rate:
        yield from _entry_tensors(f"{module}.compressor", sizes, own.dim, hidden)
    if sizes.sparse:
        index = f"{module}.compressor.indexer"
        yield from _entry_tensors(index, sizes, own.index_dim, hidden)
        yield from linear(f"{index}.q_b_proj", (own.index_heads * own.index_dim, own.query_rank))
        yield from linear(f"{index}.scorer.weights_proj", (own.index_heads, hidden), role=Role.ROUTER)


def _entry_tensors(module: str, sizes: CompressedSizes, dim: int, hidden: int) -> Iterator[TensorSpec]:
    width = 2 * dim if sizes.sparse else dim
    yield from linear(f"{module}.kv_proj", (width, hidden), role=Role.ROUTER)
    yield from linear(f"{module}.gate_proj", (width, hidden), role=Role.ROUTER)
    yield TensorSpec(f"{module}.position_bias", (sizes.rate, width), Role.WIDE)
    yield norm(f"{module}.kv_norm", dim)


class PassRows:
    """Where the rows of a pass have their tokens, on the device once for all layers. ``row``, ``positions`` int64
    [tokens]: of the pass's tokens. ``starts``, ``counts``: as ``AttentionRows``."""

    def __init__(self, put: Callable[[Longs], Tensor]) -> None:
        self._put = put
        self._batch: ForwardBatch | None = None

    @property
    def batch(self) -> ForwardBatch:
        """The pass that runs."""
        assert self._batch is not None
        return self._batch

    @batch.setter
    def batch(self, batch: ForwardBatch) -> None:
        if batch is self._batch:
            return
        rows = batch.rows
        if rows is None:
            raise ValueError("compressed attention reads rows on the host; a captured pass has none")
        self._batch = batch
        self._tables: dict[Window | None, Tensor] = {}
        self._ready: dict[int, tuple[Tensor, Tensor] | None] = {}
        self.starts, self.counts = rows.starts, rows.counts
        self.row = self._put(np.repeat(np.arange(len(rows.counts)), rows.counts))
        self.positions = batch.positions

    @property
    def ends(self) -> Longs:
        """Tokens of each row, int64 [rows]."""
        return self.starts + self.counts

    def seen(self, rate: int) -> Tensor:
        """Entries of ``rate`` tokens that each token sees, int64 [tokens]."""
        return torch.div(self.positions + 1, rate, rounding_mode="floor")

    def bounded(self, spec: Window) -> BoundedRows:
        """The pass's part of a window."""
        return self.batch.bounded[spec]

    def in_window(self, spec: Window, row: Tensor, positions: Tensor) -> Tensor:
        """Where a window has ``positions`` int64 [n, m] of the rows ``row`` int64 [n]; those below 0: anywhere."""
        size, at = self.bounded(spec).page_tokens, positions.clamp(min=0)
        pages = self._table(spec)[row.unsqueeze(1), torch.div(at, size, rounding_mode="floor")]
        return pages * size + at % size

    def of_entries(self, sizes: CompressedSizes, row: Tensor, numbers: Tensor, page_size: int) -> Tensor:
        """Where the main pages have the entries ``numbers`` int64 [n, m] of the rows ``row`` int64 [n], as int64 [n, m,
        shares]."""
        last = numbers * sizes.rate + sizes.rate - 1
        pages = self._table(None)[row.unsqueeze(1), torch.div(last, page_size, rounding_mode="floor")]
        place = torch.div(last % page_size, sizes.rate, rounding_mode="floor") * sizes.shares
        return (pages * page_size + place).unsqueeze(2) + torch.arange(sizes.shares, device=place.device)

    def ready(self, rate: int) -> tuple[Tensor, Tensor] | None:
        """The rows and numbers int64 [entries] of the entries whose last token is in this pass; None: there are
        none."""
        if rate not in self._ready:
            first = self.starts // rate
            counts = self.ends // rate - first
            total = int(counts.sum())
            row = np.repeat(np.arange(len(counts)), counts)
            numbers = np.arange(total) + np.repeat(first - np.cumsum(counts) + counts, counts)
            self._ready[rate] = (self._put(row), self._put(numbers)) if total else None
        return self._ready[rate]

    def _table(self, spec: Window | None) -> Tensor:
        """The page table int64 [rows, columns] of a window, or the main one."""
        if spec not in self._tables:
            rows = self.batch.rows
            assert rows is not None
            held = rows.pages if spec is None else self.bounded(spec).pages
            self._tables[spec] = self._put(held.astype(np.int64))
        return self._tables[spec]


class _Entries:
    """How entries of ``dim`` numbers are made. ``module``: of their norm and bias."""

    def __init__(self, builder: LayerBuilder, sizes: CompressedSizes, module: str, dim: int) -> None:
        self.sizes, self.dim = sizes, dim
        bias = builder.source.take([f"{module}.position_bias"])
        self.bias = torch.cat(bias.split(dim, 1)) if sizes.sparse else bias  # of each token that an entry reads
        self.norm = builder.norm(f"{module}.kv_norm", sizes.shared.eps)

    def __call__(self, values: Tensor, gates: Tensor, hidden: Tensor) -> Tensor:
        """``values``, ``gates`` [entries, span, width] -> [entries, dim], normed. ``hidden`` [entries, span]: tokens
        before the first one."""
        if self.sizes.sparse:  # the tokens before have the first numbers, the entry's others
            values, gates = _halves(values), _halves(gates)
        logits = (gates.float() + self.bias).masked_fill(hidden.unsqueeze(2), -torch.inf)
        return self.norm((values.float() * logits.softmax(1)).sum(1).to(values.dtype))


def _halves(x: Tensor) -> Tensor:
    """The first numbers of the first tokens, the others of the others: [n, span, 2 * dim] -> [n, span, dim]."""
    span, dim = x.shape[1] // 2, x.shape[2] // 2
    return torch.cat((x[:, :span, :dim], x[:, span:, dim:]), 1)


class CompressedAttention:
    """The layer of ``tensors``. ``heads``: of this rank. ``rotary``: of entries; None: the layer has none."""

    def __init__(
        self,
        builder: LayerBuilder,
        sizes: CompressedSizes,
        module: str,
        heads: int,
        *,
        rotary: Rotate | None,
        rows: PassRows,
    ) -> None:
        own = sizes.shared
        self.sizes, self.heads, self.rotary, self.places = sizes, heads, rotary, rows
        self.rows, self.cache = builder.rows, builder.ops.cache
        self.groups = own.groups * heads // own.heads
        self.window, self.source = sizes.window, sizes.entries[1] if sizes.rate else None
        self.scale = own.dim**-0.5
        self.down = builder.linear(f"{module}.q_a_proj", f"{module}.kv_proj")
        self.query_norm = builder.norm(f"{module}.q_a_norm", own.eps)
        self.queries = builder.linear(f"{module}.q_b_proj")
        self.norm = builder.norm(f"{module}.kv_norm", own.eps)
        self.sinks = builder.source.take([f"{module}.sinks"])
        builder.refuse_adapters((f"{module}.o_a_proj",), "it is a product for each group of heads")
        first = _floats(builder, f"{module}.o_a_proj")
        self.first = first.view(self.groups, own.group_rank, -1).transpose(1, 2)
        self.output = builder.row_parallel(f"{module}.o_b_proj")
        self.values: Linear | None = None
        if sizes.rate:
            names = [f"{module}.compressor", *([f"{module}.compressor.indexer"] if sizes.sparse else [])]
            self.values = builder.linear(*(f"{name}.{part}_proj" for name in names for part in ("kv", "gate")))
            dims = own.dim, own.index_dim
            self.makers = [_Entries(builder, sizes, name, dim) for name, dim in zip(names, dims, strict=False)]
        if sizes.sparse:
            index = f"{module}.compressor.indexer"
            self.index_queries = builder.linear(f"{index}.q_b_proj")
            self.index_weights = builder.linear(f"{index}.scorer.weights_proj")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``. ``cache``: of the window, or those of entries and then the window's."""
        own, self.places.batch = self.sizes.shared, batch
        turn = _turn(cos, sin)
        queries, keys = self.down(x).split([own.query_rank, own.dim], 1)
        compressed = self.query_norm(queries.contiguous())
        window = cache[2] if self.sizes.rate else cache
        self._write(window, self.window, _rotated(self.norm(keys.contiguous()), *turn))
        parts = [self._window_part(window)]
        if self.values is not None and self.source is not None:
            held, keys = (cache[0].vectors, cache[0].keys) if isinstance(cache[0], IndexedLatent) else (cache[0], None)
            self._write(cache[1], self.source, self.values(x))
            self._make_entries((held,) if keys is None else (held, keys), cache[1], self.source)
            chosen = None if keys is None else self._choose(x, compressed, turn, keys)
            parts += self._entry_part(held, chosen)
        heads = self.queries(compressed).view(len(x), self.heads, own.dim)
        heads = heads * torch.rsqrt(heads.float().square().mean(-1, keepdim=True) + own.eps).to(heads.dtype)
        result = _rotated(self._attend(_rotated(heads, *turn), parts), turn[0], -turn[1])
        if wanted is not None:
            if self.rows is not None:
                self.rows.select(wanted)
            result = result.index_select(0, wanted)
        grouped = result.view(len(result), self.groups, -1).transpose(0, 1)
        return self.output(torch.bmm(grouped, self.first).transpose(0, 1).flatten(1))

    def _write(self, cache: Any, spec: Window, vectors: Tensor) -> None:
        """Write the ``vectors`` [tokens, n] of the pass's tokens to a window's pages."""
        index = self.places.bounded(spec).cache_index
        assert index is not None, "of every window"
        self.cache.write(cache, index, vectors.reshape(len(vectors), 2 * spec.paged.kv_heads, spec.paged.k_dim))

    def _gather(self, cache: Any, spec: Window, row: Tensor, positions: Tensor) -> Tensor:
        """What was written of ``positions`` int64 [n, m] of the rows ``row`` int64 [n]: [n, m, numbers]."""
        found = self.cache.gather(cache, self.places.in_window(spec, row, positions).flatten())
        return found[..., : spec.paged.k_dim].reshape(*positions.shape, -1)

    def _make_entries(self, caches: Sequence[Vectors], source: Any, spec: Window) -> None:
        """Write the entries whose last token is in this pass to ``caches``."""
        sizes, rows = self.sizes, self.places
        ready = rows.ready(sizes.rate)
        if ready is None:
            return
        assert self.rotary is not None, "of a layer with entries"
        step = max(1, _numbers(ready[0].device) // (sizes.span * sum(sizes.widths)))
        for row, numbers in zip(ready[0].split(step), ready[1].split(step), strict=True):
            first = numbers * sizes.rate
            positions = (first - sizes.span + sizes.rate).unsqueeze(1) + torch.arange(sizes.span, device=first.device)
            parts = self._gather(source, spec, row, positions).split(sizes.widths, 2)
            turn, hidden = _turn(*self.rotary(first)), positions < 0
            for each, cache in enumerate(caches):
                vectors = _rotated(self.makers[each](parts[2 * each], parts[2 * each + 1], hidden), *turn)
                places = rows.of_entries(sizes, row, numbers.unsqueeze(1), page_size_of(cache))
                write_latent(cache, places.flatten(), vectors.view(places.numel(), -1))

    def _read_entries(self, cache: Vectors, row: Tensor, numbers: Tensor) -> Tensor:
        """The entries ``numbers`` int64 [n, m] of the rows ``row`` int64 [n]: [n, m, dim]."""
        places = self.places.of_entries(self.sizes, row, numbers, page_size_of(cache))
        return read_latent(cache, places.flatten()).view(*numbers.shape, -1)

    def _choose(self, x: Tensor, compressed: Tensor, turn: tuple[Tensor, Tensor], keys: Vectors) -> Tensor | None:
        """The entries int64 [tokens, chosen] that each token of the pass reads, -1: none; None: all."""
        own, rate, rows, device = self.sizes.shared, self.sizes.rate, self.places, x.device
        ends = rows.ends // rate
        if int(ends.max()) <= own.chosen:
            return None
        queries = _rotated(self.index_queries(compressed).view(len(x), own.index_heads, own.index_dim), *turn).float()
        weights = self.index_weights(x).float() * (own.index_heads * own.index_dim) ** -0.5
        seen, begin, result = rows.seen(rate), 0, []
        for row, (end, count) in enumerate(zip(ends.tolist(), rows.counts.tolist(), strict=True)):
            if end <= own.chosen:
                every = torch.arange(own.chosen, device=device).expand(count, -1)
                result.append(every.where(every < seen[begin : begin + count].unsqueeze(1), -1))
                begin += count
                continue
            every = torch.arange(end, device=device)
            held = self._read_entries(keys, torch.tensor([row], device=device), every.unsqueeze(0))[0].float().t()
            step = max(1, _numbers(device) // (end * own.index_heads))
            for low in range(begin, begin + count, step):
                here = slice(low, min(low + step, begin + count))
                scores = torch.mm(queries[here].flatten(0, 1), held).relu_().view(-1, own.index_heads, end)
                total = torch.bmm(weights[here].unsqueeze(1), scores).squeeze(1)
                total.masked_fill_(every >= seen[here].unsqueeze(1), -torch.inf)
                found = total.topk(own.chosen, 1)
                result.append(found.indices.masked_fill_(found.values == -torch.inf, -1))
            begin += count
        return torch.cat(result)

    def _window_part(self, cache: Any) -> _Part:
        """The tokens of the window."""
        rows = self.places
        width = min(self.sizes.shared.window, int(rows.ends.max()))

        def read(here: slice) -> tuple[Tensor, Tensor]:
            back = torch.arange(width - 1, -1, -1, device=rows.row.device)
            positions = rows.positions[here].unsqueeze(1) - back
            return self._gather(cache, self.window, rows.row[here], positions), positions < 0

        return width, read

    def _entry_part(self, cache: Vectors, chosen: Tensor | None) -> list[_Part]:
        """The ``chosen`` entries, or all."""
        rows, rate = self.places, self.sizes.rate
        width = int(rows.ends.max()) // rate if chosen is None else chosen.shape[1]
        if not width:
            return []
        seen = rows.seen(rate)

        def read(here: slice) -> tuple[Tensor, Tensor]:
            if chosen is None:
                numbers = torch.arange(width, device=seen.device).expand(here.stop - here.start, -1)
                hidden = numbers >= seen[here].unsqueeze(1)
            else:
                numbers, hidden = chosen[here], chosen[here] < 0
            return self._read_entries(cache, rows.row[here], numbers.masked_fill(hidden, 0)), hidden

        return [(width, read)]

    def _attend(self, queries: Tensor, parts: Sequence[_Part]) -> Tensor:
        """Attention of ``queries`` [tokens, heads, dim] to the vectors of ``parts``."""
        out = torch.empty_like(queries)
        width = sum(part[0] for part in parts)
        step = max(1, _numbers(queries.device) // (width * (queries.shape[1] + queries.shape[2])))
        for low in range(0, len(queries), step):
            here = slice(low, min(low + step, len(queries)))
            found = [read(here) for _, read in parts]
            vectors, hidden = torch.cat([one for one, _ in found], 1), torch.cat([one for _, one in found], 1)
            scores = torch.bmm(queries[here], vectors.transpose(1, 2)).float().mul_(self.scale)
            scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
            sinks = self.sinks.view(1, -1, 1).expand(len(scores), -1, 1)
            shares = torch.cat((scores, sinks), 2).softmax(-1)[..., :-1].to(vectors.dtype)
            torch.bmm(shares, vectors, out=out[here])
        return out


def _turn(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of each pair of numbers, float32 [n, pairs], from what ``RotaryEmbedding`` gives: the first sines may have
    signs."""
    half = cos.shape[-1] // 2
    return cos[:, 0, :half].float(), sin[:, 0, half:].float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [n, dim] or [n, heads, dim], whose last numbers rotate in pairs of neighbors."""
    if x.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    plain, pairs = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    first, second = pairs.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), -1)


def _floats(builder: LayerBuilder, module: str) -> Tensor:
    """The weight of a module, in floats."""
    weight = builder.source.projection([module])
    assert not isinstance(weight, tuple), "one module has one weight"
    if isinstance(weight, Tensor):
        return weight
    dense = builder.ops.linear.dequantize(weight, weight.dtype)
    builder.ops.linear.dequantized_bytes += dense.nbytes - weight.nbytes
    return dense


def _numbers(device: torch.device) -> int:
    return _CPU_NUMBERS if device.type == "cpu" else _NUMBERS
