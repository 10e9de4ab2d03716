"""Random traffic with hang-ups, aborts, bad requests, slow readers and kill -9 of the worker; then check what is left.

    python -m tests.bench soak --minutes 10                 # its own server, the included model
    python -m tests.bench soak --minutes 1440 --model DIR   # a day, another model

Every request must end exactly once, the way its client made it end: one finish reason a choice and one ``[DONE]`` in a
stream, one JSON answer else, 400 for a bad request, 429 with a Retry-After when the server is full. The server's own
count of ended requests must be that of the requests it read. Afterwards the server is let alone, and its requests,
pages, mailboxes, file descriptors, threads, tasks and children must be back where they were after the warm-up. The
slope of the server process's resident memory is printed, and checked when the run was long enough. The exit
status is 1 when any check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench._rude_clients import KEYS, Client, Ledger
from tests.bench.serving import OwnServer, cpu_name

ADMIN = "soak-admin"
SERVER = ("--api-key", ",".join(KEYS), "--admin-api-key", ADMIN, "--max-running-requests", "16")
SERVER += ("--max-queued-requests", "24", "--sse-keep-alive-interval", "0.5")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
MAX_SLOPE = 2.0  # MiB a minute of the server process
SLOPE_FROM = 240.0  # seconds of traffic from which the slope is judged: before that, caches still fill
REST_SECONDS = 300.0
"""The longest that the server may take to come to rest: a worker killed at the end is loaded again."""


@dataclass
class State:
    """Resources of an idle server."""

    files: int
    threads: int
    tasks: int
    children: int
    memory: float  # MiB of the server process

    def left_over(self, after: State) -> list[str]:
        """Resources of which there are more ``after`` than before."""
        return [
            f"{name}: {getattr(self, name)} before, {getattr(after, name)} after"
            for name in ("files", "threads", "tasks", "children")
            if getattr(after, name) > getattr(self, name)
        ]


class Observer:
    """Reads the server's state over HTTP and from the operating system."""

    def __init__(self, url: str, pid: int) -> None:
        self._url = url
        self.process = psutil.Process(pid)

    async def _get(self, path: str) -> bytes:
        parts = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            head = f"GET {path} HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer {ADMIN}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.read()
        finally:
            writer.close()
        return answer.partition(b"\r\n\r\n")[2]

    async def info(self) -> dict[str, Any]:
        info: dict[str, Any] = msgspec.json.decode(await self._get("/server_info"))
        return info

    async def metrics(self) -> dict[tuple[str, str], float]:
        """Metric values by sample name and first label."""
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families((await self._get("/metrics")).decode()):
            for sample in family.samples:
                key = sample.name, next(iter(sample.labels.values()), "")
                values[key] = values.get(key, 0.0) + sample.value
        return values

    async def rest(self) -> tuple[State, list[str]]:
        """Wait until nothing runs; the state then, and what keeps running."""
        deadline = time.monotonic() + REST_SECONDS
        while True:
            info = await self.info()
            cache, load = info["cache"], info["scheduler"]
            restless = [
                f"{name}: {value}"
                for name, value in {
                    "live requests": info["requests"]["live"],
                    "tickets": info["requests"]["sequences"],
                    "http exchanges beside this one": info["http_in_flight"] - 1,
                    "pages in use": cache["used"],
                    "pages missing": cache["total"] - cache["free"] - cache["evictable"] - cache["used"],
                    "running": load["running"],
                    "waiting": load["waiting"],
                    "steps in flight": load["steps_in_flight"],
                    "messages in mailboxes": sum(sum(a["mailbox"].values()) for a in info["actors"]),
                    "actors that do not run": sum(a["state"] != "running" for a in info["actors"]),
                }.items()
                if value
            ]
            if not restless or time.monotonic() > deadline:
                return await self.state(), restless
            await asyncio.sleep(0.2)

    async def state(self) -> State:
        metrics = await self.metrics()
        return State(
            files=self.process.num_fds(),
            threads=self.process.num_threads(),
            tasks=int(metrics["troupe_tasks", ""]),
            children=len(self.process.children(recursive=True)),
            memory=self.memory(),
        )

    def memory(self) -> float:
        return float(self.process.memory_info().rss) / 2**20


