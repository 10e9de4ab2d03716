"""The ordered list of executors, made when a model is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

from kernels.devices.prepared import CapturedPasses, CapturedSteps
from kernels.distributed.shared_experts import SharedExperts
from kernels.execution.captures import Passes, captures_draft
from kernels.execution.executors import Executor
from kernels.execution.executors.captured_pass import CapturedPass
from kernels.execution.executors.eager_pass import EagerPass
from kernels.execution.executors.native_chains import NativeChains
from kernels.execution.executors.native_decode import NativeDecode
from kernels.execution.executors.native_prefill import NativePrefill
from kernels.execution.executors.no_rows import NoRows
from kernels.execution.executors.overlapped_verify import OverlappedVerifyPass
from kernels.execution.executors.shared_pass import SharedPass
from kernels.execution.executors.two_batches import TwoBatches
from kernels.execution.executors.verify_pass import VerifyPass
from kernels.execution.executors.whole_step import WholeStep
from kernels.execution.pending_step import StepContext
from kernels.models.native_model import NativeModel
from kernels.speculation.early_draft import OverlappedVerify
from kernels.speculation.native_loop import NativeDraftLoop
from kernels.speculation.speculator import Speculator

__all__ = ["make_executors"]

_log = logging.getLogger("troupe.kernels")


def make_executors(context: StepContext) -> tuple[tuple[Executor, ...], tuple[int, ...]]:
    """Capture what the device can capture, including the drafter's passes. Returns the executors that pay off on the
    device, in the order in which they are tried, and the numbers of rows that decodes were captured for.

    Every rank of the group must call it. Call it again once the device has better operators.
    """
    executors, rows = _whole_steps(context)
    threshold = context.loaded.config.two_batch_threshold
    if threshold is not None:
        executors = (TwoBatches(context, threshold), *executors)
    _log.debug(
        "Executors, in the order in which steps try them: %s", ", ".join(type(one).__name__ for one in executors)
    )
    return executors, rows


def _whole_steps(context: StepContext) -> tuple[tuple[Executor, ...], tuple[int, ...]]:
    """Those that run a step as one batch."""
    loaded = context.loaded
    if not loaded.groups.is_captured or loaded.model.reads_rows:  # captures read page tables on the device only
        if loaded.shared is not None:
            return (SharedPass(context, loaded.shared, loaded.draft_experts),), ()
        return (NoRows(), EagerPass(context)), ()
    max_rows = loaded.config.max_slots - 1
    passes = Passes(
        loaded.config,
        loaded.device,
        loaded.model,
        loaded.caches,
        slots=loaded.slots,
        windows=loaded.windows,
        agree=loaded.agree,
        bounded=loaded.groups.bounded,
        moves=not loaded.groups.has_latent,
    )
    if loaded.shared is not None:
        return _shared(context, loaded.shared, passes, max_rows)
    if loaded.model.stage.size > 1:
        return _stage(context, passes, max_rows)
    whole = loaded.speculator is None and (loaded.group.size == 1 or loaded.device.capture.spans_ranks)
    steps = passes.capture_steps(max_rows) if whole else None
    decodes = passes.capture_decodes(max_rows) if steps is None else None
    held = steps or decodes
    if loaded.speculator is None:
        result = _plain(context, max_rows, steps, decodes)
    else:
        result = _speculative(context, loaded.speculator, passes, max_rows, decodes)
    return (*result, EagerPass(context)), held.rows if held is not None else ()


def _shared(
    context: StepContext, shared: SharedExperts, passes: Passes, max_rows: int
) -> tuple[tuple[Executor, ...], tuple[int, ...]]:
    """The executors of data-parallel attention. Passes are captured of as many rows of each part as of this one."""
    config, drafts = context.loaded.config, context.loaded.draft_experts
    eager = {
        # NCCL's guide, "Using NCCL with CUDA Graphs": all ranks capture an operation, or none does.
        "NCCL, whose captured operations all ranks have to replay together": (
            context.loaded.device.communication.backend == "nccl"
        ),
        "--moe-a2a-backend": shared.exchange is not None,
        "--speculative-algorithm": context.loaded.speculator is not None,
        "--disable-cuda-graph-padding": config.disable_graph_padding,
    }
    reasons = [option for option, given in eager.items() if given]
    if reasons and not config.disable_graphs:
        _log.info("Data-parallel attention runs every step eagerly because of %s.", ", ".join(reasons))
    shared.enter(())
    decodes = None if reasons else passes.capture_decodes(max_rows)
    if decodes is None or decodes.run_sized is None:
        return (SharedPass(context, shared, drafts),), ()
    run, shared.sizes = decodes.run_sized, decodes.rows
    sized = replace(decodes, run=lambda batch: run(batch, shared.size))
    return (SharedPass(context, shared, drafts, CapturedPass(sized, None)),), decodes.rows


def _stage(context: StepContext, passes: Passes, max_rows: int) -> tuple[tuple[Executor, ...], tuple[int, ...]]:
    """The executors of a pipeline's stage. What is captured begins after the stream is received, and ends before a head
    or the stream that is sent. The last stage captures the passes of the draft, too."""
    loaded = context.loaded
    drafter = None if loaded.speculator is None else loaded.speculator.drafter
    result: list[Executor] = [NoRows()]

    def capture() -> tuple[CapturedPasses | None, CapturedPasses | None]:
        decodes = passes.capture_decodes(max_rows)
        if drafter is None:
            return decodes, None
        rows = min(max_rows, loaded.config.max_step_tokens // drafter.max_nodes)
        return decodes, passes.capture_decodes(rows, drafter.max_nodes, drafter.branches, drafter.depth)

    decodes, verifies = capture()
    if decodes is not None or verifies is not None:
        if passes.skipped_adapters is not None:
            with passes.without_adapters():
                result.append(CapturedPass(*capture(), passes.skipped_adapters))
        result.append(CapturedPass(decodes, verifies))
    if drafter is not None and captures_draft(loaded.config, loaded.device):
        drafter.capture(loaded.agree, None)
    return (*result, EagerPass(context)), () if decodes is None else decodes.rows


def _plain(
    context: StepContext, max_rows: int, steps: CapturedSteps | None, decodes: CapturedPasses | None
) -> list[Executor]:
    """The executors of a runner that does not speculate."""
    result: list[Executor] = [*_unobserved(context, max_rows, False), NoRows()]
    if steps is not None:
        result.append(WholeStep(context, steps))
    if decodes is not None:
        result.append(CapturedPass(decodes, None))
    return result


def _speculative(
    context: StepContext, speculator: Speculator, passes: Passes, max_rows: int, decodes: CapturedPasses | None
) -> list[Executor]:
    """The executors of a runner that speculates."""
    loaded = context.loaded
    settings, drafter, windows = loaded.config.speculation, speculator.drafter, sorted(loaded.windows)
    assert settings is not None
    result: list[Executor] = _unobserved(context, max_rows, True) if settings.adaptive.enabled else []
    rows = min(max_rows, loaded.config.max_step_tokens // drafter.max_nodes)
    verifies = passes.capture_decodes(rows, drafter.max_nodes, drafter.branches, drafter.depth)
    if captures_draft(loaded.config, loaded.device):
        drafter.capture(loaded.agree, verifies.accept_outputs if verifies is not None else {})
    moved = drafter.branches and not loaded.groups.has_latent  # by the device's own kernel
    speculator.verifier.prepare(drafter.max_nodes, loaded.caches if moved else [])
    if verifies is not None and verifies.accept_outputs and loaded.group.size == 1:
        result.append(
            OverlappedVerifyPass(context, OverlappedVerify(speculator, loaded.device, loaded.slots, verifies))
        )
    host = NativeModel.make(loaded.device, loaded.model, loaded.caches, windows, rows * drafter.max_nodes)
    if host is not None:
        decode = NativeDecode(context, host, rows)
        result.insert(0, decode)
        ends = NativePrefill.make(context, windows, rows)
        drafts = drafter.native_drafts(loaded.slots, rows)
        speculator.observer.use_host(drafts, host.features.shape[1])
        if drafts is not None and speculator.is_exact:
            chains = NativeDraftLoop(speculator, drafts, host, loaded.caches, rows, context.native_grammars)
            result.append(NativeChains(context, chains, decode))
        if ends is not None:
            result.append(ends)
    result.append(NoRows())
    if verifies is not None and verifies.verify is not None:
        result.append(VerifyPass(context, verifies, verifies.verify))
    if decodes is not None or verifies is not None:
        result.append(CapturedPass(decodes, verifies))
    return result


def _unobserved(context: StepContext, max_rows: int, unobserved: bool) -> list[Executor]:
    """Executors on the CPU for steps that no draft observes (``unobserved``), or of a runner without a draft."""
    loaded = context.loaded
    windows = sorted(loaded.windows)
    model = NativeModel.make(loaded.device, loaded.model, loaded.caches, windows, max_rows, False)
    if model is None:
        return []
    result: list[Executor] = [NativeDecode(context, model, max_rows, unobserved)]
    ends = NativePrefill.make(context, windows, max_rows, unobserved, False)
    return result if ends is None else [*result, ends]
