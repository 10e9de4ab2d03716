"""Loads a model: its weights, its cache, the tables of its slots.

The files are opened first, and an unsupported model is refused. Then the ranks rendezvous, and each loads its part of
the weights. The remaining memory determines the size of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import torch

from kernels.contract.caches import CacheGroup, Latent, Paged, follows_chains, has_states, is_plain
from kernels.contract.config import RunnerConfig
from kernels.contract.divisions import stage_layers
from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import read_location
from kernels.contract.expert_settings import ExchangeSettings
from kernels.contract.info import ModelInfo
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.layer_context import LayerContext, RowAdapters
from kernels.devices.base import Device
from kernels.devices.group_caches import token_bytes
from kernels.devices.latent_cache import clear_latent
from kernels.devices.memory import MemoryUsage
from kernels.distributed.context_parallel import ContextParallel
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.group import Group
from kernels.distributed.pipeline import make_stage
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution.captures import Passes
from kernels.execution.layer_groups import LayerGroups, check_groups
from kernels.execution.outputs import StepOutputs
from kernels.execution.pooled import DenseLayers
from kernels.execution.rebalancing import Rebalancer
from kernels.execution.warmup import WarmUp
from kernels.grammar.slots import GrammarSlots
from kernels.models.config import ModelConfig, local_config
from kernels.models.config_loader import CodeChoice, read_config
from kernels.models.decoder import Decoder
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.expert_places import ExpertPlaces
from kernels.models.registry import build, caches, tensors
from kernels.models.representative_layers import one_of_each_kind
from kernels.models.stages import StageAdapters, StageSource, check_stages, stage_config
from kernels.sampling.sampler import Sampler
from kernels.speculation.drafter import Drafter, DrafterContext
from kernels.speculation.drafters.ngram import NgramDrafter
from kernels.speculation.load import captured_layers, draft_device, make_drafter
from kernels.speculation.speculator import Speculator
from kernels.speculation.stage_drafter import StageDrafter
from kernels.speculation.warmup import TargetParts, precompile_drafts
from kernels.state.cache_dtype import CacheChoice, choose_cache
from kernels.state.cache_size import cache_pages, context_length
from kernels.state.group_sizes import GroupSizes
from kernels.state.slots import SlotTable
from kernels.weights.loading import CheckpointFiles, Placement, WeightLoader, open_weights
from kernels.weights.quantization.detect import detect_scheme
from kernels.weights.quantization.online import ONLINE
from kernels.weights.tensors import Shard

__all__ = ["LoadedModel", "OpenModel", "Phases", "load_model", "open_model"]

Progress = Callable[[str, float], None]
"""Called with a stage (weights | cache | warmup) and the fraction of the whole load that is done."""


class Phases:
    """The seconds of each phase of loading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._begun
        self._begun = now


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model whose files are open, with nothing on the device yet.

    ``whole``: sizes of the full model; ``part``: of this rank's part. ``context``: tokens that a sequence may have.
    ``captures``: layers whose results the drafter reads. ``cache``: dtype and scales of keys and values. ``groups``:
    the cache groups of the layers.
    """

    whole: ModelConfig
    part: ModelConfig
    dtype: torch.dtype
    context: int
    captures: tuple[int, ...]
    weights: WeightLoader
    cache: CacheChoice
    groups: tuple[CacheGroup, ...]
    adapters: RowAdapters | None = None


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model with everything that its steps need. ``caches``: one per layer, in ``groups``; ``draft_caches``:
    the drafter's. ``shared``: with data-parallel attention, the ranks that share layers of experts; ``draft_experts``:
    the same for those of the draft, None if each part of attention has all of its own.
    ``peers``: the ranks that have the same layers. ``rebalancer``: moves experts; None: they stay.

    ``windows``: window lengths of the layers. ``speculator``: None without a draft. ``info``: the description, still
    without load times and captured graphs.
    """

    config: RunnerConfig
    device: Device
    group: Group
    model: Decoder
    windows: frozenset[int]
    sampler: Sampler
    slots: SlotTable
    caches: list[Any]
    groups: LayerGroups
    draft_caches: list[Any]
    speculator: Speculator | None
    outputs: StepOutputs
    info: ModelInfo
    grammars: GrammarSlots | None = None
    shared: SharedExperts | None = None
    rebalancer: Rebalancer | None = None
    draft_experts: DraftExperts | None = None
    peers: Group = field(default_factory=Group)

    def agree(self, could: bool) -> bool:
        """Whether every rank of ``peers`` passed True. All of them must call it."""
        return bool(self.peers.minimum(int(could)))

    def clear_pages(self, pages: list[int]) -> None:
        """Overwrite pages of the model's and the draft's caches with zeros."""
        self.groups.clear(pages)
        if self.speculator is not None and self.speculator.drafter.latent:
            clear_latent(self.draft_caches, pages)
        elif self.draft_caches:
            self.device.cache.clear(self.draft_caches, pages)


