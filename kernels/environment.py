"""What must stand in a worker's environment before torch is imported there. Imports nothing of torch.

OpenMP's threads spin while they wait for each other. When anything else wants their core, the event loop or a
neighbour, a step then waits for a thread that cannot run while its peers burn the time: on two busy cores a decode step
of 15 ms became one of 200 ms. Threads that sleep while they wait cost some microseconds a parallel region instead.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["threads_sleep", "worker_environment"]

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a worker process's environment; ``environ`` is what it inherits, and its choices stand."""
    return {} if any(name in environ for name in _CHOICES) else {"OMP_WAIT_POLICY": "PASSIVE"}


def threads_sleep(environ: Mapping[str, str]) -> bool:
    """Whether someone chose how this process's OpenMP threads wait. By default they spin."""
    return any(name in environ for name in _CHOICES)
