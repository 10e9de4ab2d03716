"""A causal language model of transformers' own modeling code, over our paged cache.

The model's code reads the tokens of all rows of a step as one sequence. Rows are separate in attention alone, which is
ours (``kernels.models.fallback.attention``). Nothing is captured: a step runs operator by operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.caches import CacheGroup, Paged, Window
from kernels.contract.errors import ConfigError
from kernels.contract.model_files import LENGTH_KEYS
from kernels.core.batch import ForwardBatch
from kernels.devices.row_attention import CapAndSinks
from kernels.models.config import ModelConfig, RopeConfig
from kernels.models.decoder import Decoder
from kernels.models.fallback.attention import PAGED, PROBE, Call, register, running
from kernels.models.fallback.loading import architecture_of, build_empty, load, read_config
from kernels.models.fallback.parallel import divide, quantize, sum_over_ranks
from kernels.models.fallback.probe import probe
from kernels.models.fallback.sizes import CodeModel, LayerCall
from kernels.models.layers.builder import ModelBuilder
from kernels.weights.loading import WeightLoader
from kernels.weights.tensors import Shard

__all__ = ["CodeDecoder", "build", "caches", "config", "divided"]


def config(
    path: str | Path,
    raw: Mapping[str, Any],
    *,
    trusted: bool = False,
    quantization: str = "",
    dummy: bool = False,
    seed: int = 0,
) -> ModelConfig:
    """The sizes of the model in directory ``path``, whose config.json with overrides is ``raw``. Raises ConfigError
    where the model cannot run."""
    register()
    theirs = read_config(path, raw, trusted)
    name = architecture_of(theirs, raw, trusted)
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{name} runs by transformers' modeling code, which needs weights in floats; use the bf16 or fp32 "
            "checkpoint"
        )
    result = probe(build_empty(theirs, PROBE, trusted))
    text = theirs.get_text_config()
    longest = next(
        (size for key in LENGTH_KEYS if isinstance(size := getattr(text, key, None), int) and size > 0), None
    )
    if longest is None:
        raise ConfigError(f"config.json of {name} does not say how long a sequence may be (max_position_embeddings)")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or getattr(text, "dtype", None)
    first = result.layers[0]
    return ModelConfig(
        architecture=name,
        vocab_size=result.vocab_size,
        hidden_size=result.hidden_size,
        intermediate_size=result.hidden_size,
        layers=len(result.layers),
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.dim,
        norm_eps=1e-6,
        max_positions=longest,
        rope=RopeConfig(1.0, "none"),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        windows=tuple(layer.window for layer in result.layers),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        code=CodeModel(str(path), theirs, result.layers, result.base, trusted, quantization, dummy, seed),
    )


def divided(config: ModelConfig, size: int) -> ModelConfig:
    """The part of one of ``size`` ranks. Raises ConfigError where the model's plan cannot be followed."""
    code = config.code
    if code is None or size == 1:
        return config
    empty = build_empty(code.config, PROBE, code.trusted)
    divide(empty, Shard(0, size))
    layers = probe(empty).layers
    pairs = zip(code.layers, layers, strict=True)
    shares = {(whole.heads // own.heads, whole.kv_heads // own.kv_heads) for whole, own in pairs}
    if not shares <= {(1, 1), (size, size)}:
        raise ConfigError(
            f"{code.layers[0].kv_heads} key heads of {config.architecture} cannot be divided by --tensor-parallel-size "
            f"{size}; lower it"
        )
    first = layers[0]
    return dataclasses.replace(
        config, heads=first.heads, kv_heads=first.kv_heads, code=dataclasses.replace(code, layers=layers)
    )


def caches(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """Keys and values of each call of attention."""
    assert config.code is not None
    groups: dict[Paged | Window, list[int]] = {}
    for index, layer in enumerate(config.code.layers):
        groups.setdefault(_spec(layer), []).append(index)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in groups.items())


def _spec(layer: LayerCall) -> Paged | Window:
    paged = Paged(layer.kv_heads, layer.dim, layer.dim)
    return Window(paged, layer.window) if layer.window else paged


def build(config: ModelConfig, builder: ModelBuilder) -> CodeDecoder:
    """The decoder, with its weights on the device."""
    assert config.code is not None
    return CodeDecoder(config, config.code, builder)


class _Reached(Exception):
    """The hidden states are known; the head is not wanted."""


class CodeDecoder(Decoder):
    """transformers' model as a decoder. ``base``: its part that makes hidden states."""

    def __init__(self, config: ModelConfig, code: CodeModel, builder: ModelBuilder) -> None:
        self.device, self.rows, self.captures, self.stage = builder.ops, None, (), builder.stage
        self.hidden_size, self.reads_rows = config.hidden_size, True
        self.pooling = self.classifier = None
        self._layers, self._dtype = code.layers, builder.dtype
        model, ops, mesh = load(code, PAGED, builder.dtype).requires_grad_(False), builder.ops, builder.mesh
        if ops.torch_device.type not in ("cpu", "cuda"):  # torch has no grouped products elsewhere
            model.set_experts_implementation("eager")
        parameters = sum(part.numel() for part in model.parameters())
        summed = divide(model, Shard(mesh.rank, mesh.size)) if mesh.size > 1 else []
        size = quantize(model, code.quantization, ops, builder.dtype) if code.quantization else 0
        self._model = model.to(ops.torch_device)
        sum_over_ranks(model, summed, mesh)
        if isinstance(builder.source, WeightLoader):
            tensors = {id(part): part for part in (*model.parameters(), *model.buffers())}.values()
            builder.source.add(parameters, size + sum(part.nbytes for part in tensors))
        base = model.get_submodule(code.base)
        self._inner = base.forward
        self._hidden: Tensor | None = None
        self._given: Tensor | None = None
        base.forward = self._run_base

    def _run_base(self, *args: Any, **kwargs: Any) -> Any:
        """In place of ``base.forward``: computes hidden states and stops, or returns those that are given."""
        if self._given is not None:
            return self._kind(last_hidden_state=self._given) if self._kind is not tuple else (self._given,)
        result = self._inner(*args, **kwargs)
        self._kind: Any = tuple if isinstance(result, tuple) else type(result)
        self._hidden = result[0]
        raise _Reached

    def run(
        self, batch: ForwardBatch, caches: Sequence[Any], capture: bool = True, wanted: Tensor | None = None
    ) -> Tensor:
        """As ``Decoder.run``."""
        batches = {spec: batch.in_window(spec) for spec in batch.bounded if isinstance(spec, Window)}
        calls = count()

        def attend(call: Call) -> Tensor:
            index = next(calls)
            layer = self._layers[index]
            spec = _spec(layer)
            seen = batches.get(spec, batch) if isinstance(spec, Window) else batch
            return self._attend(call, layer, caches[index], seen)

        try:
            with running(attend):
                ids = batch.token_ids.to(torch.int64)[None]
                self._model(input_ids=ids, position_ids=batch.positions[None], use_cache=False)
        except _Reached:
            pass
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden[0] if wanted is None else hidden[0].index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """As ``Decoder.logits``: what the model's code does behind ``base``."""
        zeros = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._given = hidden[None]
        try:
            result: Tensor = self._model(input_ids=zeros, position_ids=zeros, use_cache=False).logits
        finally:
            self._given = None
        return result[0]

    def _attend(self, call: Call, layer: LayerCall, cache: Any, batch: ForwardBatch) -> Tensor:
        parts = (call.queries, call.keys, call.values)
        queries, keys, values = (
            F.pad(part[0].transpose(0, 1).to(self._dtype), (0, layer.dim - part.shape[3])) for part in parts
        )
        self.device.cache.write(cache, batch.cache_index, torch.cat((keys, values), 1))
        queries, attention = queries.contiguous(), self.device.attention
        if layer.cap or layer.sinks:
            extra = CapAndSinks(layer.cap, None if call.sinks is None else call.sinks.float())
            result = attention.attend_capped(queries, cache, batch, layer.window, call.scale, extra)
        else:
            result = attention.attend(queries, cache, batch.plans[layer.window], call.scale)
        return result.view(1, len(queries), layer.heads, layer.dim)[..., : layer.v_dim].to(call.queries.dtype)