def open_model(config: RunnerConfig, device: Device, progress: Progress) -> OpenModel:
    """Open the files and check that the model can run. Raises ConfigError, LoadError or UnsupportedError."""
    whole = read_config(
        config.model_path,
        config.config_overrides,
        quantized=True,
        is_embedding=config.is_embedding,
        code=CodeChoice(
            config.model_impl,
            config.trust_remote_code,
            config.quantization if config.quantization in ONLINE else "",
            config.load_format == "dummy",
            config.random_seed,
        ),
    )
    if whole.code is not None:
        _check_code(whole, config)
    if whole.pooling is not None and config.speculation is not None:
        raise ConfigError(
            f"{whole.architecture} generates no text that could be drafted; leave --speculative-algorithm out"
        )
    if config.pp_size > 1:
        _check_pipeline(whole, config)
    _check_experts(whole, config)
    if config.two_batch_threshold is not None:
        _check_two_batches(whole)
    if config.exchange is not None:
        _check_exchange(whole, config.exchange, config)
    if config.dp_size > 1:
        _check_shared(whole, config)
    if config.context_parallel:
        whole = _with_whole_attention(whole, config)
    if config.whole_dense:
        whole = _with_whole_dense(whole)
    routed_alone = config.exchange is not None
    local = local_config(whole, config.attention_size, config.dp_size, config.ep_size, routed_alone=routed_alone)
    part = stage_config(local, config.pp_rank, config.pp_size)
    dtype = device.select_dtype(config.dtype, part.dtype)
    context = context_length(config, part)
    _check_states(whole, config)
    captures = captured_layers(config.speculation, whole) if config.speculation is not None else ()
    scheme = detect_scheme(config.model_path, config.quantization, config.config_overrides)
    weights = open_weights(
        CheckpointFiles(config.model_path, config.load_format, config.random_seed),
        tensors(whole) if scheme is None else scheme.adapt(tensors(whole)),
        Placement(dtype, device.torch_device, _shard(config)),
        scheme,
        lambda fraction: progress("weights", 0.9 * fraction),
    )
    cache = choose_cache(config, whole, dtype, device)
    if config.pp_size > 1 and cache.scales is not None:
        layers = stage_layers(whole.layers, config.pp_rank, config.pp_size)
        cache = replace(cache, scales=cache.scales[layers.start : layers.stop])
    device.cache.dtype, device.cache.page_size = cache.dtype, config.page_size
    groups = _open_groups(config, part, cache, context, device)
    return OpenModel(whole, part, dtype, context, captures, weights, cache, groups)


