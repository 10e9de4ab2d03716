"""Workers' processes that import while the rest of a server is put up: PyTorch takes most of a start."""

from __future__ import annotations

import contextlib
import os

from actors.arguments import ArgumentError, Arguments
from actors.placement import place
from actors.runtime import BlankProcess

__all__ = ["EarlyWorkers"]


class EarlyWorkers:
    """A process for each rank, without a model yet. What is wrong with the arguments, or keeps processes from being
    started, is left for the engine to tell: then there are none from that rank on."""

    def __init__(self, arguments: Arguments) -> None:
        self._blank: dict[int, BlankProcess] = {}
        with contextlib.suppress(ArgumentError, OSError):
            placement = place(arguments, os.environ)
            # A simulated device wants to be there before PyTorch is.
            modules = ["actors.worker"] if placement.simulator else ["actors.worker", "kernels.runner"]
            for rank in range(arguments.tensor_parallel_size):
                environment = placement.environment(arguments, rank, os.environ, arguments.watchdog_timeout)
                blank = self._blank[rank] = BlankProcess(environment, modules)
                blank.begin()

    def take(self, rank: int) -> BlankProcess | None:
        """The process of ``rank``, which is the caller's from now on; None when there is none."""
        return self._blank.pop(rank, None)

    def close(self) -> None:
        """End what nobody has taken. May be called again."""
        for blank in self._blank.values():
            blank.kill()
        while self._blank:
            self._blank.popitem()[1].close()
