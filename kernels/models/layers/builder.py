"""Builds a family's layers from weights, a device's operators and the ranks that share the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.core.layer_context import Delta, LayerContext
from kernels.core.operators import Linear, Norm
from kernels.devices.base import Device
from kernels.devices.elementwise import BiasedNorm
from kernels.devices.linear import ResidualLinear
from kernels.distributed.group import Group
from kernels.weights.source import ModelSource, TensorSource

__all__ = ["LayerBuilder", "ModelBuilder"]


@dataclass(frozen=True, eq=False)
class LayerBuilder:
    """Makes layers of the tensors of ``source``, with the operators ``ops`` of a device, for one rank of ``mesh``.

    ``rows``: which rows use which adapter; None: the model has no adapters, and layers are made as if there were none.
    A module is a tensor's name without ``.weight``. Several modules are fused along their outputs.
    """

    source: TensorSource
    ops: Device
    mesh: Group
    rows: LayerContext | None = field(default=None, kw_only=True)

    def norm(self, module: str, eps: float) -> Norm:
        """A norm; quantized checkpoints give some of them a bias."""
        weight, bias = self.source.take([f"{module}.weight"]), self.source.biases([module])
        norm = self.ops.elementwise.make_norm(weight, eps)
        return norm if bias is None else BiasedNorm(self.ops.elementwise, norm, bias)

    def linear(self, *modules: str) -> Linear:
        """A linear layer divided over ranks by its outputs, or not divided."""
        linear = self.ops.linear.make_projection(self.source.projection(modules), self.source.biases(modules))
        return self._adapted(linear, modules)

    def gated(self, *modules: str) -> Linear:
        """``silu(gate(x)) * up(x)``; the modules' outputs are the gate's, then the others."""
        weight, bias, ops = self.source.projection(modules), self.source.biases(modules), self.ops
        delta = self._delta(modules)
        if delta is None:
            return ops.linear.make_gated(weight, bias)
        linear = ops.linear.make_adapted(ops.linear.make_projection(weight, bias), delta)
        return lambda x: ops.elementwise.silu_and_mul(linear(x))  # kernels with the activation take no adapters

    def row_parallel(self, module: str) -> Linear:
        """A linear layer divided over ranks by its inputs; its result is whole on every rank."""
        mesh, bias = self.mesh, self.row_bias(module)
        linear = self._adapted(self.ops.linear.make_projection(self.source.projection([module]), bias), (module,))
        return linear if mesh.size == 1 else lambda x: mesh.all_reduce(linear(x))

    def _delta(self, modules: tuple[str, ...]) -> Delta | None:
        return None if self.rows is None else self.rows.adapters.make(modules, self.rows)

    def _adapted(self, linear: Linear, modules: tuple[str, ...]) -> Linear:
        """``linear`` with what adapters add to it."""
        delta = self._delta(modules)
        return linear if delta is None else self.ops.linear.make_adapted(linear, delta)

    def refuse_adapters(self, modules: tuple[str, ...]) -> None:
        """For layers that take no adapters. Raises ConfigError where one has something to add to them."""
        if self._delta(modules) is not None:
            raise ConfigError(
                f"an adapter changes {modules[0]}, and layers of experts are run without adapters; use one that leaves "
                "them as they are"
            )

    def row_bias(self, module: str) -> Tensor | None:
        """The bias of a layer whose results are summed over ranks: the sum holds it once."""
        bias = self.source.biases([module])
        return bias if self.mesh.rank == 0 else None

    def into_stream(self, module: str) -> ResidualLinear:
        """``row_parallel``, added to the residual stream."""
        return self.ops.linear.make_residual(self.row_parallel(module))

    def head_norms(self, query: str, key: str, heads: int, kv_heads: int, eps: float) -> Norm:
        """One norm over each query and key head, [heads + kv_heads, dim]."""
        queries = self.source.take([f"{query}.weight"]).expand(heads, -1)
        keys = self.source.take([f"{key}.weight"]).expand(kv_heads, -1)
        return self.ops.elementwise.make_norm(torch.cat((queries, keys)), eps)


@dataclass(frozen=True, eq=False)
class ModelBuilder(LayerBuilder):
    """Makes a whole model.

    ``dtype``: of activations. ``context``: the most tokens that a sequence may have; 0: as many as the model takes.
    ``captures``: layers whose results are wanted beside the last one's; 0 is the first layer. ``fp32_head``: logits are
    computed in float32.
    """

    source: ModelSource
    dtype: torch.dtype
    context: int = 0
    captures: tuple[int, ...] = ()
    fp32_head: bool = False
