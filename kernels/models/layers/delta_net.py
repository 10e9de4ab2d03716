"""The gated delta net (Yang et al., arXiv 2412.06464): linear attention whose state a delta rule corrects.

    q, k, v = silu(convolution(split(in_proj(x))));   q, k = l2(q) / sqrt(k_dim), l2(k)
    beta = sigmoid(b(x));   decay = -exp(A_log) * softplus(a(x) + dt_bias)
    out_proj(norm(delta_rule(q, k, v, decay, beta)) * silu(z(x)))

Each key head serves ``value_heads / key_heads`` value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.core.operators import Linear, Norm
from kernels.devices.delta_rule import DeltaInputs, DeltaRule, DeltaTokens, delta_rule
from kernels.devices.state_cache import StateCache, advance_states
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import GgufOrder, GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["DeltaConfig", "GatedDeltaNet", "HeadGates", "layer", "read", "run_segments", "sizes", "tensors"]


@dataclass(frozen=True)
class DeltaConfig:
    """Heads of keys and of values, each of so many numbers, and taps of the convolution before them. ``grouped``:
    whether one projection gives queries, keys, values and gates, key head by key head. ``gguf``: how a GGUF file has
    value heads, "grouped" by key heads or "tiled", one of each key head after the other."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool = True
    gguf: str = ""

    @property
    def keys(self) -> int:
        """Numbers of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Inputs of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state(self) -> State:
        """As ``Recurrence``: the convolution's, then the delta rule's."""
        return State(((self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)))

    def divided(self, size: int) -> DeltaConfig:
        """As ``Recurrence``."""
        if self.key_heads % size:
            raise ConfigError(
                f"linear_num_key_heads {self.key_heads} cannot be divided by --tensor-parallel-size {size}; lower it"
            )
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)


def read(raw: ConfigReader, grouped: bool = True) -> DeltaConfig:
    """The sizes in config.json. ``grouped``: as ``DeltaConfig``."""
    keys, values = raw.size("linear_num_key_heads", 16), raw.size("linear_num_value_heads", 32)
    if values % keys:
        raise ConfigError(
            f"config.json: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    key_dim, value_dim = raw.size("linear_key_head_dim", 128), raw.size("linear_value_head_dim", 128)
    gguf = str(raw.raw.get("gguf_value_heads", ""))
    return DeltaConfig(
        keys, values, key_dim, value_dim, raw.size("linear_conv_kernel_dim", 4), grouped and not gguf, gguf
    )


def sizes(config: ModelConfig) -> DeltaConfig:
    """The sizes of the model's layers."""
    assert isinstance(config.recurrence, DeltaConfig), "the family reads config.json by read"
    return config.recurrence


def tensors(config: ModelConfig, module: str, gguf: str = "") -> Iterator[TensorSpec]:
    """The projections, the convolution, the decays, the norm of the results, and the output. ``gguf``: the layer's name
    in GGUF files."""
    names = _gguf_places(sizes(config), gguf) if sizes(config).gguf else {}
    for spec in _tensors(config, module):
        yield dataclasses.replace(spec, gguf=names.get(spec.name.removeprefix(f"{module}.")))


