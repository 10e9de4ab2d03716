"""Inject faults into a serving engine and print what its streams saw.

    python -m tests.bench chaos                          # the included model, 64 live streams, 3 rounds of each fault
    python -m tests.bench chaos --streams 16 --rounds 1 --faults kill,hang
    python -m tests.bench chaos --streams 256 --rounds 1 --faults harmful-1-prefill,harmful-3-decode
    python -m tests.bench chaos --tokens 1000 --rounds 1 --faults kills
    python -m tests.bench chaos --npu-simulator A2 --streams 16 --tokens 64 --rounds 1 --faults kills,harmful-2-decode
    python -m tests.bench chaos --pp-size 2 --rank 1 --streams 16 --rounds 1 --faults kill

Every round starts the same greedy streams, waits until all of them decode, and breaks one thing. A stream is *lost*
when it ends in any way but complete, and *altered* when its tokens are not those of the undisturbed run, one by one and
in order: a token that is missing, repeated or different counts. The gap is the longest time between two deltas of a
stream around the fault, from the last before to the first after. The model runs in float32 unless ``--dtype`` says
otherwise: a resumed stream's tokens are computed in one prefill, and in bfloat16 a near tie may fall the other way.

``kills`` kills the worker 8 times at random moments. ``harmful-N-prefill`` and ``-decode`` start N more streams; the
worker dies whenever it prefills, or decodes, one of these. They must end with an error; the others are counted as
above. Deaths are those of actors in all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

from actors.engine.engine import Engine
from actors.faults import Fault, FaultPlan
from actors.protocol.requests import SamplingParams
from actors.runtime import Event, EventKind
from app.understudy import MODEL_DIR
from kernels.contract.info import ModelInfo
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import percentile
from tests.kits.waiting import until

_WATCHDOG = 10.0
_MARK = 9  # a token that no prompt holds but those of harmful requests


@dataclass
class Stream:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""

    def gap(self, at: float) -> float:
        """The longest pause that ended after ``at``, in seconds."""
        return max((later - earlier for earlier, later in pairwise(self.times) if later > at), default=float("nan"))


@dataclass
class Row:
    fault: str
    injected: int = 0
    live: int = 0
    lost: int = 0
    altered: int = 0
    deaths: int = 0
    gaps: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    recoveries: list[list[float]] = field(default_factory=list)  # seconds of each of _PARTS


_PARTS = ("death noticed", "next process runs", "model loaded", "first token")


class Chaos:
    """One engine, its streams and the faults that are injected."""

    def __init__(self, engine: Engine, plan: FaultPlan, streams: int, tokens: int, seed: int, *, rank: int = 0) -> None:
        self.engine, self._rank = engine, rank
        self._plan = plan
        self._rng = random.Random(seed + 1)
        self._tokens = tokens
        rng = random.Random(seed)
        vocabulary = engine.vocab_size
        self._prompts = [[rng.randrange(10, vocabulary) for _ in range(32)] for _ in range(streams)]
        self.expected: list[list[int]] = []
        self._died: list[float] = []
        self._restarted: list[float] = []
        self._loaded: list[float] = []
        self._decoding, self._behind = asyncio.Event(), 0
        assert engine._system is not None
        assert engine._actor_tree is not None
        engine._system.on_event(self._on_event)
        self._report_ready, engine._actor_tree._on_ready = engine._actor_tree._on_ready, self._on_loaded

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.DIED and event.actor != "renderer-0":
            self._died.append(time.monotonic())
        elif event.kind is EventKind.RESTARTED:
            self._restarted.append(time.monotonic())

    def _on_loaded(self, info: ModelInfo) -> None:
        self._loaded.append(time.monotonic())
        self._report_ready(info)

    async def _read(self, prompt: list[int], stream: Stream) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._tokens, ignore_eos=True)
        try:
            async for delta in self.engine.generate(prompt, params):
                stream.times.append(time.monotonic())
                young = len(stream.tokens) < self._tokens // 4
                stream.tokens += delta.token_ids
                if young and len(stream.tokens) >= self._tokens // 4:
                    self._behind -= 1
                    if self._behind == 0:
                        self._decoding.set()
        except Exception as error:
            stream.error = f"{type(error).__name__}: {error}"
            self._decoding.set()

    async def _run(
        self, fault: Callable[[], Awaitable[None]] | None, harmful: int = 0
    ) -> tuple[list[Stream], float, int]:
        """The streams, the harmful ones last, the time of the fault and how many were live then."""
        prompts = self._prompts + [[*prompt[:-1], _MARK] for prompt in self._prompts[:harmful]]
        streams = [Stream() for _ in prompts]
        self._decoding, self._behind = asyncio.Event(), len(streams)
        readers = [
            asyncio.create_task(self._read(prompt, stream)) for prompt, stream in zip(prompts, streams, strict=True)
        ]
        at, live = time.monotonic(), len(self._prompts)
        if fault is not None:
            await self._decoding.wait()
            live = sum(not reader.done() for reader in readers)
            at = time.monotonic()
            await fault()
        await asyncio.gather(*readers)
        return streams, at, live

    async def learn(self) -> None:
        """Run the streams undisturbed and keep their tokens."""
        streams, _, _ = await self._run(None)
        for stream in streams:
            if stream.error or len(stream.tokens) != self._tokens:
                raise SystemExit(f"the undisturbed run failed: {stream.error or 'tokens are missing'}")
        self.expected = [stream.tokens for stream in streams]

    async def round(self, row: Row, fault: Callable[[], Awaitable[None]] | None, harmful: int = 0) -> None:
        await self.engine.flush_cache()
        for moments in (self._died, self._restarted, self._loaded):
            moments.clear()
        streams, at, live = await self._run(fault, harmful)
        row.injected += 1
        row.live += live
        row.deaths += len(self._died)
        streams, marked = streams[: len(self._prompts)], streams[len(self._prompts) :]
        if not all(stream.error for stream in marked):
            raise SystemExit("a harmful request did not end with an error")
        for stream, expected in zip(streams, self.expected, strict=True):
            if stream.error or len(stream.tokens) < len(expected):
                row.lost += 1
                print(f"  lost: {stream.error or f'{len(stream.tokens)} tokens'}", file=sys.stderr)
            elif stream.tokens != expected:
                row.altered += 1
            row.gaps.append(stream.gap(at))
        row.restarts += [moment - at for moment in self._restarted[:1]]
        if self._died and self._restarted and self._loaded:
            after = [moment for stream in streams for moment in stream.times if moment > self._loaded[0]]
            moments = [at, self._died[0], self._restarted[0], self._loaded[0], min(after)]
            row.recoveries.append([end - start for start, end in pairwise(moments)])

    # -- the faults

    def _worker(self) -> int:
        return int(self.engine.describe()["workers"][self._rank]["pid"] or 0)

    async def kill(self) -> None:
        os.kill(self._worker(), signal.SIGKILL)

    async def kills(self) -> None:
        for _ in range(_KILLS):
            await until(lambda: self.engine.board.worker is not None, "no worker has loaded")
            await asyncio.sleep(self._rng.uniform(0.0, 3.0))
            if worker := self._worker():
                os.kill(worker, signal.SIGKILL)
                await until(lambda worker=worker: self._worker() != worker, "the worker is still alive")

    async def hang(self) -> None:
        os.kill(self._worker(), signal.SIGSTOP)

    async def abort(self) -> None:
        os.kill(self._worker(), signal.SIGABRT)

    async def _crash(self, name: str) -> None:
        assert self.engine._system is not None
        self.engine._system.crash_actor(name, RuntimeError("injected"))

    async def scheduler(self) -> None:
        await self._crash("scheduler")

    async def cache(self) -> None:
        await self._crash("cache")

    async def detokenizer(self) -> None:
        await self._crash("detokenizer")


_KILLS = 8

_FAULTS = {
    "kill": "worker killed (SIGKILL)",
    "abort": "worker aborts (SIGABRT)",
    "hang": f"worker hangs (SIGSTOP, watchdog {_WATCHDOG:g} s)",
    "scheduler": "exception in the scheduler",
    "cache": "exception in the cache manager",
    "detokenizer": "exception in the detokenizer",
    "kills": f"worker killed {_KILLS} times at random moments",
} | {
    f"harmful-{count}-{stage}": f"{count} harmful in their {stage}"
    for stage in ("prefill", "decode")
    for count in (1, 2, 3)
}
_DEFAULT = "kill,abort,hang,scheduler,cache,detokenizer"


async def measure(arguments: argparse.Namespace) -> list[Row]:
    """Measure each fault on an engine of its own, as an engine whose worker dies too often gives up."""
    rows = []
    expected: list[list[int]] = []
    several = arguments.tp_size * arguments.pp_size > 1  # which compile kernels in their first steps
    for name in arguments.faults.split(","):
        row = Row(_FAULTS[name])
        harmful, stage = (int(name.split("-")[1]), name.split("-")[2]) if name.startswith("harmful") else (0, "")
        with FaultPlan() as plan:
            async with Engine(
                model=arguments.model,
                dtype=arguments.dtype,
                max_running_requests=max(64, arguments.streams + harmful),
                max_worker_restarts=6 if name != "kills" else _KILLS * arguments.rounds,
                watchdog_timeout=10 * _WATCHDOG if arguments.npu_simulator or several else _WATCHDOG,
                random_seed=0,
                npu_simulator=arguments.npu_simulator,
                device=arguments.device,
                max_total_tokens=arguments.max_total_tokens,
                tensor_parallel_size=arguments.tp_size,
                pipeline_parallel_size=arguments.pp_size,
                faults=plan,
            ) as engine:
                chaos = Chaos(engine, plan, arguments.streams, arguments.tokens, seed=7, rank=arguments.rank)
                chaos.expected = expected
                if not expected:
                    await chaos.learn()
                    expected = chaos.expected
                for _ in range(arguments.rounds):
                    await asyncio.sleep(arguments.rest)  # the next standby gets ready, and restarts do not add up
                    if harmful:
                        plan.add(Fault(stage, "kill", mark=_MARK))  # type: ignore[arg-type]
                    await chaos.round(row, None if harmful else getattr(chaos, name), harmful)
                    plan.clear()
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| fault | rounds | live streams | resumed | lost | altered | deaths | restart (s) | gap p50 (s) | p99 (s) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        restart = f"{statistics.median(row.restarts):.2f}" if row.restarts else "-"
        lines.append(
            f"| {row.fault} | {row.injected} | {row.live} | {row.live - row.lost} | {row.lost} | {row.altered} "
            f"| {row.deaths} | {restart} | {percentile(row.gaps, 0.5):.2f} | {percentile(row.gaps, 0.99):.2f} |"
        )
    return "\n".join(lines)


def breakdown(rows: list[Row]) -> str:
    lines = [f"| seconds, median | {' | '.join(_PARTS)} |", "| --- " * (len(_PARTS) + 1) + "|"]
    for row in rows:
        if row.recoveries:
            medians = [f"{statistics.median(part):.3f}" for part in zip(*row.recoveries, strict=True)]
            lines.append(f"| {row.fault} | {' | '.join(medians)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--model", default=str(MODEL_DIR), help="directory")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--streams", type=int, default=64, help="that live when a fault comes")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="of each fault")
    parser.add_argument("--rest", type=float, default=6.0, help="seconds between rounds")
    parser.add_argument("--npu-simulator", default=None, help="simulated NPUs to run on, as in --npu-simulator A2")
    parser.add_argument("--max-total-tokens", type=int, default=None, help="tokens of the cache; default: from memory")
    parser.add_argument("--device", default="auto", help="cpu, npu or cuda")
    parser.add_argument("--tp-size", type=int, default=1, help="workers that divide each layer")
    parser.add_argument("--pp-size", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--rank", type=int, default=0, help="number of the worker that is killed, aborts or hangs")
    parser.add_argument("--faults", default=_DEFAULT, help=f"of: {', '.join(_FAULTS)}")
    arguments = parser.parse_args(argv)
    parallel = f"tp {arguments.tp_size}, pp {arguments.pp_size}, rank {arguments.rank}, "
    several = arguments.tp_size * arguments.pp_size > 1
    if arguments.rank not in range(arguments.tp_size * arguments.pp_size):
        parser.error("--rank must be a number below --tp-size times --pp-size")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {arguments.dtype}, ", end="")
    print(parallel if several else "", end="")
    print(f"{arguments.streams} streams of {arguments.tokens} tokens")
    rows = asyncio.run(measure(arguments))
    print(table(rows))
    for row in rows:
        point = f"simulated NPU: {row.fault}" if arguments.npu_simulator else row.fault
        point = parallel + point if several else point
        for metric in ("live", "lost", "altered", "deaths"):
            record(point, "live streams" if metric == "live" else metric, getattr(row, metric))
        record(point, "gap p50", percentile(row.gaps, 0.5), "s")
        record(point, "gap p99", percentile(row.gaps, 0.99), "s")
        if row.restarts:
            record(point, "restart", row.restarts, "s")
    print(f"\nParts of a recovery, one after the other:\n\n{breakdown(rows)}")
    if any(row.lost or row.altered for row in rows):
        sys.exit("streams were lost or altered")
