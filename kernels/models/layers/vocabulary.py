"""Token embeddings and the output head of a decoder, divided over ranks by the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.core.operators import Linear, Lookup
from kernels.devices.linear import TableLookup
from kernels.distributed.group import Group
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.quantization.weights import Projection
from kernels.weights.tensors import TensorSpec, embedding, output

__all__ = ["VocabularyEmbedding", "VocabularyHead", "tensors", "vocabulary"]


def tensors(config: ModelConfig, embed: str = "model.embed_tokens", head: str = "lm_head") -> Iterator[TensorSpec]:
    """The table of embeddings, and the output where it has a weight of its own."""
    yield embedding(embed, config.vocab_size, config.hidden_size, "token_embd")
    weight = output(head, config.vocab_size, config.hidden_size, "output")
    if not config.tied_embeddings:
        yield weight
    if config.head_bias:
        yield weight.bias()


def vocabulary(
    builder: ModelBuilder, config: ModelConfig, embed: str = "model.embed_tokens", head: str = "lm_head"
) -> tuple[VocabularyEmbedding, VocabularyHead]:
    """The embedding and the output of ``tensors``. Nothing else holds a tied table, which a device may repack."""
    if builder.stage.size > 1:
        return _stage_ends(builder, config, embed, head)
    return _whole(builder, config, embed, head)


def _whole(
    builder: ModelBuilder, config: ModelConfig, embed: str, head: str
) -> tuple[VocabularyEmbedding, VocabularyHead]:
    ops = builder.ops
    if config.pooling is not None:  # a number in place of logits: not finite where the hidden state is not
        table = builder.source.table(embed)
        result = ops.elementwise.compose(lambda x: x.sum(-1, keepdim=True) * 0, lambda x: x)
        first = _embedding(builder, config, embed, ops.linear.make_lookup(table), table.shape[0])
        return first, VocabularyHead(Group(), result)
    if config.tied_embeddings and builder.fp32_head:
        floats = builder.source.take([f"{embed}.weight"])
        first = _embedding(builder, config, embed, ops.linear.make_lookup(floats), len(floats))
        return first, _head(builder, config, head, ops.linear.make_float_head(floats, True))
    table = builder.source.table(embed)
    if config.tied_embeddings:
        lookup, linear = ops.linear.make_tied(table)
    else:
        lookup = ops.linear.make_lookup(table)
        linear = _untied(builder, config, head)
    return _embedding(builder, config, embed, lookup, table.shape[0]), _head(builder, config, head, linear)


def _stage_ends(
    builder: ModelBuilder, config: ModelConfig, embed: str, head: str
) -> tuple[VocabularyEmbedding, VocabularyHead]:
    """Of a pipeline's stage: only the first one embeds, the others receive the residual stream; only the last one has
    an output. Both have a table that is tied."""
    stage, ops, vocab = builder.stage, builder.ops, config.vocab_size
    if stage.is_first:
        table = builder.source.table(embed)
        first = _embedding(builder, config, embed, ops.linear.make_lookup(table), table.shape[0])
        return first, VocabularyHead(Group(), lambda x: x.new_zeros((len(x), vocab)))
    tied = _whole(builder, config, embed, head) if stage.is_last and config.tied_embeddings else None

    def read() -> VocabularyEmbedding:
        table = builder.source.table(embed)
        lookup = _scaled(builder, config, ops.linear.make_lookup(table))
        return VocabularyEmbedding(builder.mesh, lookup, table.shape[0])

    unread = UnreadEmbedding(read if tied is None else lambda: tied[0].plain, vocab)
    if not stage.is_last:
        return unread, VocabularyHead(Group(), lambda x: x.new_zeros((len(x), vocab)))
    return unread, tied[1] if tied is not None else _head(builder, config, head, _untied(builder, config, head))


def _untied(builder: ModelBuilder, config: ModelConfig, head: str) -> Linear:
    """The output with a weight of its own."""
    weight, layers = _normed(builder, config, builder.source.projection([head])), builder.ops.linear
    return layers.make_float_head(weight, False) if builder.fp32_head else layers.make_projection(weight, None)


def _normed(builder: ModelBuilder, config: ModelConfig, weight: Projection) -> Projection:
    """The weight of the output, whose rows or columns have a length of one where the model asks for it; then it is
    dequantized."""
    if not config.head_norm:
        return weight
    assert not isinstance(weight, tuple), "one module has one weight"
    dtype = weight.dtype
    if isinstance(weight, Tensor):
        wide = weight.float()
    else:
        wide = builder.ops.linear.dequantize(weight, torch.float32)
        builder.ops.linear.dequantized_bytes += wide.numel() * dtype.itemsize - weight.nbytes
    if config.head_norm == "rows":
        return F.normalize(wide).to(dtype)
    squares = wide.square().sum(0, keepdim=True)
    length = (squares if builder.mesh.size == 1 else builder.mesh.all_reduce(squares)).sqrt()
    return (wide / length.clamp(min=1e-7)).to(dtype)


def _head(builder: ModelBuilder, config: ModelConfig, head: str, linear: Linear) -> VocabularyHead:
    """The output, with what adapters add to it: see ``_logits``."""
    plain = VocabularyHead(builder.mesh, _logits(builder, config, head, linear))
    rows = builder.rows
    delta = None if rows is None or config.head_norm else rows.adapters.make_head(head, rows)
    if delta is None:
        return plain
    add = delta  # in no program: its rows are not those of the pass before
    adapted = builder.ops.elementwise.compose(lambda x: add(x, linear(x)), lambda x: x)
    return VocabularyHead(builder.mesh, _logits(builder, config, head, adapted), plain)


def _logits(builder: ModelBuilder, config: ModelConfig, head: str, linear: Linear) -> Linear:
    """``linear`` with the bias, the factor and the cap that the model's output has."""
    compose = builder.ops.elementwise.compose
    bias = builder.source.biases([head]) if config.head_bias else None
    if bias is not None:
        unbiased = linear
        linear = compose(lambda x: unbiased(x) + bias, lambda x: x)
    if (scale := config.logit_scale) != 1.0 or config.logit_softcap:
        cap, logits = config.logit_softcap, linear

        def scaled(x: Tensor) -> Tensor:
            result = logits(x) * scale if scale != 1.0 else logits(x)
            return result.div_(cap).tanh_().mul_(cap) if cap else result

        linear = compose(scaled, lambda x: x)
    return linear


