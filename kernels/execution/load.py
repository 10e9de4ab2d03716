"""Loads a model whose files are open: its weights, its cache, the tables of its slots.

The ranks divide the model, and each reads its part of the weights. The remaining memory determines the size of the
cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from kernels.contract.caches import follows_chains, is_plain
from kernels.contract.config import RunnerConfig
from kernels.contract.divisions import stage_layers
from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import read_location
from kernels.contract.info import ModelInfo
from kernels.contract.runner import Progress
from kernels.contract.speculation import SpeculativeSettings
from kernels.core.layer_context import LayerContext
from kernels.devices.base import Device
from kernels.devices.group_caches import token_bytes
from kernels.devices.latent_cache import clear_latent
from kernels.devices.memory import MemoryUsage
from kernels.distributed.context_parallel import ContextParallel
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.group import Group
from kernels.distributed.pipeline import Stage, make_stage
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution.layer_groups import LayerGroups
from kernels.execution.opening import OpenModel
from kernels.execution.outputs import StepOutputs
from kernels.execution.pooled import DenseLayers
from kernels.execution.rebalancing import Rebalancer
from kernels.execution.step_memory import make_warm_up, step_memory
from kernels.grammar.slots import GrammarSlots
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.layers.builder import ModelBuilder
from kernels.models.layers.expert_places import ExpertPlaces
from kernels.models.registry import build, tensors
from kernels.models.stages import StageAdapters, StageSource
from kernels.sampling.sampler import Sampler
from kernels.speculation.drafter import Drafter, DrafterContext
from kernels.speculation.drafters.ngram import NgramDrafter
from kernels.speculation.load import draft_device, make_drafter
from kernels.speculation.speculator import Speculator
from kernels.speculation.stage_drafter import StageDrafter
from kernels.state.cache_size import cache_pages
from kernels.state.group_sizes import GroupSizes
from kernels.state.slots import SlotTable

__all__ = ["LoadedModel", "Phases", "load_model"]


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


def load_model(opened: OpenModel, group: Group, progress: Progress, clock: Phases) -> LoadedModel:
    """Load the weights, make the cache, warm up. Every rank of the group must call it.

    Raises ConfigError, LoadError, UnsupportedError or CacheSizeError.
    """
    config, device, part = opened.config, opened.device, opened.part

    ranks = _divide(opened, group)
    target = _build_target(opened, ranks)
    sampler = _make_sampler(opened)
    draft = _load_draft(opened, ranks, target.model)
    group.minimum(0)  # a barrier: all ranks have read their weights before one waits in a collective
    clock.end("weights")

    sizes = _group_sizes(opened, draft)
    reserved = step_memory(opened, target.model, sampler, sizes, draft.drafter, alone=group.size == 1)
    weight_bytes = target.weight_bytes + draft.target_bytes
    pages = group.minimum(_most_pages(opened, sizes, draft, weight_bytes, reserved))
    if target.rows is not None:
        target.rows.open(pages, config.page_size)
    # The model's caches come last: a device plans attention for the heads of the last caches.
    draft_caches: list[Any] = draft.drafter.make_caches(pages) if draft.drafter is not None else []
    groups = LayerGroups(
        device,
        sizes.with_pages(pages),
        config.page_size,
        opened.dtype,
        opened.cache.scales,
        part.layers,
        shared=part.shared_caches,
    )
    slots = SlotTable(
        device,
        max_slots=config.max_slots,
        context=min(opened.context, (pages - 1) * config.page_size),
        page_size=config.page_size,
        num_pages=pages,
        vocab_size=part.vocab_size,
        max_drafts=draft.max_tokens,
        bounded=groups.bounded,
    )
    grammars = _make_grammars(opened, slots)
    speculator = _make_speculator(opened, draft, sampler, slots, grammars)
    outputs = StepOutputs(
        device,
        target.model,
        sampler,
        slots,
        groups.caches,
        speculator=speculator,
        grammars=grammars,
        dense=DenseLayers(config, part.pooling, device.torch_device),
    )
    clock.end("cache")

    progress("cache", 0.92)
    windows = groups.windows(frozenset(part.windows))
    make_warm_up(opened, target.model, sampler, windows, groups).warm_up(groups.caches, slots)
    one_copy = ranks.stage.size == 1 and target.places is None
    return LoadedModel(
        config=config,
        device=device,
        group=group,
        model=target.model,
        windows=windows,
        sampler=sampler,
        slots=slots,
        caches=groups.caches,
        groups=groups,
        draft_caches=draft_caches,
        speculator=speculator,
        outputs=outputs,
        info=_describe(
            opened,
            draft,
            slots=slots,
            sizes=sizes,
            groups=groups,
            parameters=opened.weights.parameters if one_copy else _parameters(opened.whole),
            weight_bytes=weight_bytes,
        ),
        grammars=grammars,
        shared=ranks.shared,
        rebalancer=target.rebalancer,
        draft_experts=draft.experts,
        peers=group if ranks.stage.size == 1 else ranks.mesh,
    )


@dataclass(frozen=True, eq=False)
class _Ranks:
    """How ``group`` divides a model. ``mesh``: the ranks that divide the attention of this rank's layers. ``stage``:
    this rank's, which begins with ``first_layer`` of the full model. ``shared``: with data-parallel attention, the
    ranks that share layers of experts."""

    group: Group
    mesh: Group
    stage: Stage
    first_layer: int
    shared: SharedExperts | None


def _divide(opened: OpenModel, group: Group) -> _Ranks:
    config = opened.config
    stage, mesh = make_stage(group, config)
    first = stage_layers(opened.whole.layers, stage.index, stage.size).start
    shared: SharedExperts | None = None
    if config.dp_size > 1:
        device = opened.device.torch_device
        shared = SharedExperts(
            group, config.dp_size, opened.part.hidden_size, opened.dtype, device, exchange=config.exchange
        )
        mesh = shared.attention
    return _Ranks(group, mesh, stage, first, shared)


@dataclass(frozen=True, eq=False)
class _Target:
    """The model with its weights, without a cache. ``rows``: of each step, their adapters; None without adapters.
    ``places``: of experts; None: divided in their order. ``weight_bytes``: of this rank, adapters included."""

    model: Decoder
    rows: LayerContext | None
    places: ExpertPlaces | None
    rebalancer: Rebalancer | None
    weight_bytes: int


def _build_target(opened: OpenModel, ranks: _Ranks) -> _Target:
    """Read this rank's weights. Raises ConfigError, LoadError or UnsupportedError."""
    config, device, part, weights = opened.config, opened.device, opened.part, opened.weights
    mesh, staged = ranks.mesh, ranks.stage.size > 1
    rows = None
    if opened.adapters is not None:
        adapters = StageAdapters(opened.adapters, ranks.first_layer) if staged else opened.adapters
        rows = LayerContext(adapters, device.torch_device, mesh.rank, mesh.size)
    divided: ContextParallel | None = None
    if config.context_parallel:
        divided = ContextParallel(mesh, device.memory.put, device.attention.plan_layers)
    builder = ModelBuilder(
        StageSource(weights, ranks.first_layer) if staged else weights,
        device,
        mesh,
        opened.dtype,
        opened.context,
        opened.captures,
        config.fp32_head,
        ranks.stage,
        first_layer=ranks.first_layer,
        whole_layers=opened.whole.layers,
        rows=rows,
        ep_size=config.ep_size,
        places=_places(opened, ranks.group),
        shared=ranks.shared,
        context_parallel=divided,
    )
    model, rebalancer = build(part, builder), None
    assert isinstance(model, Decoder)
    if builder.places is not None:
        _check_places(builder.places, opened.whole)
        assert config.experts is not None
        if config.experts.rebalance is not None:
            sparse = sorted(part.experts.layers) if part.experts is not None else []
            rebalancer = Rebalancer(builder.places, config.experts.rebalance, builder.expert_mesh, sparse)
    if ranks.shared is not None:
        _check_layers(ranks.shared, opened.whole)
    weight_bytes = weights.weight_bytes + device.linear.dequantized_bytes
    if rows is not None:
        weight_bytes += rows.adapters.nbytes
    return _Target(model, rows, builder.places, rebalancer, weight_bytes)


