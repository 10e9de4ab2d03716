"""What the troupe itself costs: streams over HTTP, planning, messages, the prefix cache, memory.

    python -m tests.bench engine                       # everything, about two minutes
    python -m tests.bench engine --only streams,memory
    python -m tests.bench engine --memory              # the same as --only memory

- streams: a real server whose worker costs nothing (tests/bench/_costless.py); the clients are this process. Each
  number of streams is measured twice: as fast as it goes, and with a fixed delay of each step that offers ``--offer``
  tokens a second. Tokens that wait for a busy loop travel in one event, so events are counted too. Processor time is
  per token, of the server's main process, its worker and the clients.
- grpc: 256 streams of the gRPC service beside as many of HTTP, by the same worker, at ``--grpc-offer`` tokens a second.
- steps: seconds the scheduler takes for a step (plan, cache, results), without sending.
- actors: processor time of the whole loop for a step, with its actors, the worker's process and a detokenizer that
  does nothing; and hops alone, which ``python -m tests.bench hop`` measures with care.
- messages: bytes of a decode step and of its answer.
- cache: finding a prompt of 131,072 tokens, and pages for one.
- prefix: time to the first token of a 4,000-token prompt that is cached, beside one that is not, and what it is of.
- memory: resident memory by process, the included model, ready and after its cache was filled.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop

from actors.caching import PrefixCache
from actors.protocol import AllocatePages, CacheUpdate, CommitTokens, OpenSequence, PeekPrefixes, Step
from kernels.contract.step import StepBatch, StepResult
from tests.bench import hop, planner
from tests.bench._costless import CONTEXT
from tests.bench._loop import step_cost
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench._streams import Streamed, stream, stream_grpc
from tests.bench.crowd import raise_fd_limit
from tests.bench.serving import Client, OwnServer, Point, cpu_name, run_point
from tests.kits.addresses import hold_port, port_of

__all__ = ["main"]

ROWS = (16, 256, 1024)
LONG = 131_072  # tokens
PREFIX, BEHIND = 4000, 20  # tokens of the long prompt, and of output


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


async def streams(options: argparse.Namespace) -> None:
    raise_fd_limit(4096)
    rows = []
    for count in options.streams:
        for offer in (0.0, options.offer):
            delay = count / offer if offer else 0.0
            runs = [await streamed(count, delay, options.seconds) for _ in range(options.rounds)]
            runs.sort(key=lambda run: run.tokens)
            run = runs[len(runs) // 2]
            point = f"{count} streams, {f'offered {offer:.0f}' if offer else 'all it can'}"
            record(point, "tokens/s", [each.tokens for each in runs])
            record(point, "server, a token", run.server, "us")
            rows.append(
                [
                    str(count),
                    f"{offer:.0f}" if offer else "all it can",
                    f"{run.tokens:.0f}",
                    f"{run.events:.0f}",
                    f"{run.tokens / max(run.events, 1):.2f}",
                    f"{run.server:.1f}",
                    f"{run.kernel:.1f}",
                    f"{run.worker:.1f}",
                    f"{run.client:.1f}",
                    f"{run.busy:.2f}",
                    f"{1e6 / (run.server * run.tokens / max(run.events, 1)):.0f}",
                ]
            )
    columns = ["streams", "offered tok/s", "tok/s", "events/s", "tokens an event", "server us a token"]
    columns += ["of it in the kernel", "worker us", "client us", "server cores", "events/s of a whole core"]
    table("Streams of a worker that costs nothing", columns, rows)


async def over_grpc(options: argparse.Namespace) -> None:
    raise_fd_limit(4096)
    count, rows, spent = 256, [], []
    runs: list[list[Streamed]] = [[], []]
    for _ in range(options.rounds):
        for by_grpc in (False, True):
            delay = count / options.grpc_offer
            runs[by_grpc].append(await streamed(count, delay, options.seconds, by_grpc=by_grpc))
    for name, found in zip(("HTTP", "gRPC"), runs, strict=True):
        found.sort(key=lambda run: run.server)
        run = found[len(found) // 2]
        record(f"{count} streams over {name}", "server, a token", [each.server for each in found], "us")
        record(f"{count} streams over {name}", "tokens/s", [each.tokens for each in found])
        spent.append(run.server)
        numbers = (run.tokens, run.tokens / max(run.events, 1), run.server, run.kernel, run.client)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    record(f"{count} streams over gRPC", "server, of HTTP's", spent[1] / spent[0])
    columns = ["over", "tok/s", "tokens an event", "server us a token", "of it in the kernel", "client us a token"]
    table(f"{count} streams of a worker that costs nothing", columns, rows)


async def streamed(count: int, delay: float, seconds: float, *, by_grpc: bool = False) -> Streamed:
    with hold_port() as held:
        grpc_port = port_of(held) if by_grpc else 0
    server = OwnServer(
        None,
        [
            *(("--grpc-mode", "--grpc-port", str(grpc_port)) if by_grpc else ()),
            *("--max-running-requests", "1024", "--context-length", str(CONTEXT), "--log-level", "warning"),
            *("--json-model-override-args", f'{{"max_position_embeddings": {CONTEXT}}}'),
        ],
        serve=("tests.bench._costless", str(delay)),
    )
    try:
        await server.wait_ready(60)
        pids = {"server": server.process.pid, "client": os.getpid()}
        pids["worker"] = max(server.family()[1:], key=lambda process: process.num_threads()).pid
        port = grpc_port or int(server.url.rpartition(":")[2])
        read = stream_grpc if by_grpc else stream
        return await read("127.0.0.1", port, pids, streams=count, max_tokens=CONTEXT // 2, seconds=seconds)
    finally:
        server.stop()


def steps(options: argparse.Namespace) -> None:
    rows = []
    for count, prompt in [*((count, planner.PROMPT) for count in ROWS), (16, 100_000), (256, 16_000)]:
        plan, finish = planner.measure(count, options.steps, prompt=prompt)
        both = statistics.median(plan) + statistics.median(finish)
        rows.append([str(count), str(prompt), *(f"{1e6 * x:.0f}" for x in (statistics.median(plan), both))])
        record(f"{count} rows, {prompt} prompt tokens", "plan and finish a step", 1e6 * both, "us")
        rows[-1] += [f"{1e6 * both / count:.2f}", "1000" if count == 256 else ""]
    table("Planning a step", ["rows", "prompt tokens", "plan us", "step us", "a row us", "goal us"], rows)


def actors(options: argparse.Namespace) -> None:
    rows = []
    for count in ROWS:
        cost = uvloop.run(step_cost(count, options.steps))
        rows.append([str(count), f"{cost * 1e6:.0f}", f"{cost * 1e6 / count:.2f}"])
        record(f"{count} rows", "a step in the loop, all actors", cost * 1e6, "us")
    table("A step in the loop, all actors", ["rows", "processor us", "a row us"], rows)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        times = runner.run(hop._in_process(2000)) | runner.run(hop._to_child(2000))
    goals = {"ask (plain handler)": "10", "child: 256-row step and back": "50", "tell, per message": ""}
    rows = [[name, f"{statistics.median(times[name]):.1f}", goal] for name, goal in goals.items()]
    table("A hop", ["case", "median us", "goal us"], rows)


def messages(options: argparse.Namespace) -> None:
    rows = []
    for count, prompt in [(1, 100), (16, 100), (256, 100), (1024, 100), (16, 100_000), (256, 16_000)]:
        sizes: list[tuple[int, int]] = []

        def seen(batch: StepBatch, result: StepResult, sizes: list[tuple[int, int]] = sizes) -> None:
            sizes.append((len(msgspec.msgpack.encode(Step(batch, 1))), len(msgspec.msgpack.encode(result))))

        planner.measure(count, 200, prompt=prompt, seen=seen)
        sent, answered = (statistics.mean(column) for column in zip(*sizes[8:], strict=True))
        rows.append([str(count), str(prompt), f"{sent:.0f}", f"{answered:.0f}", f"{(sent + answered) / count:.1f}"])
    table("Bytes of a decode step", ["rows", "prompt tokens", "step", "answer", "both, a row"], rows)


def cache(options: argparse.Namespace) -> None:
    rows = []
    for size in (16, 64, 128):
        times = _cache_times(size)
        record(f"prefix cache, pages of {size} tokens", "slowest operation", max(times), "ms")
        rows.append([str(size), *(f"{milliseconds:.3f}" for milliseconds in times), "1"])
    columns = ["page tokens", "hit: lock", "hit: look", "miss: lock", "pages of a 2048-token chunk"]
    columns += ["all pages, evicting others", "close", "goal ms"]
    table("A prompt of 131,072 tokens in the prefix cache, milliseconds", columns, rows)


def _cache_times(size: int) -> list[float]:
    """Milliseconds of each cache operation, medians of 9."""
    pages = LONG // size
    prefixes = PrefixCache(2 * pages + 2, size)  # room for the known prompt and one more
    rng = np.random.default_rng(0)
    known, *unknown = (rng.integers(0, 30_000, LONG + 1, dtype=np.int32).tobytes() for _ in range(10))
    prefixes.open(OpenSequence(sequence=0, tokens=known))
    prefixes.update(CacheUpdate(allocations=(AllocatePages(0, pages),)))
    prefixes.update(CacheUpdate(commits=(CommitTokens(0, b"", LONG),)))
    measured: dict[str, list[float]] = {}

    def time_of(name: str, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        call()
        measured.setdefault(name, []).append((time.perf_counter() - start) * 1e3)

    for number in range(1, 10):
        time_of("lock", lambda number=number: prefixes.open(OpenSequence(sequence=number, tokens=known)))
        time_of("look", lambda: prefixes.peek(PeekPrefixes(tokens=(known,), salts=(b"",))))
        prefixes.update(CacheUpdate(closed=(number,)))
        tokens = unknown[number - 1]
        time_of("miss", lambda tokens=tokens: prefixes.open(OpenSequence(sequence=100, tokens=tokens)))
        time_of("chunk", lambda: prefixes.update(CacheUpdate(allocations=(AllocatePages(100, 2048 // size),))))
        prefixes.update(CacheUpdate(closed=(100,)))
        prefixes.open(OpenSequence(sequence=100, tokens=tokens))
        time_of("all", lambda: prefixes.update(CacheUpdate(allocations=(AllocatePages(100, pages),))))
        prefixes.update(CacheUpdate(commits=(CommitTokens(100, b"", LONG),)))
        time_of("close", lambda: prefixes.update(CacheUpdate(closed=(100,))))
    return [statistics.median(times) for times in measured.values()]


async def prefix(options: argparse.Namespace) -> None:
    server = OwnServer(options.model, options.server_args)
    try:
        await server.wait_ready()
        client = Client(server.url)
        found: dict[str, list[float]] = {"miss": [], "hit": []}
        hops: dict[str, dict[str, list[float]]] = {"miss": {}, "hit": {}}
        rng = random.Random(7)
        for _ in range(options.prompts):
            prompt = [rng.randrange(300, 3000) for _ in range(PREFIX)]
            for kind in ("miss", "hit", "hit"):
                ttft, parts = await _first_token(client, prompt)
                found[kind].append(ttft)
                for name, seconds in parts.items():
                    hops[kind].setdefault(name, []).append(seconds)
        miss, hit = (statistics.median(found[kind]) for kind in ("miss", "hit"))
        point = f"first token of {PREFIX} tokens"
        record(point, "miss", [seconds * 1e3 for seconds in found["miss"]], "ms")
        record(point, "hit", [seconds * 1e3 for seconds in found["hit"]], "ms")
        record(point, "hit, of a miss", 100 * hit / miss, "%")
        rows = [["whole", f"{miss * 1e3:.2f}", f"{hit * 1e3:.2f}", f"{hit / miss:.1%}"]]
        for name in hops["hit"]:
            rows.append([name, *(f"{statistics.median(hops[kind][name]) * 1e3:.2f}" for kind in ("miss", "hit")), ""])
        title = f"First token of a prompt of {PREFIX} tokens, milliseconds; the goal is 5 %"
        table(title, ["part", "not cached", "cached", "of it"], rows)
        await client.close()
    finally:
        server.stop()


async def _first_token(client: Client, prompt: list[int]) -> tuple[float, dict[str, float]]:
    """Seconds to the first event, and their parts by the server's timeline."""
    body = {"prompt": prompt, "max_tokens": BEHIND, "ignore_eos": True, "stream": True, "temperature": 0}
    data = msgspec.json.encode(body)
    start = time.perf_counter()
    status, headers, reader = await client._send("POST", "/v1/completions", data)
    ttft = 0.0
    async for _ in client._chunks(headers, reader):
        ttft = ttft or time.perf_counter() - start
    if status != 200:
        raise SystemExit(f"the server answered {status}")
    _, timeline = await client.json("GET", f"/stage/requests/{headers['x-request-id']}")
    assert isinstance(timeline, dict)
    ends = {part["name"]: part for part in timeline["hops"]}
    first = next(mark["at"] for mark in timeline["marks"] if mark["name"] == "first_token")
    prefills = [part for part in timeline["hops"] if part["name"] == "prefill"]
    device = sum(part["attributes"].get("device_seconds", 0.0) for part in prefills)
    parts = {
        "until it is submitted (reading, checking)": ends["queue"]["start"],
        "queue": ends["queue"]["end"] - ends["queue"]["start"],
        "cache": ends["cache"]["end"] - ends["cache"]["start"],
        "prefill on the device": device,
        "the way to the worker and back": prefills[-1]["end"] - prefills[0]["start"] - device,
        "detokenizer": first - prefills[-1]["end"],
        "HTTP outside of these": ttft - first,
    }
    return ttft, parts


