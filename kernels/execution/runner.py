"""Runs a model step by step (``kernels.contract.step``)."""

from __future__ import annotations

import dataclasses
import gc
import time
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import msgspec
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.divisions import stage_layers
from kernels.contract.errors import ConfigError, UnsupportedError
from kernels.contract.grammar import Grammar
from kernels.contract.info import ModelInfo
from kernels.contract.runner import Progress, RunningStep
from kernels.contract.step import Rebalanced, StepBatch, StepResult
from kernels.devices.select import select_device
from kernels.distributed.group import Group, join_group
from kernels.execution.device_errors import device_errors
from kernels.execution.encoder_runner import EncoderRunner
from kernels.execution.executor_list import make_executors
from kernels.execution.executors import Executor
from kernels.execution.executors.eager_pass import EagerPass
from kernels.execution.executors.no_rows import NoRows
from kernels.execution.executors.shared_pass import SharedPass
from kernels.execution.load import LoadedModel, Phases, load_model
from kernels.execution.opening import open_model
from kernels.execution.pending_step import PendingStep, StepContext
from kernels.models.adapters import ResidentAdapters
from kernels.models.config_loader import read_json
from kernels.models.pooling import read_pooling
from kernels.models.registry import tensors
from kernels.speculation.warmup import warm_up_drafts
from kernels.weights.config_json import merge_overrides

__all__ = ["ModelRunner", "make_runner"]


def make_runner(config: RunnerConfig, progress: Progress | None = None) -> ModelRunner | EncoderRunner:
    """The runner for a model of this kind. Raises ConfigError."""
    raw = merge_overrides(read_json(config.model_path), config.config_overrides)
    pooling = read_pooling(Path(config.model_path), raw, config.is_embedding)
    encoder = pooling is not None and pooling.encoder
    if encoder and config.pp_size > 1:
        raise ConfigError("encoders have no stages; leave --pipeline-parallel-size out")
    return EncoderRunner(config, progress) if encoder else ModelRunner(config, progress)