def _places(opened: OpenModel, group: Group) -> ExpertPlaces | None:
    """Where experts are; None: divided in their order. Raises ConfigError, also if ranks have read different files."""
    config, device = opened.config, opened.device
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


def _check_layers(shared: SharedExperts, whole: ModelConfig) -> None:
    """Raises ConfigError if layers of experts are not among those that are shared."""
    count = 0 if whole.experts is None else len(whole.experts.layers)
    if len(shared.layers) != count:
        raise ConfigError(
            f"the layers of experts of {whole.architecture} cannot be shared; leave --enable-dp-attention out"
        )


def _make_sampler(opened: OpenModel) -> Sampler:
    config, device, part = opened.config, opened.device, opened.part
    return Sampler(
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


@dataclass(frozen=True, eq=False)
class _Draft:
    """The draft with its weights, without a cache. ``ngram``: the drafter if it is one of n-grams, which drafts the
    tokens that grammars force, too. ``target_bytes``: of the target's weights that the draft alone reads."""

    drafter: Drafter | None = None
    ngram: NgramDrafter | None = None
    experts: DraftExperts | None = None
    weight_bytes: int = 0
    target_bytes: int = 0

    @property
    def max_tokens(self) -> int:
        """Most draft tokens of a row in a step."""
        return self.drafter.max_nodes - 1 if self.drafter is not None else 0

    @property
    def spare_bytes(self) -> int:
        return self.drafter.spare_bytes if self.drafter is not None else 0

    @property
    def cache_bytes(self) -> int:
        return self.drafter.cache_bytes if self.drafter is not None else 0


def _load_draft(opened: OpenModel, ranks: _Ranks, target: Decoder) -> _Draft:
    """Read the draft's weights. Raises ConfigError, LoadError or UnsupportedError."""
    config, device, part, weights = opened.config, opened.device, opened.part, opened.weights
    speculation = config.speculation
    if speculation is None:
        return _Draft()
    draft_on = draft_device(config, speculation, device, part.dtype)
    if draft_on is not device:
        draft_on.agree(ranks.group.minimum)
    experts = _draft_experts(opened, speculation, ranks.group)
    before, read = draft_on.linear.dequantized_bytes, weights.weight_bytes
    drafter: Drafter | None = None
    if ranks.stage.is_last:
        drafter = make_drafter(
            DrafterContext(
                config,
                speculation,
                draft_on,
                ranks.mesh,  # with data-parallel attention each part drafts for its own requests
                target,
                part,
                opened.whole,
                opened.dtype,
                opened.context,
                chains=follows_chains(opened.groups),
                experts=experts,
            )
        )
    ngram = drafter if isinstance(drafter, NgramDrafter) else None
    if ranks.stage.size > 1:
        drafter = StageDrafter(drafter, ranks.group, device, config.max_slots)
    assert drafter is not None
    return _Draft(
        drafter,
        ngram,
        experts,
        weight_bytes=drafter.weight_bytes + draft_on.linear.dequantized_bytes - before,
        target_bytes=weights.weight_bytes - read,  # a draft in the last stage may read the embeddings
    )


def _draft_experts(opened: OpenModel, speculation: SpeculativeSettings, group: Group) -> DraftExperts | None:
    """The ranks that divide the draft's experts; None: each part of attention has all of them. Raises ConfigError."""
    config = opened.config
    if speculation.exchange is None:
        return None
    if config.dp_size == 1 or speculation.algorithm not in ("EAGLE", "MTP", "STANDALONE"):
        raise ConfigError(
            "--speculative-moe-a2a-backend needs --enable-dp-attention and a draft model with experts; leave it out"
        )
    place = opened.part.hidden_size, opened.dtype, opened.device.torch_device
    return DraftExperts(group, config.dp_size, *place, exchange=speculation.exchange)


def _group_sizes(opened: OpenModel, draft: _Draft) -> GroupSizes:
    """Bytes of the cache groups, with the pages that draft tokens need. Raises ConfigError or UnsupportedError."""
    config, device, scales = opened.config, opened.device, opened.cache.scales
    sizes = GroupSizes.from_groups(
        opened.groups,
        lambda spec: token_bytes(device, spec, opened.dtype, scales is not None),
        config.page_size,
        config.max_slots - 1,
        config.max_step_tokens,
        opened.context,
        snapshot_tokens=config.snapshot_tokens,
    )
    return sizes.with_drafts(draft.max_tokens).with_states(config.max_states, config.state_memory_ratio)


def _most_pages(opened: OpenModel, sizes: GroupSizes, draft: _Draft, weight_bytes: int, reserved: int) -> int:
    """Most pages of a cache in the memory that weights, ``reserved`` bytes of a step and the draft leave on this
    rank. Raises CacheSizeError."""
    config, device = opened.config, opened.device
    memory = device.memory.usage()
    return cache_pages(
        config,
        sizes.token_bytes,
        opened.context,
        weight_bytes + draft.weight_bytes + draft.spare_bytes,
        MemoryUsage(memory.total, max(0, memory.free - reserved - draft.spare_bytes)),
        default_fraction=device.traits.memory_fraction,
        default_tokens=device.traits.cache_tokens,
        draft_bytes=draft.cache_bytes,
        ahead=1 + 2 * draft.max_tokens,
        sizes=None if is_plain(opened.groups) else sizes,
    )


def _make_grammars(opened: OpenModel, slots: SlotTable) -> GrammarSlots | None:
    settings = opened.config.grammar
    if settings is None:
        return None
    return GrammarSlots(settings, opened.part.vocab_size, opened.device.memory, slots.here)


def _make_speculator(
    opened: OpenModel, draft: _Draft, sampler: Sampler, slots: SlotTable, grammars: GrammarSlots | None
) -> Speculator | None:
    settings = opened.config.speculation
    if draft.drafter is None or settings is None:
        return None
    speculator = Speculator(draft.drafter, settings, opened.device, sampler, slots)
    speculator.verifier.latent = opened.part.latent is not None
    if draft.ngram is not None and grammars is not None:
        draft.ngram.forced = grammars.forced
    return speculator


def _describe(
    opened: OpenModel,
    draft: _Draft,
    *,
    slots: SlotTable,
    sizes: GroupSizes,
    groups: LayerGroups,
    parameters: int,
    weight_bytes: int,
) -> ModelInfo:
    """The loaded model, its cache and its drafter as the scheduler sees them."""
    config, device, part, drafter = opened.config, opened.device, opened.part, draft.drafter
    speculation = config.speculation
    return ModelInfo(
        architecture=part.architecture,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=device.name,
        cpu_isa=device.traits.cpu_isa,
        cpu_operators=device.operators,
        vocab_size=part.vocab_size,
        context_length=slots.context,
        layers=opened.whole.layers,
        hidden_size=part.hidden_size,
        experts=(0, 0) if part.experts is None or config.pp_size > 1 else (part.layers, part.experts.chosen),
        tasks=("generate", "embed", "score", "next_token") if part.pooling is None else (part.pooling.task,),
        pooling=part.pooling,
        parameters=parameters,
        weight_bytes=weight_bytes,
        num_pages=slots.num_pages,
        page_size=config.page_size,
        cache_bytes=sizes.bytes(slots.num_pages),
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
        draft_weight_bytes=draft.weight_bytes,
    )


def _parameters(whole: ModelConfig) -> int:
    """Of the whole model, of which a stage reads a part, and a rank some experts more than once."""
    return sum(spec.parameters for spec in tensors(whole).values())
