"""Builds a family's layers from weights, a device's operators and the ranks that share the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.layer_context import BaseLayer, LayerContext
from kernels.core.operators import Linear, Norm
from kernels.devices.base import Device
from kernels.devices.elementwise import BiasedNorm, LayerNorm
from kernels.devices.linear import ResidualLinear
from kernels.distributed.context_parallel import ContextParallel
from kernels.distributed.group import Group
from kernels.distributed.pipeline import Stage
from kernels.distributed.shared_experts import SharedExperts
from kernels.models.layers.expert_places import ExpertPlaces
from kernels.models.layers.routes import RouteRecord
from kernels.weights.quantization.weights import Projection
from kernels.weights.source import ModelSource, TensorSource

__all__ = ["LayerBuilder", "ModelBuilder"]


@dataclass(frozen=True, eq=False)
class LayerBuilder:
    """Makes layers of the tensors of ``source``, with the operators ``ops`` of a device, for one rank of ``mesh``.

    ``rows``: which rows use which adapter; None: the model has no adapters, and layers are made as if there were none.
    ``routes``: of the model's layers of experts. ``shared``: the ranks that share them, with data-parallel attention;
    ``ep_size``: parts that ranks divide a layer's experts into. ``places``: of these; None: they are in their order.
    ``context_parallel``: divides the tokens of a pass; None: every rank runs them all.
    A module is a tensor's name without ``.weight``. Several modules are fused along their outputs.
    """

    source: TensorSource
    ops: Device
    mesh: Group
    rows: LayerContext | None = field(default=None, kw_only=True)
    routes: RouteRecord = field(default_factory=RouteRecord, kw_only=True)
    ep_size: int = field(default=1, kw_only=True)
    places: ExpertPlaces | None = field(default=None, kw_only=True)
    shared: SharedExperts | None = field(default=None, kw_only=True)
    context_parallel: ContextParallel | None = field(default=None, kw_only=True)

    @property
    def expert_mesh(self) -> Group:
        """The ranks that a layer of experts is divided over."""
        return self.mesh if self.shared is None else self.shared.whole

    def norm(self, module: str, eps: float, offset: float = 0.0) -> Norm:
        """A norm; quantized checkpoints give some of them a bias. ``offset``: what is added to its weight."""
        weight, bias = self.source.take([f"{module}.weight"]), self.source.biases([module])
        if offset:
            wide = weight.float() + offset
            weight = wide if self.ops.elementwise.float_weights else wide.to(weight.dtype)
        norm = self.ops.elementwise.make_norm(weight, eps)
        return norm if bias is None else BiasedNorm(self.ops.elementwise, norm, bias)

    def layer_norm(self, *modules: str, eps: float, order: Sequence[int] | None = None) -> Norm:
        """A layer norm, with a bias if the checkpoint has one. Of several ``modules``: of as many heads, each with a
        weight of its own, whose numbers are put in ``order``."""
        weights = [self.source.take([f"{module}.weight"]) for module in modules]
        if len(weights) == 1:
            return LayerNorm(self.ops.elementwise, weights[0], self.source.biases(modules), eps)
        heads = torch.cat([weight.view(-1, weight.shape[-1]) for weight in weights])
        return LayerNorm(self.ops.elementwise, heads if order is None else heads[:, list(order)], None, eps)

    def ordered(self, order: Sequence[int], *modules: str) -> Linear:
        """``linear`` of the outputs ``order``. Weights in floats are put in this order, others' outputs are."""
        weight, bias, ops = self.source.projection(modules), self.source.biases(modules), self.ops
        rows = sum(part.shape[0] for part in (weight if isinstance(weight, tuple) else (weight,)))
        if rows != len(order):
            raise ConfigError(
                f"{modules[0]} has {rows} outputs on a rank that needs {len(order)} of them: key heads cannot be "
                "divided over more ranks than there are; lower --tensor-parallel-size"
            )
        if self.rows is None and isinstance(weight, Tensor):
            index = torch.tensor(order, device=weight.device)
            bias = None if bias is None else bias.index_select(0, index)
            return ops.linear.make_projection(weight.index_select(0, index), bias)
        index = torch.tensor(order, device=ops.torch_device)
        linear = self._adapted(weight, bias, modules)
        return ops.elementwise.compose(lambda x: linear(x).index_select(1, index), lambda x: x)

    def linear(self, *modules: str) -> Linear:
        """A linear layer divided over ranks by its outputs, or not divided."""
        return self._adapted(self.source.projection(modules), self.source.biases(modules), modules)

    def gated(self, *modules: str, activation: str = "silu") -> Linear:
        """``silu(gate(x)) * up(x)``, or with another ``activation``; the modules' outputs are the gate's, then the
        others."""
        if activation != "silu":
            return self.ops.elementwise.activate_and_mul(self.linear(*modules), activation)
        weight, bias, ops = self.source.projection(modules), self.source.biases(modules), self.ops
        if self.rows is None or not self.rows.adapters.takes(modules):
            return ops.linear.make_gated(weight, bias)
        return self._adapted(weight, bias, modules, gated=True)

    def row_parallel(self, module: str) -> Linear:
        """A linear layer divided over ranks by its inputs; its result is whole on every rank."""
        mesh, bias = self.mesh, self.row_bias(module)
        linear = self._adapted(self.source.projection([module]), bias, (module,), sums=mesh.all_reduce)
        return linear if mesh.size == 1 else lambda x: mesh.all_reduce(linear(x))

    def _adapted(
        self,
        weight: Projection,
        bias: Tensor | None,
        modules: tuple[str, ...],
        *,
        gated: bool = False,
        sums: Callable[[Tensor], Tensor] | None = None,
    ) -> Linear:
        """A linear layer with what adapters add to it; if there are adapters, ``gated`` by silu. ``sums``: over the
        ranks that divide its inputs."""
        rows, layers = self.rows, self.ops.linear
        squares = layers.squared_norms(weight) if rows is not None and rows.adapters.scales else None
        linear = layers.make_projection(weight, bias)  # may repack the weight
        if rows is None:
            return linear
        base = None if squares is None else BaseLayer(linear, bias, squares, sums)
        delta = rows.adapters.make(modules, rows, base)
        return linear if delta is None else layers.fuse_adapted(linear, delta, gated)

    def refuse_adapters(self, modules: tuple[str, ...], reason: str) -> None:
        """For weights that take no adapters: experts, and what makes keys of latent vectors."""
        if self.rows is not None:
            self.rows.adapters.refuse(modules, reason)

    def row_bias(self, module: str) -> Tensor | None:
        """The bias of a layer whose results are summed over ranks: the sum holds it once."""
        bias = self.source.biases([module])
        return bias if self.mesh.rank == 0 else None

    def expert_bias(self, module: str) -> Tensor | None:
        """``row_bias`` of a layer of experts."""
        bias = self.source.biases([module])
        return bias if self.expert_mesh.rank == 0 else None

    def expert_linear(self, module: str) -> Linear:
        """A linear layer divided by its inputs over the ranks that share layers of experts; the sum is left to take."""
        weight, sums = self.source.projection([module]), self.expert_mesh.all_reduce
        return self._adapted(weight, self.expert_bias(module), (module,), sums=sums)

    def into_stream(self, module: str) -> ResidualLinear:
        """``row_parallel``, added to the residual stream."""
        return self.ops.linear.make_residual(self.row_parallel(module))

    def head_norms(
        self,
        query: str,
        key: str,
        heads: int,
        kv_heads: int,
        eps: float,
        *,
        order: Sequence[int] | None = None,
        offset: float = 0.0,
    ) -> Norm:
        """One norm over each query and key head, [heads + kv_heads, dim]. ``order``: of a head's numbers. ``offset``:
        what is added to the weights."""
        queries = self.source.take([f"{query}.weight"]).expand(heads, -1)
        keys = self.source.take([f"{key}.weight"]).expand(kv_heads, -1)
        if offset:
            wide = queries.float() + offset, keys.float() + offset
            queries, keys = wide if self.ops.elementwise.float_weights else (part.to(queries.dtype) for part in wide)
        both = torch.cat((queries, keys))
        return self.ops.elementwise.make_norm(both if order is None else both[:, list(order)], eps)


@dataclass(frozen=True, eq=False)
class ModelBuilder(LayerBuilder):
    """Makes a whole model.

    ``dtype``: of activations. ``context``: the most tokens that a sequence may have; 0: as many as the model takes.
    ``captures``: layers whose results are wanted beside the last one's; 0 is the first layer. ``fp32_head``: logits are
    computed in float32. ``stage``: the part of the layers that is made, see ``kernels.models.stages``. ``first_layer``:
    the number of the first of them in the whole model, whose numbers ``captures`` are, of ``whole_layers``; 0: all.
    """

    source: ModelSource
    dtype: torch.dtype
    context: int = 0
    captures: tuple[int, ...] = ()
    fp32_head: bool = False
    stage: Stage = field(default_factory=Stage)
    first_layer: int = 0
    whole_layers: int = 0
