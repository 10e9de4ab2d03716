"""The memory of the largest step, which is measured before the cache is sized."""

from __future__ import annotations

import msgspec
import numpy as np

from kernels.contract.caches import has_states
from kernels.execution.captures import Passes, captures_draft
from kernels.execution.layer_groups import LayerGroups
from kernels.execution.opening import OpenModel
from kernels.execution.warmup import WarmUp
from kernels.models.decoder import Decoder
from kernels.models.representative_layers import one_of_each_kind
from kernels.sampling.sampler import Sampler
from kernels.speculation.drafter import Drafter
from kernels.speculation.warmup import TargetParts, precompile_drafts
from kernels.state.group_sizes import GroupSizes
from kernels.state.slots import SlotTable

__all__ = ["make_warm_up", "step_memory"]


def make_warm_up(
    opened: OpenModel, model: Decoder, sampler: Sampler, windows: frozenset[int], groups: LayerGroups
) -> WarmUp:
    """``windows``: those of the model that need a plan over the main pages."""
    return WarmUp(opened.config, opened.device, model, sampler, windows, None if groups.is_plain else groups)


def step_memory(
    opened: OpenModel,
    model: Decoder,
    sampler: Sampler,
    sizes: GroupSizes,
    drafter: Drafter | None,
    *,
    alone: bool,
) -> int:
    """Bytes that the largest step needs besides weights and cache; 0 if the device does not measure. Kernels are
    compiled before, if that takes long."""
    config, device, part = opened.config, opened.device, opened.part
    longest = config.max_step_tokens
    pages, max_drafts = -(-longest // config.page_size), drafter.max_nodes - 1 if drafter is not None else 0
    if model.rows is not None:
        model.rows.open(pages, config.page_size)
    draft_caches = drafter.make_caches(1) if drafter is not None and device.traits.compiles else []
    null = tuple(msgspec.structs.replace(each, num_pages=1 if each.bounded else pages) for each in sizes.groups)
    groups = LayerGroups(
        device, null, config.page_size, opened.dtype, opened.cache.scales, part.layers, shared=part.shared_caches
    )
    caches = groups.caches
    windows = groups.windows(frozenset(part.windows))
    warm_up = make_warm_up(opened, model, sampler, windows, groups)
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
            windows=windows,
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
            if captures_draft(config, device):  # else what is captured here would stay in the drafter
                drafter.capture(lambda could: could, verifies.accept_outputs if verifies is not None else {})
            if not has_states(opened.groups):
                target = TargetParts(device, some, part, opened.dtype, own, make_slots())
                precompile_drafts(config, drafter, target)

    # Several ranks would deadlock in passes that only some of them can run.
    if alone and groups.is_captured and not model.reads_rows:
        device.capture.precompile(passes)
    draft_caches.clear()  # the drafter holds the same list
    return device.memory.measure_step(largest)
