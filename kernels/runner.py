"""Runs a model step by step, as kernels.step says."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.answers import Answer, RunningStep
from kernels.batch import ForwardBatch
from kernels.loading import open_weights
from kernels.models.config import ModelConfig, read_config
from kernels.models.decoder import Decoder, tensor_shapes
from kernels.outputs import StepOutputs
from kernels.parallel.group import Group, join_group
from kernels.parallel.partition import local_config, tensor_parts
from kernels.platforms.base import AttentionRows, Decodes, Fetched, Memory
from kernels.platforms.select import select_platform
from kernels.quantization.recognise import recognise
from kernels.rows import StepRows
from kernels.sampling import Sampler
from kernels.sizing import cache_pages, context_length
from kernels.slots import SlotError, SlotTable
from kernels.speculative.backend import draft_platform
from kernels.speculative.drafter import DrafterContext
from kernels.speculative.select import captured_layers, make_drafter
from kernels.speculative.speculator import Speculator
from kernels.speculative.steady import SteadyChains
from kernels.steady import SteadyDecodes
from kernels.step import ModelInfo, RowError, RunnerConfig, StepBatch, StepResult, StepTiming
from kernels.unsettled import StepWrites, Unsettled

__all__ = ["ModelRunner"]

WARM_DECODES = (1, 2, 4, 8)
WARM_PREFILLS = (16, 64)

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class ModelRunner:
    """One model on one device. Nothing here is thread safe: one thread at a time calls it, strictly in step order. Only
    a step that was started may be waited for by another, so that the next one is prepared while it runs.

    Results are deterministic: the same steps give the same tokens. A row's logits do not depend on what the other
    rows hold, but they are not bit-equal between batches of different shape (sizes of matrix products, padded
    lengths, chunk borders), because sums are then taken in another order.

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
        config, platform = self._config, self._platform
        clock = _Phases()
        whole = read_config(config.model_path, config.config_overrides, quantized=True)
        model = local_config(whole, config.tp_size)
        dtype = platform.dtype(config.dtype, model.dtype)
        context = context_length(config, model)
        speculation = config.speculation
        captures = captured_layers(speculation, whole) if speculation is not None else ()
        scheme = recognise(config.model_path, config.quantization, config.config_overrides)
        shapes = tensor_shapes(whole) if scheme is None else scheme.shapes(tensor_shapes(whole))
        weights = open_weights(
            config.model_path,
            config.load_format,
            config.loader_extra_config,
            shapes,
            tensor_parts(shapes, whole, config.tp_rank, config.tp_size),
            dtype,
            platform.device,
            config.random_seed,
            lambda fraction: self._progress("weights", 0.9 * fraction),
            scheme,
        )
        self._group = join_group(platform, config)
        self._model = Decoder(model, weights, platform, dtype, self._group, captures)
        self._sampler = Sampler(
            model.vocab_size, config.max_slots, platform.device, platform.cut, platform.put, platform.greedy
        )
        self._windows = frozenset(model.windows)
        self._speculator: Speculator | None = None
        drafter = None
        if speculation is not None:
            own = draft_platform(config, speculation, platform, model.dtype)
            drafter = make_drafter(
                DrafterContext(config, speculation, own, self._group, self._model, model, whole, dtype, context)
            )
        weight_bytes = weights.weight_bytes + platform.widened_bytes
        weight_bytes += drafter.weight_bytes if drafter is not None else 0
        self._levels = speculation.num_steps if speculation is not None else 0
        self._guesses = drafter.most_nodes - 1 if drafter is not None else 0
        self._group.least(0)  # from here on each waits for the others: first let all have read their weights
        clock.end("weights")

        reserved = self._step_memory(model, context, dtype)
        memory = platform.memory()
        cached = dataclasses.replace(model, head_dim=platform.cache_head_dim(model.head_dim))
        pages = self._group.least(
            cache_pages(
                config,
                cached,
                context,
                dtype.itemsize,
                weight_bytes,
                Memory(memory.total, max(0, memory.free - reserved)),
                platform.default_memory_fraction,
                platform.default_cache_tokens,
                drafter.cache_bytes if drafter is not None else 0,
                1 + 2 * self._guesses,
            )
        )
        context = min(context, (pages - 1) * config.page_size)
        self._caches: list[Any] = platform.make_cache(
            model.layers, pages, config.page_size, model.kv_heads, model.head_dim, dtype
        )
        self._draft_caches: list[Any] = drafter.make_caches(pages) if drafter is not None else []
        self._slots = self._make_slots(context, pages, model.vocab_size)
        if drafter is not None and speculation is not None:
            self._speculator = Speculator(drafter, speculation, platform, self._sampler, self._slots)
        self._outputs = StepOutputs(platform, self._model, self._sampler, self._slots, self._caches, self._speculator)
        clock.end("cache")
        self._progress("cache", 0.92)
        self._warm_up()
        self._capture()
        clock.end("warmup")
        self._progress("warmup", 1.0)
        return ModelInfo(
            architecture=model.architecture,
            dtype=str(dtype).removeprefix("torch."),
            device=platform.name,
            vocab_size=model.vocab_size,
            context_length=context,
            layers=model.layers,
            parameters=weights.parameters,
            weight_bytes=weights.weight_bytes,
            num_pages=pages,
            page_size=config.page_size,
            cache_bytes=cached.cache_elements_per_token * dtype.itemsize * config.page_size * pages,
            load_seconds=clock.seconds,
            graph_rows=self._decodes.rows if self._decodes is not None else (),
            speculative_nodes=drafter.most_nodes if drafter is not None else 1,
            speculative_depth=drafter.depth if drafter is not None else 0,
            speculative_levels=drafter.levels(speculation) if drafter is not None and speculation is not None else (0,),
            draft_parameters=drafter.parameters if drafter is not None else 0,
            draft_weight_bytes=drafter.weight_bytes if drafter is not None else 0,
        )

    def _make_slots(self, context: int, pages: int, vocab_size: int) -> SlotTable:
        config = self._config
        return SlotTable(self._platform, config.max_slots, context, config.page_size, pages, vocab_size, self._guesses)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """One step. What is wrong with one row is answered in ``failed`` and leaves the others alone. A slot whose
        admission failed, or whose logits are not finite, is dropped. Raises ValueError for a batch that is malformed
        as a whole.
        """
        result = self.start(batch).result()
        self._settle_steps()
        return result

    @torch.inference_mode()
    def start(self, batch: StepBatch) -> RunningStep:
        """The same without waiting for the device, where it works by itself. A step may start before the results of
        those before it are there; a row whose logits were not finite in one of them then fails again.
        """
        with self._device_errors():
            return self._start(batch, time.perf_counter())

    def _start(self, batch: StepBatch, begun: float) -> RunningStep:
        self._bind_thread()
        self._settle_steps()
        slots, generations, counts = (_ints(part) for part in (batch.slots, batch.generations, batch.counts))
        if not len(slots) == len(generations) == len(counts):
            raise ValueError("slots, generations and counts of a step must have one entry for each row")
        if counts.sum() > self._config.max_step_tokens:
            raise ValueError(f"a step of {counts.sum()} tokens is over max_step_tokens, {self._config.max_step_tokens}")
        answer = Answer(slots, generations)
        if self._speculator is not None:
            if self._chains is not None:
                self._chains.settle()
            self._speculator.settle(later=not (batch.drafts or batch.released))
            answer.draft = time.perf_counter() - begun
        self._update_slots(batch, answer)
        if self._steady is not None and not answer.failed and self._steady.fits(batch):
            result = self._run_steady(self._steady, batch, begun)
            if result is not None:
                return result
        if self._chains is not None and batch.drafts and not answer.failed and self._chains.fits(batch):
            result = self._run_chains(self._chains, batch, begun, answer.draft)
            if result is not None:
                return result
        rows = self._fit_rows(slots, generations, counts, answer)
        if not len(rows):
            return self._running(batch.number, answer, None, begun, time.perf_counter())
        step = StepRows(rows, slots[rows].astype(np.int64), counts[rows].astype(np.int64), self._slots)
        if self._speculator is not None and batch.drafts:
            step = self._draft(self._speculator, step, batch, answer)
        writes = self._writes(step)
        forward = self._forward_batch(step, writes.pages)
        self._unsettled.begin(writes)
        prepared = time.perf_counter()
        hidden = None
        captured = self._verifies if step.verifies else self._decodes
        if captured is not None and step.decodes + step.verifies == len(step.slots):
            hidden = captured.run(forward)
            answer.graph_rows = 0 if hidden is None else len(step.slots)
        if hidden is None:
            hidden = self._model.forward(forward, self._caches)
        self._outputs.read(step, hidden, forward.cache_index, answer)
        running = self._running(batch.number, answer, writes, begun, prepared)
        if self._speculator is not None:
            self._speculator.ahead()
        return running

    def _run_steady(self, steady: SteadyDecodes, batch: StepBatch, begun: float) -> RunningStep | None:
        """None when a row is not finite: then nothing was done that is not done again."""
        prepared = time.perf_counter()
        tokens, broken = steady.run()
        if broken.any():
            return None
        steady.keep(tokens)
        ended = self._ended = time.perf_counter()
        timing = StepTiming(prepare=prepared - begun, run=ended - prepared, graph_rows=len(tokens))
        packed = tokens.astype(np.int32).tobytes()
        result = StepResult(batch.number, accepted=batch.counts, tokens=packed, timing=timing)
        return RunningStep(lambda: result, True)

    def _run_chains(self, chains: SteadyChains, batch: StepBatch, begun: float, seen: float) -> RunningStep | None:
        """None when it is not for them: then nothing was done that is not done again. ``seen``: seconds that observing
        took."""
        drafting = time.perf_counter()
        drafted = chains.draft(batch)
        if drafted is None:
            return None
        prepared = time.perf_counter()
        found = chains.run(batch, *drafted)
        if found is None:
            return None
        ended = self._ended = time.perf_counter()
        timing = StepTiming(
            prepare=prepared - begun,
            run=ended - prepared,
            graph_rows=len(found.accepted),
            draft=seen + prepared - drafting,
            whole=ended - begun,
        )
        drafts = found.drafted.tobytes()
        result = StepResult(
            batch.number,
            accepted=found.accepted.tobytes(),
            tokens=found.tokens.tobytes(),
            drafted=drafts,
            depths=drafts,
            timing=timing,
        )
        return RunningStep(lambda: result, True)

    def _running(
        self, number: int, answer: Answer, writes: StepWrites | None, begun: float, prepared: float
    ) -> RunningStep:
        fetched = self._platform.fetch(answer.tensors())
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
        for name in (
            "_decodes",
            "_verifies",
            "_steady",
            "_chains",
            "_outputs",
            "_speculator",
            "_model",
            "_caches",
            "_draft_caches",
            "_slots",
            "_sampler",
        ):
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

    def _step_memory(self, model: ModelConfig, context: int, dtype: torch.dtype) -> int:
        """Bytes that the largest step takes beside weights and cache, where the platform wants to know."""
        config, platform = self._config, self._platform
        rows, longest = config.max_slots - 1, config.max_step_tokens
        pages = -(-longest // config.page_size)
        caches = platform.make_cache(model.layers, pages, config.page_size, model.kv_heads, model.head_dim, dtype)

        def largest() -> None:
            self._caches = caches
            self._slots = self._make_slots(context, pages, model.vocab_size)
            sampled = min(rows * (1 + self._guesses), longest)  # a row that verifies is sampled from after each guess
            self._run_nowhere(np.array([longest]), sampled, np.arange(pages, dtype=np.int32)[None])
            del self._caches, self._slots

        return platform.step_memory(largest)

    def _bind_thread(self) -> None:
        if self._thread != threading.get_ident():
            self._platform.bind_thread()
            self._thread = threading.get_ident()

    def _update_slots(self, batch: StepBatch, answer: Answer) -> None:
        """Releases, then admissions, then page grants."""
        state = self._slots
        for slot in _ints(batch.released).tolist():
            self._drop(slot)
        self._clean_granted(batch)
        if batch.admitted and not state.active.any() and self._platform.renew():  # a request sees one kind of operator
            self._capture()
        for admission in batch.admitted:
            try:
                state.admit(admission)
                self._sampler.admit(admission.slot, admission.sampling, admission.prompt_length)
                if self._speculator is not None:
                    self._speculator.admit(admission)
            except Exception as error:  # whatever is wrong with one request is its own
                self._drop(admission.slot)
                answer.failed.append(RowError(admission.slot, admission.generation, str(error)))
        if not (batch.page_slots or batch.page_ids):
            return
        granted, pages = _ints(batch.page_slots), _ints(batch.page_ids)
        if len(granted) != len(pages):
            raise ValueError("page_slots and page_ids of a step must be of one length")
        for slot in dict.fromkeys(granted.tolist()):
            if not (0 < slot < len(state.known) and state.active[slot]):
                continue  # its admission failed, or its request just ended
            try:
                state.grant(slot, pages[granted == slot])
            except SlotError as error:
                answer.failed.append(RowError(slot, int(state.generation[slot]), str(error)))
                self._drop(slot)

    def _clean_granted(self, batch: StepBatch) -> None:
        """Pages that change hands while a step is under way that writes to them, for a request that has ended."""
        if not (batch.page_ids or batch.admitted):
            return
        size = self._config.page_size
        own = [_ints(admission.pages)[-(-admission.computed // size) :] for admission in batch.admitted]
        self._clear(self._unsettled.among(np.concatenate([_ints(batch.page_ids), *own])))

    def _settle_steps(self) -> None:
        """Drop the requests that were found not to be finite, and clean what they wrote to, unless it is someone
        else's by now: then it was cleaned before. What earlier steps wrote was sound, and others may read it.
        """
        for writes, error in self._unsettled.take():
            if self._slots.active[error.slot] and self._slots.generation[error.slot] == error.generation:
                self._drop(error.slot)
            self._clear([page for page in writes.of(error.slot, error.generation) if not self._slots.holds(page)])

    def _clear(self, pages: list[int]) -> None:
        if pages:
            self._platform.clear_pages(self._caches, pages)
            if self._draft_caches:
                self._platform.clear_pages(self._draft_caches, pages)

    def _drop(self, slot: int) -> None:
        if 0 < slot < len(self._slots.known):
            self._slots.release(slot)
            self._sampler.release(slot)
            if self._speculator is not None:
                self._speculator.release(slot)

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
            token_ids, at = self._speculator.place(step, token_ids, at)
            bits = None if step.drafts.tree.linear else step.drafts.tree.bits
            attention = dataclasses.replace(attention, verifies=step.verifies, tree=bits)
        return ForwardBatch(
            token_ids=token_ids, positions=at, cache_index=self._put(index), plans=self._plans(attention)
        )

    def _plans(self, rows: AttentionRows) -> dict[int, Any]:
        return {window: self._platform.plan_attention(rows, window) for window in self._windows}

    def _put(self, array: Longs) -> Tensor:
        return self._platform.put(array)

    def _agree(self, could: bool) -> bool:
        """Whether all ranks could."""
        return bool(self._group.least(int(could)))

    def _capture(self) -> None:
        """Prepare steps beforehand: decodes, decodes with guesses, and the drafter's own."""
        rows, most = self._config.max_slots - 1, self._guesses + 1
        self._decodes = self._capture_steps(rows)
        self._verifies: Decodes | None = None
        self._steady: SteadyDecodes | None = None
        self._chains: SteadyChains | None = None
        if self._speculator is None:
            likeliest = self._platform.capture_likeliest(
                lambda batch: self._model.logits(self._model.forward(batch, self._caches)), sorted(self._windows), rows
            )
            if likeliest is not None:
                self._steady = SteadyDecodes(self._slots, self._sampler, likeliest, rows)
        if self._speculator is not None:
            drafter = self._speculator.drafter
            self._verifies = self._capture_steps(
                min(rows, self._config.max_step_tokens // most), most, drafter.branches
            )
            drafter.capture(self._agree)
            self._chains = SteadyChains.make(
                self._platform,
                self._model,
                self._caches,
                sorted(self._windows),
                self._slots,
                self._sampler,
                self._speculator,
                min(rows, self._config.max_step_tokens // most),
                self._levels,
            )

    def _capture_steps(self, rows: int, tokens: int = 1, tree: bool = False) -> Decodes | None:
        return self._platform.capture_decodes(
            lambda batch: self._model.forward(batch, self._caches),
            sorted(self._windows),
            rows,
            self._slots.pages.shape[1],
            self._agree,
            tokens,
            tree,
        )

    def _warm_up(self) -> None:
        """Run a few shapes in the dump page, so that a first request does not pay for what is made on first use."""
        shapes = [np.ones(rows, dtype=np.int64) for rows in WARM_DECODES if rows < self._config.max_slots]
        shapes += [np.array([count]) for count in WARM_PREFILLS if count <= self._config.max_step_tokens]
        for counts in shapes:
            pages = np.zeros((len(counts), -(-int(counts.max()) // self._config.page_size)), dtype=np.int32)
            self._run_nowhere(counts, len(counts), pages)

    def _run_nowhere(self, counts: Longs, sampled: int, pages: Ints) -> None:
        """Run rows of ``counts`` first tokens, written from page 0 on, and sample from ``sampled`` of them.

        ``pages`` [rows, pages]: what attention reads.
        """
        tokens = int(counts.sum())
        zeros = self._put(np.zeros(tokens, dtype=np.int64))
        places = np.arange(tokens) % ((int(pages.max()) + 1) * self._config.page_size)
        decodes = len(counts) if tokens == len(counts) else 0
        plans = self._plans(AttentionRows(np.zeros_like(counts), counts, pages, decodes))
        hidden = self._model.forward(ForwardBatch(zeros, zeros, self._put(places), plans), self._caches)
        logits = self._model.logits(self._model.split(hidden)[0][:sampled])
        nothing = zeros[:sampled]
        self._sampler.sample(logits, nothing, nothing, self._slots.tokens, host_slots=[0] * sampled, longest=0)


class _Phases:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._begun
        self._begun = now


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=np.int32)
