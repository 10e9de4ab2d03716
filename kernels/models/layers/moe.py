"""Mixture-of-experts feed-forward layer: each token is routed to a few of many SwiGLU experts (Shazeer et al., arXiv
1701.06538), and optionally to a shared expert (https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.layer_context import ExpertModules
from kernels.core.operators import Linear
from kernels.devices.experts import AdaptedExperts, ClampedGate, Dispatch, Experts, ExpertWeights, Routing
from kernels.distributed.expert_exchange import ExpertExchange
from kernels.distributed.shared_experts import SharedExperts
from kernels.distributed.turns import PassValue
from kernels.models.config import ConfigReader, ExpertsConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import GgufPlace, Role, Shard, StackedExpert, TensorSpec, by_inputs, by_outputs, linear

__all__ = [
    "ADAPTED",
    "DEEPSEEK",
    "QWEN",
    "ExpertNames",
    "ExpertTable",
    "Gate",
    "LimitedGate",
    "SparseFeedForward",
    "adapted_experts",
    "adapted_router",
    "expert_tensors",
    "expert_weights",
    "gated_by",
    "gelu_and_mul",
    "limits",
    "stacked_adapters",
    "tensors",
]


@dataclass(frozen=True)
class ExpertNames:
    """A checkpoint's names of a layer's expert block and of an expert's projections; and in the block of the expert
    that all tokens take, of the router, and of the correction of its scores, "": there is none. ``boxed``: it is
    one row of a matrix. ``both``, ``down_of_all``: the tensors of all experts, in a layer; ``gate_of_all``,
    ``up_of_all``: in place of ``both``, where gates have one of their own. ``shared_parts``: gate, up and down of the
    expert that all tokens take, where they are named otherwise. ``shared_beside``: that expert is not in the block but
    beside it."""

    block: str
    gate: str
    up: str
    down: str
    shared: str = "shared_expert"
    router: str = "gate"
    correction: str = ""
    boxed: bool = False
    both: str = "mlp.experts.gate_up_proj"
    down_of_all: str = "mlp.experts.down_proj"
    gate_of_all: str = ""
    up_of_all: str = ""
    shared_parts: tuple[str, str, str] | None = None
    shared_beside: bool = False

    def shared_in(self, layer: str) -> str:
        """The module of the expert that all tokens take."""
        return f"{layer}.{self.shared}" if self.shared_beside else f"{layer}.{self.block}.{self.shared}"

    @property
    def shared_projections(self) -> tuple[str, str, str]:
        """Gate, up and down of the expert that all tokens take."""
        return self.shared_parts or (self.gate, self.up, self.down)


QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
ADAPTED = "adapters add to them"
"""Why experts run one by one."""
_NOT_NAMED = "--lora-target-modules does not include experts"
DEEPSEEK = dataclasses.replace(QWEN, shared="shared_experts", correction="gate.e_score_correction_bias")


def tensors(
    config: ExpertsConfig, hidden: int, layer: str, gguf: str, names: ExpertNames = QWEN
) -> Iterator[TensorSpec]:
    """``SparseFeedForward``'s."""
    shared = f"{names.shared_in(layer)}."
    for spec in _tensors(config, hidden, layer, gguf, names):
        yield dataclasses.replace(spec, of_experts=True, for_all=spec.name.startswith(shared))


