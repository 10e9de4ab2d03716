"""The declaration of a model's tensors, from which everything that reads weights works.

A family's file (kernels.models) declares every tensor once: its name and shape, its role, how it is divided over ranks
(Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3), and where GGUF files keep it. Loading, quantization schemes,
dummy weights and ranks read these declarations and never look at a name's ending.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GgufOrder",
    "GgufPlace",
    "Part",
    "Role",
    "Shard",
    "Split",
    "StackedExpert",
    "TensorSpec",
    "Tensors",
    "biased_norm",
    "by_inputs",
    "by_outputs",
    "embedding",
    "linear",
    "norm",
    "output",
    "table_of",
]


class Role(Enum):
    """What a tensor is for. Only projections (``DOWN`` and ``OUTPUT`` among them) may be quantized by a scheme."""

    EMBEDDING = "table of token embeddings"
    OUTPUT = "projection to the vocabulary"
    PROJECTION = "projection"
    DOWN = "projection that reads the gated activations of a feed-forward layer"
    ROUTER = "small projection that stays in floats, such as the choice of experts"
    NORM = "weight of a norm"
    BIAS = "bias"
    EXPERTS = "weights of all experts of a layer in one tensor, which the family takes apart"
    NIBBLES = "numbers of four bits, two a byte, which the family reads as they are stored"
    EXPONENTS = "exponents of blocks of such numbers, a byte each"
    INDICES = "whole numbers, such as the experts of each token of the vocabulary"
    WIDE = "few numbers that stay in float32, such as the correction of a choice of experts"


_EACH = {Role.NIBBLES: 2, Role.EXPONENTS: 0}
_QUANTIZABLE = frozenset((Role.OUTPUT, Role.PROJECTION, Role.DOWN))


@dataclass(frozen=True, slots=True)
class Part:
    """Indices ``begin .. end`` of one dimension of a tensor."""

    dimension: int
    begin: int
    end: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        return (*whole[: self.dimension], self.end - self.begin, *whole[self.dimension + 1 :])

    def narrow(self, whole: Tensor) -> Tensor:
        """A view of the part."""
        return whole.narrow(self.dimension, self.begin, self.end - self.begin)

    @property
    def index(self) -> tuple[slice, ...]:
        """The part as an index."""
        return (*(slice(None),) * self.dimension, slice(self.begin, self.end))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the ``size`` ranks that a model's tensors are divided over. ``experts``: the rank among those that share
    layers of experts, if these are others; ``routed_alone``: they share no expert that all tokens take. ``ep_size``:
    parts that the experts of a layer are divided into first; each part is divided over ``size / ep_size`` consecutive
    ranks."""

    rank: int = 0
    size: int = 1
    experts: Shard | None = None
    ep_size: int = 1
    routed_alone: bool = False

    @property
    def within_part(self) -> Shard:
        """The rank among those that share its experts."""
        size = self.size // self.ep_size
        return Shard(self.rank % size, size)

    def places(self, count: int) -> range:
        """Those of a layer's ``count`` experts that this rank has a part of. ``ep_size`` must divide ``count``."""
        each = count // self.ep_size
        first = self.rank * self.ep_size // self.size * each
        return range(first, first + each)


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is divided over ranks along one dimension.

    ``sections``: (length, units) of the tensors that are fused along it, one for a plain tensor. A unit (a head, a
    column) stays whole. Each rank has ``units / ranks`` consecutive units; with more ranks than units, consecutive
    ranks share a unit.
    """

    dimension: int
    sections: tuple[tuple[int, int], ...]

    def parts(self, shard: Shard) -> tuple[Part, ...]:
        """The parts of rank ``shard``, one for each section. ``units`` and ranks must divide one another."""
        result, begin = [], 0
        for length, units in self.sections:
            unit, count = length // units, max(1, units // shard.size)
            first = shard.rank * units // shard.size
            result.append(Part(self.dimension, begin + first * unit, begin + (first + count) * unit))
            begin += length
        return tuple(result)


def by_outputs(*sections: tuple[int, int]) -> Split:
    """Divided along outputs, by (length, units) of each fused section."""
    return Split(0, sections)


def by_inputs(length: int, units: int) -> Split:
    """Divided along inputs."""
    return Split(1, ((length, units),))


@dataclass(frozen=True, slots=True)
class GgufOrder:
    """Where a file has the rows (or columns) of a tensor: the first ``fixed`` where they are, then, for ``counts`` (n,
    m, ...) and ``strides`` (s, t, ...), at ``begin + i * s + j * t + ...``, the last of i, j, ... running fastest.
    ``stored``: rows of the file's tensor."""

    stored: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int = 0
    fixed: int = 0

    @property
    def run(self) -> int:
        """Rows that are one after the other in the file, too."""
        return self.counts[-1] if self.strides[-1] == 1 else 1

    def indices(self, unit: int = 1) -> list[int]:
        """The file's row of each row, in units of so many rows."""
        result = [self.begin]
        for count, stride in zip(self.counts, self.strides, strict=True):
            result = [index + step * stride for index in result for step in range(count)]
        return [index // unit for index in (*range(self.fixed), *result)[::unit]]


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """Where GGUF files keep a tensor. ``rotary_heads``: its rows are heads whose halves the file interleaves; 0: rows
    are in Hugging Face's order. ``rows``, ``columns``: in what other order the file has them. ``exponent``: the file
    has ``-exp(x)`` in place of ``x``."""

    name: str
    rotary_heads: int = 0
    rows: GgufOrder | None = None
    columns: GgufOrder | None = None
    exponent: bool = False

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The file's shape of a tensor of ``shape``; a convolution has one matrix for all channels there."""
        if self.rows is not None:
            shape = (self.rows.stored, *shape[1:])
        if self.exponent:
            return (math.prod(shape),)
        return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape


@dataclass(frozen=True, slots=True)
class StackedExpert:
    """Where files that keep all ``count`` experts of a layer in one tensor have this ``expert``.

    ``stored``: the tensor in safetensors, [count, rows, columns]; this expert's rows are part ``part`` of ``parts``
    equal ones. ``gguf``: the tensor in GGUF, [count, rows, columns]. ``placed``: whether it is left to some ranks where
    experts are divided.
    """

    expert: int
    count: int
    stored: str
    part: int = 0
    parts: int = 1
    gguf: str = ""
    placed: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    ``name``: its Hugging Face name, which ends in ``.weight`` or ``.bias``. ``split``: how ranks divide it; None: each
    rank has all of it. ``gguf``: None where GGUF files have no such tensor. ``aliases``: other names in safetensors.
    ``unread``: tensors that safetensors may hold beside it and that are not read. ``of_experts``: it is of a layer of
    experts, which more ranks may share than the others; ``for_all``: of the expert of it that all tokens take.
    ``stripes``: equal parts of its rows, none of which shares a scale with another.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    split: Split | None = None
    gguf: GgufPlace | None = None
    aliases: tuple[str, ...] = ()
    stacked: StackedExpert | None = None
    unread: tuple[str, ...] = ()
    of_experts: bool = False
    for_all: bool = False
    stripes: int = 1

    @property
    def module(self) -> str:
        """The module's name: the tensor's without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def quantizable(self) -> bool:
        """Whether a quantization scheme may store it in another form."""
        return self.role in _QUANTIZABLE

    @property
    def is_placed(self) -> bool:
        """Whether it belongs to an expert that is left to some ranks where experts are divided."""
        return self.stacked is not None and self.stacked.placed

    @property
    def parameters(self) -> int:
        """Numbers of the model that it holds."""
        return _EACH.get(self.role, 1) * math.prod(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs of a projection."""
        return self.shape[0], self.shape[1]

    def parts(self, shard: Shard) -> tuple[Part, ...]:
        """The parts that a rank holds, in order; empty: the whole tensor. Of an expert: those of a rank that has it."""
        shared = self.of_experts and not (self.for_all and shard.routed_alone)
        own = shard.experts if shared and shard.experts is not None else shard
        if self.is_placed:
            own = own.within_part
        return () if self.split is None or own.size == 1 else self.split.parts(own)

    def bias(self) -> TensorSpec:
        """The bias of this projection or norm."""
        split = self.split if self.split is not None and self.split.dimension == 0 else None
        place = None if self.gguf is None else dataclasses.replace(self.gguf, name=_bias(self.gguf.name))
        return TensorSpec(_bias(self.name), self.shape[:1], Role.BIAS, split, place)


Tensors = Mapping[str, TensorSpec]
"""Declared tensors of a whole model, by name."""


def table_of(declared: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Declared tensors by name."""
    return {spec.name: spec for spec in declared}


def _bias(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"


def _place(gguf: str, heads: int = 0) -> GgufPlace | None:
    return GgufPlace(f"{gguf}.weight", heads) if gguf else None


def linear(
    module: str,
    shape: tuple[int, int],
    split: Split | None = None,
    gguf: str = "",
    *,
    bias: bool = False,
    role: Role = Role.PROJECTION,
    rotary_heads: int = 0,
) -> Iterator[TensorSpec]:
    """The weight [outputs, inputs] of a linear layer, and its bias where it has one. ``gguf``: its module there."""
    weight = TensorSpec(f"{module}.weight", shape, role, split, _place(gguf, rotary_heads))
    yield weight
    if bias:
        yield weight.bias()


def norm(module: str, size: int, gguf: str = "", split: Split | None = None) -> TensorSpec:
    """The weight of a norm over ``size`` numbers."""
    return TensorSpec(f"{module}.weight", (size,), Role.NORM, split, _place(gguf))


def biased_norm(module: str, size: int, gguf: str = "") -> Iterator[TensorSpec]:
    """The weight and the bias of a norm."""
    weight = norm(module, size, gguf)
    yield from (weight, weight.bias())


def embedding(module: str, vocab: int, hidden: int, gguf: str = "") -> TensorSpec:
    """The table of token embeddings, divided by the vocabulary."""
    split = by_outputs((vocab, vocab))
    return TensorSpec(f"{module}.weight", (vocab, hidden), Role.EMBEDDING, split, _place(gguf))


def output(module: str, vocab: int, hidden: int, gguf: str = "") -> TensorSpec:
    """The projection to the vocabulary, divided by it."""
    split = by_outputs((vocab, vocab))
    return TensorSpec(f"{module}.weight", (vocab, hidden), Role.OUTPUT, split, _place(gguf))
