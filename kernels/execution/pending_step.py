"""A step before it runs, with the preparation that all executors share."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.contract.caches import Window
from kernels.contract.runner import RunningStep
from kernels.contract.step import RowError, StepBatch, StepResult, StepTiming
from kernels.core.arrays import Ints, Longs, unpack_ints
from kernels.core.attention_rows import AttentionRows
from kernels.core.batch import ForwardBatch
from kernels.devices.memory import PendingCopies
from kernels.devices.prepared import PassResult
from kernels.execution.device_errors import device_errors
from kernels.execution.load import LoadedModel
from kernels.execution.result_builder import ResultBuilder
from kernels.speculation.speculator import Speculator
from kernels.state.in_flight_writes import InFlightWrites, StepWrites
from kernels.state.native_grammars import NativeGrammars
from kernels.state.slot_updates import SlotUpdates
from kernels.state.step_rows import StepRows

__all__ = ["PendingStep", "StepContext"]


class StepContext:
    """State that all steps of one runner share.

    renew: see ``SlotUpdates``.
    """

    def __init__(self, loaded: LoadedModel, renew: Callable[[], None]) -> None:
        self.loaded = loaded
        self.in_flight_writes = InFlightWrites()
        self.slot_updates = SlotUpdates(
            loaded.slots,
            loaded.sampler,
            self.in_flight_writes,
            observer=loaded.speculator,
            clear_pages=loaded.clear_pages,
            clear_bounded=loaded.groups.clear_bounded,
            renew=renew,
            rows=loaded.model.rows,
            grammars=loaded.grammars,
        )
        draw = loaded.device.sampling.draw
        self.native_grammars: NativeGrammars | None = None
        """None: requests have no grammars, or the device draws no tokens."""
        if loaded.grammars is not None and draw is not None and loaded.slots.here is not None:
            self.native_grammars = NativeGrammars(loaded.grammars, loaded.sampler, draw, loaded.slots)
        self.unsettled: deque[UnsettledStep] = deque()
        self.unread: deque[UnreadStep] = deque()
        self.ended = 0.0
        """``time.perf_counter`` of the last result."""
        self._thread = threading.get_ident()

    @torch.inference_mode()
    def settle(self, batch: StepBatch) -> None:
        """Settle the steps whose results the next one, ``batch``, follows, and those whose slots it releases or admits.
        The failures of later steps are kept until a batch follows them, so that all ranks and stages drop a row before
        the same step: until then, the next steps of its slot run as if it were sound."""
        loaded, known = self.loaded, batch.number - batch.unanswered
        if loaded.model.stage.size == 1:
            if loaded.group.size > 1 and loaded.device.traits.overlaps:
                self.in_flight_writes.kept_from = known
                while self.unread and self.unread[0].number < known:
                    self.unread.popleft().result()
            return
        self.in_flight_writes.kept_from = known
        slots = {*unpack_ints(batch.released).tolist(), *(admission.slot for admission in batch.admitted)}
        needed = [each for each in self.unsettled if each.number < known or not slots.isdisjoint(each.slots)]
        if needed:
            needed[-1].result()

    def bind_thread(self) -> None:
        """Make the device usable in this thread, which is the model's from now on."""
        if self._thread != threading.get_ident():
            self.loaded.device.bind_thread()
            self._thread = threading.get_ident()

    @torch.inference_mode()
    def idle_work(self) -> None:
        """Run the observation left by a step with draft tokens (``RunningStep.idle_work``)."""
        assert self.loaded.speculator is not None
        with device_errors(self.loaded.device):
            self.loaded.speculator.flush_idle()


class UnsettledStep:
    """A step of a pipeline's stage that is not the last, until it is known what the last one samples in it. ``slots``:
    of its rows. Steps are settled in their order, in the model's thread.
    """

    def __init__(
        self, context: StepContext, number: int, slots: frozenset[int], finish: Callable[[], StepResult]
    ) -> None:
        self._context, self.number, self.slots, self._finish = context, number, slots, finish
        self._result: StepResult | None = None

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Settle the steps up to this one."""
        unsettled = self._context.unsettled
        with device_errors(self._context.loaded.device):
            while self._result is None:
                step = unsettled.popleft()
                step._result = step._finish()
        return self._result


class UnreadStep:
    """A step of one of several ranks, whose results are read once: by the thread that waits for them, or by the model's
    before a step that follows them."""

    def __init__(self, number: int, finish: Callable[[], StepResult]) -> None:
        self.number, self._finish = number, finish
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for the results."""
        with self._lock:
            if self._result is None:
                self._result = self._finish()
            return self._result


