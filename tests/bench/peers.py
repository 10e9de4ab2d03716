"""Troupe beside other engines on the same cores, the same model, dtype and client.

    python -m tests.bench peers --models DIR [--llama llama-server] [--vllm vllm]     # everything, in turns
    python -m tests.bench peers --models DIR --model tiny --engines troupe --points 1:128:128 --rounds 1 --results F
    python -m tests.bench peers --results F --table                                   # only print what is in the file

DIR holds, for each NAME of ``--model``, a folder NAME as Hugging Face has them and, for llama.cpp, NAME-bf16.gguf.
A name such as tiny:Q8_0 is the file tiny-Q8_0.gguf, which Troupe and llama.cpp serve. ``tiny``, ``0.6b`` and ``moe`` of
the results are the shapes of ``tests.bench cpu`` with made-up weights.
An engine whose program is neither given nor found on PATH is left out. A point is ``concurrency:input:output tokens``,
run as ``tests.bench serving`` does. Each engine is started once and timed to its first answer; then the engines take
turns, round by round, each warmed up at each point before it counts. Who has no turn is held (SIGSTOP): idle servers
beside it took up to a sixth of the machine from one. ``--apart`` has one server at a time instead, for models that do
not fit into memory three times.

Every measurement is added to the file of ``--results``, so that short quiet windows add up, and the table shows the
medians of all that is in it: ratios are Troupe's against the best of the others, above 1 where Troupe is better.
CPU is processor time of all the server's threads for each output token, and ``others`` what processes that are neither
server nor client took of the machine meanwhile: rows with much of it say little. RSS is the sum of the processes' peaks
(pages that they share count for each), PSS their share of memory at the end of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import Client, Point, cpu_name, run_point

__all__ = ["main"]

POINTS = "1:128:128,8:512:128,32:256:64"
REQUESTS = {1: 8, 8: 3, 32: 2}  # requests a stream and round, by streams
TOKEN_IDS = (300, 8000)
LESS_IS_BETTER = ("itl50", "ttft50", "cpu", "start", "rss", "pss")

Row = dict[str, Any]


def free_port() -> int:
    """A port that was free a moment ago; some engines cannot take over an open socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """How one engine is started."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.command = command
        self.environment = environment or {}


def _engines(options: argparse.Namespace, model: str, port: Callable[[], int]) -> dict[str, Callable[[], Engine]]:
    cores = len(os.sched_getaffinity(0))
    name, _, kind = model.partition(":")
    folder, file = options.models / name, options.models / f"{name}-{kind or 'bf16'}.gguf"

    def troupe() -> Engine:
        command = [options.python, "-m", "app", "serve", str(file if kind else folder), "--served-model-name", model]
        return Engine("troupe", [*command, "--dtype", "bfloat16", "--port", str(port()), *options.troupe_args])

    def llama() -> Engine:
        slots = ["-np", "32", "-c", "32768", "-fa", "on", "-ctk", "bf16", "-ctv", "bf16"]
        command = [options.llama, "-m", str(file), "--alias", model, "-t", str(cores), "-tb", str(cores)]
        return Engine("llama", [*command, *slots, "--no-webui", "--host", "127.0.0.1", "--port", str(port())])

    def vllm() -> Engine:
        command = [options.vllm, "serve", str(folder), "--served-model-name", model, "--dtype", "bfloat16"]
        threads = Path(options.vllm).resolve().parents[1] / "lib" / "libiomp5.so"
        preload = [path for path in (options.preload, str(threads) if threads.exists() else None) if path]
        environment = {
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return Engine("vllm", [*command, "--max-model-len", "2048", "--port", str(port())], environment)

    found: dict[str, Callable[[], Engine]] = {"troupe": troupe}
    if options.llama and file.exists():
        found["llama"] = llama
    if options.vllm and not kind:
        found["vllm"] = vllm
    return {name: found[name] for name in options.engines if name in found}


class Server:
    """One engine's server. ``start``: seconds from its start to its first answer."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.name, self.model = engine.name, model
        self.url = f"http://127.0.0.1:{engine.command[engine.command.index('--port') + 1]}"
        log, self._log = tempfile.mkstemp(prefix=f"peers-{engine.name}-", suffix=".log")
        environment = os.environ | engine.environment
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(engine.command, stdout=log, stderr=log, env=environment, process_group=0)
        os.close(log)
        self.start = 0.0

    async def first_answer(self, limit: float) -> None:
        body = {"model": self.model, "prompt": [300, 301, 302], "max_tokens": 1, "temperature": 0}
        while time.perf_counter() - self._begun < limit and self._process.poll() is None:
            client = Client(self.url)
            with contextlib.suppress(OSError, ValueError, IndexError, asyncio.IncompleteReadError):
                status, answer = await client.json("POST", "/v1/completions", body)
                if status == 200 and isinstance(answer, dict) and answer.get("choices"):
                    self.start = time.perf_counter() - self._begun
                    return
            await client.close()
            await asyncio.sleep(0.02)
        tail = Path(self._log).read_text(errors="replace")[-2000:]
        self.stop()
        sys.exit(f"{self.name} did not answer within {limit:.0f} s; the end of what it wrote:\n{tail}")

    def _family(self) -> Iterator[psutil.Process]:
        root = psutil.Process(self._process.pid)
        yield root
        yield from root.children(recursive=True)

    def hold(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def resume(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                process.resume()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run inside the context; it is stopped before and after."""
        self.resume()
        try:
            yield
        finally:
            self.hold()

    def processor_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory(self) -> tuple[float, float]:
        """MiB: peak RSS and PSS."""
        peak = share = 0
        for process in self._family():
            with contextlib.suppress(OSError, psutil.Error):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
                share += process.memory_full_info().pss
        return peak / 1024, share / 2**20

    def stop(self) -> None:
        """End the server's process group."""
        with contextlib.suppress(psutil.Error):
            self.resume()
        for way, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
            if self._process.poll() is None:
                os.killpg(self._process.pid, way)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
        Path(self._log).unlink(missing_ok=True)


def _busy() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


async def _measure(server: Server, point: Point, seed: int, requests: int) -> Row:
    def own() -> float:
        return server.processor_seconds() + time.process_time()

    busy, mine, used, begun = _busy(), own(), server.processor_seconds(), time.perf_counter()
    result = await run_point(server.url, server.model, point, point.concurrency * requests, TOKEN_IDS, seed, True)
    wall, tokens = time.perf_counter() - begun, point.concurrency * requests * point.output_len
    others = (_busy() - busy - (own() - mine)) / (wall * (os.cpu_count() or 1))
    cpu = (server.processor_seconds() - used) / tokens * 1e3
    return result | {"cpu": cpu, "others": max(0.0, 100 * others), "requests": requests}


class Run:
    """All measurements of one call, and those of earlier ones in the same file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        if options.results is not None and options.results.exists():
            self.rows = [json.loads(line) for line in options.results.read_text().splitlines()]

    def add(self, row: Row) -> None:
        row["at"] = time.strftime("%Y-%m-%d %H:%M:%S")
        self.rows.append(row)
        print(
            " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in row.items()
                if value != ""
            ),
            file=sys.stderr,
            flush=True,
        )
        if self.options.results is not None:
            with self.options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")

    async def begin(self, engine: Engine, model: str) -> Server:
        server = Server(engine, model)
        await server.first_answer(self.options.start_limit)
        self.add({"engine": engine.name, "model": model, "start": server.start})
        server.hold()
        return server

    async def round(self, server: Server, point: Point, number: int) -> None:
        requests = self.options.requests or REQUESTS.get(point.concurrency, 2)
        seed = time.time_ns()  # no prompt stands in a cache
        short = Point(point.concurrency, point.input_len, min(point.output_len, 16))
        with server.turn():
            await run_point(server.url, server.model, short, point.concurrency, TOKEN_IDS, seed, True)
            result = await _measure(server, point, seed + 1, requests)
        self.add({"engine": server.name, "model": server.model, "point": str(point), "round": number} | result)

    def end(self, server: Server) -> None:
        rss, pss = server.memory()
        self.add({"engine": server.name, "model": server.model, "rss": rss, "pss": pss})
        server.stop()

    async def model(self, model: str) -> None:
        options = self.options
        points = [Point.parse(text) for text in options.points.split(",")]
        starters = list(_engines(options, model, free_port).values())
        groups = [[starter] for starter in starters] if options.apart else [starters]
        for group in groups:
            servers: list[Server] = []
            try:
                for starter in group:
                    servers.append(await self.begin(starter(), model))
                for number in range(options.rounds):
                    for point in points:
                        for place in range(len(servers)):  # the first engine changes from round to round
                            await self.round(servers[(place + number) % len(servers)], point, number)
                while servers:
                    self.end(servers.pop())
            finally:
                for server in servers:
                    server.stop()


def _median(rows: Sequence[Row], key: str, **filters: str) -> float | None:
    found = [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in filters.items())]
    return statistics.median(found) if found else None


def _line(rows: Sequence[Row], label: str, unit: str, key: str, engines: Sequence[str], **filters: str) -> str | None:
    values = {engine: _median(rows, key, engine=engine, **filters) for engine in engines}
    cells = [f"{value:.4g}" if value is not None else "" for value in values.values()]
    if not any(cells):
        return None
    metric, _, of = unit.rpartition(" ") if unit.endswith((" ms", " MiB", " %")) else (unit, "", "")
    if unit == "s":
        metric, of = "time", unit
    for engine, value in values.items():
        if value is not None:
            record(label, metric if engine == "troupe" else f"{metric}, {engine}", value, of)
    ours, ratio = values.get("troupe"), ""
    if ours and (theirs := values.get("vllm")) and key in ("start", "rss", "pss"):
        record(label, f"{metric}, of vLLM's", ours / theirs)
    others = [value for engine, value in values.items() if engine != "troupe" and value]
    if ours and others and key not in ("others", "failed"):
        times = min(others) / ours if key in LESS_IS_BETTER else ours / max(others)
        ratio = f"{times:.2f}"
        record(label, f"{metric}, of the best other engine", times)
    return f"| {label} | {unit} | {' | '.join(cells)} | {ratio} |"


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each thing measured, a column for each engine, the ratio last."""
    engines = [name for name in ("troupe", "llama", "vllm") if any(row["engine"] == name for row in rows)]
    lines = [
        f"| what | unit | {' | '.join(engines)} | Troupe against the best other |",
        "|---" * (len(engines) + 3) + "|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        filters = {"model": model}
        lines.append(_line(rows, f"{model}, start to first answer", "s", "start", engines, **filters) or "")
        for point in sorted({row["point"] for row in rows if "point" in row}, key=lambda text: int(text.split(":")[0])):
            for key, unit in (
                ("tok/s", "tokens/s"),
                ("itl50", "ITL p50 ms"),
                ("ttft50", "TTFT p50 ms"),
                ("cpu", "CPU ms/token"),
                ("others", "others %"),
                ("failed", "failed"),
            ):
                lines.append(_line(rows, f"{model} {point}", unit, key, engines, point=point, **filters) or "")
        for key, unit in (("rss", "peak RSS MiB"), ("pss", "PSS MiB")):
            lines.append(_line(rows, f"{model}, memory", unit, key, engines, **filters) or "")
    return "\n".join(line for line in lines if line)


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--models", type=Path, help="folder of the models")
    parser.add_argument(
        "--model", nargs="+", default=["tiny", "0.6b"], help="names in that folder, or NAME:KIND of a GGUF file"
    )
    parser.add_argument("--engines", nargs="+", default=["troupe", "llama", "vllm"], help="those that take part")
    parser.add_argument("--points", default=POINTS, help="concurrency:input:output tokens, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--requests", type=int, default=0, help="a stream and round; 0: 8, 3, 2 at 1, 8, 32 streams")
    parser.add_argument("--apart", action="store_true", help="one server at a time")
    parser.add_argument("--results", type=Path, help="JSON lines to add to")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--start-limit", type=float, default=900.0, help="seconds to the first answer")
    parser.add_argument("--python", default=sys.executable, help="that runs Troupe")
    parser.add_argument("--llama", default=shutil.which("llama-server"), help="llama.cpp's server")
    parser.add_argument("--vllm", default=shutil.which("vllm"), help="vLLM's command")
    parser.add_argument("--preload", help="a library that vLLM is run with, such as tcmalloc")
    parser.add_argument("troupe_args", nargs="*", help="after --: more arguments for Troupe")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and stop the servers
    run = Run(options)
    if not options.table:
        if options.models is None:
            parser.error("--models is needed: a folder with the models")
        for model in options.model:
            asyncio.run(run.model(model))
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}\n\n{table(run.rows)}")
    return 1 if any(row.get("failed") for row in run.rows) else 0
