"""What LoRA adapters cost on the CPU: tokens a second with them, of those without.

    python -m tests.bench adapters                          # the included model, about a minute
    python -m tests.bench adapters --streams 64 --prompt 512 --output 16
    python -m tests.bench adapters --model DIRECTORY        # another one, such as a quantized one

Two engines in this process, without HTTP, take turns: one without adapters, and one with sixteen loaded, of rank 16 on
all linear layers of attention and feed-forward. ``none`` are requests of the second without an adapter, ``1`` requests
of one adapter, ``16`` requests that take the sixteen in turn. A round runs each kind once; ratios are of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
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

_RANK, _LOADED = 16, 16
_WITHOUT, _NONE = "not loaded", "none"


async def _round(engine: Engine, options: argparse.Namespace, streams: int, adapters: int) -> float:
    """Tokens a second of ``streams`` requests at once, which take ``adapters`` in turn; 0: none."""
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)

    async def one(number: int) -> int:
        prompt = [random.randrange(300, 3000) for _ in range(options.prompt)]
        name = f"adapter-{number % adapters}" if adapters else None
        return sum([len(delta.token_ids) async for delta in engine.generate(prompt, params, adapter=name)])

    begun = time.perf_counter()
    made = sum(await asyncio.gather(*map(one, range(streams))))
    if made != streams * options.output:
        raise SystemExit(f"{streams} requests gave {made} tokens, not {options.output} each")
    return made / (time.perf_counter() - begun)


async def _measure(options: argparse.Namespace, folder: Path) -> None:
    from tests.kits.adapters import adapted_modules, save_adapter

    # So small that outputs stay those of a language model.
    adapter = save_adapter(folder / "adapter", adapted_modules(options.model), 1, _RANK, scale=5e-5)
    common = {"model": str(options.model), "device": "cpu", "max_running_requests": max(options.streams)}
    paths = [f"adapter-{number}={adapter}" for number in range(_LOADED)]
    label = "" if options.model == MODEL_DIR else f"{options.model.name}, "
    print(f"{label}prompts of {options.prompt} tokens, outputs of {options.output}\n")
    print("| streams | adapters | tokens/s | of those without |\n|---|---|---|---|", flush=True)
    async with Engine(**common) as plain, Engine(**common, lora_paths=paths, max_loras_per_batch=_LOADED) as adapted:
        for streams in options.streams:
            kinds = {_WITHOUT: (plain, 0), _NONE: (adapted, 0), "1": (adapted, 1), str(_LOADED): (adapted, _LOADED)}
            if streams < _LOADED:
                del kinds[str(_LOADED)]
            found: dict[str, list[float]] = {kind: [] for kind in kinds}
            repeats = max(1, options.repeats // streams)
            for number in range(options.rounds + 1):
                for kind, (engine, adapters) in kinds.items():
                    rates = [await _round(engine, options, streams, adapters) for _ in range(repeats)]
                    if number:  # the first warms up
                        found[kind].append(statistics.median(rates))
            for kind, rates in found.items():
                ratios = [rate / base for rate, base in zip(rates, found[_WITHOUT], strict=True)]
                point = f"{label}{streams} streams, adapters: {kind}, {options.prompt} in, {options.output} out"
                record(point, "throughput", rates, "tokens/s")
                record(point, "speed, of that without", ratios, "times")
                line = f"| {streams} | {kind} | {statistics.median(rates):.0f} |"
                print(f"{line} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="directory of the model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], help="requests at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt, made up")
    parser.add_argument("--output", type=int, default=128, help="tokens of each output")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind, in turn")
    parser.add_argument("--repeats", type=int, default=5, help="requests of one stream in a round")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(options, Path(folder)))
    return 0