def _embedding(
    builder: ModelBuilder, config: ModelConfig, embed: str, lookup: Lookup, size: int
) -> VocabularyEmbedding:
    """The embedding of a rank's ``size`` tokens, with what adapters add to it."""
    plain = VocabularyEmbedding(builder.mesh, _scaled(builder, config, lookup), size)
    rows = builder.rows
    delta = None if rows is None else rows.adapters.make_lookup(embed, rows)
    if delta is None:
        return plain
    add = delta
    adapted = builder.ops.elementwise.compose(lambda ids: add(ids, lookup(ids)), lambda x: x)
    return VocabularyEmbedding(builder.mesh, _scaled(builder, config, adapted), size, plain)


def _scaled(builder: ModelBuilder, config: ModelConfig, lookup: Lookup) -> Lookup:
    """``lookup`` with the factor that the model has."""
    if (factor := config.embedding_scale) == 1.0:
        return lookup
    rounded = torch.tensor(factor, dtype=builder.dtype).item()  # as the model was trained
    return builder.ops.elementwise.compose(lambda ids: lookup(ids) * rounded, lambda x: x)


class VocabularyEmbedding:
    """Rows of a table, of which each rank has ``size``: ``lookup`` finds these, as ``Elementwise.embed`` does.

    ``plain``: the same without adapters; None: it has none.
    """

    def __init__(self, group: Group, lookup: Lookup, size: int, plain: VocabularyEmbedding | None = None) -> None:
        self.group = group
        self.lookup = lookup
        self.size = size
        self.first = group.rank * size
        self._plain = plain

    @property
    def plain(self) -> VocabularyEmbedding:
        """The same without adapters, for draft models."""
        return self if self._plain is None else self._plain

    @property
    def table(self) -> Tensor | None:
        """[vocab, hidden] where it is dense and whole, for kernels that look up themselves."""
        return self.lookup.table if self.group.size == 1 and isinstance(self.lookup, TableLookup) else None

    def __call__(self, ids: Tensor) -> Tensor:
        """``ids`` int [tokens] -> [tokens, hidden], whole on every rank."""
        if self.group.size == 1:
            return self.lookup(ids)
        row = ids - self.first
        elsewhere = (row < 0) | (row >= self.size)
        result = self.lookup(row.masked_fill(elsewhere, 0))
        return self.group.all_reduce(result.masked_fill(elsewhere.unsqueeze(1), 0))


class UnreadEmbedding(VocabularyEmbedding):
    """Of a stage that embeds no tokens: the draft model of the last one may, and reads the table by ``plain``, once.
    ``read``: reads it."""

    def __init__(self, read: Callable[[], VocabularyEmbedding], vocab: int) -> None:
        super().__init__(Group(), lambda ids: self.plain(ids), vocab)
        self._read = read

    @cached_property
    def plain(self) -> VocabularyEmbedding:
        return self._read()


class VocabularyHead:
    """Logits of the whole vocabulary on every rank, each rank having computed its own part of them.

    Logits are bit-equal on all ranks, and noise is a function of seed, position and token. So every rank samples the
    same tokens, and no rank sends them to the others. ``plain``: as in ``VocabularyEmbedding``.
    """

    def __init__(self, group: Group, linear: Linear, plain: VocabularyHead | None = None) -> None:
        self.group = group
        self.linear = linear
        self._plain = plain

    @property
    def plain(self) -> VocabularyHead:
        """The same without adapters, for draft models."""
        return self if self._plain is None else self._plain

    def __call__(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> [rows, vocab] in the dtype that ``linear`` gives."""
        return self.group.all_gather(self.linear(hidden))
