"""Layers of experts of which each token takes a few.

The reference runs experts in turn: tokens are sorted by the experts that they take, and each expert that any token
takes runs once, over its tokens. The results are weighted and added in float32, always in the order of the experts, so
that a token's result does not depend on the others. Devices with kernels for all experts at once stack their weights.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.errors import UnsupportedError
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers
from kernels.weights.quantization.tokens import clip_tokens, fake_quantize_tokens
from kernels.weights.quantization.weights import (
    GroupedWeight,
    Int8Weight,
    Projection,
    QuantizedWeight,
    StaticActivation,
)

__all__ = [
    "EPSILON",
    "AdaptedExperts",
    "ClampedGate",
    "Communicator",
    "Dispatch",
    "ExchangingExperts",
    "ExpertInputs",
    "ExpertLayers",
    "ExpertWeights",
    "Experts",
    "ExpertsInTurn",
    "Routing",
    "StackedExperts",
    "choose",
    "choose_places",
    "may_be_dense",
    "refusal",
    "unbiased_refusal",
]

_Stack = TypeVar("_Stack")
EPSILON = 1e-20  # where all chosen scores are 0
_BLOCK = 1 << 22  # elements of rows that are prepared at a time


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one expert. ``gate_up`` [2 * inner, hidden] is gate's, then up's; ``down`` [hidden, inner]."""

    gate_up: Projection
    gate_up_bias: Tensor | None
    down: Projection
    down_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which place a token's expert is taken from: of row r of a pass, place ``table[r % rows, expert]``.

    ``table`` int32 [rows, experts]; it may be overwritten between passes. ``places``: of all ranks together.
    ``source``: the row of the table for all rows of a pass, where they have a rank that they come from.
    ``moves``: whether experts change their places between passes, so that the layer must let one expert's weights be
    overwritten (``Experts.weights``).
    """

    table: Tensor
    places: int
    moves: bool = False
    source: int | None = None

    def __call__(self, experts: Tensor) -> Tensor:
        """``experts`` int [tokens, chosen] -> their places int32."""
        if self.source is not None:
            return self.table[self.source][experts.long()]
        rows = torch.arange(len(experts), device=experts.device).remainder(len(self.table))
        return self.table[rows.unsqueeze(1), experts.long()]


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """What adapters add to each expert's gate and up, and to its down, for the adapters of ``rows``. ``router``: to the
    logits that choose them; None: nothing."""

    deltas: Sequence[tuple[Delta, Delta]]
    rows: LayerContext
    router: Delta | None = None


@dataclass(frozen=True, eq=False)
class Routing:
    """How a token's experts follow from a logit for each.

    The ``chosen`` experts of the best ``scores`` (softmax | sigmoid | sqrtsoftplus | mixer), which are their weights;
    ``normalized``: divided by their sum; then times ``scale``. mixer: experts are chosen one after the other, each
    weighted by a softmax over those left whose logits are within ``2 * jitter`` of the best one, relative to the
    greater magnitude of both (Liu et al., GRIN, arXiv 2409.12136). ``correction`` float32 [experts] is added to the
    scores for the choice alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). With several ``groups`` of experts
    only those of the ``top_groups`` best are chosen (DeepSeek-V2, arXiv 2405.04434, section 2.2.2); a group is as good
    as its best expert, or as the sum of its two best (``pair_sum``). ``on_inputs``: weights multiply what experts
    read, not their results (Llama 4). ``local``: the experts that are on this rank, whose weights are all that a layer
    is given; the others' part of a result is 0, and nothing is read for it. None: all are here; ``parts``: ranges like
    it. ``dispatch``: ``local`` are places, and an expert has one or more of them; None: expert n is in place n.
    ``fixed``: the experts int64 [tokens, chosen] of the tokens that run, whatever their scores; None: scores choose.
    ``wide``: logits are float32, also of a plain softmax.
    """

    chosen: int
    normalized: bool
    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    pair_sum: bool = False
    scale: float = 1.0
    correction: Tensor | None = None
    jitter: float = 0.0
    on_inputs: bool = False
    local: range | None = None
    dispatch: Dispatch | None = None
    parts: int = 1
    fixed: Callable[[], Tensor] | None = None
    wide: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax of logits in the model's dtype and no more, which devices have kernels for."""
        plain = self.scores == "softmax" and self.groups == 1 and self.scale == 1.0
        return plain and self.correction is None and self.fixed is None and not self.wide

    @property
    def in_torch(self) -> bool:
        """Whether plain torch alone has it (``choose``)."""
        return self.scores not in ("softmax", "sigmoid") or self.fixed is not None


