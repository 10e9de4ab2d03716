"""Engines for tests."""

from pathlib import Path
from typing import Any

from actors.engine import Engine

__all__ = ["small_engine"]


def small_engine(model: Path, **keywords: Any) -> Engine:
    """An engine of a tiny model on one thread of the CPU; ``keywords`` come before its options."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "max_total_tokens": 4096,
    }
    return Engine(model=str(model), **(options | keywords))