def _gguf_places(delta: DeltaConfig, layer: str) -> dict[str, GgufPlace]:
    """Where GGUF files have the tensors. Those of Qwen3-Next have b and a of each key head in one matrix."""
    heads, ratio = delta.value_heads, delta.value_heads // delta.key_heads
    names = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
    result = {f"{own}.weight": GgufPlace(f"{layer}.{name}.weight") for own, name in names.items()}
    result |= {"norm.weight": GgufPlace(f"{layer}.ssm_norm.weight"), "dt_bias": GgufPlace(f"{layer}.ssm_dt.bias")}
    result["A_log"] = GgufPlace(f"{layer}.ssm_a", exponent=True)
    if delta.gguf == "grouped":
        for part, begin in (("b", 0), ("a", ratio)):
            order = GgufOrder(2 * heads, (delta.key_heads, ratio), (2 * ratio, 1), begin)
            result[f"in_proj_{part}.weight"] = GgufPlace(f"{layer}.ssm_ba.weight", rows=order)
        return result
    for part, name in (("b", "ssm_beta"), ("a", "ssm_alpha")):
        result[f"in_proj_{part}.weight"] = GgufPlace(f"{layer}.{name}.weight")

    def tiled(fixed: int, dim: int) -> GgufOrder:
        strides = (dim, delta.key_heads * dim, 1)
        return GgufOrder(fixed + heads * dim, (delta.key_heads, ratio, dim), strides, fixed, fixed)

    dim, before = delta.value_dim, 2 * delta.keys
    rows = {
        "in_proj_qkv.weight": tiled(before, dim),
        "conv1d.weight": tiled(before, dim),
        "in_proj_z.weight": tiled(0, dim),
    }
    rows |= {name: tiled(0, 1) for name in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")}
    result |= {name: dataclasses.replace(result[name], rows=tiles) for name, tiles in rows.items()}
    result["out_proj.weight"] = dataclasses.replace(result["out_proj.weight"], columns=tiled(0, dim))
    return result


def _tensors(config: ModelConfig, module: str) -> Iterator[TensorSpec]:
    delta, hidden = sizes(config), config.hidden_size
    heads = delta.value_heads
    by_key_head, by_value_head = (delta.keys, delta.key_heads), (delta.values, heads)
    if delta.grouped:
        rows = 2 * delta.keys + 2 * delta.values
        yield from linear(f"{module}.in_proj_qkvz", (rows, hidden), by_outputs((rows, delta.key_heads)))
        yield from linear(f"{module}.in_proj_ba", (2 * heads, hidden), by_outputs((2 * heads, delta.key_heads)))
    else:
        parts = by_outputs(by_key_head, by_key_head, by_value_head)
        yield from linear(f"{module}.in_proj_qkv", (delta.channels, hidden), parts)
        yield from linear(f"{module}.in_proj_z", (delta.values, hidden), by_outputs(by_value_head))
        for part in "ba":
            yield from linear(f"{module}.in_proj_{part}", (heads, hidden), by_outputs((heads, heads)))
    split = by_outputs(by_key_head, by_key_head, by_value_head)
    yield TensorSpec(f"{module}.conv1d.weight", (delta.channels, 1, delta.taps), Role.WIDE, split)
    for name in ("A_log", "dt_bias"):
        yield TensorSpec(f"{module}.{name}", (heads,), Role.WIDE, by_outputs((heads, heads)))
    yield norm(f"{module}.norm", delta.value_dim)
    yield from linear(f"{module}.out_proj", (hidden, delta.values), by_inputs(delta.values, heads))


def layer(builder: LayerBuilder, config: ModelConfig, module: str, sigmoid: bool = False) -> GatedDeltaNet:
    """The layer of ``tensors``. ``sigmoid``: as ``GatedDeltaNet``."""
    delta, source = sizes(config), builder.source
    if delta.grouped:
        projection = builder.ordered(_ungrouped(delta), f"{module}.in_proj_qkvz", f"{module}.in_proj_ba")
    else:
        projection = builder.linear(*(f"{module}.in_proj_{part}" for part in ("qkv", "z", "b", "a")))
    heads = delta.value_heads
    head_gates = HeadGates(builder, module)

    def inputs(x: Tensor) -> DeltaInputs:
        mixed, gates, b, a = projection(x).split((delta.channels, delta.values, heads, heads), 1)
        return DeltaInputs(mixed, gates, *head_gates(b, a))

    return GatedDeltaNet(
        builder,
        delta,
        inputs,
        CausalConvolution(source.take([f"{module}.conv1d.weight"])),
        builder.norm(f"{module}.norm", config.norm_eps),
        builder.row_parallel(f"{module}.out_proj"),
        sigmoid=sigmoid,
    )


def _ungrouped(delta: DeltaConfig) -> list[int]:
    """The order of outputs that stand key head by key head, in which all queries come first, then keys, values, gates,
    betas and decays."""
    share = delta.value_heads // delta.key_heads
    widths = (delta.key_dim, delta.key_dim, share * delta.value_dim, share * delta.value_dim)
    places, begin = [], 0
    for group in (widths, (share, share)):
        total = sum(group)
        for part, width in enumerate(group):
            first = begin + sum(group[:part])
            places += [first + head * total + at for head in range(delta.key_heads) for at in range(width)]
        begin += total * delta.key_heads
    return places


def _l2_norm(x: Tensor) -> Tensor:
    """``x`` divided by its length, over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class HeadGates:
    """Betas and decays of each head, by the tensors ``A_log`` and ``dt_bias`` [heads] of ``module``."""

    def __init__(self, builder: LayerBuilder, module: str) -> None:
        take = builder.source.take
        self._rule, self._offset = builder.ops.delta, take([f"{module}.dt_bias"]).float()
        self._factor = -take([f"{module}.A_log"]).float().exp()

    def __call__(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """``b``, ``a`` [tokens, heads]: see ``DeltaRule.head_gates``."""
        return self._rule.head_gates(b, a, self._factor, self._offset)


def run_segments(
    delta: DeltaConfig,
    rule: DeltaRule,
    convolution: CausalConvolution,
    inputs: DeltaInputs,
    cache: StateCache,
    segments: tuple[StateSegments, ...],
    *,
    out: Tensor,
) -> None:
    """Run the tokens of ``inputs`` on from their states in ``cache``; results go to ``out`` [tokens, heads,
    value_dim]."""
    heads, share = delta.value_heads, delta.value_heads // delta.key_heads

    def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
        some, before = convolution(segment.take(inputs.mixed), states[0], segment.lengths)
        q, k, v = some.split((delta.keys, delta.keys, delta.values), 2)
        q, k = (_l2_norm(part.unflatten(2, (delta.key_heads, -1))) for part in (q, k))
        if share > 1:
            q, k = (part.repeat_interleave(share, 2) for part in (q, k))
        results, memory = delta_rule(
            DeltaTokens(
                q * delta.key_dim**-0.5,
                k,
                v.unflatten(2, (heads, -1)),
                segment.without_padding(segment.take(inputs.decays)),
                segment.without_padding(segment.take(inputs.betas)),
            ),
            states[1],
            rule.scan,
        )
        segment.put(out, results)
        return [before, memory]

    def step(segment: StateSegments) -> bool:
        return rule.step(inputs, convolution.weight, cache, segment, out, share)

    advance_states(cache, segments, advance, step)


class GatedDeltaNet:
    """A gated delta net of any family, made of its parts. ``sigmoid``: the activation of the gates, in place
    of silu."""

    def __init__(
        self,
        builder: LayerBuilder,
        delta: DeltaConfig,
        inputs: Callable[[Tensor], DeltaInputs],
        convolution: CausalConvolution,
        norm: Norm,
        output: Linear,
        *,
        sigmoid: bool = False,
    ) -> None:
        self.sizes, self.spec, self.rows, self.rule = delta, delta.state(), builder.rows, builder.ops.delta
        self.inputs, self.convolution, self.norm, self.output, self.sigmoid = inputs, convolution, norm, output, sigmoid

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: StateCache, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        inputs = self.inputs(x)
        gates, dim = inputs.gates, self.sizes.value_dim

        def run(parts: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
            out = parts[0].new_empty(len(parts[0]), self.sizes.value_heads, dim)
            run_segments(self.sizes, self.rule, self.convolution, DeltaInputs(*parts), cache, segments, out=out)
            return out

        out = batch.bounded[self.spec].run(run, inputs.mixed, gates, inputs.betas, inputs.decays)
        if wanted is not None:
            out, gates = out.index_select(0, wanted), gates.index_select(0, wanted)
            if self.rows is not None:
                self.rows.select(wanted)
        return self.output(self.rule.gated_norm(self.norm, out, gates, self.sigmoid))
