"""How long the steps of running requests are while an adapter is loaded.

    python -m tests.bench adapter_loading --record          # the included model, about a minute
    python -m tests.bench adapter_loading --model DIRECTORY

An engine in this process, without HTTP, decodes one stream. Gaps between its tokens are measured in rounds: with
nothing beside it, and while adapters of rank 16 on all linear layers are loaded and unloaded one after the other. A gap
counts as one beside a load if an adapter was loaded at any time in it. ``median`` and ``p99`` are ratios of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from app.understudy import MODEL_DIR
from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_RANK = 16


async def _gaps(engine: Engine, tokens: int, adapter: Path | None) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of a request, and those of them in which an adapter was loaded."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    moments: list[float] = []
    loads: list[tuple[float, float]] = []
    ended = asyncio.Event()

    async def load() -> None:
        while adapter is not None and not ended.is_set():
            begun = time.perf_counter()
            await engine.load_adapter("one", str(adapter))
            loads.append((begun, time.perf_counter()))
            await engine.unload_adapter("one")
            await asyncio.sleep(0.02)

    loading = asyncio.create_task(load())
    async for _ in engine.generate(list(range(300, 332)), params):
        moments.append(time.perf_counter())
    ended.set()
    await loading
    steps = list(itertools.pairwise(moments[8:]))
    beside = [after - before for before, after in steps if any(b < after and e > before for b, e in loads)]
    return [after - before for before, after in steps], beside


async def _measure(options: argparse.Namespace, folder: Path) -> None:
    from tests.kits.adapters import adapted_modules, save_adapter

    adapter = save_adapter(folder / "adapter", adapted_modules(options.model), 1, _RANK)
    room = {"enable_lora": True, "max_lora_rank": _RANK}
    ratios: dict[str, list[float]] = {"median": [], "p99": []}
    async with Engine(model=str(options.model), **room) as engine:
        for number in range(options.rounds + 1):
            alone, _ = await _gaps(engine, options.tokens, None)
            _, beside = await _gaps(engine, options.tokens, adapter)
            if not number:  # the first warms up
                continue
            for name, place in (("median", 0.5), ("p99", 0.99)):
                first, second = (sorted(gaps)[int(place * (len(gaps) - 1))] for gaps in (alone, beside))
                ratios[name].append(second / first)
            print(
                f"{len(beside)} steps beside loads: median {statistics.median(beside) * 1e3:.2f} ms "
                f"({ratios['median'][-1]:.3f} times), p99 {ratios['p99'][-1]:.3f} times, longest "
                f"{max(beside) * 1e3:.2f} ms, of {max(alone) * 1e3:.2f} ms without",
                flush=True,
            )
    for name, values in ratios.items():
        record("1 stream beside loads of adapters", f"step, {name}, of that without", values, "times")
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) times")


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the model")
    parser.add_argument("--tokens", type=int, default=1500, help="of each request")
    parser.add_argument("--rounds", type=int, default=5, help="with and without loads, in turn")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(options, Path(folder)))
    return 0