def slope(samples: list[tuple[float, float]]) -> float:
    """The slope of the second half of the samples by least squares, in MiB a minute."""
    later = samples[len(samples) // 2 :]
    if len(later) < 2:
        return 0.0
    at = [second for second, _ in later]
    middle, mean = sum(at) / len(at), sum(value for _, value in later) / len(later)
    across = sum((second - middle) ** 2 for second in at)
    return 60 * sum((second - middle) * (value - mean) for second, value in later) / across if across else 0.0


async def traffic(url: str, seconds: float, clients: int, seed: int, ledger: Ledger) -> None:
    """Run the clients for the given time."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(Client(url, number, seed, ledger).live(until) for number in range(clients)))


async def kill_workers(observer: Observer, every: float, until: float, ledger: Ledger) -> None:
    """Kill the worker (SIGKILL) at intervals until a monotonic time; the last requests may end much later."""
    while time.monotonic() + every < until:
        await asyncio.sleep(every)
        for worker in (await observer.info())["workers"]:
            if worker["pid"] and worker["state"] == "running":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker["pid"], signal.SIGKILL)
                    ledger.kills += 1


async def watch_memory(observer: Observer, ledger: Ledger) -> None:
    while True:
        ledger.memory.append((time.monotonic(), observer.memory()))
        await asyncio.sleep(1.0)


async def idle_state(observer: Observer, before: State) -> tuple[State, list[str]]:
    """The idle state, after a while in which connections close and a standby worker is prepared."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        state, restless = await observer.rest()
        problems = restless + before.left_over(state)
        if not problems or time.monotonic() > deadline:
            return state, problems
        await asyncio.sleep(0.5)


async def soak(
    url: str, pid: int, *, seconds: float, warm_up: float, clients: int, kill_every: float, seed: int
) -> tuple[Ledger, State, State, list[str]]:
    """Run the soak: the ledger, the state before and after, and all problems."""
    observer, ledger = Observer(url, pid), Ledger()
    warm = Ledger()
    await traffic(url, warm_up, clients, seed + 1, warm)
    # /metrics is written by threads of a pool, which has them all only after it was asked for that many at a time.
    await asyncio.gather(*(observer.metrics() for _ in range(32)))
    before, problems = await observer.rest()
    first = await observer.metrics()
    helpers = [asyncio.create_task(watch_memory(observer, ledger))]
    if kill_every:
        helpers.append(asyncio.create_task(kill_workers(observer, kill_every, time.monotonic() + seconds, ledger)))
    try:
        await traffic(url, seconds, clients, seed, ledger)
    finally:
        for task in helpers:
            task.cancel()
        outcomes = await asyncio.gather(*helpers, return_exceptions=True)
    problems += [f"{o!r}" for o in outcomes if o is not None and not isinstance(o, asyncio.CancelledError)]
    after, left = await idle_state(observer, before)
    last = await observer.metrics()
    read = sum(last.get(("troupe_http_requests_total", path), 0) - first.get(("troupe_http_requests_total", path), 0)
               for path in GENERATING)  # fmt: skip
    ended = sum(value - first.get(key, 0) for key, value in last.items() if key[0] == "troupe_requests_total")
    if read != ended:
        problems.append(f"the server read {read:.0f} requests and counted the end of {ended:.0f}")
    problems += left + warm.problems + ledger.problems
    if seconds >= SLOPE_FROM and slope(ledger.memory) > MAX_SLOPE:
        problems.append(f"memory grows by {slope(ledger.memory):.2f} MiB a minute; {MAX_SLOPE:g} is the most allowed")
    return ledger, before, after, problems


async def bench(options: argparse.Namespace) -> int:
    server = OwnServer(options.model, [*SERVER, *options.server_args])
    try:
        await server.wait_ready()
        ledger, before, after, problems = await soak(
            server.url,
            server.process.pid,
            seconds=options.minutes * 60,
            warm_up=options.warm_up,
            clients=options.clients,
            kill_every=options.kill_every,
            seed=options.seed,
        )
        server.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(server.process.wait, 60)
        if status:
            problems.append(f"after SIGTERM the server ended with status {status}")
    except OSError as error:
        print(f"the server does not answer ({error}); its status is {server.process.poll()}, its log ends so:")
        print(server.log_text()[-8000:])
        return 1
    finally:
        server.stop()
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}")
    print(f"{options.minutes:g} minutes, {options.clients} clients, {ledger.kills} workers killed; requests:")
    for outcome, count in sorted(ledger.ended.items()):
        print(f"  {outcome}: {count}")
    print(
        f"resident memory of the server process: {before.memory:.1f} MiB before, {after.memory:.1f} MiB after, "
        f"slope {slope(ledger.memory):+.2f} MiB a minute"
    )
    point = f"{options.minutes:g} minutes"
    record(point, "requests", sum(ledger.ended.values()))
    record(point, "workers killed", ledger.kills)
    record(point, "problems", len(problems))
    record(point, "memory before", before.memory, "MiB")
    record(point, "memory after", after.memory, "MiB")
    record(point, "memory slope", slope(ledger.memory), "MiB/min")
    for name in ("files", "threads", "tasks", "children"):
        print(f"{name}: {getattr(before, name)} before, {getattr(after, name)} after")
    print(f"not as it should be: {len(problems) or 'nothing'}")
    for problem, count in Counter(problems).most_common(20):
        print(f"  {count} x {problem}")
    return 1 if problems else 0


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of traffic before the state is noted")
    parser.add_argument("--clients", type=int, default=32, help="at once")
    parser.add_argument(
        "--kill-every",
        type=float,
        default=60.0,
        help="seconds between two kills; 0 for none. More than six in 300 s are a reason to give up, for the engine.",
    )
    parser.add_argument("--model", help="model directory (default: the included model)")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server")
    return asyncio.run(bench(parser.parse_args(argv)))
