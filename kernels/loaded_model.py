"""What is made once, when a model is loaded: its weights, its cache, the tables of its slots.

First its files are opened, and what cannot be run here is refused. Then the ranks find each other, and each takes its
part of the weights; what memory is left says how large the cache is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.captures import Passes
from kernels.loading import WeightLoader, open_weights
from kernels.models.config import ModelConfig, read_config
from kernels.models.decoder import Decoder, tensor_shapes
from kernels.models.kinds import one_of_each_kind
from kernels.outputs import StepOutputs
from kernels.parallel.group import Group
from kernels.parallel.partition import local_config, tensor_parts
from kernels.platforms.base import Memory, Platform
from kernels.quantization.cache_scales import CacheChoice, choose_cache
from kernels.quantization.recognise import recognise
from kernels.rehearsal import Rehearsal
from kernels.sampling import Sampler
from kernels.sizing import cache_pages, context_length
from kernels.slots import SlotTable
from kernels.speculative.backend import draft_platform
from kernels.speculative.drafter import Drafter, DrafterContext
from kernels.speculative.looking_ahead import look_ahead
from kernels.speculative.select import captured_layers, make_drafter
from kernels.speculative.speculator import Speculator
from kernels.step import ModelInfo, RunnerConfig

__all__ = ["LoadedModel", "OpenModel", "Phases", "load_model", "open_model"]

Progress = Callable[[str, float], None]
"""Called with a stage (weights | cache | warmup) and the fraction of the whole load that is done."""


class Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._begun
        self._begun = now


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model whose files are open, and of which nothing is on the device yet.

    ``whole``: all of it; ``part``: this rank's. ``context``: tokens that a sequence may have. ``captures``: layers
    whose results the drafter wants. ``cache``: how keys and values are kept.
    """

    whole: ModelConfig
    part: ModelConfig
    dtype: torch.dtype
    context: int
    captures: tuple[int, ...]
    weights: WeightLoader
    cache: CacheChoice


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """All that steps are run with. ``caches``: a layer's each; ``draft_caches``: the drafter's.

    ``windows``: lengths that the layers have. ``speculator``: None where nothing is guessed. ``info``: all but the
    seconds that loading takes and the graphs, which are captured later.
    """

    config: RunnerConfig
    platform: Platform
    group: Group
    model: Decoder
    windows: frozenset[int]
    sampler: Sampler
    slots: SlotTable
    caches: list[Any]
    draft_caches: list[Any]
    speculator: Speculator | None
    outputs: StepOutputs
    info: ModelInfo


def open_model(config: RunnerConfig, platform: Platform, progress: Progress) -> OpenModel:
    """Raises ConfigError, LoadError or PlatformError."""
    whole = read_config(config.model_path, config.config_overrides, quantized=True)
    part = local_config(whole, config.tp_size)
    dtype = platform.dtype(config.dtype, part.dtype)
    context = context_length(config, part)
    captures = captured_layers(config.speculation, whole) if config.speculation is not None else ()
    scheme = recognise(config.model_path, config.quantization, config.config_overrides)
    shapes = tensor_shapes(whole) if scheme is None else scheme.shapes(tensor_shapes(whole))
    weights = open_weights(
        config.model_path,
        config.load_format,
        shapes,
        tensor_parts(shapes, whole, config.tp_rank, config.tp_size),
        dtype,
        platform.device,
        config.random_seed,
        lambda fraction: progress("weights", 0.9 * fraction),
        scheme,
    )
    cache = choose_cache(config, whole, dtype, platform)
    platform.cache_dtype = cache.dtype
    return OpenModel(whole, part, dtype, context, captures, weights, cache)


