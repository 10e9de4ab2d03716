"""Replica: one scheduler, one cache manager, one detokenizer and their workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from actors.boards.expert_recorder import ExpertRecorder
from actors.boards.health_board import HealthBoard
from actors.boards.journal import Journal
from actors.caching.cache_manager import CacheManager
from actors.engine.configuration import grammar_settings, planner_config, runner_config
from actors.engine.opening import OpenedModel
from actors.faults import FaultInjector
from actors.options import Arguments
from actors.protocol import (
    CacheProtocol,
    DetokenizerProtocol,
    HandOver,
    NumberedAdapter,
    SchedulerProtocol,
    WorkerConfig,
    WorkerProtocol,
    WorkerReady,
)
from actors.requests.router import Route
from actors.runtime import ActorRef, ActorSystem, ChildCrash, MailboxFull, Strategy, Supervision
from actors.scheduling.lockstep import Lockstep
from actors.scheduling.scheduler import Scheduler, SchedulerLinks
from actors.text.detokenizer import Detokenizer
from actors.workers.group import WorkerGroup
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.placement import Placement
from kernels.contract.info import ModelInfo
from kernels.contract.topology import Rank, WorkerId

if TYPE_CHECKING:
    from telemetry.traces.tracing import Tracing

__all__ = ["Replica", "ReplicaEvents", "ReplicaSetup"]

_MIN_SILENCE_SECONDS = 10.0
"""Seconds. A worker sends a heartbeat every second, but a machine may be slow."""


class ReplicaSetup(msgspec.Struct, frozen=True):
    """Settings that all replicas of an engine share. ``context_length``: read once, so that a restarted actor uses the
    same value. ``fault_plan``: the directory of ``faults``, for child processes. ``adapters``: what a worker loads with
    the model. ``adapters_lost``: called with those that one could not load again, by number with the reasons."""

    system: ActorSystem
    arguments: Arguments
    opened: OpenedModel
    placement: Placement
    context_length: int
    launcher: WorkerLauncher
    tracing: Tracing | None = None
    faults: FaultInjector | None = None
    fault_plan: str = ""
    recorder: ExpertRecorder | None = None
    adapters: Callable[[], tuple[NumberedAdapter, ...]] = tuple
    adapters_lost: Callable[[Mapping[int, str]], None] = lambda lost: None


class ReplicaEvents(msgspec.Struct, frozen=True):
    """Callbacks of a replica to its engine. ``on_progress``: loading progress, a stage and a fraction. ``on_ready``:
    its workers have loaded, for the first time or again. ``on_refused``: they cannot load, with a reason and whether it
    is permanent. ``hand_over``: lets other replicas run the live sequences of this route; returns those that moved.
    ``others_serve``: whether the workers of another replica have loaded."""

    on_progress: Callable[[str, float], None]
    on_ready: Callable[[ModelInfo], None]
    on_refused: Callable[[str, bool], None]
    hand_over: Callable[[Route], Sequence[int]]
    others_serve: Callable[[], bool]


class Replica:
    """A copy of the model with its own journal, pages and restarts. ``number`` counts from 0.

    Actors of the first replica have plain names (``scheduler``), those of others a number (``scheduler-1``). ``lead``:
    with data-parallel attention the first replica, whose group has the workers of all replicas.
    """

    cache: ActorRef[CacheProtocol]
    detokenizer: ActorRef[DetokenizerProtocol]
    scheduler: ActorRef[SchedulerProtocol]

    def __init__(
        self, number: int, setup: ReplicaSetup, board: HealthBoard, events: ReplicaEvents, lead: Replica | None = None
    ) -> None:
        self.number = number
        self.board = board
        self.journal = Journal()
        self._setup = setup
        self._events = events
        self._started = False
        self._lead = lead
        self._members = [self]  # that share the workers' group
        self.lockstep: Lockstep | None = None
        arguments = setup.arguments
        self.worker_ids = _worker_ids(arguments, number)
        self._group: WorkerGroup
        if lead is not None:
            self._group, self.lockstep = lead._group, lead.lockstep
            lead._members.append(self)
            return
        ids = self.worker_ids
        if arguments.enable_dp_attention:
            count = arguments.data_parallel_size
            ids = tuple(worker for each in range(count) for worker in _worker_ids(arguments, each))
            self.lockstep = Lockstep(count, 1 if arguments.disable_overlap_schedule else 2, self._replace_workers)
        self._group = WorkerGroup(
            setup.system,
            ids,
            address=None if arguments.rendezvous is None else self._rendezvous,
            configure=self._worker_config,
            launcher=setup.launcher,
            on_progress=self._progressed,
            on_loaded=self._workers_loaded,
            on_refused=events.on_refused,
            adapters=setup.adapters,
            on_adapters_lost=setup.adapters_lost,
        )

    @property
    def workers(self) -> list[ActorRef[WorkerProtocol]]:
        """The workers, first the one whose results count."""
        return [self._group.workers[worker] for worker in self.worker_ids]

    @cached_property
    def route(self) -> Route:
        """The one route of this replica; read it after the start of the actors."""
        return Route(self.scheduler, self.journal, self.board, tuple(self.workers), self.number)

    def hand_over(self) -> None:
        """Let other replicas run the live sequences if the workers have died. The scheduler sends them.
        With data-parallel attention no other replica has workers then."""
        if self.lockstep is None and self._started and self.board.worker is None and len(self.journal):
            # If the lane is full, the sequences wait for the workers of this replica.
            with contextlib.suppress(MailboxFull):
                self.scheduler.offer(HandOver())

    async def start_workers(self) -> None:
        """Start the worker processes. They load the model while the other actors start."""
        if self._lead is not None:
            return
        arguments, placement = self._setup.arguments, self._setup.placement
        await self._group.spawn(
            lambda worker: placement.environment(
                arguments, worker.number % arguments.node_workers, os.environ, arguments.watchdog_timeout
            ),
            standby=arguments.standby_worker,
            silence=max(arguments.watchdog_timeout, _MIN_SILENCE_SECONDS),
            max_restarts=arguments.max_worker_restarts,
            counts=self._death_counts,
        )

    def _death_counts(self) -> bool:
        """Whether the death of the workers counts towards the most restarts. While another replica serves, it does not:
        one broken device must not end all."""
        if self.lockstep is not None:
            return all(each.board.last_death_counts() for each in self._members if each.board.worker is None)
        return self.board.last_death_counts() and not self._events.others_serve()

    async def start_actors(self) -> None:
        """Start the actors in the loop. Workers may still load when this returns; ``on_ready`` reports the end of
        loading."""
        setup, arguments, suffix = self._setup, self._setup.arguments, f"-{self.number}" if self.number else ""
        together = Supervision(strategy=Strategy.RESTART_GROUP, max_restarts=5, within=60.0)
        self.cache = await setup.system.spawn(
            lambda: CacheManager(
                self.board,
                use_radix_cache=not arguments.disable_radix_cache and not setup.opened.served.is_encoder,
                policy=arguments.radix_eviction_policy,
            ),
            name=f"cache{suffix}",
            group=f"scheduling{suffix}",
            supervision=together,
        )
        self.detokenizer = await setup.system.spawn(
            lambda: Detokenizer(self.journal, setup.opened.served.codec, lambda: self.scheduler, faults=setup.faults),
            name=f"detokenizer{suffix}",
            supervision=Supervision(strategy=Strategy.RESTART_ONE, max_restarts=5, within=60.0),
        )
        self.scheduler = await setup.system.spawn(
            self._make_scheduler,
            name=f"scheduler{suffix}",
            capacity=8192,
            control_capacity=16384,
            group=f"scheduling{suffix}",
            supervision=together,
        )
        self._started = True
        if self.board.worker is not None:  # it loaded before the other actors started
            self._introduce_worker(*self.board.worker)

    def _worker_config(self, worker: WorkerId) -> WorkerConfig:
        setup = self._setup
        runner = runner_config(
            setup.arguments,
            setup.opened.served.files.path,
            setup.context_length,
            setup.placement,
            setup.opened.speculation,
            grammar_settings(setup.arguments, setup.opened.served),
            adapters=setup.opened.adapter_settings,
        )
        return WorkerConfig(
            runner=msgspec.structs.replace(
                runner,
                tp_rank=worker.rank.tp if self.lockstep is None else worker.number,
                pp_rank=worker.rank.pp,
            ),
            worker=worker,
            load_timeout=setup.arguments.model_load_timeout,
            download_dir=setup.arguments.download_dir,
            faults=setup.fault_plan,
        )

    def _rendezvous(self) -> str:
        """host:port of rank 0, which the replicas of several nodes have on different ones."""
        host, _, port = str(self._setup.arguments.rendezvous).rpartition(":")
        elsewhere = self._setup.launcher.host(min(self.worker_ids, key=lambda worker: worker.number))
        if elsewhere is not None:
            host = f"[{elsewhere}]" if ":" in elsewhere else elsewhere
        return f"{host}:{int(port) + self.number}"

    def _replace_workers(self, reason: str) -> None:
        self._setup.system.crash_actor(self.workers[0], ChildCrash(reason))

    def _make_scheduler(self) -> Scheduler:
        setup = self._setup
        worker, *peers = self.workers
        return Scheduler(
            planner_config(
                setup.arguments,
                setup.context_length,
                setup.placement,
                setup.opened.speculation,
                whole_inputs=setup.opened.served.is_encoder,
            ),
            SchedulerLinks(self.cache, self.detokenizer, worker, tuple(peers)),
            journal=self.journal,
            board=self.board,
            tracing=setup.tracing,
            step_timeout=setup.arguments.watchdog_timeout,
            faults=setup.faults,
            recorder=setup.recorder,
            hand_over=lambda: self._events.hand_over(self.route),
            lockstep=self.lockstep,
        )

    def _progressed(self, stage: str, fraction: float) -> None:
        for each in self._members:
            each._events.on_progress(stage, fraction)

    def _workers_loaded(self, info: ModelInfo, epoch: int) -> None:
        for each in self._members:
            each.board.worker = (info, epoch)
        for each in self._members:
            if each._started:
                each._introduce_worker(info, epoch)

    def _introduce_worker(self, info: ModelInfo, epoch: int) -> None:
        self._events.on_ready(info)
        self.scheduler.offer(WorkerReady(info=info, epoch=epoch))


def _worker_ids(arguments: Arguments, replica: int) -> tuple[WorkerId, ...]:
    """The workers of a replica, the last stage first: its rank 0 has the results."""
    stages = arguments.pipeline_parallel_size
    size, parts, whole = arguments.replica_size // stages, arguments.expert_parts, arguments.tensor_parallel_size
    first = replica * size if arguments.enable_dp_attention else 0  # of the ranks that share layers of experts
    return tuple(
        WorkerId((replica * stages + pp) * size + tp, Rank(replica, pp, tp, (first + tp) * parts // whole))
        for pp in reversed(range(stages))
        for tp in range(size)
    )
