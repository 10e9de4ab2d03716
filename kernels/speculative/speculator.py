"""Draft, verify, accept: what a runner does when it speculates, whatever the algorithm.

Lengths are the host's, and how many guesses a step accepts is known to the device first. So a step that verified some
is settled before the next one is prepared: the host then knows every length again, and the drafter observes what was
computed, before slots change hands. But where nothing changes hands the next one may run ahead of that (``following``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.platforms.base import Fetched, Platform
from kernels.prompt_ends import Reached
from kernels.rows import StepRows, ragged
from kernels.sampling import Sampled, Sampler
from kernels.slots import SlotTable
from kernels.speculative.drafter import Drafter, DraftRows, Drafts
from kernels.speculative.grown import GrownTrees, rows_of
from kernels.speculative.host_drafts import Raw, SeenHere, raw
from kernels.speculative.observing import Observer, Run
from kernels.speculative.samples import Samples, Verified
from kernels.speculative.settings import SpeculativeSettings
from kernels.speculative.verifier import Verifier
from kernels.step import Admission

__all__ = ["Speculator"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Speculator:
    """Of one runner. Everything in the model's thread, in the order of the steps."""

    def __init__(
        self,
        drafter: Drafter,
        settings: SpeculativeSettings,
        platform: Platform,
        sampler: Sampler,
        slots: SlotTable,
    ) -> None:
        self.drafter = drafter
        self._settings = settings
        self._platform = platform
        self._sampler = sampler
        self._slots = slots
        self.verifier = Verifier(settings, platform, sampler, slots, drafter.depth)
        self._wants = np.zeros(len(slots.known), dtype=bool)
        self._observer = Observer(drafter, platform, slots)
        self.trees = GrownTrees(drafter, settings, platform, sampler, slots)
        self._last: Run | None = None
        self._chained: tuple[SeenHere, Ints] | None = None  # what a step of chains accepted, with its generations
        self._waits = False  # whether the next such step may see it itself
        self._reached: tuple[Reached, Ints] | None = None  # the same of a step that ran prompts to their ends
        self.calm = False
        """Whether before more of the decodes that were run last nothing is to be settled, nor to be seen after them."""
        self.unseen = False
        """Whether nothing is kept of the step that runs."""

    @property
    def exact(self) -> bool:
        """Whether what the target samples, and nothing else, is accepted."""
        return not self._settings.lossy

    def wanted(self, slots: Longs) -> bool:
        """Whether all of them may have guesses."""
        return bool(self._wants[slots].all())

    @property
    def observer(self) -> Observer:
        return self._observer

    @property
    def last(self) -> Run | None:
        """The step that is not settled."""
        return self._last

    def quiet(self, unseen: bool) -> bool:
        """Whether before more of the decodes that were run last nothing is to be done; ``unseen``: as in ``settle``."""
        return self.calm and self.unseen == unseen

    def show_later(self, slots: Longs, features: Raw) -> None:
        """A token of each slot was computed, and no guess was verified; where the device is the host.

        ``slots``: the same array for as long as the requests are the same.
        """
        if self.calm:
            self.calm = self._observer.more(features)
            return
        if self._observer.follows(slots):
            self.calm = self._observer.bound(self._observer.more(features))
            return
        wants = self._wants[slots]
        every = bool(wants.all())
        if not every:
            slots, features = slots[wants], features[wants]
        if len(slots):
            state = self._slots
            room = self._observer.later(slots, state.generation[slots], state.computed[slots] - 1, features)
            self.calm = every and room

    def show_vain(self, slots: Longs, features: Raw, generations: Ints) -> None:
        """The same where there was no guess to make, though some were asked for."""
        if not self.drafter.needs_host_tokens:  # whose next guess wants this token, and a glance at it costs nothing
            self.show_later(slots, features)
            return
        ones = np.ones(len(slots), dtype=np.int64)
        self.show_next(SeenHere(slots, self._slots.computed[slots] - 1, ones, None, ones), generations)

    def show_next(self, seen: SeenHere, generations: Ints, waits: bool = False) -> None:
        """What a step on the host accepted is to be seen before the next one. ``waits``: that sees it itself, as a
        rule (``follows``)."""
        self._chained, self._waits = (seen, generations), waits

    def follows(self, slots: Longs) -> bool:
        """Whether nothing is to be seen but what the last step accepted of the very ``slots``, so that more guesses
        for them need no ``settle`` if the draft sees it first (``saw``)."""
        chained = self._chained
        if chained is None or not self._waits or chained[0].slots is not slots:
            return False
        return self._reached is None and self._last is None and self._observer.empty

    def saw(self) -> None:
        """It did, and there are guesses."""
        self._chained, self.calm = None, False

    def show_ends(self, reached: Reached, generations: Ints) -> None:
        """The same of what a step without guesses ran on the host."""
        self._reached = reached, generations

    def rest(self) -> None:
        """Let the drafter see what it has to see before the next step, whatever that is: the last was answered, and
        nobody waits. But what the next step may see itself takes less time there."""
        if self._chained is not None and not self._waits:
            self._observer.show(*self._chained)
            self._chained = None
        self._see_ends()

    def _see_ends(self) -> None:
        if self._reached is None:
            return
        (reached, generations), self._reached = self._reached, None
        # Of a request that does not speculate prompts are observed all the same: others may share them.
        rows = np.flatnonzero(self._wants[reached.slots] | (reached.counts > 1))
        if not len(rows):
            return
        slots, starts, counts = reached.slots[rows], reached.starts[rows], reached.counts[rows]
        features = reached.features if self.drafter.features else None
        first = (np.cumsum(reached.counts) - reached.counts)[rows]
        self._observer.show(SeenHere(slots, starts, counts, features, ragged(first, counts)), generations[rows])

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """A request has taken a slot."""
        self._wants[admission.slot] = admission.sampling.drafts != 0
        self.drafter.admit(admission, np.frombuffer(admission.tokens, dtype=np.int32))

    def release(self, slot: int) -> None:
        self.drafter.release(slot)

    # -- before a step ------------------------------------------------------------------------------------------------

    def settle(self, drafts: bool, released: bool, unseen: bool = False) -> None:
        """Learn what the last step accepted, and let the drafter see what it computed. That can wait where nothing is
        drafted in the step that comes, unless slots are ``released`` in it whose pages others may share.

        ``unseen``: nothing of the step that comes is kept for the drafter, nor of those before it that it has not seen.
        """
        asleep, self.unseen, self.calm = self.unseen, unseen, unseen
        if unseen:
            if not asleep:
                self._drop()
            return
        later = not drafts and not released
        chained, self._chained = self._chained, None
        if chained is not None:
            if later:
                self._observer.show_later(*chained)
            else:
                self._observer.show(*chained)
        self._see_ends()
        run, self._last = self._last, None
        if run is None:
            if not later:
                self._observer.flush()
            return
        step = run.step
        sound, counts, paths = self._count(run)
        if later and self._observer.keeps and step.decodes == len(step.rows):
            kept = np.flatnonzero(sound & self._wants[step.slots])
            features = None if run.features is None else raw(run.features)[kept]
            if len(kept):
                self._observer.later(step.slots[kept], run.generations[kept], step.starts[kept], features)
            return
        # Of a request that does not speculate prompts are observed all the same: others may share them.
        rows = np.flatnonzero(sound & (self._wants[step.slots] | (step.counts > 1)))
        if self.trees.settled(run, step.starts + counts, rows):
            self._observer.flush()
            return
        if len(rows):
            self._observer.add(run, rows, counts, paths)
        if later:
            self._observer.keep()
        else:
            self._observer.flush()

    def _count(self, run: Run) -> tuple[npt.NDArray[np.bool_], Longs, Longs | None]:
        """Make slots longer by what the run accepted. -> its rows whose requests are there still and finite, tokens of
        each, and of those that verified guesses which nodes they are."""
        state, step = self._slots, run.step
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
        sound[step.verifying] &= outcome[:, 0] > 0
        self.drafter.judged(slots.tolist(), (accepted[alive] - 1).tolist(), depths[alive].tolist())
        return sound, counts, outcome[:, 2:]

    def _drop(self) -> None:
        """Keep nothing that the drafter has not seen; but lengths count."""
        run, self._last = self._last, None
        if run is not None:
            self._count(run)
        self._chained = self._reached = None
        self.trees.drop()
        self._observer.drop()

    def draft(self, step: StepRows, most: Longs, levels: int) -> StepRows:
        """Guesses for the decodes that may verify some: ``most`` int64 [rows], with a page for each already granted.
        ``levels``: of the trees, 0 for all that there are.
        """
        state = self._slots
        head = slice(0, step.decodes)
        slots = step.slots[head]
        known = state.known[slots]
        limits = np.minimum(most[head], state.page_count[slots] * state.page_size - known)
        limits = np.minimum(limits, self.drafter.most_nodes - 1)
        wants = (step.starts[head] + 1 == known) & self._wants[slots] & (state.left(slots) > 1)
        limits = np.where(wants, limits, 0)
        chosen = np.flatnonzero(limits > 0)
        if not len(chosen):
            return step
        slots, roots, limits = slots[chosen], step.starts[chosen], limits[chosen]
        put = self._platform.put
        columns = int((roots + limits).max()) // state.page_size + 1
        drafts = self.trees.ready(slots, roots, limits, levels) or self.drafter.draft(
            DraftRows(
                slots=slots,
                roots=roots,
                pages=state.pages[slots, :columns],
                capacity=state.page_count[slots] * state.page_size,
                limits=limits,
                root_tokens=state.read(slots, roots, put(roots)).to(torch.int64),
                root_positions=put(roots),
                device_slots=put(slots),
                table=state.tokens,
                noise=self._sampler.noise(slots.tolist()),
                steps=min(levels or self._settings.num_steps, self._settings.num_steps),
            )
        )
        verifying = np.flatnonzero(drafts.nodes > 1)
        if not len(verifying):
            return step
        if len(verifying) < len(chosen):
            drafts = Drafts(rows_of(drafts.tree, put(verifying)), drafts.nodes[verifying])
        return step.with_drafts(chosen[verifying], drafts)

    def ahead(self) -> None:
        """Let the drafter go on behind the step that was just given to the device, where it can."""
        self.trees.grow(self._last)

    # -- after the model ----------------------------------------------------------------------------------------------

    def sample(self, step: StepRows, samples: Samples, logits: Tensor, likeliest: Sampled | None = None) -> Verified:
        """What ``Verifier.sample`` finds."""
        verified, tokens = self.verifier.sample(step, samples, logits, likeliest)
        self.trees.found(verified.outcome, tokens)
        return verified

    def ran(
        self,
        step: StepRows,
        reached: npt.NDArray[np.bool_],
        features: Tensor | None,
        sampled: Sampled | None,
        verified: Verified | None,
    ) -> Fetched | None:
        """A step was given to the device; it is observed before the next one. -> what brings the outcome, the tokens
        and which are broken, if one copy does."""
        arrives = None
        if verified is not None and verified.accepted is not None:
            arrives = self.trees.arrival(verified.accepted)
        if self.unseen:
            return arrives
        outcome = tokens = None
        rows = np.flatnonzero(reached)
        places = np.zeros(len(rows), dtype=np.int64)
        if verified is not None:
            outcome = arrives or self._platform.fetch([verified.outcome], lasting=True)
            rows, places, sampled = verified.rows, verified.places, verified.sampled
        if self.drafter.needs_host_tokens and not self._observer.keeps and sampled is not None:
            tokens = self._platform.fetch([sampled.tokens]) if arrives is None else lambda: arrives()[1:]
        self._last = Run(
            step,
            self._slots.generation[step.slots],
            reached,
            features if self.drafter.features else None,
            outcome,
            tokens,
            rows,
            places,
        )
        return arrives
