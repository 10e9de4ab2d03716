"""Drafting and verifying before the host knows what the last step accepted.

Lengths are known only on the device here. ``EarlyDraftPasses`` observe accepted tokens and grow the next trees in one
pass of static shapes without a read-back, so that a device can capture it (``Capture.draft``). Meanwhile the host
prepares the next step. ``EarlyDrafts`` keeps the trees until a step verifies them. If that step has other rows, the
observation and the trees of the remaining rows stay valid.

``OverlappedVerify`` goes further. A pass that accepts on the device leaves the new lengths there for the next pass.
While the rows stay the same and have enough pages, the next pass and its drafting are issued before the host has
counted the last one. The device then never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import StepBatch
from kernels.core.arrays import Ints, Longs
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Acceptance
from kernels.core.tree import Drafts, DraftTree, Growth, Level, chain
from kernels.devices.base import Device
from kernels.devices.draft_kernels import AcceptedBuffers, AcceptedTokens, TreeBuilder, TreeShape
from kernels.devices.memory import PendingCopies
from kernels.devices.prepared import CapturedPasses, PassResult, VerifyOutputs
from kernels.sampling.sampler import Sampler
from kernels.speculation.draft_sampler import DraftSampler
from kernels.speculation.drafter import AcceptedRows, Drafter, DrafterContext
from kernels.speculation.observe import Run
from kernels.speculation.verify import VerifyResult
from kernels.state.slots import SlotTable
from kernels.state.step_rows import StepRows

if TYPE_CHECKING:
    from kernels.speculation.speculator import Speculator

__all__ = [
    "EarlyDraftModel",
    "EarlyDraftPasses",
    "EarlyDrafts",
    "OverlappedResult",
    "OverlappedVerify",
    "PlanDraft",
    "TorchGrowing",
    "rows_of",
]

PlanDraft = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, int], Any]
"""``Attention.plan_draft``."""


class TorchGrowing:
    """``TreeBuilder`` in plain torch."""

    def __init__(self, shape: TreeShape, accepted: AcceptedTokens, plan: PlanDraft, sampler: DraftSampler) -> None:
        self._shape, self._given, self._plan, self._sampler = shape, accepted, plan, sampler
        self._step = 0
        self._seen = accepted.slots  # bit masks of the nodes that each node of the last level attends to

    def observe(self) -> ForwardBatch:
        shape, given = self._shape, self._given
        rows, levels = given.tokens.shape
        self._counts = given.outcome[:, 0].abs().clamp(min=1)
        level = torch.arange(levels, device=given.tokens.device)
        positions = given.roots.unsqueeze(1) + level
        index = torch.where(
            level < self._counts.unsqueeze(1), self._places(positions), level % shape.page_size
        )  # a row with NaN logits writes nothing
        sound = (given.outcome[:, :1] > 0).unsqueeze(2)
        features = torch.where(sound, given.features.view(rows, levels, -1), 0).view(rows * levels, -1)
        plans = self._plans(given.roots, levels, None, None)
        return ForwardBatch(given.tokens.reshape(-1), positions.reshape(-1), index.reshape(-1), plans, features)

    def start(self, seen: Tensor) -> Tensor:
        given = self._given
        rows, levels = given.tokens.shape
        last = (self._counts - 1).unsqueeze(1)
        states = seen.view(rows, levels, -1).gather(1, last.unsqueeze(2).expand(-1, -1, seen.shape[1])).squeeze(1)
        given.states.index_copy_(0, given.slots, states)
        root_tokens = given.tokens.gather(1, last).squeeze(1)
        self._begins = given.roots + self._counts + self._shape.first
        self._tokens = [root_tokens]
        self._growth = Growth(root_tokens, self._shape.topk)
        return states

    def level(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        self._step += 1
        return self._link(logits, states) if self._shape.topk == 1 else self._branches(logits, states)

    def _link(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        self._tokens.append(self._sampler.best(logits, None, self._begins, self._step))
        at = self._begins + (self._step - 1)
        index = self._places(at.unsqueeze(1)).view(-1)
        return ForwardBatch(self._tokens[-1], at, index, self._plans(at, 1, None, None), states)

    def _branches(self, logits: Tensor, states: Tensor) -> ForwardBatch:
        rows, width, step, device = len(self._begins), self._shape.topk, self._step, logits.device
        node = torch.arange(width, device=device)
        own = torch.ones((), dtype=torch.int64, device=device) << (node + (step - 1) * width)
        level = self._grow(logits)
        above = 1 if step == 1 else width
        row = torch.arange(rows, device=device).unsqueeze(1)
        states = states.index_select(0, (row * above + level.origins).view(-1))
        self._seen = own.expand(rows, width) if step == 1 else self._seen.gather(1, level.origins) | own
        starts = self._begins + width * (step - 1)
        index = self._places(starts.unsqueeze(1) + node).view(-1)
        positions = (self._begins + (step - 1)).repeat_interleave(width, output_size=rows * width)
        plans = self._plans(starts, width, self._seen, self._begins)
        return ForwardBatch(level.tokens.reshape(-1), positions, index, plans, states)

    def _grow(self, logits: Tensor) -> Level:
        rows, width = len(self._begins), self._shape.topk
        tokens, scores = self._sampler.candidates(logits, None, self._begins, 0, width)
        return self._growth.grow(tokens.view(rows, -1, width), scores.view(rows, -1, width))

    def tree(self, logits: Tensor) -> DraftTree:
        if self._shape.topk == 1:
            best = self._sampler.best(logits, None, self._begins, self._step + 1)
            return chain(torch.stack([*self._tokens, best], 1))
        self._grow(logits)
        return self._growth.tree(self._shape.kept)

    def _places(self, positions: Tensor) -> Tensor:
        """Places in the cache of ``positions`` int64 [rows, n]."""
        size = self._shape.page_size
        return self._given.pages.gather(1, positions // size) * size + positions % size

    def _plans(self, starts: Tensor, tokens: int, bits: Tensor | None, roots: Tensor | None) -> dict[int, Any]:
        pages = self._given.pages
        return {window: self._plan(starts, pages, tokens, bits, roots, window) for window in self._shape.windows}


_ROWS = (1, 2, 4, 8, 16)

_Passes = dict[int, tuple[Callable[[], None], list[DraftTree]]]
"""Passes by number of rows: the function that runs one, and the trees that it writes."""


class EarlyDraftModel(Protocol):
    """An ``expansion.DraftModel`` that can start from the target's features."""

    width: int

    def start(self, features: Tensor) -> Tensor: ...

    def forward(self, batch: ForwardBatch, states: Tensor, caches: list[Any]) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...


