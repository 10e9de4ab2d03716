"""Mamba 2 (Dao & Gu, arXiv 2405.21060, section 7): a state-space layer between two projections.

    z, xbc, dt = in_proj(x);  x, b, c = split(silu(convolution(xbc)))
    y = scan(x, b, c, clamp(softplus(dt + dt_bias)), -exp(A_log), D)
    out_proj(norm(y * silu(z)))

The norm is over the numbers of each group of heads; some models have none, or weight what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import State
from kernels.contract.errors import ConfigError
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.devices.state_cache import StateCache, advance_states
from kernels.devices.state_space import SpaceInputs, SpaceTokens, StateSpace, space_scan
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.layers.builder import LayerBuilder
from kernels.models.layers.recurrent import CausalConvolution
from kernels.weights.tensors import GgufPlace, Role, TensorSpec, by_inputs, by_outputs, linear, norm

__all__ = ["Mamba", "MambaConfig", "MambaKeys", "read", "run_segments", "sizes", "tensors"]


@dataclass(frozen=True)
class MambaConfig:
    """``heads`` of ``dim`` numbers, each with a state of ``dim`` times ``state_dim``; those of one of ``groups`` share
    what is written and read. ``taps``: of the convolution. ``norm_width``: numbers that are normed together, on all
    ranks; 0: there is no norm. ``norm_first``: the gate weights what the norm returns. ``steps``: the least and the
    most that a token's step may be. ``bias``, ``output_bias``, ``taps_bias``: of both projections and the
    convolution."""

    heads: int
    dim: int
    groups: int
    state_dim: int
    taps: int
    norm_width: int
    norm_first: bool = False
    steps: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    output_bias: bool = False
    taps_bias: bool = True

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.dim

    @property
    def shared(self) -> int:
        """Numbers that the groups write; they read as many."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Inputs of the convolution."""
        return self.inner + 2 * self.shared

    def state(self) -> State:
        """As ``Recurrence``: the convolution's, then the heads'."""
        return State(((self.taps - 1, self.channels), (self.heads, self.dim, self.state_dim)))

    def divided(self, size: int) -> MambaConfig:
        """As ``Recurrence``."""
        if self.heads % size or (self.groups % size and size % self.groups):
            raise ConfigError(
                f"{self.heads} heads of Mamba in {self.groups} groups cannot be divided by --tensor-parallel-size "
                f"{size}; lower it"
            )
        if 0 < self.norm_width < self.inner and self.inner // size % self.norm_width:
            raise ConfigError(
                f"Mamba's norms over {self.norm_width} of {self.inner} numbers cannot be divided by "
                f"--tensor-parallel-size {size}; lower it"
            )
        return replace(self, heads=self.heads // size, groups=max(1, self.groups // size))


@dataclass(frozen=True)
class MambaKeys:
    """What config.json calls the sizes."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    taps_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"


def read(raw: ConfigReader, inner: int, keys: MambaKeys = MambaKeys()) -> MambaConfig:
    """The sizes in config.json, with a norm of each group. ``inner``: numbers of all heads; 0: as the heads have
    them."""
    heads, groups = raw.size(keys.heads, 128), raw.size(keys.groups, 1)
    dim = max(1, inner // heads) if raw.raw.get(keys.dim, "auto") == "auto" else raw.size(keys.dim)
    if inner and heads * dim != inner:
        raise ConfigError(f"config.json: {keys.heads} {heads} of {keys.dim} {dim} numbers do not make up {inner}")
    if heads % groups:
        raise ConfigError(f"config.json: {keys.heads} {heads} is not a multiple of {keys.groups} {groups}")
    bias = raw.flag(keys.bias)
    return MambaConfig(
        heads,
        dim,
        groups,
        raw.size(keys.state_dim, 256),
        raw.size(keys.taps, 4),
        norm_width=heads * dim // groups,
        steps=_steps(raw),
        bias=bias,
        output_bias=bias,
        taps_bias=raw.flag(keys.taps_bias, True),
    )


def _steps(raw: ConfigReader) -> tuple[float, float]:
    """``time_step_limit``; nothing: no limit."""
    given = raw.raw.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    numbers = [_real(one) for one in given] if isinstance(given, list) else []
    if len(numbers) == 2 and 0.0 <= numbers[0] < numbers[1]:
        return numbers[0], numbers[1]
    raise ConfigError(f"config.json: time_step_limit must be two rising numbers of at least 0, and is {given!r}")


def _real(given: object) -> float:
    """A number of config.json, which may be infinite: tools write that as JSON's extension, or as an object."""
    if given == {"__float__": "Infinity"}:
        return math.inf
    return float(given) if isinstance(given, int | float) else math.nan


def sizes(config: ModelConfig) -> MambaConfig:
    """The sizes of the model's layers."""
    assert isinstance(config.recurrence, MambaConfig), "the family reads config.json by read"
    return config.recurrence


def tensors(config: ModelConfig, module: str, gguf: str) -> Iterator[TensorSpec]:
    """The projections, the convolution, the steps and rates of the heads, and the norm. ``gguf``: the layer's name in
    GGUF files."""
    mamba, hidden = sizes(config), config.hidden_size
    by_head, by_group, heads = (mamba.inner, mamba.heads), (mamba.shared, mamba.groups), (mamba.heads, mamba.heads)
    rows = mamba.inner + mamba.channels + mamba.heads
    split = by_outputs(by_head, by_head, by_group, by_group, heads)
    yield from linear(f"{module}.in_proj", (rows, hidden), split, f"{gguf}.ssm_in", bias=mamba.bias)
    mixed = by_outputs(by_head, by_group, by_group)
    taps = f"{module}.conv1d.weight"
    place = GgufPlace(f"{gguf}.ssm_conv1d.weight")
    yield TensorSpec(taps, (mamba.channels, 1, mamba.taps), Role.WIDE, mixed, place)
    if mamba.taps_bias:
        place = GgufPlace(f"{gguf}.ssm_conv1d.bias")
        yield TensorSpec(f"{module}.conv1d.bias", (mamba.channels,), Role.WIDE, mixed, place)
    places = {"A_log": GgufPlace(f"{gguf}.ssm_a", exponent=True)}
    places |= {"D": GgufPlace(f"{gguf}.ssm_d"), "dt_bias": GgufPlace(f"{gguf}.ssm_dt.bias")}
    for name, place in places.items():
        yield TensorSpec(f"{module}.{name}", (mamba.heads,), Role.WIDE, by_outputs(heads), place)
    if mamba.norm_width:
        yield norm(f"{module}.norm", mamba.inner, f"{gguf}.ssm_norm", by_outputs(by_head))
    outputs = by_inputs(mamba.inner, mamba.heads)
    yield from linear(f"{module}.out_proj", (hidden, mamba.inner), outputs, f"{gguf}.ssm_out", bias=mamba.output_bias)


def run_segments(
    mamba: MambaConfig,
    space: StateSpace,
    convolution: CausalConvolution,
    inputs: SpaceInputs,
    cache: StateCache,
    segments: tuple[StateSegments, ...],
    *,
    out: Tensor,
) -> None:
    """Run the tokens of ``inputs`` on from their states in ``cache``; results go to ``out`` [tokens, inner]."""

    def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
        some, before = convolution(segment.take(inputs.mixed), states[0], segment.lengths)
        x, b, c = some.split((mamba.inner, mamba.shared, mamba.shared), 2)
        tokens = SpaceTokens(
            x.unflatten(2, (mamba.heads, -1)),
            b.unflatten(2, (mamba.groups, -1)),
            c.unflatten(2, (mamba.groups, -1)),
            segment.without_padding(segment.take(inputs.steps)),
            inputs.rates,
            inputs.skips,
        )
        results, memory = space_scan(tokens, states[1])
        segment.put(out, results.flatten(2))
        return [before, memory]

    def step(segment: StateSegments) -> bool:
        return space.step(inputs, convolution.weight, convolution.bias, cache, segment, out)

    advance_states(cache, segments, advance, step)


class Mamba:
    """The layer of ``tensors``. ``scales``: of what ``in_proj`` returns as gates, x, b, c and steps; empty: none."""

    def __init__(self, builder: LayerBuilder, config: ModelConfig, module: str, scales: tuple[float, ...] = ()) -> None:
        self.sizes = mamba = sizes(config)
        self.spec, self.rows, self.mesh, self.eps = mamba.state(), builder.rows, builder.mesh, config.norm_eps
        take, self.space = builder.source.take, builder.ops.space
        self.inputs = builder.linear(f"{module}.in_proj")
        bias = take([f"{module}.conv1d.bias"]) if mamba.taps_bias else None
        self.convolution = CausalConvolution(take([f"{module}.conv1d.weight"]), bias)
        self.rates = -take([f"{module}.A_log"]).float().exp()
        self.skips = take([f"{module}.D"]).float()
        self.offsets = take([f"{module}.dt_bias"]).float()
        self.norm = take([f"{module}.norm.weight"]).float() if mamba.norm_width else None
        self.output = builder.row_parallel(f"{module}.out_proj")
        self.scales: Tensor | None = None
        if scales:
            counts = torch.tensor([mamba.inner, mamba.inner, mamba.shared, mamba.shared, mamba.heads])
            self.scales = torch.tensor(scales).repeat_interleave(counts).to(self.rates.device)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: StateCache, batch: ForwardBatch, wanted: Tensor | None
    ) -> Tensor:
        """As ``AttentionLayer``."""
        mamba, given = self.sizes, self.inputs(x)
        if self.scales is not None:
            given = given * self.scales.to(given.dtype)
        gates, mixed, steps = given.split((mamba.inner, mamba.channels, mamba.heads), 1)
        steps = F.softplus(steps.float() + self.offsets).clamp(*mamba.steps)

        def run(parts: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
            mixed, steps = parts
            inputs = SpaceInputs(mixed, steps, self.rates, self.skips)
            out = mixed.new_empty(len(mixed), mamba.inner, dtype=torch.float32)
            run_segments(mamba, self.space, self.convolution, inputs, cache, segments, out=out)
            return out

        out = batch.bounded[self.spec].run(run, mixed, steps)
        if wanted is not None:
            out, gates = out.index_select(0, wanted), gates.index_select(0, wanted)
            if self.rows is not None:
                self.rows.select(wanted)
        return self.output(self._normed(out, F.silu(gates.float())).to(x.dtype))

    def _normed(self, x: Tensor, gates: Tensor) -> Tensor:
        """``x`` float32 [rows, inner], normed and weighted by the ``gates``."""
        mamba = self.sizes
        if self.norm is None or not mamba.norm_first:
            x = x * gates
        if self.norm is None:
            return x
        parts = x.unflatten(1, (-1, min(mamba.norm_width, mamba.inner)))
        mean = parts.square().mean(2, keepdim=True)
        if mamba.norm_width > mamba.inner:  # each rank has some of the heads that one norm is over
            mean = self.mesh.all_reduce(mean) / self.mesh.size
        x = (parts * torch.rsqrt(mean + self.eps)).flatten(1) * self.norm
        return x * gates if mamba.norm_first else x