class ModelRunner:
    """One model on one device: see ``kernels.contract.runner.Runner``.

    Results are deterministic: the same steps give the same tokens. A row's logits do not depend on the contents of
    other rows. They are bit-equal between batches of different shape (sizes, lengths, padding, chunk borders) only with
    ``RunnerConfig.invariant``, because shapes change the order of sums.

    progress: called while the model is loaded.
    """

    def __init__(self, config: RunnerConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._adapters: ResidentAdapters | None = None
        self._progress: Progress = progress or (lambda stage, fraction: None)
        self._device = select_device(config)
        self._group = Group()
        self._executors: tuple[Executor, ...] = ()
        self._eager: tuple[Executor, ...] = ()

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        """Read the weights, make the cache, warm up.

        Raises ConfigError, LoadError, UnsupportedError or CacheSizeError: each a ValueError or RuntimeError whose
        message says what to do.
        """
        with device_errors(self._device):
            return self._load()

    def _load(self) -> ModelInfo:
        config, device, clock = self._config, self._device, Phases()
        device.bind_thread()
        opened = open_model(config, device, self._progress)
        if config.adapters is not None:
            layers = stage_layers(opened.whole.layers, config.pp_rank, config.pp_size)
            self._adapters = ResidentAdapters(
                config.adapters,
                tensors(opened.whole),
                device,
                opened.dtype,
                config.ep_size,
                layers=layers if config.pp_size > 1 else None,
            )
        opened = dataclasses.replace(opened, adapters=self._adapters)
        self._group = join_group(device, config)
        device.agree(self._group.minimum)
        self._loaded: LoadedModel = load_model(opened, self._group, self._progress, clock)
        loaded = self._loaded
        self._context = StepContext(loaded, self._renew)
        self._executors, graph_rows = make_executors(self._context)
        self._eager = (NoRows(), EagerPass(self._context))
        if loaded.shared is not None:
            self._eager = (SharedPass(self._context, loaded.shared, loaded.draft_experts),)
        # A step of data-parallel attention would need the other ranks; the stages of a pipeline know different drafts.
        alone = loaded.shared is None and loaded.model.stage.size == 1
        if loaded.speculator is not None and device.traits.compiles and alone:
            warm_up_drafts(self.start, loaded.info, loaded.speculator.drafter, config.max_slots, config.max_step_tokens)
        clock.end("warmup")
        self._progress("warmup", 1.0)
        return msgspec.structs.replace(loaded.info, load_seconds=clock.seconds, graph_rows=graph_rows)

    def _renew(self) -> None:
        """Capture again if the device has got faster operators."""
        if self._device.renew_operators():
            self._executors, _ = make_executors(self._context)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepResult:
        """Run one step and wait for it. An error of one row is returned in ``failed`` and leaves the others alone. A
        slot whose admission failed, or whose logits are not finite, is dropped. Raises ValueError for a batch that is
        malformed as a whole.
        """
        result = self.start(batch).result()
        self._context.slot_updates.drop_nonfinite()
        return result

    def start(self, batch: StepBatch) -> RunningStep:
        """Launch one step without waiting for its results, if the device works asynchronously. Results of earlier steps
        need not be known; a row whose logits were not finite in one of them then fails again.
        """
        begun, stage = time.perf_counter(), self._loaded.model.stage
        waited, step = stage.waited, PendingStep(self._context, batch, begun)
        try:
            self._context.settle(batch)
            rebalancer, rebalanced = self._loaded.rebalancer, None
            # On all ranks before what a step prepares: a draft may run then, whose passes ranks agree on.
            if rebalancer is not None and (batch.slots or any(batch.pass_tokens)):
                rebalanced = rebalancer.before_step()
            if batch.admitted:
                step.prepare()  # before the walk: an admission may renew the executors
            # No other executor records experts.
            counting = rebalancer is not None and rebalancer.counting
            eager = batch.record_experts or counting or self._loaded.slots.returns_experts
            executors = self._eager if eager else self._executors
            for executor in executors:
                running = executor.execute(step)
                if running is not None:
                    if stage.size > 1 and not self._device.traits.overlaps:
                        running.stage_seconds = time.perf_counter() - begun - (stage.waited - waited)
                    return running if rebalanced is None else _with(running, rebalanced)
        except Exception as error:
            explained = self._device.explain(error)
            if explained is None:
                raise
            raise explained from error
        raise AssertionError("the last executor takes every step")

    def compile_grammar(self, grammar: Grammar) -> Future[object]:
        """Compile in another thread, so that an admission with the grammar finds it ready.

        The future raises GrammarError, or UnsupportedError where the backend cannot be used.
        """
        if self._loaded.grammars is None:
            raise UnsupportedError("this runner has no grammar backend")
        return cast("Future[object]", self._loaded.grammars.compiler.compile(grammar))

    def load_adapter(self, index: int, path: str) -> None:
        """Read an adapter: see ``kernels.contract.runner.Runner``."""
        self._device.bind_thread()
        self._resident().load(index, path)

    def unload_adapter(self, index: int) -> None:
        """Forget an adapter: see ``kernels.contract.runner.Runner``."""
        self._resident().unload(index)

    def resident_adapters(self) -> tuple[int, ...]:
        """The adapters on the device: see ``kernels.contract.runner.Runner``."""
        return () if self._adapters is None else self._adapters.resident

    def _resident(self) -> ResidentAdapters:
        if self._adapters is None:
            raise UnsupportedError("this runner was loaded without adapters; give --enable-lora")
        return self._adapters

    def close(self) -> None:
        """Drop the model and the cache. The runner is of no further use."""
        self._adapters = None
        self._executors = self._eager = ()
        if "_loaded" in self.__dict__ and self._loaded.grammars is not None:
            self._loaded.grammars.close()
        if "_loaded" in self.__dict__:
            self._loaded.model.stage.flush()
            for shared in (self._loaded.draft_experts, self._loaded.shared):
                if shared is not None:
                    shared.close()
        for name in ("_context", "_loaded"):
            self.__dict__.pop(name, None)
        if self._group.size > 1:
            gc.collect()  # NCCL waits for graphs that hold its collectives, if they are in a cycle for ever
        self._group.close()
        self._group = Group()


def _with(running: RunningStep, rebalanced: Rebalanced) -> RunningStep:
    """The step, whose result says that experts were placed anew."""
    return RunningStep(
        lambda: msgspec.structs.replace(running.result(), rebalanced=rebalanced), running.done, running.idle_work
    )
