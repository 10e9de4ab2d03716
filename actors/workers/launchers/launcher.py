"""WorkerLauncher: starts the processes of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.runtime import LaunchedProcess
from kernels.contract.topology import WorkerId

__all__ = ["WorkerLauncher"]


class WorkerLauncher(Protocol):
    """A local launcher starts child processes. One of several nodes starts a worker on the host of its device and
    connects to it; the returned process behaves the same."""

    async def launch(self, worker: WorkerId, environment: Mapping[str, str]) -> LaunchedProcess:
        """Start a process for this worker with ``environment`` added to that of its host.

        Called for the first start, for each restart and for each standby; waits for the host. Raises OSError when no
        process can be started.
        """

    def host(self, worker: WorkerId) -> str | None:
        """The address of the host of this worker, as the other nodes reach it; None: node 0."""
