"""LocalLauncher: workers in child processes of the engine's process."""

from __future__ import annotations

from collections.abc import Mapping

from actors.runtime import BlankProcess
from actors.workers.early_workers import EarlyWorkers
from kernels.contract.topology import WorkerId

__all__ = ["LocalLauncher"]


class LocalLauncher:
    """A :class:`~actors.workers.launchers.launcher.WorkerLauncher` on this host.

    ``early``: processes started before the engine. Each becomes the first process of its worker if it still runs and
    has the same environment.
    """

    def __init__(self, early: EarlyWorkers | None = None) -> None:
        self._early = early

    async def launch(self, worker: WorkerId, environment: Mapping[str, str]) -> BlankProcess:
        early = None if self._early is None else self._early.take(worker.number)
        if early is not None:
            if early.process.poll() is None and early.environment == dict(environment):
                return early
            early.close()
        return BlankProcess(environment)

    def host(self, worker: WorkerId) -> None:
        return None