def load_model(
    opened: OpenModel, config: RunnerConfig, platform: Platform, group: Group, progress: Progress, clock: Phases
) -> LoadedModel:
    """Take the weights, make the cache, warm up. Every rank of the group must do so.

    Raises ConfigError, LoadError, PlatformError or CacheSizeError.
    """
    part, dtype, weights, speculation = opened.part, opened.dtype, opened.weights, config.speculation
    model = Decoder(part, weights, platform, dtype, group, opened.captures, config.fp32_head)
    sampler = Sampler(
        part.vocab_size,
        config.max_slots,
        platform.device,
        platform.cut,
        platform.put,
        platform.greedy,
        platform.draw,
        platform.samples_apart,
    )
    windows = frozenset(part.windows)
    drafter: Drafter | None = None
    weight_bytes, draft_bytes = weights.weight_bytes + platform.widened_bytes, 0
    if speculation is not None:
        own = draft_platform(config, speculation, platform, part.dtype)
        before = own.widened_bytes
        drafter = make_drafter(
            DrafterContext(config, speculation, own, group, model, part, opened.whole, dtype, opened.context)
        )
        draft_bytes = drafter.weight_bytes + own.widened_bytes - before
    guesses = drafter.most_nodes - 1 if drafter is not None else 0
    group.least(0)  # from here on each waits for the others: first let all have read their weights
    clock.end("weights")

    rehearsal = Rehearsal(config, platform, model, sampler, windows)
    reserved = _step_memory(opened, config, platform, model, rehearsal, drafter, group)
    spare = drafter.spare_bytes if drafter is not None else 0
    memory = platform.memory()
    scales = opened.cache.scales
    token_bytes = part.layers * platform.cache_bytes(part.kv_heads, part.head_dim, dtype, scales is not None)
    pages = group.least(
        cache_pages(
            config,
            token_bytes,
            opened.context,
            weight_bytes + draft_bytes + spare,
            Memory(memory.total, max(0, memory.free - reserved - spare)),
            platform.default_memory_fraction,
            platform.default_cache_tokens,
            drafter.cache_bytes if drafter is not None else 0,
            1 + 2 * guesses,
        )
    )
    context = min(opened.context, (pages - 1) * config.page_size)
    # The model's come last: a platform plans by the heads of those that were made last.
    draft_caches: list[Any] = drafter.make_caches(pages) if drafter is not None else []
    caches: list[Any] = platform.make_cache(
        part.layers, pages, config.page_size, part.kv_heads, part.head_dim, dtype, scales
    )
    slots = SlotTable(platform, config.max_slots, context, config.page_size, pages, part.vocab_size, guesses)
    speculator: Speculator | None = None
    if drafter is not None and speculation is not None:
        speculator = Speculator(drafter, speculation, platform, sampler, slots)
    outputs = StepOutputs(platform, model, sampler, slots, caches, speculator)
    clock.end("cache")
    progress("cache", 0.92)
    rehearsal.warm_up(caches, slots)
    info = ModelInfo(
        architecture=part.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=platform.name,
        cpu_isa=platform.cpu_isa,
        vocab_size=part.vocab_size,
        context_length=context,
        layers=part.layers,
        parameters=weights.parameters,
        weight_bytes=weight_bytes,
        num_pages=pages,
        page_size=config.page_size,
        cache_bytes=token_bytes * config.page_size * pages,
        cache_dtype=str(opened.cache.dtype or dtype).removeprefix("torch."),
        cache_token_bytes=token_bytes,
        load_seconds={},
        speculative_nodes=drafter.most_nodes if drafter is not None else 1,
        speculative_depth=drafter.depth if drafter is not None else 0,
        speculative_levels=drafter.levels(speculation) if drafter is not None and speculation is not None else (0,),
        speculative_tokens=platform.verified_tokens if drafter is not None and drafter.stepwise else 0,
        speculative_apart=drafter is not None and platform.verifies_apart,
        draft_parameters=drafter.parameters if drafter is not None else 0,
        draft_weight_bytes=draft_bytes,
    )
    return LoadedModel(
        config, platform, group, model, windows, sampler, slots, caches, draft_caches, speculator, outputs, info
    )


def _step_memory(
    opened: OpenModel,
    config: RunnerConfig,
    platform: Platform,
    model: Decoder,
    rehearsal: Rehearsal,
    drafter: Drafter | None,
    group: Group,
) -> int:
    """Bytes that the largest step takes beside weights and cache, where the platform wants to know. Kernels of this and
    other steps are compiled before, where that takes long."""
    part, longest = opened.part, config.max_step_tokens
    pages, guesses = -(-longest // config.page_size), drafter.most_nodes - 1 if drafter is not None else 0
    draft_caches = drafter.make_caches(1) if drafter is not None and platform.compiles else []
    caches = platform.make_cache(
        part.layers, pages, config.page_size, part.kv_heads, part.head_dim, opened.dtype, opened.cache.scales
    )
    # A row that verifies is sampled from after each guess.
    sampled = min((config.max_slots - 1) * (1 + guesses), longest)

    given = np.array([longest]), sampled, np.arange(pages, dtype=np.int32)[None]

    def make_slots() -> SlotTable:
        return SlotTable(platform, config.max_slots, opened.context, config.page_size, pages, part.vocab_size, guesses)

    def largest() -> None:
        rehearsal.run(caches, make_slots(), *given)

    def passes() -> None:
        some, own = one_of_each_kind(model, caches)
        ahead = rehearsal.of(some)
        ahead.logits(own, *given)
        ahead.look_ahead(own)
        captured = Passes(config, platform, some, own, make_slots(), part.windows, lambda could: could)
        rows = config.max_slots - 1
        if drafter is None:
            captured.capture_steps(rows)
        else:
            captured.capture_decodes(rows)
            rows = min(rows, longest // drafter.most_nodes)
            verifies = captured.capture_decodes(rows, drafter.most_nodes, drafter.branches, drafter.depth)
            drafter.capture(lambda could: could, verifies.ends if verifies is not None else {})
            look_ahead(config, platform, some, part, opened.dtype, own, drafter, make_slots())

    if group.size == 1:  # ranks would wait for one another in passes that only some of them can make
        platform.compile_ahead(passes)
    draft_caches.clear()  # the drafter holds this very list
    return platform.step_memory(largest)
