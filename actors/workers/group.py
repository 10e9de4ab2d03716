"""WorkerGroup: the workers that run one model together, started and replaced together."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from actors.protocol import (
    Load,
    LoadProgress,
    LoadRefused,
    NumberedAdapter,
    UnloadAdapter,
    WorkerConfig,
    WorkerLoaded,
    WorkerProtocol,
)
from actors.runtime import (
    ActorRef,
    ActorSystem,
    Backoff,
    ChildCrash,
    Event,
    EventKind,
    MailboxFull,
    Message,
    Strategy,
    Supervision,
)
from actors.workers.launchers.launcher import WorkerLauncher
from actors.workers.launchers.local import LocalLauncher
from kernels.contract.info import ModelInfo
from kernels.contract.topology import WorkerId

__all__ = ["PeerDied", "WorkerGroup"]

_log = logging.getLogger("troupe.engine")

_START_TIMEOUT_SECONDS = 300.0
"""Seconds until a worker's process runs; the model is loaded later."""


class PeerDied(ChildCrash):
    """The cause of death of a worker that was ended because another one of its group had died."""


class WorkerGroup:
    """The workers of one replica, one per device. They start and end together: the results of one rank are useless
    without the others, and a rank may wait long in a collective for a dead one.

    An *epoch* of the group begins when all of its processes run. Steps carry its number, which is independent of the
    incarnations of the processes. Each epoch has its own rendezvous, so that ranks of different epochs never meet.

    ``ids``: the workers, first the one whose results count: rank 0 of the last stage. ``configure``: returns the config
    of a worker. ``address``: returns the rendezvous (host:port) of an epoch when that begins; without it each epoch
    uses a file in a private folder. ``on_loaded``: called when every rank has loaded, with the report of the first
    one, which has the bytes of all, and the epoch.
    ``on_refused``: called with a reason and whether it is permanent when the first epoch cannot load the model.
    ``adapters``: those that an epoch loads with the model. ``on_adapters_lost``: called before ``on_loaded`` with those
    that a rank could not load again, by number with the reasons. All ranks forget them, so that they compute the same.
    """

    def __init__(
        self,
        system: ActorSystem,
        ids: Sequence[WorkerId],
        *,
        address: Callable[[], str] | None,
        configure: Callable[[WorkerId], WorkerConfig],
        on_progress: Callable[[str, float], None],
        on_loaded: Callable[[ModelInfo, int], None],
        on_refused: Callable[[str, bool], None],
        launcher: WorkerLauncher | None = None,
        adapters: Callable[[], tuple[NumberedAdapter, ...]] = tuple,
        on_adapters_lost: Callable[[Mapping[int, str]], None] = lambda lost: None,
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
        self._on_adapters_lost = on_adapters_lost
        self._launcher = launcher or LocalLauncher()
        self._epoch = -1
        self._running: dict[WorkerId, int] = {}  # incarnations of the processes started since the last death
        self._progress: dict[WorkerId, float] = {}
        self._loaded: dict[WorkerId, ModelInfo] = {}
        self._lost: dict[int, str] = {}  # adapters of this epoch
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
                group=f"workers of replica {self.ids[0].replica}",  # one, also where replicas share the workers
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
                    self._system.crash_actor(ref, PeerDied(f"ended because {event.actor} had died"))
        elif event.kind is EventKind.STOPPED:
            self._release()

    def _begin(self) -> None:
        """Let all running processes load the model and rendezvous."""
        self._epoch += 1
        self._progress.clear()
        self._loaded.clear()
        self._lost.clear()
        rendezvous = ""
        if len(self.ids) > 1:
            rendezvous = self._reserve() if self._address is None else self._meet_at(self._address())
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
            for index, reason in message.failed.items():
                host = f" on {message.worker.name}" if len(self.ids) > 1 else ""
                self._lost[index] = f"{reason}{host}"
            if len(self._loaded) == len(self.ids) and self._forget_adapters():
                self._on_loaded(self._info(), self._epoch)
        elif isinstance(message, LoadRefused) and self._is_current(message.worker, message.epoch):
            if self._epoch == 0:
                self._on_refused(message.reason, message.permanent)
            else:  # an earlier epoch loaded: after a restart the memory may be free again
                self._system.crash_actor(self.workers[message.worker], ChildCrash(message.reason))

    def _forget_adapters(self) -> bool:
        """Unload lost adapters on all ranks, which would compute different rows otherwise. Returns False if a rank's
        mailbox is full; that rank restarts, which ends the epoch."""
        if not self._lost:
            return True
        self._on_adapters_lost(self._lost)
        for ref in self.workers.values():
            for index in self._lost:
                try:
                    ref.offer(UnloadAdapter(index))
                except MailboxFull:
                    self._system.crash_actor(ref, ChildCrash("its mailbox is full, so it cannot unload an adapter"))
                    return False
        return True

    def _info(self) -> ModelInfo:
        """The report of the first worker, with the bytes of all of them."""
        first, all_ = self._loaded[self.ids[0]], self._loaded.values()
        return msgspec.structs.replace(
            first,
            weight_bytes=sum(each.weight_bytes for each in all_),
            draft_weight_bytes=sum(each.draft_weight_bytes for each in all_),
            cache_bytes=sum(each.cache_bytes for each in all_),
        )

    def _is_current(self, worker: WorkerId, epoch: int) -> bool:
        return epoch == self._epoch and worker in self._running

    # -- the rendezvous of an epoch

    def _meet_at(self, address: str) -> str:
        if self._epoch == 0:
            _log.warning(
                "the workers rendezvous at %s, where any user who reaches that port may disturb them: with several "
                "nodes keep it in a private network; with one leave --dist-init-addr out to use a private folder",
                address,
            )
        return f"{address}/{self._epoch}"

    def _reserve(self) -> str:
        """The path of the rendezvous file of this epoch, which its ranks create."""
        self._release()
        self._folder = tempfile.TemporaryDirectory(prefix="troupe-ranks-", ignore_cleanup_errors=True)  # of mode 0700
        return str(Path(self._folder.name).resolve() / "store")

    def _release(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