class EarlyDraftPasses:
    """One pass for each of a few numbers of rows. ``states`` [max_slots, width]: the state of each slot's last
    token."""

    def __init__(
        self,
        context: DrafterContext,
        model: EarlyDraftModel,
        sampler: DraftSampler,
        caches: list[Any],
        states: Tensor,
        shape: TreeShape,
    ) -> None:
        self._model, self._sampler, self._device, self._caches = model, sampler, context.device, caches
        self._states, self._shape = states, shape
        early_positions, target = shape.first + shape.topk * shape.steps, context.target
        columns = -(-(context.context + early_positions) // shape.page_size) + 1  # pages that a sequence may have
        features = target.hidden_size * max(1, len(target.captures))
        max_rows, levels, home = max(_ROWS), shape.steps + 1, states.device
        self._host = torch.zeros((max_rows, 2 + columns), dtype=torch.int64, device=home)  # roots, slots, pages
        self._outcome = torch.zeros((max_rows, 2 + levels), dtype=torch.int64, device=home)
        self._tokens = torch.zeros((max_rows, levels), dtype=torch.int64, device=home)
        self._features = torch.zeros((max_rows * levels, features), dtype=states.dtype, device=home)
        self._passes: _Passes = {}
        self._after_pass: _Passes = {}

    def capture(self, rows: int, agree: Callable[[bool], bool], accept_outputs: Mapping[int, VerifyOutputs]) -> None:
        """Capture passes of up to ``rows`` rows, as far as the device can, and those that follow ``accept_outputs``."""
        for size in sorted((size for size in _ROWS if size <= rows), reverse=True):
            if not self._capture(self._passes, size, partial(self._run, size), agree):
                break
        if not self._passes:
            return
        for size, end in accept_outputs.items():
            if size <= rows and not self._capture(self._after_pass, size, partial(self._run_after_pass, end), agree):
                break
        # Compiled here, so that no step waits for it.
        nothing = self._host.new_zeros((1, 2 + self._host.shape[1]))
        outcome, tokens = torch.zeros_like(self._outcome[:1]), torch.zeros_like(self._tokens[:1])
        self._copy_accepted(nothing[:, :4], nothing[:, 4:], outcome, tokens, torch.zeros_like(self._features))

    def _capture(self, passes: _Passes, size: int, run: Callable[[], DraftTree], agree: Callable[[bool], bool]) -> bool:
        result: list[DraftTree] = []

        def hold() -> None:
            result[:] = [run()]

        captured = self._device.capture.draft(hold)
        if not agree(captured is not None) or captured is None:
            return False
        passes[size] = captured, result
        return True

    @property
    def early_positions(self) -> int:
        """The most positions after the root that a pass writes to."""
        shape = self._shape
        return shape.steps + 1 + shape.first + shape.topk * (shape.steps - 1)

    def size(self, rows: int) -> int:
        """Rows of the smallest pass that can run ``rows`` rows; 0: there is none."""
        return min((size for size in self._passes if size >= rows), default=0)

    def run(self, accepted: AcceptedRows) -> DraftTree:
        """Observe accepted tokens and grow trees after them. The next call overwrites the trees."""
        roots, slots, pages, outcome, tokens, features, places = accepted
        rows = len(roots)
        size = self.size(rows)
        columns, show = self._host.shape[1], self._device.memory.put_pinned
        host = np.zeros((size, 2 + columns), dtype=np.int64)
        host[:rows, 0], host[:rows, 1], host[:rows, 3] = slots, roots, places
        host[:rows, 4 : 4 + pages.shape[1]] = pages
        packed = show(host)
        self._copy_accepted(packed[:, :4], packed[:, 4:], outcome, tokens, features)
        return self._replay(self._passes[size], rows)

    def run_after_pass(self, end: int, rows: int) -> DraftTree | None:
        """``run`` for the first ``rows`` rows of a pass that accepted on the device. None if no pass was captured to
        follow it; state is unchanged then.
        """
        return self._replay(self._after_pass[end], rows) if end in self._after_pass else None

    @staticmethod
    def _replay(captured: tuple[Callable[[], None], list[DraftTree]], rows: int) -> DraftTree:
        replay, result = captured
        replay()
        tree = result[0]
        return DraftTree(tree.tokens[:rows], tree.parents[:rows], tree.depths[:rows], tree.bits[:rows], tree.linear)

    def _copy_accepted(self, rows: Tensor, pages: Tensor, outcome: Tensor, tokens: Tensor, features: Tensor) -> None:
        """Copy accepted tokens to the input of a pass, as ``DraftKernels.copy_accepted`` does."""
        size, count, columns = len(rows), len(outcome), min(self._host.shape[1] - 2, pages.shape[1])
        drafting = self._device.drafting
        buffers = AcceptedBuffers(self._host[:size], self._outcome, self._tokens, self._features)
        if drafting is not None and drafting.copy_accepted(rows, pages, outcome, tokens, features, buffers):
            return
        self._host[:size].zero_()
        self._host[:size, 0], self._host[:size, 1] = rows[:, 1], rows[:, 0]
        self._host[:size, 2 : 2 + columns].copy_(pages[:, :columns])
        self._outcome[:size].zero_()
        self._outcome[:count, : outcome.shape[1]].copy_(outcome)
        self._tokens[:count, : tokens.shape[1]].copy_(tokens)
        at = (self._outcome[:count, 2:] + rows[:count, 3:4]).reshape(-1)
        self._features[: len(at)].copy_(features.index_select(0, at))

    def _run_after_pass(self, end: VerifyOutputs) -> DraftTree:
        self._copy_accepted(end.rows, end.pages, end.accepted.outcome, end.accepted.tokens, end.features)
        return self._run(len(end.rows))

    def _run(self, rows: int) -> DraftTree:
        model, levels, caches = self._model, self._shape.steps + 1, self._caches
        accepted = AcceptedTokens(
            self._host[:rows, 0],
            self._host[:rows, 1],
            self._host[:rows, 2:],
            self._outcome[:rows],
            self._tokens[:rows],
            self._features[: rows * levels],
            self._states,
        )
        builder = self._make(accepted)
        batch = builder.observe()
        assert batch.states is not None
        states = builder.start(model.forward(batch, model.start(batch.states), caches))
        for _ in range(self._shape.steps - 1):
            batch = builder.level(model.logits(states), states)
            assert batch.states is not None
            states = model.forward(batch, batch.states, caches)
        return builder.tree(model.logits(states))

    def _make(self, accepted: AcceptedTokens) -> TreeBuilder:
        drafting = self._device.drafting
        own = None if drafting is None else drafting.make_tree_builder(self._shape, accepted)
        return own or TorchGrowing(self._shape, accepted, self._device.attention.plan_draft, self._sampler)


@dataclass(eq=False)
class _EarlyTrees:
    """Trees drafted after ``run``, one for each of its rows. ``end``: the result of the pass that they start from; 0:
    none. ``roots``: positions of the roots, once the host knows them."""

    run: Run
    tree: DraftTree
    end: int = 0
    roots: Longs | None = None


class EarlyDrafts:
    """The trees of one runner that are not verified yet."""

    def __init__(
        self, drafter: Drafter, settings: SpeculativeSettings, device: Device, sampler: Sampler, slots: SlotTable
    ) -> None:
        self._drafter, self._steps = drafter, settings.num_steps
        self._device, self._sampler, self._slots = device, sampler, slots
        self._found: tuple[Tensor, Tensor] | None = (
            None  # the last step's outcome, and the token after each accepted node
        )
        self._end = 0  # index of the pass that left these; 0: none
        self._arrives: PendingCopies | None = None  # the last result of such a pass
        self._grown: _EarlyTrees | None = None
        self._whole = True  # whether the last trees had all levels

    # -- accepted tokens of a step ------------------------------------------------------------------------------------

    def set_outcome(self, outcome: Tensor, tokens: Tensor) -> None:
        """Record the ``outcome`` of a step (``VerifyResult.outcome``), and the ``tokens`` after each accepted node,
        int64 [verified rows, levels]."""
        self._found, self._end = (outcome, tokens), 0

    def can_accept(self, slots: Longs) -> bool:
        """Whether a pass that verifies the drafts of ``slots`` may accept on the device. Waits until the results of the
        pass before are on the host."""
        if not self._sampler.plain(tuple(slots.tolist())):
            return False
        if self._arrives is not None:
            self._arrives()
        return True

    def take_accepted(self, result: PassResult) -> VerifyResult:
        """Take the tokens that a pass accepted on the device, and start their copy to the host."""
        assert result.accepted is not None
        self._found, self._end = (result.accepted.outcome, result.accepted.tokens), result.accept_size
        # Only the next accepting pass overwrites it, and that waits on the device (``after_copies``) or in
        # ``can_accept``.
        self._arrives = self._device.memory.fetch([result.accepted.packed], lasting=True)
        return VerifyResult.from_device(result.accepted)

    def arrival(self, accepted: Acceptance) -> PendingCopies:
        """A function that waits for the last step's outcome, its tokens and which of these are not finite."""
        begun = self._arrives if self._end else None
        fetched = begun or self._device.memory.fetch([accepted.packed], lasting=True)

        def arrives() -> list[Tensor]:
            here = accepted.on_host(fetched()[0])
            return [here.outcome, here.tokens.reshape(-1), here.nonfinite.reshape(-1)]

        return arrives

    # -- drafts after it ----------------------------------------------------------------------------------------------

    def draft_after(self, run: Run | None) -> None:
        """Draft after the step that was just launched, so that the next one finds its draft tokens ready.

        Only for steps whose requests all decode greedily and verify; others draft once the host knows the result.
        """
        result, state, early_positions = self._found, self._slots, self._drafter.early_positions()
        self._found = self._grown = None
        if run is None or result is None or not early_positions or not self._whole or run.features is None:
            return
        step = run.step
        if step.verifies < len(step.rows) or self._sampler.noise(step.slots.tolist()) is not None:
            return
        if (step.starts + early_positions >= state.page_count[step.slots] * state.page_size).any():
            return
        columns = int(step.starts.max() + early_positions) // state.page_size + 1
        end = self._end
        tree = self._drafter.draft_after_pass(end, len(step.slots)) if end else None
        if tree is None:
            end, pages = 0, state.pages[step.slots, :columns]
            accepted = AcceptedRows(step.starts, step.slots, pages, *result, run.features, step.offsets)
            tree = self._drafter.draft_early(accepted)
        if tree is not None:
            self._grown = _EarlyTrees(run, tree, end)

    def find_behind(self, slots: Longs, generations: Ints, levels: int) -> tuple[Run, DraftTree] | None:
        """The last step, whose outcome the host does not know, and the trees drafted after it.

        None unless they have exactly the given rows and levels, and can be verified without the host.
        """
        grown, state = self._grown, self._slots
        if grown is None or grown.roots is not None or not grown.end or 0 < levels < self._steps:
            return None
        if not np.array_equal(slots, grown.run.step.slots):
            return None
        there = state.active[slots] & (state.generation[slots] == generations)
        return (grown.run, grown.tree) if there.all() else None

    def set_followed(self, run: Run | None, end: int, tree: DraftTree | None) -> None:
        """Record that ``tree`` was drafted after ``run``, from the results of its pass."""
        self._found = None
        self._grown = None if tree is None or run is None else _EarlyTrees(run, tree, end)

    def confirm(self, run: Run, roots: Longs, rows: Longs) -> bool:
        """Confirm that the host has counted ``run``. ``roots`` [rows]: positions of the last known tokens; ``rows``:
        those whose requests still run.

        Returns whether the drafter has already observed the step because it drafted after it.
        """
        grown = self._grown
        if grown is None or grown.run is not run:
            return False
        grown.roots = roots
        self._drafter.mark_observed(run.step.slots[rows], roots[rows])
        return True

    def drop(self) -> None:
        """Forget the trees: no step will verify them."""
        self._grown = None

    def take_ready(self, slots: Longs, roots: Longs, limits: Longs, levels: int) -> Drafts | None:
        """Trees drafted early for exactly these rows and ``levels`` (0: all), if there are any."""
        grown, self._whole = self._grown, not levels or levels >= self._steps
        if grown is None or grown.roots is None or not self._whole:
            return None
        run, tree = grown.run, grown.tree
        held = {slot: row for row, slot in enumerate(run.step.slots.tolist())}
        at = np.array([held.get(slot, -1) for slot in slots.tolist()])
        if (at < 0).any() or (grown.roots[at] != roots).any():
            return None
        if (run.generations[at] != self._slots.generation[slots]).any():
            return None
        if len(at) < len(held) or (at[1:] < at[:-1]).any():
            tree = rows_of(tree, self._device.memory.put(at))
        return Drafts(tree, np.minimum(limits + 1, tree.tokens.shape[1]))


def rows_of(tree: DraftTree, rows: Tensor) -> DraftTree:
    """The trees of ``rows`` int64."""
    return DraftTree(
        tree.tokens.index_select(0, rows),
        tree.parents.index_select(0, rows),
        tree.depths.index_select(0, rows),
        tree.bits.index_select(0, rows),
        tree.linear,
    )


class OverlappedResult(NamedTuple):
    """A launched pass of ``slots`` int64 [rows]. ``found``: its results, also as ``verified``. ``tree``: the trees that
    it verifies, one per row. ``behind``: the trees that were drafted after it, if any."""

    slots: Longs
    found: PassResult
    verified: VerifyResult
    tree: DraftTree
    behind: DraftTree | None


class OverlappedVerify:
    """Issues a runner's passes before the host knows the last result. ``prepared``: captured passes that verify; some
    of them accept on the device."""

    def __init__(self, speculator: Speculator, device: Device, slots: SlotTable, prepared: CapturedPasses) -> None:
        self._speculator, self._device, self._slots, self._prepared = speculator, device, slots, prepared

    def is_candidate(self, batch: StepBatch) -> bool:
        """Whether the batch may be such a step: only decodes that draft, and grants. ``issue`` decides."""
        if not batch.draft_limits or batch.admitted or batch.released:
            return False
        if not len(batch.draft_limits) == len(batch.slots) == len(batch.generations):
            return False
        return bool(batch.counts == np.ones(len(batch.slots) // 4, dtype=np.int32).tobytes())

    def issue(self, batch: StepBatch) -> OverlappedResult | None:
        """Launch the next pass after one whose outcome the host does not know, and draft after it. None if it must wait
        for the host; state is unchanged then."""
        slots, generations, max_rows = (
            np.frombuffer(part, dtype=np.int32) for part in (batch.slots, batch.generations, batch.draft_limits)
        )
        at, speculator, state = slots.astype(np.int64), self._speculator, self._slots
        held = speculator.early_drafts.find_behind(at, generations, batch.draft_levels)
        if held is None or self._prepared.verify is None:
            return None
        run, tree = held
        width, early_positions = tree.tokens.shape[1], speculator.drafter.early_positions()
        draft_tokens = min(speculator.drafter.depth, width - 1)  # most draft tokens that the run accepts
        starts: Longs = run.step.starts + draft_tokens + 1
        ends = starts + max(width, early_positions + 1)
        if (max_rows < width - 1).any() or (ends > state.page_count[at] * state.page_size).any():
            return None
        if (starts + 1 >= state.max_length).any() or (state.left(at) <= draft_tokens + 2).any():
            return None
        pages = state.pages[at, : int(ends.max() - 1) // state.page_size + 1]
        self._device.memory.wait_for_copies()
        result = self._prepared.verify(None, pages, tree, at)
        if result is None:
            return None
        verified = speculator.early_drafts.take_accepted(result)
        behind = speculator.drafter.draft_after_pass(result.accept_size, len(at))
        return OverlappedResult(at, result, verified, tree, behind)

    def finish_previous(self, followed: OverlappedResult) -> StepRows:
        """Wait for the accepted tokens of the pass before. -> the rows of the pass issued after it, with their now
        known positions."""
        self._speculator.begin_step(True, False)
        slots = followed.slots
        rows, ones = np.arange(len(slots)), np.ones(len(slots), dtype=np.int64)
        nodes = ones * followed.tree.tokens.shape[1]
        return StepRows(rows, slots, ones, self._slots).with_drafts(rows, Drafts(followed.tree, nodes))