def _check_pipeline(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for what the stages of a pipeline do not run."""
    check_stages(whole, config.pp_size)


def _check_states(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for options of recurrent states where the model has none."""
    options = {
        "--max-mamba-cache-size": config.max_states,
        "--mamba-full-memory-ratio": config.state_memory_ratio,
        "--mamba-track-interval": config.snapshot_tokens,
    }
    given = [name for name, value in options.items() if value]
    if given and whole.recurrence is None:
        raise ConfigError(f"{whole.architecture} keeps no recurrent states; leave {', '.join(given)} out")


def _check_experts(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for experts that ``ep_size`` does not divide."""
    size, experts = config.ep_size, whole.experts
    if config.experts is not None and (size == 1 or config.pp_size > 1):
        raise ConfigError(
            "--ep-num-redundant-experts, --init-expert-location and --enable-eplb need --expert-parallel-size, and do "
            "not run with --pipeline-parallel-size; leave them out"
        )
    if size == 1:
        return
    if size < 1 or config.tp_size % size:
        raise ConfigError(f"--expert-parallel-size {size} must divide --tensor-parallel-size {config.tp_size}")
    option = "--expert-parallel-size" if config.exchange is None else "--moe-a2a-backend"
    if experts is None:
        raise ConfigError(f"{whole.architecture} has no experts to divide: leave {option} out")
    placed = whole.code is None and any(spec.is_placed for spec in tensors(whole).values())
    if not placed or experts.identities:
        raise ConfigError(
            f"the experts of {whole.architecture} can only be divided by their inner dimension: leave {option} out; "
            "--tensor-parallel-size divides them"
        )
    redundant = 0 if config.experts is None else config.experts.redundant
    if (experts.count + redundant) % size:
        more = f" and {redundant} copies" if redundant else ""
        how = f"by {option} {size}" if config.exchange is None else f"over {size} devices, as {option} does"
        raise ConfigError(
            f"the {experts.count} experts of {whole.architecture}{more} cannot be divided {how}; "
            "--ep-num-redundant-experts adds further copies"
        )


def _places(opened: OpenModel, config: RunnerConfig, device: Device, group: Group) -> ExpertPlaces | None:
    """Where experts are; None: divided in their order. Raises ConfigError, also if ranks have read different files."""
    settings, experts = config.experts, opened.whole.experts
    if settings is None or experts is None:
        return None
    count, sparse, parts = experts.count, sorted(experts.layers), config.ep_size
    shape = opened.whole.layers, count
    moves = settings.rebalance is not None
    if moves:
        device.finish_operators()
    placement = read_location(settings.location, shape, sparse, count + settings.redundant, parts)
    if not group.agrees(crc32(placement.tobytes())):
        raise ConfigError(
            "--init-expert-location: workers have read different placements; give all nodes the same file"
        )
    source = group.rank if config.exchange is not None and settings.dispatch == "static" else None
    return ExpertPlaces(placement, count, parts, settings.dispatch, device.torch_device, moves=moves, source=source)


def _check_places(places: ExpertPlaces, whole: ModelConfig) -> None:
    """Raises ConfigError if layers of experts are not among those that were placed."""
    if places.taken != len(places.layers):
        raise ConfigError(
            f"the experts of {whole.architecture} cannot be placed; leave --ep-num-redundant-experts, "
            "--init-expert-location and --enable-eplb out"
        )


def _check_code(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for options that transformers' modeling code does not support."""
    wrong = {
        "--speculative-algorithm": config.speculation is not None,
        "--quantization": config.quantization not in ("", "unquant", *ONLINE),
        "--kv-cache-dtype": bool(config.kv_cache_dtype),
        "--enable-fp32-lm-head": config.fp32_head,
        "--enable-deterministic-inference": config.invariant,
        "--enable-lora": config.adapters is not None,
    }
    given = [name for name, is_given in wrong.items() if is_given]
    if given:
        raise ConfigError(
            f"{whole.architecture} runs by transformers' modeling code, which is without {', '.join(given)}; leave "
            "it out"
        )


def _shard(config: RunnerConfig) -> Shard:
    """The rank's part of the tensors."""
    parts = config.ep_size
    experts = Shard(config.tp_rank, config.tp_size, ep_size=parts) if config.dp_size > 1 else None
    return Shard(config.attention_rank, config.attention_size, experts, parts, config.exchange is not None)


def _check_shared(whole: ModelConfig, config: RunnerConfig) -> None:
    """Raises ConfigError for what data-parallel attention does not run."""
    if whole.code is not None or whole.experts is None:
        raise ConfigError(
            f"{whole.architecture} has no layers of experts that ranks could share; leave --enable-dp-attention out: "
            "--data-parallel-size alone runs replicas of the whole model"
        )
    if config.pp_size > 1:
        raise ConfigError("--enable-dp-attention does not run with --pipeline-parallel-size; leave one out")


def _check_exchange(whole: ModelConfig, exchange: ExchangeSettings, config: RunnerConfig) -> None:
    """Raises ConfigError if the model or the parallel sizes allow no all-to-all of experts."""
    if config.dp_size == 1 or config.ep_size != config.tp_size:
        raise ConfigError(
            "--moe-a2a-backend deepep needs --enable-dp-attention and --enable-expert-parallel: without the first every"
            " rank has all tokens, without the second no rank has whole experts"
        )
    if exchange.overlap and (whole.experts is None or not whole.experts.shared):
        raise ConfigError(
            f"--enable-single-batch-overlap: {whole.architecture} has no shared expert that could run beside the "
            "exchange of rows; leave it out"
        )


def _with_whole_attention(whole: ModelConfig, config: RunnerConfig) -> ModelConfig:
    """The config with whole attention on every rank. Raises ConfigError for models and options without it."""
    latent, option = whole.latent, "--enable-nsa-prefill-context-parallel"
    if latent is None or latent.index is None:
        raise ConfigError(f"{whole.architecture} has no sparse attention, which {option} needs; leave it out")
    others = {
        "drafts that read hidden states between layers (EAGLE3, DFLASH)": config.speculation is not None
        and bool(captured_layers(config.speculation, whole)),
        "--pipeline-parallel-size": config.pp_size > 1,
        "--enable-dp-attention": config.dp_size > 1,
    }
    for name, given in others.items():
        if given:
            raise ConfigError(f"{option} does not run with {name}; leave one out")
    return replace(whole, latent=replace(latent, whole=True))


def _with_whole_dense(whole: ModelConfig) -> ModelConfig:
    """The config with whole dense feed-forward layers on every rank. Raises ConfigError for a model without any."""
    result = replace(whole, whole_dense=True)
    if whole.code is not None or whole.experts is None or tensors(result) == tensors(whole):
        raise ConfigError(
            f"{whole.architecture} has no dense feed-forward layers beside layers of experts that could be whole on "
            "each device; leave --moe-dense-tp-size out"
        )
    return result


def _check_layers(shared: SharedExperts, whole: ModelConfig) -> None:
    """Raises ConfigError if layers of experts are not among those that are shared."""
    count = 0 if whole.experts is None else len(whole.experts.layers)
    if len(shared.layers) != count:
        raise ConfigError(
            f"the layers of experts of {whole.architecture} cannot be shared; leave --enable-dp-attention out"
        )


_WINDOW_SHARE = 0.5
"""Layers keep their windows alone if the longest sequence then takes less than this share of memory: drafts and narrow
caches know one page table."""


def _check_two_batches(whole: ModelConfig) -> None:
    """Raises ConfigError for a model whose layers keep something beside pages, which two passes in turns would mix."""
    reasons = {
        "transformers' modeling code runs it": whole.code is not None,
        "its layers keep recurrent states": whole.recurrence is not None,
        "its attention is sparse": whole.indexed,
        "it embeds or classifies whole prompts": whole.pooling is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise ConfigError(
                f"{whole.architecture} cannot run as two batches: {reason}; leave --enable-two-batch-overlap out"
            )


def _open_groups(
    config: RunnerConfig, part: ModelConfig, cache: CacheChoice, context: int, device: Device
) -> tuple[CacheGroup, ...]:
    """The cache groups of a rank's layers. Raises ConfigError for options that only plain pages support."""
    kept = sum(min(context, abs(window) or context) for window in part.windows)
    plain_only = config.speculation is not None or cache.dtype is not None or config.two_batch_threshold is not None
    eager = part.eager_with(device.attention.plans)
    share = 1.0 if eager else _WINDOW_SHARE  # of which nothing is captured anyway
    saves = kept < share * context * part.layers
    windows = config.window_pages and saves and not plain_only and config.pp_size == 1  # stages share page tables
    groups = caches(part, windows=windows)
    if config.snapshot_tokens % config.page_size:
        raise ConfigError(
            f"mamba_track_interval {config.snapshot_tokens} is not a multiple of --page-size {config.page_size}; "
            "change one of them"
        )
    check_groups(groups, part.layers)
    chunk = -min(part.windows)
    if chunk > 0 and chunk % config.page_size:
        raise ConfigError(
            f"attention_chunk_size {chunk} of {part.architecture} is not a multiple of --page-size {config.page_size}"
        )
    if config.page_size % part.page_unit:
        raise ConfigError(
            f"--page-size {config.page_size} is not a multiple of {part.page_unit} tokens, over which "
            f"{part.architecture} divides its cache's entries; change it"
        )
    if part.eager_attention and config.invariant:
        raise ConfigError(
            f"{part.architecture} has {part.eager_attention}, for which no attention gives results independent "
            "of the chunks of prompts; leave --enable-deterministic-inference out"
        )
    shifted = not eager and "offsets" not in device.attention.plans
    if part.row_attention and shifted and any(layer.offsets is not None for layer in cache.scales or ()):
        raise ConfigError(
            f"{part.architecture} has {part.eager_attention}, which does not read a cache whose static scales have "
            "offsets: leave --kv-cache-dtype out, or scale tokens dynamically"
        )
    latent = part.latent
    dependent = latent is not None and (latent.index is not None or not device.attention.invariant_latent)
    if dependent and config.invariant:
        raise ConfigError(
            f"latent attention of {part.architecture} has no form whose results are independent of the chunks of "
            "prompts; leave --enable-deterministic-inference out"
        )
    if part.recurrence is not None and config.invariant:
        raise ConfigError(
            f"states of {part.architecture} have no form whose results are independent of the chunks of prompts; leave "
            "--enable-deterministic-inference out"
        )
    if is_plain(groups):
        return groups
    kinds = ", ".join(sorted({type(group.spec).__name__.lower() for group in groups}))
    if config.speculation is not None and config.speculation.topk > 1 and follows_chains(groups):
        what = "states" if has_states(groups) else "windows"
        raise ConfigError(
            f"layers of {part.architecture} keep {what}, which follow a single chain of draft tokens: use "
            "--speculative-eagle-topk 1"
        )
    if cache.dtype is not None and not all(isinstance(group.spec, Paged | Latent) for group in groups):
        raise ConfigError(
            f"--kv-cache-dtype is for keys and values of all tokens in every layer, and the layers of "
            f"{part.architecture} keep: {kinds}; leave it out"
        )
    return groups


def load_model(
    opened: OpenModel, config: RunnerConfig, device: Device, group: Group, progress: Progress, clock: Phases
) -> LoadedModel:
    """Load the weights, make the cache, warm up. Every rank of the group must call it.

    Raises ConfigError, LoadError, UnsupportedError or CacheSizeError.
    """
    part, dtype, weights, speculation = opened.part, opened.dtype, opened.weights, config.speculation
    stage, mesh = make_stage(group, config)
    first = stage_layers(opened.whole.layers, stage.index, stage.size).start
    shared: SharedExperts | None = None
    if config.dp_size > 1:
        shared = SharedExperts(
            group, config.dp_size, part.hidden_size, dtype, device.torch_device, exchange=config.exchange
        )
        mesh = shared.attention
    rows = None
    if opened.adapters is not None:
        adapters = opened.adapters if stage.size == 1 else StageAdapters(opened.adapters, first)
        rows = LayerContext(adapters, device.torch_device, mesh.rank, mesh.size)
    source = weights if stage.size == 1 else StageSource(weights, first)
    divided: ContextParallel | None = None
    if config.context_parallel:
        divided = ContextParallel(mesh, device.memory.put, device.attention.plan_layers)
    make = ModelBuilder(
        source,
        device,
        mesh,
        dtype,
        opened.context,
        opened.captures,
        config.fp32_head,
        stage,
        first_layer=first,
        whole_layers=opened.whole.layers,
        rows=rows,
        ep_size=config.ep_size,
        places=_places(opened, config, device, group),
        shared=shared,
        context_parallel=divided,
    )
    model, rebalancer = build(part, make), None
    assert isinstance(model, Decoder)
    if make.places is not None:
        _check_places(make.places, opened.whole)
        assert config.experts is not None
        if config.experts.rebalance is not None:
            sparse = sorted(part.experts.layers) if part.experts is not None else []
            rebalancer = Rebalancer(make.places, config.experts.rebalance, make.expert_mesh, sparse)
    if shared is not None:
        _check_layers(shared, opened.whole)
    sampler = Sampler(
        part.vocab_size if part.pooling is None else 1,
        config.max_slots,
        device.torch_device,
        own_top_k_top_p=device.sampling.top_k_top_p,
        put=device.memory.put,
        own_greedy=device.sampling.greedy,
        own_draw=device.sampling.draw,
        apart=device.traits.samples_row_by_row,
        own_mask=device.sampling.mask,
    )
    scales = opened.cache.scales
    sizes = GroupSizes.from_groups(
        opened.groups,
        lambda spec: token_bytes(device, spec, dtype, scales is not None),
        config.page_size,
        config.max_slots - 1,
        config.max_step_tokens,
        opened.context,
        snapshot_tokens=config.snapshot_tokens,
    )
    windows = frozenset(part.windows)
    drafter: Drafter | None = None
    draft_experts: DraftExperts | None = None
    ngram: NgramDrafter | None = None
    weight_bytes, draft_bytes = weights.weight_bytes + device.linear.dequantized_bytes, 0
    if rows is not None:
        weight_bytes += rows.adapters.nbytes
    if speculation is not None:
        draft_on = draft_device(config, speculation, device, part.dtype)
        if draft_on is not device:
            draft_on.agree(group.minimum)
        draft_experts = _draft_experts(config, speculation, part, group, dtype, device)
        before, read = draft_on.linear.dequantized_bytes, weights.weight_bytes
        if stage.is_last:
            drafter = make_drafter(
                DrafterContext(
                    config,
                    speculation,
                    draft_on,
                    mesh,  # with data-parallel attention each part drafts for its own requests
                    model,
                    part,
                    opened.whole,
                    dtype,
                    opened.context,
                    chains=follows_chains(opened.groups),
                    experts=draft_experts,
                )
            )
        ngram = drafter if isinstance(drafter, NgramDrafter) else None
        if stage.size > 1:
            drafter = StageDrafter(drafter, group, device, config.max_slots)
        assert drafter is not None
        weight_bytes += weights.weight_bytes - read  # a draft in the last stage may read the embeddings
        draft_bytes = drafter.weight_bytes + draft_on.linear.dequantized_bytes - before
    max_drafts = drafter.max_nodes - 1 if drafter is not None else 0
    sizes = sizes.with_drafts(max_drafts).with_states(config.max_states, config.state_memory_ratio)
    group.minimum(0)  # a barrier: all ranks have read their weights before one waits in a collective
    clock.end("weights")

    reserved = _step_memory(opened, config, device, model, sampler=sampler, sizes=sizes, drafter=drafter, group=group)
    spare = drafter.spare_bytes if drafter is not None else 0
    memory = device.memory.usage()
    pages = group.minimum(
        cache_pages(
            config,
            sizes.token_bytes,
            opened.context,
            weight_bytes + draft_bytes + spare,
            MemoryUsage(memory.total, max(0, memory.free - reserved - spare)),
            default_fraction=device.traits.memory_fraction,
            default_tokens=device.traits.cache_tokens,
            draft_bytes=drafter.cache_bytes if drafter is not None else 0,
            ahead=1 + 2 * max_drafts,
            sizes=None if is_plain(opened.groups) else sizes,
        )
    )
    context = min(opened.context, (pages - 1) * config.page_size)
    if rows is not None:
        rows.open(pages, config.page_size)
    # The model's caches come last: a device plans attention for the heads of the last caches.
    draft_caches: list[Any] = drafter.make_caches(pages) if drafter is not None else []
    groups = LayerGroups(
        device, sizes.with_pages(pages), config.page_size, dtype, scales, part.layers, shared=part.shared_caches
    )
    windows = groups.windows(windows)
    slots = SlotTable(
        device,
        max_slots=config.max_slots,
        context=context,
        page_size=config.page_size,
        num_pages=pages,
        vocab_size=part.vocab_size,
        max_drafts=max_drafts,
        bounded=groups.bounded,
    )
    grammars: GrammarSlots | None = None
    if config.grammar is not None:
        grammars = GrammarSlots(config.grammar, part.vocab_size, device.memory, slots.here)
    speculator: Speculator | None = None
    if drafter is not None and speculation is not None:
        speculator = Speculator(drafter, speculation, device, sampler, slots)
        speculator.verifier.latent = part.latent is not None
        if ngram is not None and grammars is not None:
            ngram.forced = grammars.forced
    dense = DenseLayers(config, part.pooling, device.torch_device)
    outputs = StepOutputs(
        device, model, sampler, slots, groups.caches, speculator=speculator, grammars=grammars, dense=dense
    )
    clock.end("cache")
    progress("cache", 0.92)
    _make_warm_up(config, device, model, sampler, windows, groups).warm_up(groups.caches, slots)
    one_copy = stage.size == 1 and make.places is None
    info = _describe(
        opened,
        config,
        device,
        drafter,
        context=context,
        pages=pages,
        sizes=sizes,
        groups=groups,
        parameters=weights.parameters if one_copy else _parameters(opened.whole),
        weight_bytes=weight_bytes,
        draft_bytes=draft_bytes,
    )
    return LoadedModel(
        config,
        device,
        group,
        model,
        windows,
        sampler,
        slots,
        groups.caches,
        groups,
        draft_caches,
        speculator,
        outputs,
        info,
        grammars,
        shared,
        rebalancer,
        draft_experts,
        group if stage.size == 1 else mesh,
    )


def _describe(
    opened: OpenModel,
    config: RunnerConfig,
    device: Device,
    drafter: Drafter | None,
    *,
    context: int,
    pages: int,
    sizes: GroupSizes,
    groups: LayerGroups,
    parameters: int,
    weight_bytes: int,
    draft_bytes: int,
) -> ModelInfo:
    """The loaded model, its cache and its drafter as the scheduler sees them."""
    part, speculation = opened.part, config.speculation
    return ModelInfo(
        architecture=part.architecture,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=device.name,
        cpu_isa=device.traits.cpu_isa,
        cpu_operators=device.operators,
        vocab_size=part.vocab_size,
        context_length=context,
        layers=opened.whole.layers,
        hidden_size=part.hidden_size,
        experts=(0, 0) if part.experts is None or config.pp_size > 1 else (part.layers, part.experts.chosen),
        tasks=("generate", "embed", "score", "next_token") if part.pooling is None else (part.pooling.task,),
        pooling=part.pooling,
        parameters=parameters,
        weight_bytes=weight_bytes,
        num_pages=pages,
        page_size=config.page_size,
        cache_bytes=sizes.bytes(pages),
        cache_groups=groups.groups,
        cache_dtype=str(opened.cache.dtype or opened.dtype).removeprefix("torch."),
        cache_token_bytes=sizes.token_bytes,
        load_seconds={},
        speculative_nodes=drafter.max_nodes if drafter is not None else 1,
        speculative_depth=drafter.depth if drafter is not None else 0,
        speculative_levels=drafter.levels(speculation) if drafter is not None and speculation is not None else (0,),
        speculative_tokens=device.traits.verify_budget if drafter is not None and drafter.stepwise else 0,
        speculative_decode_only=drafter is not None and device.traits.verifies_without_prefills,
        draft_parameters=drafter.parameters if drafter is not None else 0,
        draft_weight_bytes=draft_bytes,
    )


def _draft_experts(
    config: RunnerConfig,
    speculation: SpeculativeSettings,
    part: ModelConfig,
    group: Group,
    dtype: torch.dtype,
    device: Device,
) -> DraftExperts | None:
    """The ranks that divide the draft's experts; None: each part of attention has all of them. Raises ConfigError."""
    if speculation.exchange is None:
        return None
    if config.dp_size == 1 or speculation.algorithm not in ("EAGLE", "MTP", "STANDALONE"):
        raise ConfigError(
            "--speculative-moe-a2a-backend needs --enable-dp-attention and a draft model with experts; leave it out"
        )
    place = part.hidden_size, dtype, device.torch_device
    return DraftExperts(group, config.dp_size, *place, exchange=speculation.exchange)


def _parameters(whole: ModelConfig) -> int:
    """Of the whole model, of which a stage reads a part, and a rank some experts more than once."""
    return sum(spec.parameters for spec in tensors(whole).values())


def _make_warm_up(
    config: RunnerConfig,
    device: Device,
    model: Decoder,
    sampler: Sampler,
    windows: frozenset[int],
    groups: LayerGroups,
) -> WarmUp:
    return WarmUp(config, device, model, sampler, windows, None if groups.is_plain else groups)


def _step_memory(
    opened: OpenModel,
    config: RunnerConfig,
    device: Device,
    model: Decoder,
    *,
    sampler: Sampler,
    sizes: GroupSizes,
    drafter: Drafter | None,
    group: Group,
) -> int:
    """Bytes that the largest step needs besides weights and cache; 0 if the device does not measure. Kernels are
    compiled before, if that takes long."""
    part, longest = opened.part, config.max_step_tokens
    pages, max_drafts = -(-longest // config.page_size), drafter.max_nodes - 1 if drafter is not None else 0
    if model.rows is not None:
        model.rows.open(pages, config.page_size)
    draft_caches = drafter.make_caches(1) if drafter is not None and device.traits.compiles else []
    null = tuple(msgspec.structs.replace(each, num_pages=1 if each.bounded else pages) for each in sizes.groups)
    groups = LayerGroups(
        device, null, config.page_size, opened.dtype, opened.cache.scales, part.layers, shared=part.shared_caches
    )
    caches = groups.caches
    warm_up = _make_warm_up(config, device, model, sampler, groups.windows(frozenset(part.windows)), groups)
    # A row that verifies samples after each draft token.
    sampled = min((config.max_slots - 1) * (1 + max_drafts), longest)

    given = np.array([longest]), sampled, np.arange(pages, dtype=np.int32)[None]

    def make_slots() -> SlotTable:
        return SlotTable(
            device,
            max_slots=config.max_slots,
            context=opened.context,
            page_size=config.page_size,
            num_pages=pages,
            vocab_size=part.vocab_size,
            max_drafts=max_drafts,
        )

    def largest() -> None:
        warm_up.run(caches, make_slots(), *given)

    def passes() -> None:
        some, own = one_of_each_kind(model, caches)
        others = warm_up.for_model(some)
        others.logits(own, *given)
        others.precompile_passes(own)
        captured = Passes(
            config,
            device,
            some,
            own,
            slots=make_slots(),
            windows=groups.windows(frozenset(part.windows)),
            agree=lambda could: could,
            bounded=groups.bounded,
            moves=part.latent is None,
        )
        rows = config.max_slots - 1
        if drafter is None:
            captured.capture_steps(rows)
        else:
            captured.capture_decodes(rows)
            rows = min(rows, longest // drafter.max_nodes)
            verifies = captured.capture_decodes(rows, drafter.max_nodes, drafter.branches, drafter.depth)
            drafter.capture(lambda could: could, verifies.accept_outputs if verifies is not None else {})
            if not has_states(opened.groups):
                target = TargetParts(device, some, part, opened.dtype, own, make_slots())
                precompile_drafts(config, drafter, target)

    # Several ranks would deadlock in passes that only some of them can run.
    if group.size == 1 and groups.is_captured and not model.reads_rows:
        device.capture.precompile(passes)
    draft_caches.clear()  # the drafter holds the same list
    return device.memory.measure_step(largest)