def choose(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``logits`` [tokens, experts] -> the weights float32 [tokens, chosen] of the experts that each token takes, and
    the experts int64."""
    if routing.scores == "mixer":
        return _mix(logits.float(), routing)
    if routing.scores == "sqrtsoftplus":
        scores = F.softplus(logits.float()).sqrt_()
    else:
        scores = logits.float().sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
    ranked = scores if routing.correction is None else scores + routing.correction
    if routing.groups > 1:
        grouped = ranked.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1) if routing.pair_sum else grouped.amax(-1)
        others = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(routing.top_groups, -1).indices, False)
        ranked = grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)
    experts = ranked.topk(routing.chosen, -1).indices if routing.fixed is None else routing.fixed()
    weights = scores.gather(1, experts)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    return weights * routing.scale if routing.scale != 1.0 else weights, experts


def choose_places(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``choose``, with the experts' places."""
    weights, experts = choose(logits, routing)
    return weights, experts if routing.dispatch is None else routing.dispatch(experts)


def _mix(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``choose`` of the mixer."""
    left, weights, experts = logits, [], []
    for _ in range(routing.chosen):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * routing.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, expert))
        experts.append(expert)
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(weights, 1), torch.cat(experts, 1)


class Communicator(NamedTuple):
    """The ranks that exchange rows. ``name``: by which the device's operators find the group."""

    name: str
    rank: int
    size: int


class Experts(Protocol):
    """A layer of experts of which each token takes a few."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        ...

    def choose(self, x: Tensor) -> Tensor:
        """The experts int [tokens, chosen] that the tokens ``x`` [tokens, hidden] take, the best first."""
        ...

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [tokens, chosen] of the experts that the tokens ``x`` [tokens, hidden] take, and their places."""
        ...

    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """The layer without its router, for at least one token. ``weights`` float32 and ``places`` int32 [tokens,
        chosen]: what ``route`` returned for the tokens, on any rank."""
        ...

    def weights(self, number: int) -> list[Tensor]:
        """All that the layer knows of the ``number``-th expert here, which may be overwritten between passes with what
        another rank's layer has of one. Raises UnsupportedError if it cannot."""
        ...


@runtime_checkable
class ExchangingExperts(Experts, Protocol):
    """Experts of a device that has operators to send rows to the ranks of their experts and to add up the results."""

    def exchange_rows(self, ranks: int) -> int:
        """The most rows of a rank that these operators support among ``ranks`` ranks; 0: they do not support these
        experts."""
        ...

    def run_exchanged(
        self, x: Tensor, weights: Tensor, places: Tensor, mask: Tensor, communicator: Communicator
    ) -> Tensor:
        """The results of all experts of the rows ``x`` [rows, hidden]. Each rank has the same number of rows.
        ``weights``, ``places``: as ``route`` returns them. ``mask`` bool [rows]: true for real rows, which come first;
        the results of the others are undefined."""
        ...


@dataclass(frozen=True)
class ClampedGate:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of gate | up [tokens, 2 * n], gates of at most ``limit`` and others
    within it (gpt-oss, arXiv 2508.10925)."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1.0) * (gate * torch.sigmoid(self.alpha * gate))


class ExpertsInTurn:
    """[tokens, hidden] -> [tokens, hidden]. How many tokens an expert has is read back to the host.

    ``router``: to a logit for each expert. ``experts``: (gate and up, down) of each. ``rows``: of the tokens, which
    adapters of experts read. ``stored``: of each expert what ``weights`` returns; empty: nothing can be overwritten.
    """

    def __init__(
        self,
        router: Callable[[Tensor], Tensor],
        experts: Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]],
        routing: Routing,
        rows: LayerContext | None = None,
    ) -> None:
        self.rows = rows
        self.stored: Sequence[list[Tensor]] = ()
        self.router = router
        self.experts = tuple(experts)
        self.routing = routing

    def choose(self, x: Tensor) -> Tensor:
        return choose(self.router(x), self.routing)[1]

    def weights(self, number: int) -> list[Tensor]:
        if not self.stored:
            raise UnsupportedError("they run one by one in torch")
        return self.stored[number]

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, self.router(x))

    def run(self, x: Tensor, logits: Tensor) -> Tensor:
        """The experts of ``x`` [tokens, hidden] that ``logits`` [tokens, experts] choose."""
        return self.run_places(x, *choose_places(logits, self.routing))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose_places(self.router(x), self.routing)

    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        experts = places
        order = experts.flatten().argsort(stable=True)
        local = self.routing.local or range(len(self.experts))
        counts = experts.flatten().bincount(minlength=local.stop).tolist()
        tokens, weights = order // self.routing.chosen, weights.flatten()[order].unsqueeze(1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        begin = sum(counts[: local.start])
        for count, (gate_up, down) in zip(counts[local.start : local.stop], self.experts, strict=True):
            if count:
                here = slice(begin, begin + count)
                begin += count
                with nullcontext() if self.rows is None else self.rows.selected(tokens[here]):
                    rows, shares = x[tokens[here]], weights[here]
                    if self.routing.on_inputs:
                        out.index_add_(0, tokens[here], down(gate_up(rows * shares.to(x.dtype))).float())
                    else:
                        out.index_add_(0, tokens[here], down(gate_up(rows)) * shares)
        return out.to(x.dtype)