def _tensors(config: ExpertsConfig, hidden: int, layer: str, gguf: str, names: ExpertNames) -> Iterator[TensorSpec]:
    """A layer's router, its experts, and the one that all tokens take. ``layer``, ``gguf``: the layer's names.

    Checkpoints keep experts apart, or as transformers has them in memory: ``mlp.experts.gate_up_proj`` [experts, 2 *
    inner, hidden] is gate's, then up's; ``mlp.experts.down_proj`` [experts, hidden, inner].
    """
    block, stored = f"{layer}.{names.block}", f"{layer}.mlp"
    (router,) = linear(
        f"{block}.{names.router}",
        (config.count + config.identities, hidden),
        None,
        f"{gguf}.ffn_gate_inp",
        role=Role.WIDE if config.wide_router else Role.ROUTER,
    )
    yield router if block == stored else dataclasses.replace(router, aliases=(f"{stored}.gate.weight",))
    if names.correction:
        corrected = GgufPlace(f"{gguf}.exp_probs_b.bias")
        count = config.count + config.identities
        shape = (1, count) if names.boxed else (count,)
        other = () if block == stored else (f"{stored}.{names.correction}",)
        yield TensorSpec(f"{block}.{names.correction}", shape, Role.WIDE, None, corrected, other)
    inner, count = config.inner, config.count
    rows, columns = by_outputs((inner, inner)), by_inputs(inner, inner)
    both, down = f"{layer}.{names.both}", f"{layer}.{names.down_of_all}"
    first, second = (both, 0, 2), (both, 1, 2)
    if names.gate_of_all:
        first, second = (f"{layer}.{names.gate_of_all}", 0, 1), (f"{layer}.{names.up_of_all}", 0, 1)
    projections = (  # name, role, shape, split; name in GGUF; part and parts of the stacked tensor
        (names.gate, Role.PROJECTION, (inner, hidden), rows, "ffn_gate", *first),
        (names.up, Role.PROJECTION, (inner, hidden), rows, "ffn_up", *second),
        (names.down, Role.DOWN, (hidden, inner), columns, "ffn_down", down, 0, 1),
    )
    for expert in range(count):
        for name, role, shape, split, place, held, part, parts in projections:
            stacked = StackedExpert(expert, count, held, part, parts, f"{gguf}.{place}_exps.weight", True)
            apart = GgufPlace(f"{gguf}.{place}.{expert}.weight")
            weight = f"{block}.experts.{expert}.{name}.weight"
            yield TensorSpec(weight, shape, role, split, apart, (), stacked)
    if config.shared:
        name, width, bias = names.shared_in(layer), config.shared, config.shared_bias
        outputs, inputs, place = by_outputs((width, width)), by_inputs(width, width), f"{gguf}.ffn_down_shexp"
        gate, up, last = names.shared_projections
        yield from linear(f"{name}.{gate}", (width, hidden), outputs, f"{gguf}.ffn_gate_shexp", bias=bias)
        yield from linear(f"{name}.{up}", (width, hidden), outputs, f"{gguf}.ffn_up_shexp", bias=bias)
        yield from linear(f"{name}.{last}", (hidden, width), inputs, place, bias=bias, role=Role.DOWN)
        if config.weighted:
            yield from linear(f"{name}_gate", (1, hidden), None, f"{gguf}.ffn_gate_inp_shexp", role=Role.ROUTER)


