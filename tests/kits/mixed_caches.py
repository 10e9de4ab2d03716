"""A model family with mixed cache groups, as another distribution would add it. ``layer_types`` in config.json gives
the kind of each layer: full, window, latent or state.

Full and window layers are Llama's. Latent layers read one vector of each token, as MLA does (arXiv 2405.04434, section
2.1), without rotary positions. State layers are gated linear attention (Yang et al., arXiv 2312.06635) behind a
convolution over two tokens, whose last input is a second state.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from kernels.contract.caches import CacheGroup, CacheSpec, Latent, Paged, State, Window
from kernels.core.batch import ForwardBatch, StateSegments
from kernels.core.operators import Norm
from kernels.devices.latent_attention import attend_latent
from kernels.devices.latent_cache import write_latent
from kernels.devices.linear import norm_of_sum
from kernels.devices.state_cache import advance_states
from kernels.models.config import ConfigReader, ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers import pre_norm, vocabulary
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.pre_norm import PreNormLayer
from kernels.weights.tensors import TensorSpec, linear, norm, table_of
from tests.kits.tiny_model import make_tiny_model

__all__ = ["ARCHITECTURE", "build", "caches", "config", "install", "make_mixed_model", "tensors"]

ARCHITECTURE = "MixedCachesForCausalLM"
LATENT_DIM, LATENT_ROPE_DIM = 12, 4


@dataclass(frozen=True)
class MixedConfig(ModelConfig):
    """``kinds``: of each layer. ``window``: tokens of the window layers."""

    kinds: tuple[str, ...] = ()
    window: int = 0


def config(raw: ConfigReader) -> ModelConfig:
    """The sizes in config.json."""
    plain = raw.decoder()
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return MixedConfig(**fields, kinds=tuple(raw.raw["layer_types"]), window=raw.size("sliding_window"))


def tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint."""
    assert isinstance(config, MixedConfig)
    hidden, dim = config.hidden_size, config.head_dim
    yield from vocabulary.tensors(config)
    for index, kind in enumerate(config.kinds):
        name = f"model.layers.{index}"
        if kind in ("full", "window"):
            yield from pre_norm.tensors(config, name)
            continue
        width, value = (LATENT_DIM + LATENT_ROPE_DIM, LATENT_DIM) if kind == "latent" else (dim, dim)
        yield norm(f"{name}.norm", hidden)
        yield from linear(f"{name}.q_proj", (config.heads * width, hidden))
        yield from linear(f"{name}.o_proj", (hidden, config.heads * value))
        if kind == "latent":
            yield from linear(f"{name}.kv_proj", (width, hidden))
        else:
            yield from linear(f"{name}.k_proj", (config.heads * dim, hidden))
            yield from linear(f"{name}.v_proj", (config.heads * dim, hidden))
            yield from linear(f"{name}.gate_proj", (config.heads, hidden))
    yield norm("model.norm", hidden)


def _spec(config: MixedConfig, kind: str) -> CacheSpec:
    paged = Paged(config.kv_heads, config.head_dim, config.head_dim)
    if kind == "full":
        return paged
    if kind == "window":
        return Window(paged, config.window)
    if kind == "latent":
        return Latent(LATENT_DIM, LATENT_ROPE_DIM)
    return State(((config.heads, config.head_dim, config.head_dim), (config.hidden_size,)))


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """What the layers keep."""
    assert isinstance(config, MixedConfig)
    kinds = config.kinds
    return tuple(
        CacheGroup(_spec(config, kind), tuple(layer for layer, other in enumerate(kinds) if other == kind))
        for kind in dict.fromkeys(kinds)
    )


def build(config: ModelConfig, builder: ModelBuilder) -> Decoder:
    """The decoder of one rank."""
    assert isinstance(config, MixedConfig)
    ends = vocabulary.vocabulary(builder, config)
    layers: list[Any] = []
    for index, kind in enumerate(config.kinds):
        name = f"model.layers.{index}"
        if kind == "full":
            layers.append(pre_norm.layer(builder, config, name, 0))
        elif kind == "window":
            inner = pre_norm.layer(builder, config, name, config.window)
            layers.append(_WindowLayer(inner, _spec(config, kind)))
        elif kind == "latent":
            layers.append(_LatentLayer(builder, config, name))
        else:
            layers.append(_StateLayer(builder, config, name))
    return Decoder(builder, config, ends, layers, builder.norm("model.norm", config.norm_eps))


class _WindowLayer:
    """``inner`` over the pages of its group."""

    def __init__(self, inner: PreNormLayer, spec: CacheSpec) -> None:
        assert isinstance(spec, Window)
        self._inner, self._spec = inner, spec

    @property
    def first_norm(self) -> Norm:
        return self._inner.first_norm

    def set_next_norm(self, norm: Norm) -> None:
        self._inner.set_next_norm(norm)

    def __call__(
        self, x: Any, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Any = None
    ) -> tuple[Any, Tensor]:
        return self._inner(x, residual, cos, sin, cache, batch.in_window(self._spec), wanted)


