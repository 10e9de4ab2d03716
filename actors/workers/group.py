"""WorkerGroup: the workers that run one model together, started and replaced together."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actors.protocol import Load, LoadProgress, LoadRefused, NumberedAdapter, WorkerConfig, WorkerLoaded, WorkerProtocol
from actors.runtime import ActorRef, ActorSystem, Backoff, ChildCrash, Event, EventKind, Message, Strategy, Supervision
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.launchers.local import LocalLauncher
from kernels.contract.info import ModelInfo
from kernels.contract.topology import WorkerId

__all__ = ["WorkerGroup"]

_log = logging.getLogger("troupe.engine")

_START_TIMEOUT_SECONDS = 300.0
"""Seconds until a worker's process runs; the model is loaded later."""


class WorkerGroup:
    """The workers of one replica, one per device. They start and end together: the results of one rank are useless
    without the others, and a rank may wait long in a collective for a dead one.

    An *epoch* of the group begins when all of its processes run. Steps carry its number, which is independent of the
    incarnations of the processes. Each epoch has its own rendezvous, so that ranks of different epochs never meet.

    ``ids``: the workers, first the one whose results count: rank 0 of the last stage. ``configure``: returns the config
    of a worker. ``address``: a rendezvous (host:port) for all epochs; without it each epoch uses a file in a private
    folder. ``on_loaded``: called with the report of the first one and the epoch when every rank has loaded.
    ``on_refused``: called with a reason and whether it is permanent when the first epoch cannot load the model.
    ``adapters``: those that an epoch loads with the model.
    """

    def __init__(
        self,
        system: ActorSystem,
        ids: Sequence[WorkerId],
        *,
        address: str | None,
        configure: Callable[[WorkerId], WorkerConfig],
        on_progress: Callable[[str, float], None],
        on_loaded: Callable[[ModelInfo, int], None],
        on_refused: Callable[[str, bool], None],
        launcher: WorkerLauncher | None = None,
        adapters: Callable[[], tuple[NumberedAdapter, ...]] = tuple,
    ) -> None:
        self.ids = tuple(ids)
        self.workers: dict[WorkerId, ActorRef[WorkerProtocol]] = {}
        self._system = system
        self._address = address
        self._configure = configure
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._on_refused = on_refused
        self._adapters = adapters
        self._launcher = launcher or LocalLauncher()
        self._epoch = -1
        self._running: dict[WorkerId, int] = {}  # incarnations of the processes started since the last death
        self._progress: dict[WorkerId, float] = {}
        self._loaded: dict[WorkerId, ModelInfo] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def spawn(
        self,
        environment: Callable[[WorkerId], Mapping[str, str]],
        *,
        standby: bool,
        silence: float | None = None,
        max_restarts: int = 6,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a process for each worker and return. ``environment``: variables to add to those of its host.

        With ``standby`` each worker has a second process, prepared for its next incarnation. A process without a
        heartbeat for ``silence`` seconds is replaced, also while it loads. ``max_restarts``: most restarts within 300
        s, for deaths that count by ``counts``.
        """
        self._system.on_event(self._on_event)
        if self._address is not None:
            _log.warning(
                "the workers rendezvous at %s, where any user who reaches that port may disturb them; leave "
                "--dist-init-addr out to use a private folder",
                self._address,
            )
        for worker in self.ids:
            self.workers[worker] = await self._system.spawn_process(
                WorkerProtocol,
                name=worker.name,
                target="actors.workers.worker:Worker",
                config=self._configure(worker),
                environment=environment(worker),
                events=self._on_report,
                events_type=LoadProgress | LoadRefused | WorkerLoaded,
                supervision=Supervision(
                    strategy=Strategy.RESTART_GROUP,
                    max_restarts=max_restarts,
                    within=300.0,
                    backoff=Backoff(first=0.02),  # streams wait for it: the first restarts are immediate
                    counts=counts,
                ),
                group=f"workers of replica {worker.replica}",
                standby=standby,
                launcher=partial(self._launcher.launch, worker),
                start_timeout=_START_TIMEOUT_SECONDS,
                stop_timeout=5.0,
                heartbeat_timeout=silence,
                wait=False,
            )

    # -- an epoch

    def _on_event(self, event: Event) -> None:
        worker = next((worker for worker in self.workers if worker.name == event.actor), None)
        if worker is None:
            return
        if event.kind in (EventKind.STARTED, EventKind.RESTARTED) and event.incarnation is not None:
            self._running[worker] = event.incarnation
            if len(self._running) == len(self.ids):
                self._begin()
        elif event.kind is EventKind.DIED:
            self._running.clear()
            self._loaded.clear()
            for other, ref in self.workers.items():
                if other != worker:
                    # Immediately: it may hang in a collective and not see a request to stop.
                    self._system.crash_actor(ref, ChildCrash(f"ended because {event.actor} had died"))
        elif event.kind is EventKind.STOPPED:
            self._release()

    def _begin(self) -> None:
        """Let all running processes load the model and rendezvous."""
        self._epoch += 1
        self._progress.clear()
        self._loaded.clear()
        rendezvous = "" if len(self.ids) == 1 else self._address or self._reserve()
        for worker, ref in self.workers.items():
            ref.offer(
                Load(
                    incarnation=self._running[worker],
                    epoch=self._epoch,
                    rendezvous=rendezvous,
                    adapters=self._adapters(),
                )
            )

    def _on_report(self, message: Message[Any, None]) -> None:
        if isinstance(message, LoadProgress):
            self._progress[message.worker] = message.fraction
            slowest = min(self._progress.get(worker, 0.0) for worker in self.ids)
            if slowest == message.fraction:
                self._on_progress(message.stage, slowest)
        elif isinstance(message, WorkerLoaded) and self._is_current(message.worker, message.epoch):
            self._loaded[message.worker] = message.info
            if len(self._loaded) == len(self.ids):
                self._on_loaded(self._loaded[self.ids[0]], self._epoch)
        elif isinstance(message, LoadRefused) and self._is_current(message.worker, message.epoch):
            if self._epoch == 0:
                self._on_refused(message.reason, message.permanent)
            else:  # an earlier epoch loaded: after a restart the memory may be free again
                self._system.crash_actor(self.workers[message.worker], ChildCrash(message.reason))

    def _is_current(self, worker: WorkerId, epoch: int) -> bool:
        return epoch == self._epoch and worker in self._running

    # -- the rendezvous of an epoch

    def _reserve(self) -> str:
        """The path of the rendezvous file of this epoch, which its ranks create."""
        self._release()
        self._folder = tempfile.TemporaryDirectory(prefix="troupe-ranks-", ignore_cleanup_errors=True)  # of mode 0700
        return str(Path(self._folder.name).resolve() / "store")

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