def _same(x: Tensor) -> Tensor:
    return x


class StackedExperts(ABC, Generic[_Stack]):
    """[tokens, hidden] -> [tokens, hidden]. ``router``: to a logit for each expert. ``gate_up``, ``down``: of all."""

    def __init__(self, router: Callable[[Tensor], Tensor], experts: Sequence[ExpertWeights], routing: Routing) -> None:
        self.router = router
        self.count = len(experts)
        self.routing = routing
        self.gate_up = self.stack([expert.gate_up for expert in experts])
        self.down = self.stack([expert.down for expert in experts])

    def choose(self, x: Tensor) -> Tensor:
        return choose(self.router(x), self.routing)[1]

    @abstractmethod
    def weights(self, number: int) -> list[Tensor]:
        """As ``Experts.weights``."""

    @abstractmethod
    def stack(self, weights: Sequence[Projection]) -> _Stack:
        """Weights of one kind."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose_places(self.router(x), self.routing)

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class ExpertInputs:
    """Steps on inputs before they are multiplied. ``orders`` int64 [experts, inputs]: the order in which each expert's
    weight has them. ``clips`` float32 [experts, 1]: the share of their largest magnitude that they are clamped to.
    ``fake_quantizes``: whether tokens are rounded to 8 bits."""

    orders: Tensor | None
    clips: Tensor | None
    fake_quantizes: bool

    @classmethod
    def from_weights(cls, weights: Sequence[Projection]) -> ExpertInputs | None:
        """None: nothing. ``weights``: of one kind."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        groups = [weight for weight in quantized if isinstance(weight, GroupedWeight)]
        orders = [weight.order for weight in groups if weight.order is not None]
        clips = [weight.clip for weight in quantized if weight.clip is not None]
        fake_quantizes = any(weight.activation is not None for weight in groups)
        if not orders and not clips and not fake_quantizes:
            return None
        return cls(
            torch.stack(orders) if orders else None, torch.stack(clips).float() if clips else None, fake_quantizes
        )

    def __call__(self, rows: Tensor, experts: Tensor) -> Tensor:
        """``rows`` [pairs, inputs], each of the expert ``experts`` int [pairs]."""
        size = max(1, _BLOCK // rows.shape[1])
        if len(rows) <= size:
            return self._prepared(rows, experts)
        out = torch.empty_like(rows)
        # An index of all elements takes four times the rows' own memory, and so do floats in which they are rounded.
        for some, owners, target in zip(rows.split(size), experts.split(size), out.split(size), strict=True):
            target.copy_(self._prepared(some, owners))
        return out

    def _prepared(self, rows: Tensor, experts: Tensor) -> Tensor:
        if self.orders is not None:
            rows = rows.gather(1, self.orders.index_select(0, experts))
        if self.clips is not None:
            rows = clip_tokens(rows, self.clips.index_select(0, experts))
        return fake_quantize_tokens(rows) if self.fake_quantizes else rows


def may_be_dense(weight: QuantizedWeight) -> bool:
    """Whether the weight in floats is all there is to it: its inputs are rounded by no scale that was found before."""
    return not (isinstance(weight, Int8Weight) and isinstance(weight.activation, StaticActivation))


def refusal(
    experts: Sequence[ExpertWeights],
    kind: Callable[[Tensor | QuantizedWeight], object],
    gate: ClampedGate | None = None,
) -> str | None:
    """Why experts cannot stand side by side; None: they can. ``kind``: what those of a layer must share, None for a
    weight that there is no kernel for."""
    if gate is not None:
        return "their gates are clamped"
    if any(expert.gate_up_bias is not None or expert.down_bias is not None for expert in experts):
        return "they have biases"
    for part in ([expert.gate_up for expert in experts], [expert.down for expert in experts]):
        kinds = set()
        for weight in part:
            if isinstance(weight, tuple):
                return "gates are of another kind than what they are multiplied with"
            kinds.add(kind(weight))
            if None in kinds:
                return f"no kernel takes {_named(weight)}"
        if len(kinds) > 1:
            return "they are of different kinds"
    return None


def unbiased_refusal(
    experts: Sequence[ExpertWeights], kind: Callable[[Tensor | QuantizedWeight], object]
) -> str | None:
    """``refusal`` of kernels that add biases, which all experts must have or none, and take any gate."""
    if len({(expert.gate_up_bias is None, expert.down_bias is None) for expert in experts}) > 1:
        return "some have biases"
    return refusal([dataclasses.replace(one, gate_up_bias=None, down_bias=None) for one in experts], kind)


def _named(weight: Tensor | QuantizedWeight) -> str:
    if isinstance(weight, Tensor):
        return f"{str(weight.dtype).removeprefix('torch.')} of {list(weight.shape)}"
    if not may_be_dense(weight):
        return "inputs that are rounded by scales found before"
    return f"{type(weight).__name__} of {list(weight.shape)}"


class ExpertLayers:
    """Makes layers of experts; these run in turn, unless a device has kernels for all at once.

    ``reads_back``: whether a layer made so far reads something back to the host, which no graph can hold.
    """

    def __init__(self, linear: LinearLayers, fallbacks: Fallbacks) -> None:
        self.linear = linear
        self.fallbacks = fallbacks
        self.reads_back = False

    def make(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: ClampedGate | None = None,
    ) -> Experts:
        """A layer of experts of which each token takes a few: [tokens, hidden] -> [tokens, hidden].

        ``router`` [experts, hidden] and ``bias`` [experts] give a logit for each. ``gate``: in place of SwiGLU's.
        """
        reason = "there is no kernel for all at once"
        return self.make_in_turn(self.make_router(router, bias, routing), experts, routing, reason, gate)

    def make_routed(
        self,
        router: Linear,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: Linear | None = None,
        *,
        identities: int = 0,
    ) -> Experts:
        """``make`` of a ``router`` that is made already. ``gate``, ``identities``: as ``make_in_turn``."""
        reason = "there is no kernel for all at once"
        return self.make_in_turn(router, experts, routing, reason, gate, identities=identities)

    def make_router(self, router: Tensor, bias: Tensor | None, routing: Routing, shared: bool = False) -> Linear:
        """The logits of experts; in float32 where scores are more than a softmax, which DeepSeek-V3 is trained with.
        ``shared``: as ``LinearLayers.make_dense``."""
        if routing.is_plain:
            return self.linear.make_dense(router, bias, shared)
        linear = self.linear.make_float_linear(router.float())
        return linear if bias is None else lambda x: linear(x) + bias

    def make_in_turn(
        self,
        router: Linear,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        reason: str,
        gate: Linear | None = None,
        *,
        identities: int = 0,
        adapted: AdaptedExperts | None = None,
    ) -> ExpertsInTurn:
        """The same by ``ExpertsInTurn``. ``reason``: for the log. ``gate``: as ``make_gated``. ``identities``: so many
        more experts return what they are given; a negative number: nothing, since another rank does. ``adapted``: what
        adapters add."""
        self.reads_back = True
        self.fallbacks.log(
            "experts are run one by one (%s): the host reads back which are chosen, so decodes are not captured", reason
        )
        if adapted is not None:
            made = [
                self._make_adapted(expert, gate, *deltas)
                for expert, deltas in zip(experts, adapted.deltas, strict=True)
            ]
        else:
            made = [
                (self.make_gated(expert, gate), self.linear.make_projection(expert.down, expert.down_bias))
                for expert in experts
            ]
        made += [(_same, _same if identities > 0 else torch.zeros_like)] * abs(identities)
        return ExpertsInTurn(router, made, routing, None if adapted is None else adapted.rows)

    def _make_adapted(
        self, expert: ExpertWeights, gate: Linear | None, first: Delta, last: Delta
    ) -> tuple[Linear, Linear]:
        """The two parts of an expert with what adapters add to them."""
        layers = self.linear
        both = layers.make_adapted(layers.make_projection(expert.gate_up, expert.gate_up_bias), first)
        then = layers.elementwise.silu_and_mul if gate is None else gate
        down = layers.make_adapted(layers.make_projection(expert.down, expert.down_bias), last)
        return layers.elementwise.compose(lambda x: then(both(x)), lambda x: x), down

    def make_gated(self, expert: ExpertWeights, gate: Linear | None) -> Linear:
        """The inner activations of an expert. ``gate``: in place of SwiGLU's; ``gate_up`` has the outputs it reads."""
        if gate is None:
            return self.linear.make_gated(expert.gate_up, expert.gate_up_bias)
        linear = self.linear.make_projection(expert.gate_up, expert.gate_up_bias)
        return self.linear.elementwise.compose(lambda x: gate(linear(x)), lambda x: x)

    def stackable(
        self, experts: Sequence[ExpertWeights], kind: Callable[[Tensor | QuantizedWeight], object]
    ) -> list[ExpertWeights]:
        """The experts with weights of no ``kind``, or of several, as floats, so that all can be multiplied at once; all
        as they are if that would not suffice."""

        def floats(weight: Tensor | QuantizedWeight) -> Tensor:
            if isinstance(weight, Tensor):
                return weight
            self.fallbacks.log(
                "experts in %s are dequantized to %s while they are loaded: no kernel of all experts takes them",
                type(weight).__name__,
                weight.dtype,
            )
            dense = self.linear.dequantize(weight, weight.dtype)
            self.linear.dequantized_bytes += dense.nbytes - weight.nbytes
            return dense

        def one(weight: Projection, dense: Callable[[Tensor | QuantizedWeight], Tensor]) -> Projection:
            pieces = weight if isinstance(weight, tuple) else (weight,)
            if not all(isinstance(piece, Tensor) or may_be_dense(piece) for piece in pieces):
                return weight
            if len(pieces) > 1:
                return torch.cat([dense(piece) for piece in pieces])
            return pieces[0] if kind(pieces[0]) is not None else dense(pieces[0])

        def every(dense: Callable[[Tensor | QuantizedWeight], Tensor]) -> list[ExpertWeights]:
            return [
                dataclasses.replace(expert, gate_up=one(expert.gate_up, dense), down=one(expert.down, dense))
                for expert in experts
            ]

        described = every(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
        return every(floats) if refusal(described, kind) is None else list(experts)