class PendingStep:
    """A step that no executor has taken yet.

    An executor calls its parts in this order, and leaves out what it does not need. Each runs once, for the first
    executor that needs it:

        grant       append the granted pages
        prepare     count the accepted tokens of the step before, then ``update``: change the slots
        form        the rows that can run, with their draft tokens
        begin       the executor takes the step; the model runs
        complete    start to copy the results to the host; ``complete_pass``: read them from a pass first

    ``begun``: ``time.perf_counter`` at the call that requested the step.
    """

    _granted: list[RowError] | None = None
    _builder: ResultBuilder | None = None
    _prepared = False
    _formed = False
    _writes: StepWrites | None = None
    _forward: ForwardBatch | None = None
    _started = 0.0
    rows: StepRows | None = None
    """The rows that can run, once the step is formed; None when there is none."""

    def __init__(self, context: StepContext, batch: StepBatch, begun: float) -> None:
        self._context, self.batch, self.begun = context, batch, begun

    # -- before the rows are known -------------------------------------------------------------------------------------

    def grant(self) -> bool:
        """Append the granted pages, before any other part of the step. Returns whether all grants were valid."""
        if self._granted is None:
            self._granted = self._context.slot_updates.grant(self.batch)
        return not self._granted

    def update(self) -> ResultBuilder:
        """Apply the step's slot changes. Before ``prepare`` only a step without admissions and releases may call it."""
        if self._builder is None:
            context, batch = self._context, self.batch
            context.bind_thread()
            context.slot_updates.drop_nonfinite()
            builder = ResultBuilder(unpack_ints(batch.slots), unpack_ints(batch.generations))
            context.slot_updates.update(batch, builder.failed, self._granted)
            self._builder = builder
        return self._builder

    def prepare(self) -> ResultBuilder:
        """Count the accepted tokens of the step before, then change the slots. Raises ValueError for a malformed
        batch."""
        if not self._prepared:
            self._prepare()
        assert self._builder is not None
        return self._builder

    @torch.inference_mode()
    def _prepare(self) -> None:
        context, batch, speculator = self._context, self.batch, self._context.loaded.speculator
        context.bind_thread()
        context.slot_updates.drop_nonfinite()
        rows = len(batch.slots)
        if not rows == len(batch.generations) == len(batch.counts):
            raise ValueError("slots, generations and counts of a step must have one entry for each row")
        tokens, max_tokens = int(unpack_ints(batch.counts).sum()), context.loaded.config.max_step_tokens
        if tokens > max_tokens:
            raise ValueError(f"a step of {tokens} tokens is over max_step_tokens, {max_tokens}")
        draft_seconds = 0.0
        if speculator is not None:
            speculator.begin_step(bool(batch.draft_limits), bool(batch.released), batch.unobserved)
            draft_seconds = time.perf_counter() - self.begun
        self.update().draft = draft_seconds
        self._prepared = True

    # -- rows ----------------------------------------------------------------------------------------------------------

    def form(self) -> StepRows | None:
        """Find the rows that can run, and draft for those that speculate. Returns ``rows``."""
        if not self._formed:
            self.prepare()
            self._form()
        return self.rows

    @torch.inference_mode()
    def _form(self) -> None:
        batch, loaded, builder = self.batch, self._context.loaded, self.prepare()
        counts = unpack_ints(batch.counts)
        rows = self._runnable(counts, builder)
        if len(rows):
            step = StepRows(rows, builder.slots[rows].astype(np.int64), counts[rows].astype(np.int64), loaded.slots)
            if loaded.speculator is not None and batch.draft_limits:
                step = self._draft(loaded.speculator, step, builder)
            self.rows = step
        self._formed = True

    def _runnable(self, counts: Ints, builder: ResultBuilder) -> Longs:
        """Indices of the rows that can run. Every request with another row fails, once."""
        errors = self._context.loaded.slots.errors(builder.slots, builder.generations, counts)
        if not errors:
            return np.arange(len(counts))
        reported = {(error.slot, error.generation) for error in builder.failed}
        for row, message in errors.items():
            name = (int(builder.slots[row]), int(builder.generations[row]))
            if name not in reported:
                builder.failed.append(RowError(*name, message))
        return np.array([row for row in range(len(counts)) if row not in errors], dtype=np.int64)

    def _draft(self, speculator: Speculator, step: StepRows, builder: ResultBuilder) -> StepRows:
        begun, limits = time.perf_counter(), unpack_ints(self.batch.draft_limits)
        if len(limits) != len(builder.slots):
            raise ValueError("drafts of a step must have one entry for each row, or none")
        step = speculator.draft(step, limits[step.rows].astype(np.int64), self.batch.draft_levels)
        builder.draft += time.perf_counter() - begun
        return step

    @property
    def writes(self) -> StepWrites:
        """The pages that the rows write to."""
        if self._writes is None:
            assert self.rows is not None
            step, state = self.rows, self._context.loaded.slots
            last = (step.starts + step.counts - 1) // state.page_size
            pages = state.pages[step.slots, : int(last.max()) + 1]
            generations = state.generation[step.slots]
            first = step.starts // state.page_size
            self._writes = StepWrites(step.slots, generations, first, last, pages, self.batch.number)
        return self._writes

    def forward_batch(self) -> ForwardBatch:
        """The model's input for the rows, on the device."""
        if self._forward is None:
            self._forward = self._make_forward_batch()
        return self._forward

    def receive(self, into: Tensor | None) -> ForwardBatch:
        """``forward_batch`` with the residual stream of the stage before: see ``Decoder.receive``."""
        self._forward = self._context.loaded.model.receive(self.forward_batch(), into)
        return self._forward

    def send(self, result: Tensor) -> None:
        """Send the ``result`` of a captured pass to the next stage, if there is one. It is copied, so that the next
        pass need not wait until it has arrived."""
        stage = self._context.loaded.model.stage
        if not stage.is_last:
            stage.send_stream(result.clone())

    def _make_forward_batch(self) -> ForwardBatch:
        assert self.rows is not None
        step, loaded = self.rows, self._context.loaded
        state, device = loaded.slots, loaded.device
        attention = AttentionRows(step.starts, step.counts, self.writes.pages, step.decodes)
        token_ids, at, index = self._tokens(step.slots, attention)
        if step.drafts is not None and loaded.speculator is not None:
            token_ids, at = loaded.speculator.verifier.place(step, token_ids, at)
            bits = None if step.drafts.tree.linear else step.drafts.tree.bits
            attention = dataclasses.replace(attention, verifies=step.verifies, tree=bits)
        plans = {window: device.attention.plan_layers(attention, window) for window in loaded.windows}
        batch = ForwardBatch(token_ids, at, index, plans, rows=attention)
        return batch if loaded.groups.is_plain else loaded.groups.place(batch, attention, step.slots, state.bounded)

    def _tokens(self, slots: Longs, rows: AttentionRows) -> tuple[Tensor, Tensor, Tensor]:
        """The ids, positions and places in the cache of the rows' tokens, on the device. ``slots`` [rows]."""
        state, device = self._context.loaded.slots, self._context.loaded.device
        if rows.decodes == len(slots):
            token_slots, positions = slots, rows.starts
        else:
            token_slots = np.repeat(slots, rows.counts)
            before = np.cumsum(rows.counts) - rows.counts
            positions = np.arange(len(token_slots)) + np.repeat(rows.starts - before, rows.counts)
        size = state.page_size
        index = state.pages[token_slots, positions // size] * np.int64(size) + positions % size
        at = device.memory.put(positions)
        return state.read(token_slots, positions, at), at, device.memory.put(index)

    def divided_batches(self, threshold: float) -> tuple[tuple[ForwardBatch, Longs], ...] | None:
        """The rows as two batches, of a model without bounded groups: see ``AttentionRows.divided``. -> each
        batch, and its rows' indices in ``rows``."""
        assert self.rows is not None
        step, loaded = self.rows, self._context.loaded
        parts = AttentionRows(step.starts, step.counts, self.writes.pages, step.decodes).divided(threshold)
        if parts is None:
            return None
        batches = []
        for rows, index in parts:
            token_ids, at, places = self._tokens(step.slots[index], rows)
            plans = {window: loaded.device.attention.plan_layers(rows, window) for window in loaded.windows}
            batch = ForwardBatch(token_ids, at, places, plans, rows=rows)
            if not loaded.groups.is_plain:
                batch = loaded.groups.place(batch, rows, step.slots[index], ())
            batches.append((batch, index))
        return tuple(batches)

    # -- running -------------------------------------------------------------------------------------------------------

    def begin(self, started: float = 0.0) -> None:
        """Record that the rows are launched now and write to their pages. ``started``: ``time.perf_counter`` of the
        launch; 0: now."""
        if not self._started:
            self._context.in_flight_writes.begin(self.writes)
            self._started = started or time.perf_counter()

    def complete(self) -> RunningStep:
        """Start to fetch the collected results. No other executor may take the step afterwards."""
        context, builder, writes = self._context, self.update(), self._writes if self._started else None
        device, started = context.loaded.device, self._started or time.perf_counter()
        if builder.settle is not None:
            return RunningStep(self._unsettled(builder, writes, started).result, True)
        # A graph's output is overwritten by its next replay; results of verification are not.
        fetched = builder.arrives or device.memory.fetch(builder.tensors(), lasting=builder.outcome is not None)
        thread = threading.get_ident()

        def finish() -> StepResult:
            with device_errors(device):
                if threading.get_ident() != thread:
                    device.bind_thread()
                return self._finish(fetched, builder, writes, started)

        # A page of a window may get a new owner before it is cleared: no step may use it by then. A state's new owner
        # reads nothing that it has not written.
        loaded = context.loaded
        windows = any(isinstance(table.group.group.spec, Window) for table in loaded.slots.bounded)
        if not device.traits.overlaps or windows or loaded.group.size == 1:
            return RunningStep(finish, not device.traits.overlaps or windows)
        if loaded.model.stage.size > 1:  # the other stages wait for its tokens
            return RunningStep(finish, True)
        step = UnreadStep(self.batch.number, finish)
        context.unread.append(step)
        return RunningStep(step.result, False)

    def _unsettled(self, builder: ResultBuilder, writes: StepWrites | None, started: float) -> UnsettledStep:
        context = self._context

        def finish() -> StepResult:
            assert builder.settle is not None
            builder.settle()
            return self._finish(context.loaded.device.memory.fetch(builder.tensors()), builder, writes, started)

        step = UnsettledStep(context, self.batch.number, frozenset(builder.slots.tolist()), finish)
        context.unsettled.append(step)
        return step

    def complete_pass(self, result: PassResult) -> RunningStep:
        """Read the results ``result`` of the model's pass, then ``complete``."""
        loaded, builder = self._context.loaded, self.update()
        assert self.rows is not None
        loaded.outputs.read(self.rows, result, builder)
        running = self.complete()
        if loaded.speculator is not None:
            loaded.speculator.draft_early()
        return running

    def _finish(
        self, fetched: PendingCopies, builder: ResultBuilder, writes: StepWrites | None, started: float
    ) -> StepResult:
        """Wait for the results and pack them. Runs in the waiting thread, so it shares no state with later steps."""
        host, context = fetched(), self._context
        ended = time.perf_counter()
        timing = StepTiming(
            prepare=started - self.begun,
            run=ended - max(started, context.ended),
            graph_rows=builder.graph_rows,
            divided=builder.divided,
            draft=builder.draft,
            total=ended - max(self.begun, context.ended),
        )
        context.ended = ended
        result, nonfinite = builder.pack(self.batch.number, host, timing)
        if writes is not None:
            context.in_flight_writes.finish(writes, nonfinite)
        return result
