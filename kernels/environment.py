"""What should stand in a worker's environment before torch is imported there. Imports nothing of torch.

OpenMP's threads spin while they wait for each other. When anything else wants their core, a step then waits for a
thread that cannot run while its peers burn the time: on two busy cores a decode step of 10 ms became one of 100 ms.
Threads that sleep while they wait cost some microseconds a parallel region instead.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["worker_environment"]


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a worker process's environment; ``environ`` is what it inherits, and its choices stand."""
    chosen = "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ
    return {} if chosen else {"OMP_WAIT_POLICY": "PASSIVE"}
