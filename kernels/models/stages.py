"""Cuts a model into the stages of a pipeline.

A stage is built as a model of its layers alone: its sizes say less layers, and its weights are found under the names
that these layers have in the whole model. So families know nothing of stages. A family whose layers are not like that,
because they depend on their place or on other layers, is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from kernels.contract.divisions import stage_layers
from kernels.contract.errors import ConfigError
from kernels.core.layer_context import BaseLayer, Delta, ExpertModules, LayerContext, RowAdapters
from kernels.models.config import ModelConfig
from kernels.models.registry import tensors
from kernels.weights.quantization.weights import Projection, QuantizedWeight
from kernels.weights.source import ModelSource
from kernels.weights.tensors import TensorSpec

__all__ = ["StageAdapters", "StageSource", "check_stages", "layer_of", "stage_config"]

_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a name is the layer's


def stage_config(config: ModelConfig, stage: int, size: int) -> ModelConfig:
    """The sizes of one of ``size`` stages; ``config`` may be one rank's. Raises ConfigError for what cannot be cut."""
    if size == 1:
        return config
    own = stage_layers(config.layers, stage, size)
    reason = _refusal(config)
    if reason:
        raise ConfigError(
            f"{config.architecture} cannot be cut into stages, {reason}; leave --pipeline-parallel-size out"
        )
    experts = config.experts
    if experts is not None:
        experts = dataclasses.replace(experts, layers=_moved(experts.layers, own))
    return dataclasses.replace(
        config,
        layers=len(own),
        windows=config.windows[own.start : own.stop],
        ropes={layer - own.start: rope for layer, rope in config.ropes.items() if layer in own},
        experts=experts,
    )


def check_stages(config: ModelConfig, size: int) -> None:
    """Compare the tensors of the stages with the whole model's. Raises ConfigError where layers depend on their
    place."""
    whole = {name: spec for name, spec in tensors(config).items() if _LAYER.search(name)}
    found: dict[str, TensorSpec] = {}
    for stage in range(size):
        first = stage_layers(config.layers, stage, size).start
        part = tensors(stage_config(config, stage, size))
        found |= {_renamed(name, first): spec for name, spec in part.items() if _LAYER.search(name)}
    same = found.keys() == whole.keys() and all(
        (spec.shape, spec.role) == (whole[name].shape, whole[name].role) for name, spec in found.items()
    )
    if not same:
        raise ConfigError(
            f"{config.architecture} cannot be cut into stages, because its layers depend on their place; leave "
            "--pipeline-parallel-size out"
        )


def _refusal(config: ModelConfig) -> str:
    """Why a model cannot be cut; empty if it can."""
    if config.code is not None:
        return "because transformers' modeling code runs it"
    if config.pooling is not None:
        return "because it generates no text"
    if config.recurrence is not None:
        return "because its layers keep states"
    latent = config.latent
    if config.shared_caches or (latent is not None and latent.index is not None):
        return "because some layers read what others made"
    if not config.layers_alike:
        return "because its layers have sizes or constants of their own"
    return ""


def _moved(layers: Iterable[int], own: range) -> frozenset[int]:
    return frozenset(layer - own.start for layer in layers if layer in own)


def _renamed(name: str, first: int) -> str:
    return _LAYER.sub(lambda match: f".{int(match[1]) + first}.", f"{name}.", count=1)[:-1]


def layer_of(module: str) -> int | None:
    """The number of the layer that a module of the whole model is in; None: it is in no layer."""
    found = _LAYER.search(module)
    return None if found is None else int(found[1])


class StageAdapters:
    """The adapters of the layers from ``first`` on, which a stage counts from 0. ``adapters``: the whole model's. See
    ``kernels.core.layer_context.RowAdapters``."""

    def __init__(self, adapters: RowAdapters, first: int) -> None:
        self._adapters, self._first = adapters, first

    @property
    def nbytes(self) -> int:
        return self._adapters.nbytes

    @property
    def scales(self) -> bool:
        return self._adapters.scales

    def takes(self, modules: tuple[str, ...]) -> bool:
        return self._adapters.takes(self._names(modules))

    def make(self, modules: tuple[str, ...], context: LayerContext, base: BaseLayer | None = None) -> Delta | None:
        return self._adapters.make(self._names(modules), context, base)

    def make_lookup(self, module: str, context: LayerContext) -> Delta | None:
        return self._adapters.make_lookup(module, context)

    def make_head(self, module: str, context: LayerContext) -> Delta | None:
        return self._adapters.make_head(module, context)

    def make_latent(self, module: str, context: LayerContext) -> tuple[Tensor, Tensor] | None:
        (whole,) = self._names((module,))
        return self._adapters.make_latent(whole, context)

    def make_experts(self, experts: ExpertModules, context: LayerContext) -> list[tuple[Delta, Delta]] | None:
        (stacked,) = self._names((experts.stacked,))
        modules = [self._names(each) for each in experts.modules]
        return self._adapters.make_experts(dataclasses.replace(experts, stacked=stacked, modules=modules), context)

    def make_router(self, module: str, context: LayerContext) -> Delta | None:
        (whole,) = self._names((module,))
        return self._adapters.make_router(whole, context)

    def refuse(self, modules: tuple[str, ...], reason: str) -> None:
        self._adapters.refuse(self._names(modules), reason)

    def acquire(self, index: int) -> int:
        return self._adapters.acquire(index)

    def release(self, index: int) -> None:
        self._adapters.release(index)

    def _names(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_renamed(module, self._first) for module in modules)


class StageSource:
    """The weights of the layers from ``first`` on, which a stage counts from 0. ``source``: the whole model's."""

    def __init__(self, source: ModelSource, first: int) -> None:
        self._source, self._first = source, first

    def take(self, names: Sequence[str]) -> Tensor:
        """As ``TensorSource.take``."""
        return self._source.take(self._names(names))

    def biases(self, modules: Sequence[str]) -> Tensor | None:
        """As ``TensorSource.biases``."""
        return self._source.biases(self._names(modules))

    def projection(self, modules: Sequence[str]) -> Projection:
        """As ``TensorSource.projection``."""
        return self._source.projection(self._names(modules))

    def table(self, module: str) -> Tensor | QuantizedWeight:
        """As ``ModelSource.table``."""
        return self._source.table(module)

    def _names(self, names: Sequence[str]) -> list[str]:
        return [_renamed(name, self._first) for name in names]
