"""WorkerLauncher: starts the processes of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.runtime import LaunchedProcess
from kernels.contract.topology import WorkerId

__all__ = ["WorkerLauncher"]


class WorkerLauncher(Protocol):
    """A local launcher starts child processes. One for a cluster starts a worker on the host of its device and connects
    to it; the returned process behaves the same."""

    def launch(self, worker: WorkerId, environment: Mapping[str, str]) -> LaunchedProcess:
        """Start a process for this worker with ``environment`` added to that of its host.

        Called for the first start, for each restart and for each standby. Raises OSError when no process can be
        started.
        """
