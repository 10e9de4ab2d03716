"""Streams with LoRA adapters on a GPU, as many tokens a second as without, through a ModelRunner.

Adapters of rank 16 change all linear layers of attention and feed-forward; prompts have 512 tokens and outputs 128.
``not loaded``: a runner without room for adapters; ``none``: one with 16 of them, which no request uses. The time to
the first tokens is that of all streams' prompts.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.contract.adapters import AdapterSettings
from kernels.contract.info import ModelInfo
from tests.bench._device_rows import write_model
from tests.bench._device_runner import Requests, load
from tests.bench._record import record

if TYPE_CHECKING:
    from kernels.execution.runner import ModelRunner

__all__ = ["adapters"]

_RANK, _LOADED = 16, 16
_STREAMS = (1, 64)
_PROMPT, _OUTPUT, _ROUNDS = 512, 128, 3


def adapters(names: list[str], directory: Path) -> None:
    """Measure, print and record models: rounds without adapters, then those with them on a runner of their own."""
    from tests.kits.adapters import adapted_modules, save_adapter

    print("\n| model | streams | adapters | tokens/s | first tokens, ms | of those without |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for name in names:
        path = write_model(name, directory)
        adapter = save_adapter(directory / f"adapter-{name}", adapted_modules(path), 1, _RANK, scale=5e-5)
        base = _measure(name, path, None, ("not loaded",), {})
        _measure(name, path, adapter, ("none", "1", str(_LOADED)), base)


def _measure(
    name: str, path: Path, adapter: Path | None, kinds: tuple[str, ...], base: dict[int, tuple[float, float]]
) -> dict[int, tuple[float, float]]:
    """Tokens a second, and milliseconds to the first tokens, by number of streams, of the last kind."""
    settings = AdapterSettings(max_rank=_RANK, max_batch=_LOADED) if adapter is not None else None
    runner, info = load(path, adapters=settings)
    if adapter is not None:
        for index in range(1, _LOADED + 1):
            runner.load_adapter(index, str(adapter))
    result: dict[int, tuple[float, float]] = {}
    for streams in _STREAMS:
        for kind in kinds:
            used = int(kind) if kind.isdigit() else 0
            if used > streams:
                continue
            for output in (_OUTPUT, 1):
                Requests(runner, info, streams, _PROMPT, output, used).run()
            rates = [streams * _OUTPUT / _seconds(runner, info, streams, _OUTPUT, used) for _ in range(_ROUNDS)]
            firsts = [1e3 * _seconds(runner, info, streams, 1, used) for _ in range(_ROUNDS)]
            rate, first = result[streams] = statistics.median(rates), statistics.median(firsts)
            point = f"{name} {streams} streams, adapters: {kind}"
            record(point, "throughput", rates, "tokens/s")
            record(point, "time to first token", firsts, "ms")
            line = f"| {name} | {streams} | {kind} | {rate:.0f} | {first:.1f} |"
            if base:
                speed, time = rate / base[streams][0], first / base[streams][1]
                record(point, "speed, of that without", speed, "times")
                record(point, "time to first token, of that without", time, "times")
                line += f" {speed:.3f}, {time:.3f} |"
            print(line, flush=True)
    runner.close()
    del runner
    gc.collect()
    import torch

    torch.cuda.empty_cache()
    return result


def _seconds(runner: ModelRunner, info: ModelInfo, streams: int, output: int, used: int) -> float:
    return Requests(runner, info, streams, _PROMPT, output, used).run()