class _Mixer:
    """A layer that adds ``mix`` of the normed residual stream to it."""

    first_norm: Norm | None = None

    def __init__(self, builder: ModelBuilder, config: MixedConfig, name: str) -> None:
        self.heads, self.dim = config.heads, config.head_dim
        self.norm = builder.norm(f"{name}.norm", config.norm_eps)
        self.queries, self.output = builder.linear(f"{name}.q_proj"), builder.linear(f"{name}.o_proj")

    def set_next_norm(self, norm: Norm) -> None:
        """The sum is taken here."""

    def __call__(
        self, x: Any, residual: Tensor, cos: Tensor, sin: Tensor, cache: Any, batch: ForwardBatch, wanted: Any = None
    ) -> tuple[Any, Tensor]:
        normed, total = norm_of_sum(self.norm, x, residual)
        total = total + self.output(self.mix(normed, cache, batch))
        return None, total if wanted is None else total.index_select(0, wanted)

    def mix(self, x: Tensor, cache: Any, batch: ForwardBatch) -> Tensor:
        raise NotImplementedError


class _LatentLayer(_Mixer):
    def __init__(self, builder: ModelBuilder, config: MixedConfig, name: str) -> None:
        super().__init__(builder, config, name)
        self.vectors = builder.linear(f"{name}.kv_proj")

    def mix(self, x: Tensor, cache: Any, batch: ForwardBatch) -> Tensor:
        assert batch.rows is not None
        write_latent(cache, batch.cache_index, self.vectors(x))
        queries = self.queries(x).view(len(x), self.heads, LATENT_DIM + LATENT_ROPE_DIM)
        return attend_latent(queries, cache, batch.rows, LATENT_DIM, 0.25).flatten(1)


class _StateLayer(_Mixer):
    def __init__(self, builder: ModelBuilder, config: MixedConfig, name: str) -> None:
        super().__init__(builder, config, name)
        self.spec = _spec(config, "state")
        self.keys, self.values = builder.linear(f"{name}.k_proj"), builder.linear(f"{name}.v_proj")
        self.gate = builder.linear(f"{name}.gate_proj")

    def mix(self, x: Tensor, cache: Any, batch: ForwardBatch) -> Tensor:
        def run(inputs: tuple[Tensor, ...], segments: tuple[StateSegments, ...]) -> Tensor:
            (x,) = inputs
            out = x.new_empty(len(x), self.heads * self.dim)

            def advance(segment: StateSegments, states: list[Tensor]) -> list[Tensor]:
                memory, before = states
                tokens, mine = segment.tokens, segment.take(x)
                shifted = torch.cat((before.unsqueeze(1), mine[:, :-1]), 1)
                mixed = (mine + 0.5 * shifted).flatten(0, 1)
                shape = (*tokens.shape, self.heads, self.dim)
                q, k, v = (part(mixed).view(shape) for part in (self.queries, self.keys, self.values))
                decay = torch.sigmoid(self.gate(mixed) + 2.0).view(*tokens.shape, self.heads, 1, 1)
                decay, k = 1 + segment.without_padding(decay - 1), segment.without_padding(k)
                results = []
                for at in range(tokens.shape[1]):
                    memory = memory * decay[:, at] + torch.einsum("nhk,nhv->nhkv", k[:, at], v[:, at])
                    results.append(torch.einsum("nhk,nhkv->nhv", q[:, at], memory).flatten(1))
                segment.put(out, torch.stack(results, 1) * self.dim**-0.5)
                return [memory, mine[:, -1]]

            advance_states(cache, segments, advance)
            return out

        return batch.bounded[self.spec].run(run, x)


def make_mixed_model(directory: Path, kinds: Sequence[str], window: int = 24, **overrides: Any) -> Path:
    """Write a model with layers of these kinds, of random weights large enough for every layer to matter."""
    changes = {"num_hidden_layers": len(kinds), "layer_types": list(kinds), "sliding_window": window}
    make_tiny_model(directory, **(changes | {"architectures": [ARCHITECTURE]} | overrides))
    raw = json.loads((directory / "config.json").read_text())
    rng = np.random.default_rng(5)
    weights: dict[str, np.ndarray] = {}
    for name, spec in table_of(tensors(config(ConfigReader(raw, ARCHITECTURE)))).items():
        if len(spec.shape) == 1:
            weights[name] = np.ones(spec.shape, dtype=np.float32)
            continue
        gain = 1.0 if "embed" in name else 3.0 / spec.shape[1] ** 0.5
        weights[name] = (rng.standard_normal(spec.shape) * gain).astype(np.float32)
    save_file(weights, directory / "model.safetensors")
    return directory


def install(site: Path) -> Path:
    """Write the metadata of a distribution that adds the family; with ``site`` on the path it is installed."""
    metadata = site / "mixed_caches-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mixed-caches\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[troupe.models]\n{ARCHITECTURE} = tests.kits.mixed_caches\n")
    return site
