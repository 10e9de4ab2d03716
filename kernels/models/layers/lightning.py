"""Lightning attention (Qin et al., arXiv 2401.04658): linear attention whose heads forget at rates of their own.

    q, k, v = silu(qkv_proj(x)), head by head;   S = exp(-slope) * S + outer(k, v);   o = S^T q
    out_proj(sigmoid(output_gate(x)) * norm(o))

The norm is over all heads. It is Mamba 2's state space without steps of the tokens' own: ``space_scan`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.devices.state_cache import StateCache, advance_states
from kernels.devices.state_space import SpaceTokens, space_scan
from kernels.models.config import ModelConfig
from kernels.models.layers.block import wide_norm
from kernels.models.layers.builder import LayerBuilder
from kernels.weights.tensors import TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["LightningAttention", "LightningConfig", "sizes", "tensors"]

_EPS = 1e-6  # of the norm, whatever the model's other norms have


@dataclass(frozen=True)
class LightningConfig:
    """``heads`` of ``dim`` numbers each. ``layers``: of the whole model, by which the slopes of a layer are."""

    heads: int
    dim: int
    layers: int

    def state(self) -> State:
        """As ``Recurrence``."""
        return State(((self.heads, self.dim, self.dim),))

    def divided(self, size: int) -> LightningConfig:
        """As ``Recurrence``."""
        if self.heads % size:
            raise ConfigError(
                f"num_attention_heads {self.heads} cannot be divided by --tensor-parallel-size {size}; lower it"
            )
        return replace(self, heads=self.heads // size)


def sizes(config: ModelConfig) -> LightningConfig:
    """The sizes of the model's layers."""
    assert isinstance(config.recurrence, LightningConfig), "the family reads config.json so"
    return config.recurrence


def tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    """The projections and the norm; transformers also saves the decays of blocks."""
    own, hidden = sizes(config), config.hidden_size
    heads, width = own.heads, own.heads * own.dim
    by_head = by_outputs((width, heads))
    unread = tuple(f"{module}.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    for spec in linear(f"{module}.qkv_proj", (3 * width, hidden), by_outputs((3 * width, heads))):
        yield replace(spec, unread=unread)
    yield from linear(f"{module}.output_gate", (width, hidden), by_head)
    yield norm(f"{module}.norm", width, split=by_head)
    yield from linear(f"{module}.out_proj", (hidden, width), by_inputs(width, heads))


class LightningAttention:
    """The layer ``index`` of ``tensors``."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str, index: int) -> None:
        self.sizes = own = sizes(config)
        self.spec, self.rows = own.state(), builder.rows
        self.without_program = builder.ops.elementwise.without_program()
        self.inputs, self.gate = builder.linear(f"{module}.qkv_proj"), builder.linear(f"{module}.output_gate")
        self.norm, self.output = wide_norm(builder, f"{module}.norm", _EPS), builder.row_parallel(f"{module}.out_proj")
        first, device = builder.mesh.rank * own.heads, builder.ops.torch_device
        self.rates = -slopes(own, builder.mesh.size, index)[first : first + own.heads].to(device)
        self.skips = torch.zeros_like(self.rates)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: StateCache, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        heads, dim = self.sizes.heads, self.sizes.dim
        mixed, gates = F.silu(self.inputs(self.without_program(x))), self.gate(x)

        def run(parts: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
            (mixed,) = parts
            out = mixed.new_empty(len(mixed), heads * dim)

            def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
                q, k, v = segment.take(mixed).float().unflatten(2, (heads, 3, dim)).unbind(3)
                steps = segment.without_padding(q.new_ones(q.shape[:3]))
                results, state = space_scan(SpaceTokens(v, k, q, steps, self.rates, self.skips), states[0])
                segment.put(out, results.flatten(2))
                return [state]

            advance_states(cache, segments, advance)
            return out

        out = batch.bounded[self.spec].run(run, mixed)
        if wanted is not None:
            out, gates = out.index_select(0, wanted), gates.index_select(0, wanted)
            if self.rows is not None:
                self.rows.select(wanted)
        return self.output(torch.sigmoid(gates) * self.norm(out))


def slopes(own: LightningConfig, ranks: int, index: int) -> Tensor:
    """Of all heads in the layer ``index``, float32 [heads of all ranks]: the later a layer, the less it forgets."""
    heads = torch.arange(1, own.heads * ranks + 1)
    return 2.0 ** (-8.0 * heads / len(heads)) * (1 - index / (own.layers - 1 + 1e-5) + 1e-5)