async def memory(options: argparse.Namespace) -> None:
    server = OwnServer(options.model, options.server_args)
    try:
        await server.wait_ready()
        await asyncio.sleep(5.0)  # a standby worker gets ready
        ready = _resident(server)
        await run_point(server.url, "", Point(32, 1500, 64), 96, (300, 3000), 1)
        full = _resident(server)
        rows = []
        for process in server.family():
            used = [*ready.get(process.pid, (0, 0)), *full.get(process.pid, (0, 0))]
            rows.append([_role(process, rows), *(f"{value / 2**20:.0f}" for value in used)])
        sums = [sum(each[place] for each in state.values()) for state in (ready, full) for place in (0, 1)]
        rows.append(["all", *(f"{value / 2**20:.0f}" for value in sums)])
        record("memory, when ready", "PSS", sums[1] / 1e6, "MB")
        record("memory, cache filled", "PSS", sums[3] / 1e6, "MB")
        columns = ["process", "RSS when ready", "PSS", "RSS, cache filled", "PSS"]
        table("Resident memory, MiB; the goal is 700 MB (668 MiB)", columns, rows)
    finally:
        server.stop()


def _resident(server: OwnServer) -> dict[int, tuple[int, int]]:
    """Bytes by process: RSS, and PSS, which divides shared memory among its processes."""
    used = {process.pid: process.memory_full_info() for process in server.family()}
    return {pid: (info.rss, info.pss) for pid, info in used.items()}


