"""The gated short convolution of LFM2 (Liquid AI, arXiv 2511.23404, section 2): ``out_proj(c * convolution(b * x))``,
with b, c and x of ``in_proj``. Its state is the last few inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.devices.state_cache import StateCache, advance_states
from kernels.models.config import ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear

__all__ = ["ConvolutionConfig", "ShortConvolution", "sizes", "tensors"]


@dataclass(frozen=True)
class ConvolutionConfig:
    """``channels`` with a convolution over ``taps`` tokens each. ``bias``: of it and of both projections."""

    channels: int
    taps: int
    bias: bool

    def state(self) -> State:
        """As ``Recurrence``."""
        return State(((self.taps - 1, self.channels),))

    def divided(self, size: int) -> ConvolutionConfig:
        """As ``Recurrence``."""
        if self.channels % size:
            raise ConfigError(
                f"hidden_size {self.channels} cannot be divided by --tensor-parallel-size {size}; lower it"
            )
        return replace(self, channels=self.channels // size)


def sizes(config: ModelConfig) -> ConvolutionConfig:
    """The sizes of the model's layers."""
    assert isinstance(config.recurrence, ConvolutionConfig), "the family reads config.json so"
    return config.recurrence


def tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The projections and the convolution. ``gguf``: what their names begin with there."""
    own, hidden = sizes(config), config.hidden_size
    part = (own.channels, own.channels)
    inputs, place = by_outputs(*3 * [part]), GgufPlace(f"{gguf}.conv.weight")
    yield from linear(f"{module}.in_proj", (3 * own.channels, hidden), inputs, f"{gguf}.in_proj", bias=own.bias)
    yield TensorSpec(f"{module}.conv.weight", (own.channels, 1, own.taps), Role.WIDE, by_outputs(part), place)
    if own.bias:
        yield TensorSpec(f"{module}.conv.bias", (own.channels,), Role.WIDE, by_outputs(part))
    outputs = f"{gguf}.out_proj"
    yield from linear(f"{module}.out_proj", (hidden, own.channels), by_inputs(*part), outputs, bias=own.bias)


class ShortConvolution:
    """The layer of ``tensors``."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str) -> None:
        own, take = sizes(config), builder.source.take
        self.spec, self.rows, self.kernels = own.state(), builder.rows, builder.ops.convolution
        self.inputs, self.output = builder.linear(f"{module}.in_proj"), builder.row_parallel(f"{module}.out_proj")
        bias = take([f"{module}.conv.bias"]) if own.bias else None
        self.convolution = CausalConvolution(take([f"{module}.conv.weight"]), bias, activate=False)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: StateCache, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        before, after, values = self.inputs(x).chunk(3, 1)

        def run(inputs: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
            (mixed,) = inputs
            out = torch.empty_like(mixed)

            def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
                results, state = self.convolution(segment.take(mixed), states[0], segment.lengths)
                segment.put(out, results)
                return [state]

            def step(segment: StateSegments) -> bool:
                weight, bias = self.convolution.weight, self.convolution.bias
                return self.kernels.step(mixed, weight, bias, cache[0], segment, out)

            advance_states(cache, segments, advance, step)
            return out

        out = batch.bounded[self.spec].run(run, before * values)
        if wanted is not None:
            out, after = out.index_select(0, wanted), after.index_select(0, wanted)
            if self.rows is not None:
                self.rows.select(wanted)
        return self.output(after * out)
