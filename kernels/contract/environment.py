"""Environment variables that a process needs before it imports torch. Imports no torch.

OpenMP's threads spin while they wait for each other. When anything else wants their core, a step then waits for a
thread that cannot run while its peers burn the time: on two busy cores a decode step of 10 ms became one of 100 ms.
Threads that sleep while they wait cost some microseconds a parallel region instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec

__all__ = ["NO_AUTOLOAD", "NPU_TRITON", "hide_broken_npu", "worker_environment"]

NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Without it, importing torch imports torch_npu wherever that is installed, which fails where CANN is not."""

NPU_TRITON = "TROUPE_NPU_TRITON"
"""The variable that selects our own kernels on Ascend NPUs: see kernels/devices/npu_triton/selection.py."""


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a worker process's environment; ``environ`` is what it inherits, and its choices stand."""
    chosen = "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ
    return NO_AUTOLOAD | ({} if chosen else {"OMP_WAIT_POLICY": "PASSIVE"})


def hide_broken_npu() -> None:
    """Let this process import transformers' models where torch_npu is installed and CANN is not.

    They import torch_npu wherever it is installed, and fail where it cannot be loaded. It is then hidden from this
    process, so only a program of its own may call this: tools, benchmarks and tests, never a server.
    """
    os.environ.update(NO_AUTOLOAD)
    if find_spec("torch_npu") is None:
        return
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        sys.modules["torch_npu"] = None  # type: ignore[assignment]