def expert_tensors(config: ExpertsConfig, hidden: int, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The experts of a GGUF file, for families whose checkpoints have all of a layer in one tensor. ``gguf``: the
    layer's name."""
    inner, count = config.inner, config.count
    rows, columns = by_outputs((inner, inner)), by_inputs(inner, inner)
    for name, shape, split, role in (
        ("gate", (inner, hidden), rows, Role.PROJECTION),
        ("up", (inner, hidden), rows, Role.PROJECTION),
        ("down", (hidden, inner), columns, Role.DOWN),
    ):
        for expert in range(count):
            stacked = StackedExpert(expert, count, "", gguf=f"{gguf}.ffn_{name}_exps.weight")
            weight = f"{module}.{expert}.{name}_proj.weight"
            yield TensorSpec(weight, shape, role, split, stacked=stacked)


def expert_weights(builder: LayerBuilder, config: ExpertsConfig, module: str) -> list[ExpertWeights]:
    """The weights of ``expert_tensors``, without biases."""
    project = builder.source.projection
    return [
        ExpertWeights(project([f"{name}.gate_proj", f"{name}.up_proj"]), None, project([f"{name}.down_proj"]), None)
        for name in (f"{module}.{expert}" for expert in range(config.count))
    ]


@dataclass(frozen=True)
class LimitedGate:
    """``min(silu(gate), limit) * up`` of gate | up [tokens, 2 * n], ups within ``limit`` (Step 3.5). ``before``:
    ``silu(min(gate, limit)) * up`` (DeepSeek V4)."""

    limit: float
    before: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        limited = F.silu(gate.clamp(max=self.limit)) if self.before else F.silu(gate).clamp(max=self.limit)
        return limited * up.clamp(-self.limit, self.limit)


Gate = LimitedGate | ClampedGate
"""What stands in the place of SwiGLU's gate."""


def gated_by(builder: LayerBuilder, gate: Gate, *modules: str) -> Linear:
    """The inner activations of a feed-forward layer. ``modules``: as ``LayerBuilder.gated``."""
    linear = builder.linear(*modules)
    return builder.ops.elementwise.compose(lambda x: gate(linear(x)), lambda x: x)


def limits(raw: ConfigReader, key: str) -> tuple[float, ...]:
    """``LimitedGate.limit`` of each layer by the list ``key`` of config.json, 0: none."""
    values = raw.raw.get(key) or [None] * raw.layers
    if not isinstance(values, list) or len(values) != raw.layers:
        raise ConfigError(f"config.json: {key} must have a number or null for each layer")
    reader = (ConfigReader({key: value}, raw.architecture) for value in values)
    return tuple(one.number(key, 0.0) if one.raw[key] else 0.0 for one in reader)


class SharedExpert:
    """``down(silu(gate(x)) * up(x))``, if it is ``weighted`` times ``sigmoid(weight @ x)``. Each rank has its part of
    the inner dimension. ``gate``: in place of SwiGLU's."""

    def __init__(
        self, builder: LayerBuilder, names: ExpertNames, module: str, weighted: bool, gate: Gate | None = None
    ) -> None:
        self._elementwise = builder.ops.elementwise
        *gates, down = (f"{module}.{name}" for name in names.shared_projections)
        apart = builder.shared is not None and builder.shared.exchange is not None  # it runs its own rows alone
        if apart:
            builder = dataclasses.replace(builder, shared=None)
        elif builder.shared is not None:  # it runs rows of other ranks, whose adapters it does not know
            builder.refuse_adapters((*gates, down), "it runs rows of other ranks (--enable-dp-attention)")
            builder = dataclasses.replace(builder, rows=None)
        self.gate_up = builder.gated(*gates) if gate is None else gated_by(builder, gate, *gates)
        self.down = builder.expert_linear(down)
        self.weight: Linear | None = None
        if weighted:
            weight = builder.source.take([f"{module}_gate.weight"])
            dense = builder.ops.linear.make_dense(weight, builder.source.biases([f"{module}_gate"]), shared=True)
            self.weight = _with_adapters(builder, dense, f"{module}_gate")

    def run(self, x: Tensor) -> Tensor:
        """The result for ``x`` [tokens, hidden], before the factor ``sigmoid(weight @ x)``."""
        return self.down(self.gate_up(x))

    def add(self, x: Tensor, others: Tensor, result: Tensor) -> Tensor:
        """The sum of ``result``, what ``run`` gave for ``x``, and ``others`` [tokens, hidden], the result of the other
        experts. May overwrite them."""
        if self.weight is None:
            return self._elementwise.add_pending(result, others)
        return self._elementwise.add_weighted(others, result, self.weight(x))


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """The ``experts`` int64 [vocabulary, chosen] of each token. ``tokens`` int [rows]: the ids of the rows that run,
    which the layer around the experts sets."""

    experts: Tensor
    tokens: PassValue

    def __call__(self) -> Tensor:
        """Of the rows: [rows, chosen]."""
        assert self.tokens.value is not None, "the layer sets them"
        return self.experts.index_select(0, self.tokens.value)


class SparseFeedForward:
    """``sum(weight[e] * down[e](silu(gate[e](x)) * up[e](x)))`` over the experts e that a token takes, and the one that
    all take. Each rank has its part of every expert's inner dimension, or of its own experts' alone. ``gate``,
    ``shared_gate``: in place of SwiGLU's, of these experts and of that one. ``table``: has the experts of each
    token; None: the router chooses them."""

    def __init__(
        self,
        builder: LayerBuilder,
        config: ExpertsConfig,
        layer: str,
        names: ExpertNames = QWEN,
        gate: Gate | None = None,
        shared_gate: Gate | None = None,
        *,
        table: ExpertTable | None = None,
    ) -> None:
        block, source = f"{layer}.{names.block}", builder.source
        self.group, self._routes, factor = builder.expert_mesh, builder.routes, config.result_scale
        self._scaled = builder.ops.elementwise.compose(lambda x: x * factor, lambda x: x) if factor != 1.0 else None
        shard = Shard(builder.expert_mesh.rank, builder.expert_mesh.size, ep_size=builder.ep_size)
        placed = None if builder.places is None else builder.places.take()
        here = shard.places(config.count if placed is None else placed.dispatch.places)
        modules = [
            tuple(f"{block}.experts.{expert}.{part}" for part in (names.gate, names.up, names.down))
            for expert in range(config.count)
        ]
        stacked = f"{layer}.{names.both}".rpartition(".")[0]
        router = f"{block}.{names.router}"
        adapted = adapted_experts(builder, ExpertModules(stacked, modules, here, router=router))
        experts: list[ExpertWeights] = []
        for expert in here if placed is None else placed.placement[here.start : here.stop].tolist():
            *gates, down = modules[expert]
            first, bias, last = source.projection(gates), source.biases(gates), source.projection([down])
            end = source.biases([down])
            experts.append(ExpertWeights(first, bias, last, end if shard.within_part.rank == 0 else None))
        weight, bias = source.take([f"{router}.weight"]), source.biases([router])
        correction = source.take([f"{block}.{names.correction}"]) if names.correction else None
        dispatch = None if placed is None else placed.dispatch
        routing = _routing(config, correction, here if builder.ep_size > 1 else None, dispatch)
        routing = dataclasses.replace(routing, parts=builder.ep_size, fixed=table)
        self.experts = _experts(builder, config, weight, bias, experts, routing=routing, gate=gate, adapted=adapted)
        if placed is not None:
            placed.experts = self.experts
        self.shared: SharedExpert | None = None
        if config.shared:
            self.shared = SharedExpert(builder, names, names.shared_in(layer), config.weighted, shared_gate)
        self._ranks, self._routing, self._ids = builder.shared, routing, None if table is None else table.tokens
        if self._ranks is not None:
            self._ranks.layers.append(self)
            if self._ranks.exchange is not None:
                self._ranks.exchange.add(self.experts)

    def __call__(self, x: Tensor) -> Tensor:
        if self._routes.is_open:
            self._routes.add(self.experts.choose(x))
        if self._ranks is not None and self._ranks.exchange is not None:
            return self._exchanged(x, self._ranks, self._ranks.exchange)
        if self._ranks is not None:
            return self._ranks.run(x, self._summand, self._ids)
        out = self._summand(x)
        return out if self.group.size == 1 else self.group.all_reduce(out)

    def _exchanged(self, x: Tensor, ranks: SharedExperts, exchange: ExpertExchange) -> Tensor:
        """The result for ``x`` [tokens, hidden], whose rows travel to their experts by all-to-all."""
        tokens, shared, results = ranks.tokens(len(x)), self.shared, list[Tensor]()
        if not any(tokens):
            return x

        def run_shared() -> None:
            if shared is not None and len(x):
                results.append(shared.run(x))

        beside = run_shared if exchange.settings.overlap else None
        out = exchange.run(x, tokens, self.experts, self._routing, beside, ids=self._ids)
        if not len(x):
            return x
        if not results:
            run_shared()
        out = self._finish(x, out, results[0] if results else None)
        return ranks.attention.all_reduce(out)

    def _summand(self, x: Tensor) -> Tensor:
        """What this rank adds to the result."""
        return self._finish(x, self.experts(x), None if self.shared is None else self.shared.run(x))

    def _finish(self, x: Tensor, out: Tensor, result: Tensor | None) -> Tensor:
        """``out`` of the routed experts with the ``result`` of the one that all tokens take."""
        if self.shared is not None and result is not None:
            out = self.shared.add(x, out, result)
        if self._scaled is not None:
            out = self._scaled(out)
        return out


def _experts(
    builder: LayerBuilder,
    config: ExpertsConfig,
    router: Tensor,
    bias: Tensor | None,
    experts: Sequence[ExpertWeights],
    *,
    routing: Routing,
    gate: Gate | None,
    adapted: AdaptedExperts | None = None,
) -> Experts:
    layers, cap = builder.ops.experts, config.router_softcap
    plain = adapted is None and config.activation == "silu" and not cap and not config.identities
    if plain and (gate is None or isinstance(gate, ClampedGate)):
        return layers.make(router, bias, experts, routing, gate)
    linear = adapted_router(builder, layers.make_router(router, bias, routing), adapted)
    capped = (
        builder.ops.elementwise.compose(lambda x: torch.tanh(linear(x) / cap) * cap, lambda x: x) if cap else linear
    )
    own = gate if config.activation == "silu" else gelu_and_mul
    identities = config.identities if builder.expert_mesh.rank == 0 else -config.identities
    if adapted is None:
        return layers.make_routed(capped, experts, routing, own, identities=identities)
    return layers.make_in_turn(capped, experts, routing, ADAPTED, own, identities=identities, adapted=adapted)


def stacked_adapters(
    builder: LayerBuilder,
    config: ExpertsConfig,
    hidden: int,
    module: str,
    *,
    router: str = "",
    alternate: bool = False,
) -> AdaptedExperts | None:
    """``adapted_experts`` of a ``module`` whose parameters are those of all experts. ``alternate``: outputs of gate and
    up alternate in them."""
    parts = ("gate_proj", "up_proj", "down_proj")
    modules = [tuple(f"{module}.{expert}.{part}" for part in parts) for expert in range(config.count)]
    sizes = config.inner * builder.expert_mesh.size, hidden  # of all ranks
    experts = ExpertModules(module, modules, range(config.count), sizes, alternate, router)
    return adapted_experts(builder, experts)


def adapted_experts(builder: LayerBuilder, experts: ExpertModules) -> AdaptedExperts | None:
    """What adapters add to the experts of this rank; None: nothing."""
    rows = builder.rows
    deltas = None if rows is None else rows.adapters.make_experts(experts, rows)
    if rows is None or deltas is None:
        names = tuple(module for expert in experts.modules for module in expert)
        builder.refuse_adapters((*names, experts.router), _NOT_NAMED)
        return None
    if builder.places is not None:
        raise ConfigError(
            "adapters of experts do not run with --ep-num-redundant-experts, --init-expert-location or --enable-eplb; "
            "leave experts out of --lora-target-modules"
        )
    if builder.shared is not None:
        raise ConfigError(
            "adapters of experts do not run with --enable-dp-attention; leave experts out of --lora-target-modules"
        )
    return AdaptedExperts(deltas, rows, rows.adapters.make_router(experts.router, rows) if experts.router else None)


def adapted_router(builder: LayerBuilder, router: Linear, adapted: AdaptedExperts | None) -> Linear:
    """``router`` with what adapters add to its logits."""
    delta = None if adapted is None else adapted.router
    return router if delta is None else builder.ops.linear.make_adapted(router, delta)


def _with_adapters(builder: LayerBuilder, weight: Linear, module: str) -> Linear:
    """The ``weight`` of the expert that all tokens take, with what adapters add to it."""
    delta = None if builder.rows is None else builder.rows.adapters.make_router(module, builder.rows)
    if delta is None:
        builder.refuse_adapters((module,), _NOT_NAMED)
        return weight
    return builder.ops.linear.make_adapted(weight, delta)


def gelu_and_mul(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` of gate | up [tokens, 2 * n], by the approximation by tanh."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _routing(
    config: ExpertsConfig, correction: Tensor | None, local: range | None, dispatch: Dispatch | None
) -> Routing:
    return Routing(
        config.chosen,
        config.normalized,
        config.scores,
        config.groups,
        config.top_groups,
        config.pair_sum,
        config.scale,
        correction,
        config.jitter,
        local=local,
        dispatch=dispatch,
        wide=config.wide_router,
    )
