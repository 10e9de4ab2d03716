"""The troupe of one engine: which actors there are, who supervises them, and how they learn of each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from actors.arguments import Arguments
from actors.cache_manager import CacheManager
from actors.configuration import planner_config, runner_config
from actors.detokenizer import Detokenizer
from actors.early import EarlyWorkers
from actors.faults import FaultInjector, FaultPlan
from actors.journal import Journal
from actors.placement import place
from actors.protocol import (
    CacheProtocol,
    DetokenizerProtocol,
    SchedulerProtocol,
    TokenizerProtocol,
    WorkerConfig,
    WorkerProtocol,
    WorkerReady,
)
from actors.rendering import Rendering
from actors.runtime import ActorRef, ActorSystem, Strategy, Supervision
from actors.scheduler import Scheduler
from actors.served_model import ServedModel
from actors.tokenizer import Tokenizer
from actors.vitals import Vitals
from actors.worker_group import WorkerGroup
from kernels.step import ModelInfo

if TYPE_CHECKING:
    from telemetry.tracing import Tracing

__all__ = ["Company"]

_LEAST_SILENCE = 10.0
"""Seconds. A worker's event loop beats every second, but a machine may be slow."""


class Company:
    """Spawns the actors in their order and keeps their refs."""

    rendering: Rendering
    tokenizers: list[ActorRef[TokenizerProtocol]]
    detokenizer: ActorRef[DetokenizerProtocol]
    cache: ActorRef[CacheProtocol]
    scheduler: ActorRef[SchedulerProtocol]
    worker: ActorRef[WorkerProtocol]  # rank 0
    peers: list[ActorRef[WorkerProtocol]]  # the other ranks

    def __init__(
        self,
        system: ActorSystem,
        arguments: Arguments,
        model: ServedModel,
        *,
        journal: Journal,
        vitals: Vitals,
        on_progress: Callable[[str, float], None],
        on_ready: Callable[[ModelInfo], None],
        on_refused: Callable[[str, bool], None],
        tracing: Tracing | None = None,
        faults: FaultPlan | None = None,
        early: EarlyWorkers | None = None,
    ) -> None:
        self.journal = journal
        self.faults = None if faults is None else FaultInjector(faults.path, self._worker_process)
        self._fault_plan = "" if faults is None else faults.path
        self._system = system
        self._arguments = arguments
        self._model = model
        self._vitals = vitals
        # Taken once: a restarted actor must plan for the context its forerunner planned for.
        self._context_length = model.context_length
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._tracing = tracing
        self._early = early
        self._assembled = False

    async def assemble(self) -> None:
        """Start every actor. The worker's load goes on after this returns; ``on_ready`` tells its end."""
        arguments, system = self._arguments, self._system
        alone = Supervision(strategy=Strategy.RESTART_ONE, max_restarts=5, within=60.0)
        together = Supervision(strategy=Strategy.RESTART_GROUP, max_restarts=5, within=60.0)

        self.tokenizers = []
        if self._model.codec is not None:
            codec = self._model.codec
            for rank in range(arguments.tokenizer_worker_num):
                self.tokenizers.append(
                    await system.spawn(
                        lambda: Tokenizer(
                            codec,
                            batch_size=arguments.dynamic_batch_tokenizer_batch_size,
                            batch_timeout=(
                                arguments.dynamic_batch_tokenizer_batch_timeout
                                if arguments.enable_dynamic_batch_tokenizer
                                else 0.0
                            ),
                            batch_encode=arguments.enable_tokenizer_batch_encode,
                        ),
                        name=f"tokenizer-{rank}",
                        capacity=8192,
                        supervision=alone,
                    )
                )

        placement = place(arguments, os.environ)
        runner = runner_config(
            arguments, self._model.files.path, self._context_length, placement, self._model.speculation
        )
        group = WorkerGroup(
            system,
            arguments.tensor_parallel_size,
            address=arguments.dist_init_addr,
            configure=lambda rank: WorkerConfig(
                runner=msgspec.structs.replace(runner, tp_rank=rank),
                load_timeout=arguments.model_load_timeout,
                faults=self._fault_plan,
            ),
            on_progress=self._on_progress,
            on_loaded=self._workers_loaded,
            on_refused=self._on_refused,
            early=self._early,
        )
        # The workers' processes start first: they take longest, and the rest is put up while they import.
        await group.spawn(
            lambda rank: placement.environment(arguments, rank, os.environ, arguments.watchdog_timeout),
            standby=arguments.standby_worker,
            silence=max(arguments.watchdog_timeout, _LEAST_SILENCE),
            max_restarts=arguments.max_worker_restarts,
            counts=self._vitals.last_death_counts,
        )
        self.worker, *self.peers = group.workers
        self.rendering = await Rendering.start(
            system,
            template=self._model.codec.template if self._model.codec else None,
            variables=self._model.codec.special_tokens if self._model.codec else {},
            count=arguments.tokenizer_worker_num,
            guests=arguments.trust_request_chat_template,
            faults=self._fault_plan,
        )
        self.cache = await system.spawn(
            lambda: CacheManager(
                self._vitals,
                use_radix_cache=not arguments.disable_radix_cache,
                policy=arguments.radix_eviction_policy,
            ),
            name="cache",
            group="scheduling",
            supervision=together,
        )
        self.detokenizer = await system.spawn(
            lambda: Detokenizer(self.journal, self._model.codec, lambda: self.scheduler, faults=self.faults),
            name="detokenizer",
            supervision=alone,
        )
        self.scheduler = await system.spawn(
            self._make_scheduler,
            name="scheduler",
            capacity=8192,
            control_capacity=16384,
            group="scheduling",
            supervision=together,
        )
        self._assembled = True
        if self._vitals.worker is not None:
            # It was quicker than the rest of the company.
            self._introduce_worker(*self._vitals.worker)

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            planner_config(
                self._arguments,
                self._context_length,
                place(self._arguments, os.environ),
                self._model.speculation,
            ),
            journal=self.journal,
            cache=self.cache,
            worker=self.worker,
            peers=self.peers,
            detokenizer=self.detokenizer,
            vitals=self._vitals,
            tracing=self._tracing,
            step_timeout=self._arguments.watchdog_timeout,
            faults=self.faults,
        )

    def _worker_process(self) -> int | None:
        return next((actor.pid for actor in self._system.describe() if actor.name == self.worker.name), None)

    def _workers_loaded(self, info: ModelInfo, epoch: int) -> None:
        self._vitals.worker = (info, epoch)
        if self._assembled:
            self._introduce_worker(info, epoch)

    def _introduce_worker(self, info: ModelInfo, epoch: int) -> None:
        self._on_ready(info)
        self.scheduler.offer(WorkerReady(info=info, epoch=epoch))
