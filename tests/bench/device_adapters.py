"""Streams with LoRA adapters on a GPU, as many tokens a second as without, through a ModelRunner.

Adapters of rank 16 change all linear layers of attention and feed-forward; prompts have 512 tokens and outputs 128.
``not loaded``: a runner without room for adapters; ``none``: one with 16 of them, which no request uses.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path

from kernels.contract.adapters import AdapterSettings
from tests.bench._device_rows import write_model
from tests.bench._device_runner import Requests, load
from tests.bench._record import record

__all__ = ["adapters"]

_RANK, _LOADED = 16, 16
_STREAMS = (1, 64)
_PROMPT, _OUTPUT, _ROUNDS = 512, 128, 3


def adapters(names: list[str], directory: Path) -> None:
    """Measure, print and record models: rounds without adapters, then those with them on a runner of their own."""
    from tests.kits.adapters import adapted_modules, save_adapter

    print("\n| model | streams | adapters | tokens/s | of those without |\n|---|---|---|---|---|", flush=True)
    for name in names:
        path = write_model(name, directory)
        adapter = save_adapter(directory / f"adapter-{name}", adapted_modules(path), 1, _RANK, scale=5e-5)
        base = _measure(name, path, None, ("not loaded",), {})
        _measure(name, path, adapter, ("none", "1", str(_LOADED)), base)


def _measure(
    name: str, path: Path, adapter: Path | None, kinds: tuple[str, ...], base: dict[int, float]
) -> dict[int, float]:
    """Tokens a second by number of streams, of the last kind."""
    settings = AdapterSettings(max_rank=_RANK, max_batch=_LOADED) if adapter is not None else None
    runner, info = load(path, adapters=settings)
    if adapter is not None:
        for index in range(1, _LOADED + 1):
            runner.load_adapter(index, str(adapter))
    result: dict[int, float] = {}
    for streams in _STREAMS:
        for kind in kinds:
            used = int(kind) if kind.isdigit() else 0
            if used > streams:
                continue
            Requests(runner, info, streams, _PROMPT, _OUTPUT, used).run()
            seconds = [Requests(runner, info, streams, _PROMPT, _OUTPUT, used).run() for _ in range(_ROUNDS)]
            rates = [streams * _OUTPUT / each for each in seconds]
            result[streams] = statistics.median(rates)
            point = f"{name} {streams} streams, adapters: {kind}"
            record(point, "throughput", rates, "tokens/s")
            line = f"| {name} | {streams} | {kind} | {result[streams]:.0f} |"
            if base:
                record(point, "speed, of that without", result[streams] / base[streams], "times")
                line += f" {result[streams] / base[streams]:.3f} |"
            print(line, flush=True)
    runner.close()
    del runner
    gc.collect()
    import torch

    torch.cuda.empty_cache()
    return result
