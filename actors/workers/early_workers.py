"""EarlyWorkers: worker processes that import PyTorch while the server starts."""

from __future__ import annotations

import contextlib
import os

from actors.options import ArgumentError, Arguments
from actors.runtime import BlankProcess
from actors.workers.placement import place
from kernels.contract.runner import RUNNER_MODULE

__all__ = ["EarlyWorkers"]


class EarlyWorkers:
    """A process without a model for each worker.

    The engine reports errors of arguments or of a start: here the workers from the failing one on have no early
    process.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._blank: dict[int, BlankProcess] = {}
        with contextlib.suppress(ArgumentError, OSError):
            placement = place(arguments, os.environ)
            # A simulated device must be set up before PyTorch is imported.
            modules = ["actors.workers.worker"] if placement.simulator else ["actors.workers.worker", RUNNER_MODULE]
            for number in range(arguments.node_workers):
                environment = placement.environment(arguments, number, os.environ, arguments.watchdog_timeout)
                blank = self._blank[number] = BlankProcess(environment, modules)
                blank.begin()

    def take(self, number: int) -> BlankProcess | None:
        """Remove and return the process of worker ``number``, or None."""
        return self._blank.pop(number, None)

    def close(self) -> None:
        """End the processes that were not taken. Idempotent."""
        for blank in self._blank.values():
            blank.kill()
        while self._blank:
            self._blank.popitem()[1].close()
