"""Engines for tests."""

import os
import signal
from pathlib import Path
from typing import Any

from actors.engine.engine import Engine
from actors.options import Arguments
from tests.kits.waiting import until

__all__ = ["halt_in_a_step", "rest", "small_engine"]


def small_engine(model: Path, **keywords: Any) -> Engine:
    """An engine of a tiny model on one thread of the CPU, without a standby. ``keywords`` come before its options, and
    may be those of a server that gets ``engine.arguments``."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "max_total_tokens": 4096,
        "standby_worker": False,
    }
    options |= keywords
    others = {name: options.pop(name) for name in ("registry", "faults", "tracer_provider") if name in options}
    return Engine(arguments=Arguments.from_keywords(model=str(model), **options), **others)


async def rest(engine: Engine) -> None:
    """Wait until no sequence runs or waits, no step is in flight and no page is in use."""

    def rests() -> bool:
        usage, load = engine.board.cache(), engine.board.scheduler
        return (
            usage is not None
            and load is not None
            and usage.used == load.running == load.waiting == load.steps_in_flight == 0
            and engine.board.oldest_step_sent is None
        )

    await until(rests, "the engine did not come to rest")


async def halt_in_a_step(engine: Engine) -> int:
    """Stop the worker's process (SIGSTOP) with a step in flight; returns its pid."""
    pid = int(engine.describe()["workers"][0]["pid"] or 0)
    os.kill(pid, signal.SIGSTOP)
    sent: list[float | None] = []

    def owes() -> bool:  # what it had answered before is read, and what follows from it is sent
        sent.append(engine.board.oldest_step_sent)
        return len(sent) > 20 and len(set(sent[-20:])) == 1 and sent[-1] is not None

    await until(owes, "it owes no step")
    return pid
