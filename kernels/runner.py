"""Runs a model step by step, as kernels.step says."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.answers import Answer, RunningStep
from kernels.batch import ForwardBatch
from kernels.captures import CapturedSteps
from kernels.host_steps import HostSteps, of_no_use
from kernels.loaded_model import Phases, load_model, open_model
from kernels.parallel.group import Group, join_group
from kernels.platforms.base import Fetched
from kernels.platforms.prepared import PassFound, Steps
from kernels.platforms.rows import AttentionRows, PromptTokens, StepTokens
from kernels.platforms.select import select_platform
from kernels.rows import StepRows
from kernels.speculative.following import Following
from kernels.speculative.rehearsal import rehearse
from kernels.speculative.speculator import Speculator
from kernels.speculative.steady import SteadyChains
from kernels.step import ModelInfo, RowError, RunnerConfig, StepBatch, StepResult, StepTiming
from kernels.tenants import Tenants
from kernels.unsettled import StepWrites, Unsettled

__all__ = ["ModelRunner"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class ModelRunner:
    """One model on one device. Nothing here is thread safe: one thread at a time calls it, strictly in step order. Only
    a step that was started may be waited for by another, so that the next one is prepared while it runs.

    Results are deterministic: the same steps give the same tokens. A row's logits do not depend on what the other
    rows hold, but they are not bit-equal between batches of different shape (sizes of matrix products, lengths of
    all rows, padded or not, chunk borders), because sums are then taken in another order; they are with
    ``RunnerConfig.invariant``.

    progress: called with a stage (weights | cache | warmup) and the fraction of the whole load that is done.
    """

    def __init__(self, config: RunnerConfig, progress: Callable[[str, float], None] | None = None) -> None:
        self._config = config
        self._progress = progress or (lambda stage, fraction: None)
        self._platform = select_platform(config)
        self._group = Group()
        self._thread = 0
        self._unsettled = Unsettled()
        self._ended = 0.0

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        """Read the weights, make the cache, warm up.

        Raises ConfigError, LoadError, PlatformError or CacheSizeError: each a ValueError or RuntimeError whose message
        says what to do.
        """
        with self._device_errors():
            return self._load()

    def _load(self) -> ModelInfo:
        self._bind_thread()
        config, platform, clock = self._config, self._platform, Phases()
        opened = open_model(config, platform, self._progress)
        self._group = join_group(platform, config)
        loaded = load_model(opened, config, platform, self._group, self._progress, clock)
        self._model, self._windows = loaded.model, loaded.windows
        self._slots, self._caches = loaded.slots, loaded.caches
        self._speculator, self._outputs = loaded.speculator, loaded.outputs
        self._captured = CapturedSteps(loaded)
        self._host = HostSteps(self._captured, self._speculator, self._rest)
        self._tenants = Tenants(loaded, self._captured, self._unsettled)
        if self._speculator is not None and platform.compiles:
            drafter = self._speculator.drafter
            rehearse(self.start, loaded.info, drafter, config.max_slots, config.max_step_tokens)
        clock.end("warmup")
        self._progress("warmup", 1.0)
        return msgspec.structs.replace(loaded.info, load_seconds=clock.seconds, graph_rows=self._captured.rows)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """One step. What is wrong with one row is answered in ``failed`` and leaves the others alone. A slot whose
        admission failed, or whose logits are not finite, is dropped. Raises ValueError for a batch that is malformed
        as a whole.
        """
        result = self.start(batch).result()
        self._tenants.settle()
        return result

    def start(self, batch: StepBatch) -> RunningStep:
        """The same without waiting for the device, where it works by itself. A step may start before the results of
        those before it are there; a row whose logits were not finite in one of them then fails again.
        """
        begun, steady, granted = time.perf_counter(), self._host.steady(batch), None
        again = steady is not None and self._unsettled.nothing and steady.again(batch)
        if steady is not None and again and (self._speculator is None or self._speculator.quiet(batch.unseen)):
            granted = self._tenants.grant(batch)
            result = None if granted else self._host.run_steady(steady, batch, begun)
            if result is not None:
                return result
        chains = self._captured.chains
        if chains is not None and batch.drafts and self._unsettled.nothing and chains.again(batch):
            granted = self._tenants.grant(batch)
            result = None if granted else self._again(chains, batch, begun)
            if result is not None:
                return result
            chains = None
        with self._device_errors():
            following = self._captured.following
            if following is not None and granted is None and following.may(batch):
                result, granted = self._follow(following, batch, begun)
                if result is not None:
                    return result
            return self._start(batch, begun, granted, chains)

    @torch.inference_mode()
    def _follow(
        self, following: Following, batch: StepBatch, begun: float
    ) -> tuple[RunningStep | None, list[RowError]]:
        """Give the step to the device before the one before it is settled; None where that is not for it. Also what was
        wrong with its grants."""
        self._bind_thread()
        self._tenants.settle()
        answer = Answer(_ints(batch.slots), _ints(batch.generations))
        self._tenants.update(batch, answer.failed, None)
        followed = following.issue(batch)
        if followed is None:
            return None, answer.failed
        prepared = time.perf_counter()
        step = following.settle(followed)
        writes = self._writes(step)  # not sooner: of pages that the step before has filled, it writes to none
        self._unsettled.begin(writes)
        answer.graph_rows = len(step.slots)
        self._outputs.followed(step, followed, answer)
        return self._running(batch.number, answer, writes, begun, prepared), []

    @torch.inference_mode()
    def _again(self, chains: SteadyChains, batch: StepBatch, begun: float) -> RunningStep | None:
        """Rows that guessed in the step before; None when it is not for them any more."""
        assert self._speculator is not None
        self._bind_thread()
        with self._device_errors():
            if not chains.follows:
                self._speculator.settle(True, False)  # until then the last step's tokens may not all be counted
                if chains.over():
                    return of_no_use(batch)
            seen = time.perf_counter() - begun
            return self._host.run_chains(chains, batch, begun, seen) if chains.goes_on() else None

    @torch.inference_mode()
    def _start(
        self, batch: StepBatch, begun: float, granted: list[RowError] | None, chains: SteadyChains | None
    ) -> RunningStep:
        """``granted``: what was wrong with its grants, if they are done. ``chains``: where they may be for it."""
        self._bind_thread()
        self._tenants.settle()
        slots, generations, counts = (_ints(part) for part in (batch.slots, batch.generations, batch.counts))
        if not len(slots) == len(generations) == len(counts):
            raise ValueError("slots, generations and counts of a step must have one entry for each row")
        if counts.sum() > self._config.max_step_tokens:
            raise ValueError(f"a step of {counts.sum()} tokens is over max_step_tokens, {self._config.max_step_tokens}")
        answer = Answer(slots, generations)
        if self._speculator is not None:
            self._speculator.settle(bool(batch.drafts), bool(batch.released), batch.unseen)
            answer.draft = time.perf_counter() - begun
        self._tenants.update(batch, answer.failed, granted)
        steady = self._host.steady(batch)
        if steady is not None and not (answer.failed or batch.drafts) and steady.fits(batch):
            result = self._host.run_steady(steady, batch, begun, answer.draft)
            if result is not None:
                return result
        if chains is not None and batch.drafts and not answer.failed and chains.fits(batch):
            if chains.over():
                return of_no_use(batch)
            result = self._host.run_chains(chains, batch, begun, answer.draft)
            if result is not None:
                return result
        if not (answer.failed or batch.drafts):
            result = self._host.run_ends(batch, begun, answer.draft)
            if result is not None:
                return result
        rows = self._fit_rows(slots, generations, counts, answer)
        if not len(rows):
            return self._running(batch.number, answer, None, begun, time.perf_counter())
        step = StepRows(rows, slots[rows].astype(np.int64), counts[rows].astype(np.int64), self._slots)
        if self._speculator is not None and batch.drafts:
            step = self._draft(self._speculator, step, batch, answer)
        writes = self._writes(step)
        if self._captured.steps is not None:
            running = self._run_step(self._captured.steps, step, batch, writes, answer, begun)
            if running is not None:
                return running
        prepared = time.perf_counter()
        found = self._verify(step, writes.pages)
        if found is None:
            forward = self._forward_batch(step, writes.pages)
            self._unsettled.begin(writes)
            prepared = time.perf_counter()
            found = PassFound(self._forward(step, forward, answer), forward.cache_index)
        else:
            self._unsettled.begin(writes)
            answer.graph_rows = len(step.slots)
        self._outputs.read(step, found, answer)
        running = self._running(batch.number, answer, writes, begun, prepared)
        if self._speculator is not None:
            self._speculator.ahead()
        return running

    def _verify(self, step: StepRows, pages: Ints) -> PassFound | None:
        """What ``Decodes.verify`` gives, where every row of the step verifies a whole tree; None where it does not."""
        prepared, drafts = self._captured.verifies, step.drafts
        if drafts is None or prepared is None or prepared.verify is None or step.verifies < len(step.rows):
            return None
        if (step.counts < drafts.tree.tokens.shape[1]).any():
            return None
        slots, speculator = None, self._speculator
        if speculator is not None and prepared.ends and speculator.trees.accepts(step.slots):
            # Guesses behind it may take places on pages that it does not touch itself.
            last = (int(step.starts.max()) + speculator.drafter.reach()) // self._config.page_size
            slots, pages = step.slots, self._slots.pages[step.slots, : max(pages.shape[1], last + 1)]
        return prepared.verify(step.starts, pages, drafts.tree, slots)

    def _forward(self, step: StepRows, batch: ForwardBatch, answer: Answer) -> Tensor:
        """What the model makes of the step, by steps that were prepared where one fits."""
        captured = self._captured.verifies if step.verifies else self._captured.decodes
        prompts = step.counts[step.decodes + step.verifies :]
        if captured is not None and (not len(prompts) or prompts.max() <= captured.prompts):
            hidden = captured.run(batch)
            if hidden is not None:
                answer.graph_rows = len(step.slots)
                return hidden
        return self._model.forward(batch, self._caches, wanted=self._wanted(step))

    def _wanted(self, step: StepRows) -> Tensor | None:
        """The last token of each row, where nothing is read off the others; None where something is, or there are no
        others."""
        if self._speculator is not None or step.decodes == len(step.slots) or self._outputs.scores(step):
            return None
        return self._put(step.last)

    def _run_step(
        self, steps: Steps, step: StepRows, batch: StepBatch, writes: StepWrites, answer: Answer, begun: float
    ) -> RunningStep | None:
        """None when none that was prepared fits."""
        ends = step.starts + step.counts
        grows, found = ends == self._slots.known[step.slots], None
        if step.decodes == len(step.slots):
            found = steps.run(StepTokens(step.slots, ends, grows, writes.pages))
        elif steps.prompts is not None and not self._outputs.scores(step):
            found = steps.prompts(PromptTokens(step.slots, step.starts, step.counts, grows, writes.pages, step.decodes))
        if found is None:
            return None
        self._unsettled.begin(writes)
        prepared = time.perf_counter()
        answer.graph_rows = len(step.slots)
        if not self._outputs.likeliest(step, found, answer):
            self._outputs.rest(step, found, answer)
        return self._running(batch.number, answer, writes, begun, prepared)

    @torch.inference_mode()
    def _rest(self) -> None:
        assert self._speculator is not None
        with self._device_errors():
            self._speculator.rest()

    def _running(
        self, number: int, answer: Answer, writes: StepWrites | None, begun: float, prepared: float
    ) -> RunningStep:
        # A graph's own output is overwritten by its next replay; what verifying leaves is not.
        fetched = answer.arrives or self._platform.fetch(answer.tensors(), lasting=answer.outcome is not None)
        thread = threading.get_ident()

        def finish() -> StepResult:
            with self._device_errors():
                if threading.get_ident() != thread:
                    self._platform.bind_thread()
                return self._finish(number, answer, writes, fetched, begun, prepared)

        # What a step finds out late, rows that are not finite, all ranks must act on before the same step.
        return RunningStep(finish, not self._platform.overlaps or self._group.size > 1)

    def _finish(
        self,
        number: int,
        answer: Answer,
        writes: StepWrites | None,
        fetched: Fetched,
        begun: float,
        prepared: float,
    ) -> StepResult:
        """In the thread of who waits: touches nothing that a step started meanwhile does."""
        host = fetched()
        ended = time.perf_counter()
        run = ended - max(prepared, self._ended)
        whole = ended - max(begun, self._ended)
        timing = StepTiming(
            prepare=prepared - begun, run=run, graph_rows=answer.graph_rows, draft=answer.draft, whole=whole
        )
        self._ended = ended
        result, broken = answer.pack(number, host, timing)
        if writes is not None:
            self._unsettled.settle(writes, broken)
        return result

    def close(self) -> None:
        """Drop the model and the cache. The runner is of no further use."""
        for name in ("_tenants", "_host", "_captured", "_outputs", "_speculator", "_model", "_caches", "_slots"):
            self.__dict__.pop(name, None)
        self._group.close()
        self._group = Group()

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """An error of the device is raised in the platform's words."""
        try:
            yield
        except Exception as error:
            told = self._platform.explain(error)
            if told is None:
                raise
            raise told from error

    def _bind_thread(self) -> None:
        if self._thread != threading.get_ident():
            self._platform.bind_thread()
            self._thread = threading.get_ident()

    def _draft(self, speculator: Speculator, step: StepRows, batch: StepBatch, answer: Answer) -> StepRows:
        """Have guesses made for the rows that may verify some."""
        begun = time.perf_counter()
        most = _ints(batch.drafts)
        if len(most) != len(answer.slots):
            raise ValueError("drafts of a step must have one entry for each row, or none")
        step = speculator.draft(step, most[step.rows].astype(np.int64), batch.levels)
        answer.draft += time.perf_counter() - begun
        return step

    def _fit_rows(self, slots: Ints, generations: Ints, counts: Ints, answer: Answer) -> Longs:
        """Indices of the rows that can run; the others are answered as failed, once each."""
        errors = self._slots.errors(slots, generations, counts)
        if not errors:
            return np.arange(len(slots))
        told = {(error.slot, error.generation) for error in answer.failed}
        for row, message in errors.items():
            name = (int(slots[row]), int(generations[row]))
            if name not in told:
                answer.failed.append(RowError(*name, message))
        return np.array([row for row in range(len(slots)) if row not in errors], dtype=np.int64)

    def _writes(self, step: StepRows) -> StepWrites:
        state, page_size = self._slots, self._config.page_size
        last = (step.starts + step.counts - 1) // page_size
        pages = state.pages[step.slots, : int(last.max()) + 1]
        return StepWrites(step.slots, state.generation[step.slots], step.starts // page_size, last, pages)

    def _forward_batch(self, step: StepRows, pages: Ints) -> ForwardBatch:
        """``pages`` [rows, columns]: those of the step's rows."""
        state, page_size = self._slots, self._config.page_size
        if step.decodes == len(step.slots):
            token_slots, positions = step.slots, step.starts
        else:
            token_slots = np.repeat(step.slots, step.counts)
            positions = np.arange(len(token_slots)) + np.repeat(step.starts - step.offsets, step.counts)
        index = state.pages[token_slots, positions // page_size] * np.int64(page_size) + positions % page_size
        at = self._put(positions)
        token_ids = state.read(token_slots, positions, at)
        attention = AttentionRows(step.starts, step.counts, pages, step.decodes)
        if step.drafts is not None and self._speculator is not None:
            token_ids, at = self._speculator.verifier.place(step, token_ids, at)
            bits = None if step.drafts.tree.linear else step.drafts.tree.bits
            attention = dataclasses.replace(attention, verifies=step.verifies, tree=bits)
        return ForwardBatch(
            token_ids=token_ids, positions=at, cache_index=self._put(index), plans=self._plans(attention)
        )

    def _plans(self, rows: AttentionRows) -> dict[int, Any]:
        return {window: self._platform.plan_attention(rows, window) for window in self._windows}

    def _put(self, array: Longs) -> Tensor:
        return self._platform.put(array)


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=np.int32)
