"""Token embeddings and the output head of a decoder, divided over ranks by the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.errors import ConfigError
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
        return VocabularyEmbedding(
            builder.mesh, _scaled(builder, config, ops.linear.make_lookup(table)), table.shape[0]
        ), (VocabularyHead(Group(), result))
    if config.tied_embeddings and builder.fp32_head:
        floats = builder.source.take([f"{embed}.weight"])
        linear = ops.linear.make_float_head(floats, True)
        return _ends(
            builder, config, ops.linear.make_lookup(floats), _biased(builder, config, linear, head), len(floats)
        )
    table = builder.source.table(embed)
    if config.tied_embeddings:
        lookup, linear = ops.linear.make_tied(table)
    else:
        lookup = ops.linear.make_lookup(table)
        linear = _untied(builder, config, head)
    return _ends(builder, config, lookup, _biased(builder, config, linear, head), table.shape[0])


def _stage_ends(
    builder: ModelBuilder, config: ModelConfig, embed: str, head: str
) -> tuple[VocabularyEmbedding, VocabularyHead]:
    """Of a pipeline's stage: only the first one embeds, the others receive the residual stream; only the last one has
    an output. Both have a table that is tied."""
    stage, ops, hidden, vocab = builder.stage, builder.ops, config.hidden_size, config.vocab_size
    if stage.is_first:
        table = builder.source.table(embed)
        first = VocabularyEmbedding(
            builder.mesh, _scaled(builder, config, ops.linear.make_lookup(table)), table.shape[0]
        )
        return first, VocabularyHead(Group(), lambda x: x.new_zeros((len(x), vocab)))
    received = VocabularyEmbedding(
        Group(), lambda ids: stage.receive_stream(len(ids), hidden, builder.dtype, ops.torch_device), vocab
    )
    if not stage.is_last:
        return received, VocabularyHead(Group(), lambda x: x.new_zeros((len(x), vocab)))
    if config.tied_embeddings:
        return received, _whole(builder, config, embed, head)[1]
    linear = _biased(builder, config, _untied(builder, config, head), head)
    return received, _ends(builder, config, received.lookup, linear, vocab)[1]


def _untied(builder: ModelBuilder, config: ModelConfig, head: str) -> Linear:
    """The output with a weight of its own."""
    weight, layers = _normed(builder, config, builder.source.projection([head])), builder.ops.linear
    return layers.make_float_head(weight, False) if builder.fp32_head else layers.make_projection(weight, None)


def _normed(builder: ModelBuilder, config: ModelConfig, weight: Projection) -> Projection:
    """The weight of the output, whose rows or columns have a length of one where the model asks for it."""
    if not config.head_norm:
        return weight
    if not isinstance(weight, Tensor):
        raise ConfigError(f"the output of {config.architecture} is normed when it is loaded; leave it unquantized")
    wide = weight.float()
    if config.head_norm == "rows":
        return F.normalize(wide).to(weight.dtype)
    squares = wide.square().sum(0, keepdim=True)
    length = (squares if builder.mesh.size == 1 else builder.mesh.all_reduce(squares)).sqrt()
    return (wide / length.clamp(min=1e-7)).to(weight.dtype)


def _biased(builder: ModelBuilder, config: ModelConfig, linear: Linear, head: str) -> Linear:
    """``linear`` with the output's bias, if the model has one."""
    bias = builder.source.biases([head]) if config.head_bias else None
    return linear if bias is None else builder.ops.elementwise.compose(lambda x: linear(x) + bias, lambda x: x)


def _ends(
    builder: ModelBuilder, config: ModelConfig, lookup: Lookup, linear: Linear, size: int
) -> tuple[VocabularyEmbedding, VocabularyHead]:
    """Embedding and output head, with the factors and the cap that the model has."""
    compose, mesh = builder.ops.elementwise.compose, builder.mesh
    lookup = _scaled(builder, config, lookup)
    if (scale := config.logit_scale) != 1.0 or config.logit_softcap:
        cap, logits = config.logit_softcap, linear

        def scaled(x: Tensor) -> Tensor:
            result = logits(x) * scale if scale != 1.0 else logits(x)
            return result.div_(cap).tanh_().mul_(cap) if cap else result

        linear = compose(scaled, lambda x: x)
    return VocabularyEmbedding(mesh, lookup, size), VocabularyHead(mesh, linear)


def _scaled(builder: ModelBuilder, config: ModelConfig, lookup: Lookup) -> Lookup:
    """``lookup`` with the factor that the model has."""
    if (factor := config.embedding_scale) == 1.0:
        return lookup
    rounded = torch.tensor(factor, dtype=builder.dtype).item()  # as the model was trained
    return builder.ops.elementwise.compose(lambda ids: lookup(ids) * rounded, lambda x: x)


class VocabularyEmbedding:
    """Rows of a table, of which each rank has ``size``: ``lookup`` finds these, as ``Elementwise.embed`` does."""

    def __init__(self, group: Group, lookup: Lookup, size: int) -> None:
        self.group = group
        self.lookup = lookup
        self.size = size
        self.first = group.rank * size

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


class VocabularyHead:
    """Logits of the whole vocabulary on every rank, each rank having computed its own part of them.

    Logits are bit-equal on all ranks, and noise is a function of seed, position and token. So every rank samples the
    same tokens, and no rank sends them to the others.
    """

    def __init__(self, group: Group, linear: Linear) -> None:
        self.group = group
        self.linear = linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """``hidden`` [rows, hidden] -> [rows, vocab] in the dtype that ``linear`` gives."""
        return self.group.all_gather(self.linear(hidden))