def _role(process: psutil.Process, earlier: list[list[str]]) -> str:
    if not earlier:
        return "server"
    if not any("libtorch" in mapped.path for mapped in process.memory_maps()):
        return "renderer"
    return "standby worker" if any(row[0] == "worker" for row in earlier) else "worker"


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "streams": streams,
    "grpc": over_grpc,
    "steps": steps,
    "actors": actors,
    "messages": messages,
    "cache": cache,
    "prefix": prefix,
    "memory": memory,
}


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--memory", action="store_true", help="only memory")
    parser.add_argument("--model", help="model directory for prefix and memory (default: the included model)")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000], help="at once, of each point")
    parser.add_argument("--offer", type=float, default=21_000.0, help="tokens a second offered by delayed steps")
    parser.add_argument("--grpc-offer", type=float, default=5_000.0, help="tokens a second offered to the part grpc")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement of streams")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each point of streams")
    parser.add_argument("--steps", type=int, default=1000, help="planned steps of each point")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of prefix")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server of prefix and memory")
    options = parser.parse_args(argv)
    chosen = ["memory"] if options.memory else options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part is called {min(unknown)}: choose from {', '.join(PARTS)}")
    load = os.getloadavg()[0]
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}, Python {sys.version.split()[0]}")
    for name in chosen:
        part = PARTS[name](options)
        if part is not None:
            uvloop.run(part)
    return 0
