"""The workers that run one model together: started, told of and replaced as one."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from actors.early import EarlyWorkers
from actors.protocol import Load, LoadProgress, LoadRefused, WorkerConfig, WorkerLoaded, WorkerProtocol
from actors.runtime import ActorRef, ActorSystem, Backoff, ChildCrash, Event, EventKind, Message, Strategy, Supervision
from kernels.step import ModelInfo

__all__ = ["WorkerGroup"]

_log = logging.getLogger("troupe.engine")

_START_TIMEOUT = 300.0
"""Seconds until a worker's process runs; its model is loaded after that."""


class WorkerGroup:
    """One worker a device, ``worker-0`` and so on. They live and die together: what a rank has computed is of no use
    without the others, and a rank that waits for a dead one in a collective may wait for long.

    A *life* of the group begins when all of its processes run. Its number is the epoch of the steps, whatever the
    numbers of the processes are, and it has a rendezvous of its own, so that nobody of one life meets anybody of
    another.

    ``early``: processes that the first life may begin with. ``configure``: the config of a rank. ``address``: a
    rendezvous (host:port) for all lives; else each gets a file in a folder that only this user may enter.
    ``on_loaded``: called when every rank of a life has loaded, with what rank 0 says, and the epoch. ``on_refused``:
    called when the first life cannot load the model, with the reason and whether it is permanent.
    """

    def __init__(
        self,
        system: ActorSystem,
        size: int,
        *,
        address: str | None,
        configure: Callable[[int], WorkerConfig],
        on_progress: Callable[[str, float], None],
        on_loaded: Callable[[ModelInfo, int], None],
        on_refused: Callable[[str, bool], None],
        early: EarlyWorkers | None = None,
    ) -> None:
        self.workers: list[ActorRef[WorkerProtocol]] = []
        self._system = system
        self._size = size
        self._address = address
        self._configure = configure
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._on_refused = on_refused
        self._early = early
        self._epoch = -1
        self._running: dict[int, int] = {}  # rank -> incarnation of its process, of those since the last death
        self._progress: dict[int, float] = {}
        self._loaded: dict[int, ModelInfo] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def spawn(
        self,
        environment: Callable[[int], Mapping[str, str]],
        *,
        standby: bool,
        silence: float | None = None,
        max_restarts: int = 6,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a process for each rank and return; ``environment``: what to add to that of a rank. With ``standby``
        each has a prepared process beside it for the next life. One that runs and is silent for ``silence`` seconds is
        replaced, whatever it was doing: it may be stopped while it loads, when nobody waits for a step.
        ``max_restarts``: within 300 s, of deaths that count by ``counts``."""
        self._system.on_event(self._on_event)
        if self._address is not None:
            _log.warning(
                "the workers meet at %s, where any user who reaches that port may disturb them; leave --dist-init-addr "
                "out, and they meet in a private folder",
                self._address,
            )
        for rank in range(self._size):
            worker = await self._system.spawn_process(
                WorkerProtocol,
                name=f"worker-{rank}",
                target="actors.worker:Worker",
                config=self._configure(rank),
                environment=environment(rank),
                events=partial(self._told, rank),
                events_type=LoadProgress | LoadRefused | WorkerLoaded,
                supervision=Supervision(
                    strategy=Strategy.RESTART_GROUP,
                    max_restarts=max_restarts,
                    within=300.0,
                    backoff=Backoff(first=0.02),  # streams wait for it: the first restarts come at once
                    counts=counts,
                ),
                group="workers",
                standby=standby,
                blank=partial(self._early.take, rank) if self._early is not None else lambda: None,
                start_timeout=_START_TIMEOUT,
                stop_timeout=5.0,
                heartbeat_timeout=silence,
                wait=False,
            )
            self.workers.append(worker)

    # -- a life

    def _on_event(self, event: Event) -> None:
        rank = next((rank for rank, worker in enumerate(self.workers) if worker.name == event.actor), None)
        if rank is None:
            return
        if event.kind in (EventKind.STARTED, EventKind.RESTARTED) and event.incarnation is not None:
            self._running[rank] = event.incarnation
            if len(self._running) == self._size:
                self._begin()
        elif event.kind is EventKind.DIED:
            self._running.clear()
            self._loaded.clear()
            for worker in self.workers:
                if worker.name != event.actor:
                    # At once: it may hang in a collective, and would not hear that it is to stop.
                    self._system.crash_actor(worker, ChildCrash(f"ended because {event.actor} had died"))
        elif event.kind is EventKind.STOPPED:
            self._release()

    def _begin(self) -> None:
        """All processes run: let them load, and meet."""
        self._epoch += 1
        self._progress.clear()
        self._loaded.clear()
        rendezvous = "" if self._size == 1 else self._address or self._reserve()
        for rank, worker in enumerate(self.workers):
            worker.offer(Load(incarnation=self._running[rank], epoch=self._epoch, rendezvous=rendezvous))

    def _told(self, rank: int, message: Message[Any, None]) -> None:
        if isinstance(message, LoadProgress):
            self._progress[rank] = message.fraction
            slowest = min(self._progress.get(rank, 0.0) for rank in range(self._size))
            if slowest == message.fraction:
                self._on_progress(message.stage, slowest)
        elif isinstance(message, WorkerLoaded) and message.epoch == self._epoch and rank in self._running:
            self._loaded[rank] = message.info
            if len(self._loaded) == self._size:
                self._on_loaded(self._loaded[0], self._epoch)
        elif isinstance(message, LoadRefused) and message.epoch == self._epoch and rank in self._running:
            if self._epoch == 0:
                self._on_refused(message.reason, message.permanent)
            else:  # it was loaded before: a restart may find its memory free again
                self._system.crash_actor(self.workers[rank], ChildCrash(message.reason))

    # -- where the ranks of a life meet

    def _reserve(self) -> str:
        """The path of a file that this life's ranks make, and use as long as they live."""
        self._release()
        self._folder = tempfile.TemporaryDirectory(prefix="troupe-ranks-", ignore_cleanup_errors=True)  # of mode 0700
        return str(Path(self._folder.name).resolve() / "store")

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
