"""Speculator: drafting, verification and acceptance around the model's passes, for all algorithms.

The host keeps the lengths of sequences, but only the device knows how many draft tokens a step accepts. The host
therefore counts a step with draft tokens before it prepares the next one; then it knows every length again, and the
drafter observes the results before slots change owners. If no slot changes, the next step may be issued earlier
(``OverlappedVerify``). ``kernels.speculation`` draws the states of what a draft has observed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission
from kernels.core.arrays import Ints, Longs, ragged
from kernels.core.batch import BoundedRows
from kernels.core.tree import Drafts
from kernels.devices.base import Device
from kernels.devices.memory import PendingCopies
from kernels.devices.state_cache import run_accepted
from kernels.sampling.masks import RowMasks
from kernels.sampling.sampler import SampledTokens, Sampler
from kernels.speculation.drafter import Drafter, DraftRows
from kernels.speculation.early_draft import EarlyDrafts, rows_of
from kernels.speculation.native_drafts import NativeObservation, Raw, raw
from kernels.speculation.observe import Observer, Run
from kernels.speculation.stage_drafter import StageDrafter
from kernels.speculation.verify import Samples, Verifier, VerifyResult
from kernels.state.slots import SlotTable
from kernels.state.step_rows import PrefilledRows, StepRows

__all__ = ["Speculator"]


class Speculator:
    """The speculation of one runner. All methods are called in the model's thread, in the order of the steps.

    For each step: ``begin_step``, ``draft``, the model, ``sample``, ``record_run``, ``draft_early``. Steps that one
    native call runs on the host replace the last ones by ``defer``, ``record_accepted``, ``record_skipped`` or
    ``record_prompts``, and may skip ``begin_step`` while the speculator ``is_settled`` or ``can_continue``.
    """

    def __init__(
        self,
        drafter: Drafter,
        settings: SpeculativeSettings,
        device: Device,
        sampler: Sampler,
        slots: SlotTable,
    ) -> None:
        self.drafter = drafter
        self.settings = settings
        self.device = device
        self.sampler = sampler
        self.slots = slots
        self.verifier = Verifier(settings, device, sampler, slots, drafter.depth)
        self._wants = np.zeros(len(slots.known), dtype=bool)
        self._observer = Observer(drafter, device, slots)
        self.early_drafts = EarlyDrafts(drafter, settings, device, sampler, slots)
        self._last: Run | None = None
        # the accepted tokens of a step of chains, with its generations
        self._accepted: tuple[NativeObservation, Ints] | None = None
        self._continues = False  # whether the next such step may observe them itself
        self._prompts: tuple[PrefilledRows, Ints] | None = None  # the same for a step that ran prompts to their ends
        self._settled = False
        """Whether another step of the last decodes needs no call before or after it."""
        self._unobserved = False
        """Whether the draft does not observe the running step."""

    @property
    def stage_drafter(self) -> StageDrafter:
        """The drafter of a pipeline's stage."""
        assert isinstance(self.drafter, StageDrafter)
        return self.drafter

    @property
    def is_exact(self) -> bool:
        """Whether acceptance is lossless: only tokens that the target samples are accepted."""
        return not self.settings.lossy

    def is_wanted(self, slots: Longs) -> bool:
        """Whether all of these requests want draft tokens."""
        return bool(self._wants[slots].all())

    @property
    def observer(self) -> Observer:
        return self._observer

    @property
    def last_run(self) -> Run | None:
        """The step whose outcome the host has not counted."""
        return self._last

    def is_settled(self, unobserved: bool) -> bool:
        """Whether more of the decodes that ran last need no ``begin_step``. ``unobserved``: as in ``begin_step``."""
        return self._settled and self._unobserved == unobserved

    def defer(self, slots: Longs, features: Raw) -> None:
        """Record a plain decode of each slot on the host; its token may be observed together with later ones.

        ``slots``: the same array object while the requests are the same.
        """
        if self._settled:
            self._settled = self._observer.defer_again(features)
            return
        if self._observer.is_last_deferred(slots):
            self._settled = self._observer.flush_if_full(self._observer.defer_again(features))
            return
        wants = self._wants[slots]
        every = bool(wants.all())
        if not every:
            slots, features = slots[wants], features[wants]
        if len(slots):
            state = self.slots
            room = self._observer.defer(slots, state.generation[slots], state.computed[slots] - 1, features)
            self._settled = every and room

    def record_skipped(self, slots: Longs, features: Raw, generations: Ints) -> None:
        """As ``defer``, for a step that requested draft tokens but found none."""
        # The next draft needs this token, and observing it is free.
        if not self.drafter.needs_host_tokens:
            self.defer(slots, features)
            return
        ones = np.ones(len(slots), dtype=np.int64)
        self.record_accepted(NativeObservation(slots, self.slots.computed[slots] - 1, ones, None, ones), generations)

    def record_accepted(self, observation: NativeObservation, generations: Ints, continues: bool = False) -> None:
        """Record the accepted draft tokens of a step on the host, which are observed before the next step.

        ``continues``: whether the next step usually observes them itself (``can_continue``).
        """
        self._accepted, self._continues = (observation, generations), continues

    def can_continue(self, slots: Longs) -> bool:
        """Whether a step that observes by itself may continue without ``begin_step``.

        True if only the tokens that the last step accepted in exactly these ``slots`` are unobserved. The step then
        calls ``mark_seen``.
        """
        chained = self._accepted
        if chained is None or not self._continues or chained[0].slots is not slots:
            return False
        return self._prompts is None and self._last is None and self._observer.is_empty

    def mark_seen(self) -> None:
        """Record that the continuing step has observed the last accepted tokens, and drafts."""
        self._accepted, self._settled = None, False

    def record_prompts(self, reached: PrefilledRows, generations: Ints) -> None:
        """Record a step on the host that ran prompts to their ends; they are observed before the next step."""
        self._prompts = reached, generations

    def flush_idle(self) -> None:
        """Observe the tokens that the next step needs, after the last result is sent, except those that the step
        observes itself."""
        if self._accepted is not None and not self._continues:
            self._observer.show(*self._accepted)
            self._accepted = None
        self._observe_prompts()

    def _observe_prompts(self) -> None:
        if self._prompts is None:
            return
        (reached, generations), self._prompts = self._prompts, None
        # Prompts of requests that do not speculate are observed too: other requests may share them.
        rows = np.flatnonzero(self._wants[reached.slots] | (reached.counts > 1))
        if not len(rows):
            return
        slots, starts, counts = reached.slots[rows], reached.starts[rows], reached.counts[rows]
        features = reached.features if self.drafter.features else None
        first = (np.cumsum(reached.counts) - reached.counts)[rows]
        self._observer.show(
            NativeObservation(slots, starts, counts, features, ragged(first, counts)), generations[rows]
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """Admit a request to a slot."""
        self._wants[admission.slot] = admission.sampling.max_drafts != 0
        self.drafter.admit(admission, np.frombuffer(admission.tokens, dtype=np.int32))

    def release(self, slot: int) -> None:
        self.drafter.release(slot)

    # -- before a step ------------------------------------------------------------------------------------------------

    def begin_step(self, drafts: bool, released: bool, unobserved: bool = False) -> None:
        """Count the accepted tokens of the last step, and let the drafter observe the computed ones.

        ``drafts``: whether the new step may draft; otherwise observation can wait, unless slots are ``released`` whose
        pages others may share. ``unobserved``: the drafter does not observe the new step, nor unobserved steps before
        it.
        """
        asleep, self._unobserved, self._settled = self._unobserved, unobserved, unobserved
        if unobserved:
            if not asleep:
                self._drop()
            return
        later = not drafts and not released
        chained, self._accepted = self._accepted, None
        if chained is not None:
            if later:
                self._observer.defer_accepted(*chained)
            else:
                self._observer.show(*chained)
        self._observe_prompts()
        run, self._last = self._last, None
        if run is None:
            if not later:
                self._observer.flush()
            return
        step = run.step
        sound, counts, paths = self._count(run)
        if later and self._observer.can_defer and step.decodes == len(step.rows):
            kept = np.flatnonzero(sound & self._wants[step.slots])
            features = None if run.features is None else raw(run.features)[kept]
            if len(kept):
                self._observer.defer(step.slots[kept], run.generations[kept], step.starts[kept], features)
            return
        # Prompts of requests that do not speculate are observed too: other requests may share them.
        rows = np.flatnonzero(sound & (self._wants[step.slots] | (step.counts > 1)))
        if self.early_drafts.confirm(run, step.starts + counts, rows):
            self._observer.flush()
            return
        if len(rows):
            self._observer.add(run, rows, counts, paths)
        if later:
            self._observer.defer_pending()
        else:
            self._observer.flush()

    def _count(self, run: Run) -> tuple[npt.NDArray[np.bool_], Longs, Longs | None]:
        """Extend slots and states by the accepted tokens of the run. Returns its rows whose requests still run and are
        finite, the tokens of each, and for rows that verified draft tokens the accepted nodes."""
        state, step = self.slots, run.step
        sound = state.active[step.slots] & (state.generation[step.slots] == run.generations)
        if run.outcome is None:
            return sound, step.counts, None
        outcome: Longs = run.outcome()[0].numpy()
        accepted, depths = np.abs(outcome[:, 0]), outcome[:, 1]
        counts = step.counts.copy()
        counts[step.verifying] = accepted
        alive = sound[step.verifying]
        slots = step.slots[step.verifying][alive]
        state.known[slots] += accepted[alive]
        state.computed[slots] += accepted[alive]
        for rows in run.states:
            run_accepted(rows, np.where(sound, counts, 0), self.device.memory.put)
        sound[step.verifying] &= outcome[:, 0] > 0
        self.drafter.record_acceptance(slots.tolist(), (accepted[alive] - 1).tolist(), depths[alive].tolist())
        return sound, counts, outcome[:, 2:]

    # -- in the stages of a pipeline -----------------------------------------------------------------------------------

    def drafts_for(self, step: StepRows, reached: npt.NDArray[np.bool_]) -> Longs:
        """The rows of a step after which the last stage drafts. ``reached`` bool [rows]: those that sample."""
        return np.flatnonzero(reached & self._wants[step.slots])

    def draft_next(self, step: StepRows, rows: Longs, broken: npt.NDArray[np.bool_]) -> Longs:
        """In the last stage: count and observe the step that was just launched, and draft after its ``rows``, for the
        step that follows them. Waits for the results. -> ``StageDrafter.draft_next``.

        ``broken`` bool [rows of the step]: which without draft tokens are not finite.
        """
        drafter, state, slots = self.stage_drafter, self.slots, step.slots[rows]
        result = np.zeros((len(rows), drafter.width), dtype=np.int64)
        run, self._last = self._last, None
        if run is None:
            return result
        sound, counts, paths = self._count(run)
        sound = sound & ~broken
        seen = np.flatnonzero(sound & (self._wants[step.slots] | (step.counts > 1)))
        if len(seen):
            self._observer.add(run, seen, counts, paths)
        self._observer.flush()
        known = state.known[slots]
        limits = np.minimum(drafter.max_nodes - 1, state.left(slots) - 1)
        chosen = np.flatnonzero(sound[rows] & (limits > 0))
        if len(chosen):
            result[chosen] = drafter.draft_next(self._draft_rows(slots[chosen], known[chosen] - 1, limits[chosen], 0))
        drafter.store(slots, known - 1, result)
        return result

    def follow(self, step: StepRows, samples: Samples, generations: Ints, verified: VerifyResult) -> None:
        """In a stage that is not the last: extend slots and table by what the last one sampled and accepted."""
        outcome = verified.outcome
        self.verifier.append_sent(step, samples, verified.sampled.tokens, outcome.shape[1] - 2)
        reached = np.zeros(len(step.slots), dtype=bool)
        none: Longs = np.zeros(0, dtype=np.int64)
        self._count(Run(step, generations, reached, None, lambda: [outcome.cpu()], None, none, none))

    def _drop(self) -> None:
        """Forget all tokens that the drafter has not observed; lengths are kept."""
        run, self._last = self._last, None
        if run is not None:
            self._count(run)
        self._accepted = self._prompts = None
        self.early_drafts.drop()
        self._observer.drop()

    def draft(self, step: StepRows, draft_limits: Longs, levels: int) -> StepRows:
        """Draft for the decodes that may verify draft tokens: at most ``draft_limits`` int64 [rows], whose pages are
        already granted. ``levels``: depth of the trees, 0 for the maximum.
        """
        state = self.slots
        head = slice(0, step.decodes)
        slots = step.slots[head]
        known = state.known[slots]
        limits = np.minimum(draft_limits[head], state.page_count[slots] * state.page_size - known)
        limits = np.minimum(limits, self.drafter.max_nodes - 1)
        wants = (step.starts[head] + 1 == known) & self._wants[slots] & (state.left(slots) > 1)
        masked = self.sampler.masked(tuple(slots.tolist()))
        if not self.is_exact:
            wants[masked] = False  # tokens that are not sampled may break a grammar
        limits = np.where(wants, limits, 0)
        chosen = np.flatnonzero(limits > 0)
        if not len(chosen):
            return step
        slots, roots, limits = slots[chosen], step.starts[chosen], limits[chosen]
        put = self.device.memory.put
        drafts = self.early_drafts.take_ready(slots, roots, limits, levels) or self.drafter.draft(
            self._draft_rows(slots, roots, limits, levels)
        )
        verifying = np.flatnonzero(drafts.nodes > 1)
        if not len(verifying):
            return step
        if len(verifying) < len(chosen):
            drafts = Drafts(rows_of(drafts.tree, put(verifying)), drafts.nodes[verifying])
        fetched = None
        if not set(masked).isdisjoint(chosen[verifying].tolist()):
            fetched = self.device.memory.fetch([drafts.tree.tokens, drafts.tree.parents])
        return step.with_drafts(chosen[verifying], drafts, fetched)

    def _draft_rows(self, slots: Longs, roots: Longs, limits: Longs, levels: int) -> DraftRows:
        state, put = self.slots, self.device.memory.put
        columns = int((roots + limits).max()) // state.page_size + 1
        return DraftRows(
            slots=slots,
            roots=roots,
            pages=state.pages[slots, :columns],
            capacity=state.page_count[slots] * state.page_size,
            limits=limits,
            root_tokens=state.read(slots, roots, put(roots)).to(torch.int64),
            root_positions=put(roots),
            device_slots=put(slots),
            table=state.tokens,
            noise=self.sampler.noise(slots.tolist()),
            steps=min(levels or self.settings.num_steps, self.settings.num_steps),
        )

    def draft_early(self) -> None:
        """Let the drafter draft after the step that was just launched, if it can."""
        self.early_drafts.draft_after(self._last)

    # -- after the model ----------------------------------------------------------------------------------------------

    def sample(
        self,
        step: StepRows,
        samples: Samples,
        logits: Tensor,
        argmax: SampledTokens | None = None,
        masks: RowMasks | None = None,
    ) -> VerifyResult:
        """Sample and verify: see ``Verifier.sample``."""
        verified, tokens = self.verifier.sample(step, samples, logits, argmax, masks)
        self.early_drafts.set_outcome(verified.outcome, tokens)
        return verified

    def record_run(
        self,
        step: StepRows,
        reached: npt.NDArray[np.bool_],
        features: Tensor | None,
        sampled: SampledTokens | None,
        verified: VerifyResult | None,
        states: tuple[BoundedRows, ...] = (),
    ) -> PendingCopies | None:
        """Record a launched step; it is observed before the next one, and its rows of ``states`` are then brought
        behind the accepted tokens. Returns the copy that fetches outcome, tokens and nonfinite rows, if there is a
        single one."""
        arrives = None
        if verified is not None and verified.accepted is not None:
            arrives = self.early_drafts.arrival(verified.accepted)
        if self._unobserved:
            return arrives
        outcome = tokens = None
        rows = np.flatnonzero(reached)
        places = np.zeros(len(rows), dtype=np.int64)
        if verified is not None:
            outcome = arrives or self.device.memory.fetch([verified.outcome], lasting=True)
            rows, places, sampled = verified.rows, verified.places, verified.sampled
        if self.drafter.needs_host_tokens and not self._observer.can_defer and sampled is not None:
            tokens = self.device.memory.fetch([sampled.tokens]) if arrives is None else lambda: arrives()[1:]
        self._last = Run(
            step,
            self.slots.generation[step.slots],
            reached,
            features if self.drafter.features else None,
            outcome,
            tokens,
            rows,
            places,
            states,
        )
        return arrives
