"""Random traffic with hang-ups, aborts, bad requests, slow readers and kill -9 of the worker; then look what is left.

    python -m tests.bench soak --minutes 10                 # its own server, the model in the box
    python -m tests.bench soak --minutes 1440 --model DIR   # a day, another model

Every request must end exactly once, the way its client made it end: one finish reason a choice and one ``[DONE]`` in a
stream, one JSON answer else, 400 for a bad request, 429 with a Retry-After when the server is full. The server's own
count of ended requests must be that of the requests it read. Afterwards the server is let alone, and its requests,
pages, mailboxes, file descriptors, threads, tasks and children must be back where they were after the warm-up. The
slope of the server process's resident memory is printed, and judged when the run was long enough to tell. The exit
status is 1 when anything of this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.serving import OwnServer, cpu_name

KEYS = ("soak-one", "soak-two")
ADMIN = "soak-admin"
SERVER = ("--api-key", ",".join(KEYS), "--admin-api-key", ADMIN, "--max-running-requests", "16")
SERVER += ("--max-queued-requests", "24", "--sse-keep-alive-interval", "0.5")
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
MAX_SLOPE = 2.0  # MiB a minute of the server process
SLOPE_FROM = 240.0  # seconds of traffic from which the slope is judged: before that, caches still fill
REST_SECONDS = 300.0
"""The longest that the server may take to come to rest: a worker killed at the end is loaded again."""


class Unexpected(Exception):
    """An answer that the client's behaviour does not explain."""


@dataclass
class Ledger:
    """What became of the requests, by what their clients did."""

    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    kills: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB of the server process


class Http:
    """One connection of one request, with nothing between it and the socket, so that it can be as rude as it likes."""

    def __init__(self, url: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key = rng.choice(KEYS)
        self._writer: asyncio.StreamWriter | None = None
        self.reader = asyncio.StreamReader()

    async def __aenter__(self) -> Http:
        taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # so that who does not read is soon noticed
        taken.setblocking(False)
        await asyncio.get_running_loop().sock_connect(taken, (self._host, self._port))
        self.reader, self._writer = await asyncio.open_connection(sock=taken, limit=4096)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def vanish(self) -> None:
        """Reset the connection, as a machine that loses its power does."""
        assert self._writer is not None
        self._writer.transport.abort()

    def send(self, path: str, body: object, *, label: str = "", cut: int | None = None) -> None:
        """Write a POST, or only its first ``cut`` bytes."""
        assert self._writer is not None
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        if label:
            head += f"X-Request-Id: {label}\r\n"
        self._writer.write((head.encode() + b"\r\n" + data)[:cut])

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in headers.items()}

    async def body(self, headers: dict[str, str]) -> bytes:
        """The rest of the answer."""
        return b"".join([piece async for piece in self.pieces(headers)])

    async def pieces(self, headers: dict[str, str]):  # type: ignore[no-untyped-def]
        """The rest of the answer as it comes."""
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
        else:
            yield await self.reader.readexactly(int(headers.get("content-length", "0")))


class Client:
    """A user who does something else every time."""

    def __init__(self, url: str, number: int, seed: int, ledger: Ledger) -> None:
        self._url = url
        self._rng = random.Random(f"{seed}/{number}")
        self._number = number
        self._count = 0
        self._ledger = ledger

    async def live(self, until: float) -> None:
        """One request after the other until that monotonic time."""
        kinds = {
            self._stream: 30,
            self._whole: 15,
            self._hang_up_early: 10,
            self._hang_up: 15,
            self._abort: 10,
            self._bad: 10,
            self._slow: 5,
        }
        while time.monotonic() < until:
            self._count += 1
            kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
            if self._count == 1:  # so that everything happens, however few requests there is time for
                kind = list(kinds)[self._number % len(kinds)]
            name = kind.__name__.lstrip("_").replace("_", " ")
            try:
                async with asyncio.timeout(600), Http(self._url, self._rng) as http:
                    outcome = await kind(http)
                self._ledger.ended[f"{name}: {outcome}"] += 1
            except (Unexpected, OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
                self._ledger.problems.append(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(20))

    def _request(self, *, stream: bool, length: int | None = None) -> tuple[str, dict[str, Any]]:
        """A good request; prompts repeat, so that prefixes are shared."""
        rng = self._rng
        length = length or rng.randint(1, 60)
        text = " ".join(["Tell me of the capital of country"] * rng.randint(1, 12)) + f" {rng.randrange(40)}."
        more: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "stream": stream}
        more |= {"temperature": rng.choice([0, 0.8]), "n": 1 if rng.random() < 0.8 else rng.randint(2, 3)}
        if stream:
            more["stream_options"] = {"include_usage": True}
        if rng.random() < 0.2:
            more["logprobs"] = 2
        if rng.random() < 0.2:
            more |= {"presence_penalty": 0.5, "stop": ["zzzz"]}
        if rng.random() < 0.5:
            return "/v1/completions", {"prompt": text, **more}
        if "logprobs" in more:
            more |= {"logprobs": True, "top_logprobs": 2}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more}

    async def _admitted(self, http: Http) -> dict[str, str] | None:
        """The headers of a 200, or None after a refusal as it should be."""
        status, headers = await http.head()
        if status == 200:
            return headers
        told = await http.body(headers)
        if status != 429 or not 1 <= int(headers.get("retry-after", "0")) <= 120:
            raise Unexpected(f"status {status}: {told[:300]!r}")
        return None

    async def _events(self, http: Http, headers: dict[str, str], body: dict[str, Any], pause: float = 0.0) -> str:
        """Read a stream to its end, which must come once; how it ended."""
        finished: Counter[int] = Counter()
        reasons, text = set(), ""
        rest, done, error, usage = b"", 0, "", 0
        async for piece in http.pieces(headers):
            if pause and not finished:
                await asyncio.sleep(pause)
                pause = 0.0
            rest += piece
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if not event.startswith(b"data:"):
                    continue  # a comment that keeps the connection alive
                if done:
                    raise Unexpected(f"after [DONE] came {event[:200]!r}")
                if event == b"data: [DONE]":
                    done += 1
                    continue
                record = msgspec.json.decode(event[5:])
                if "error" in record:
                    error = str(record["error"]["code"])
                for choice in record.get("choices", ()):
                    finished[choice["index"]] += choice["finish_reason"] is not None
                    reasons.add(choice["finish_reason"])
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                usage = (record.get("usage") or {}).get("completion_tokens", usage)
        if done != 1:
            raise Unexpected("the stream ended without [DONE]")
        if error:
            return error
        if any(finished[index] != 1 for index in range(body["n"])):
            raise Unexpected(f"finish reasons by choice: {dict(finished)} of {body['n']}")
        if usage != body["n"] * body["max_tokens"]:
            told = f"{usage} tokens, not {body['n']} x {body['max_tokens']}"
            raise Unexpected(f"{told}, for {reasons - {None}}, after {text[-200:]!r}; asked: {body}")
        return "complete"

    async def _stream(self, http: Http, pause: float = 0.0, length: int | None = None) -> str:
        path, body = self._request(stream=True, length=length)
        http.send(path, body)
        headers = await self._admitted(http)
        if headers is None:
            return "refused"
        outcome = await self._events(http, headers, body, pause)
        if outcome not in ("complete", "internal_error"):  # set apart after two deaths of its worker
            raise Unexpected(f"the stream ended with {outcome}")
        return "set apart" if outcome == "internal_error" else outcome

    async def _slow(self, http: Http) -> str:
        """A reader that stops for a while, and then wants everything."""
        return await self._stream(http, pause=self._rng.uniform(0.5, 3), length=200)

    async def _whole(self, http: Http) -> str:
        path, body = self._request(stream=False)
        http.send(path, body)
        status, headers = await http.head()
        told = await http.body(headers)
        if status == 429:
            return "refused"
        if status == 500:
            return "set apart"
        if status != 200:
            raise Unexpected(f"status {status}: {told[:300]!r}")
        answer = msgspec.json.decode(told)
        if (
            answer["usage"]["completion_tokens"] != body["n"] * body["max_tokens"]
            or len(answer["choices"]) != body["n"]
        ):
            raise Unexpected(f"{answer['usage']} for {body}")
        return "complete"

    async def _hang_up_early(self, http: Http) -> str:
        """Gone before the answer starts, perhaps in the middle of the request."""
        path, body = self._request(stream=self._rng.random() < 0.5, length=200)
        http.send(path, body, cut=self._rng.randrange(20, 500) if self._rng.random() < 0.4 else None)
        await asyncio.sleep(self._rng.choice([0, 0.005, 0.05]))
        if self._rng.random() < 0.5:
            http.vanish()
        return "gone"

    async def _hang_up(self, http: Http) -> str:
        path, body = self._request(stream=True, length=200)
        http.send(path, body)
        headers = await self._admitted(http)
        if headers is None:
            return "refused"
        left = self._rng.randint(1, 20)
        async for _ in http.pieces(headers):
            left -= 1
            if not left:
                break
        if self._rng.random() < 0.5:
            http.vanish()
        return "gone"

    async def _abort(self, http: Http) -> str:
        label = f"soak-{self._number}-{self._count}"
        path, body = self._request(stream=True, length=200)
        http.send(path, body, label=label)

        async def abort() -> None:
            await asyncio.sleep(self._rng.uniform(0, 0.3))
            async with Http(self._url, self._rng) as other:
                other.send("/abort_request", {"rid": label})
                status, headers = await other.head()
                await other.body(headers)
                if status != 200:
                    raise Unexpected(f"/abort_request answered {status}")

        aborting = asyncio.create_task(abort())
        try:
            status, headers = await http.head()
            if status != 200:
                told = await http.body(headers)
                if status not in (429, 499):
                    raise Unexpected(f"status {status}: {told[:300]!r}")
                return "refused" if status == 429 else "aborted"
            outcome = await self._events(http, headers, body)
        finally:
            await aborting
        if outcome not in ("complete", "request_aborted", "internal_error"):
            raise Unexpected(f"the stream ended with {outcome}")
        return "aborted" if outcome == "request_aborted" else "complete or set apart"

    async def _bad(self, http: Http) -> str:
        path, body = self._request(stream=self._rng.random() < 0.5)
        bad: object = self._rng.choice(
            [
                {**body, "temperature": -1},
                {**body, "max_tokens": 10**9},
                {**body, "n": 0},
                {**body, "stop": [""] * 20},
                {**body, "logit_bias": {"-7": 3}},
                {**body, "messages": 7, "prompt": {}},
                b'{"prompt": "half of',
                b"[" * 5000,
                b"\xff\xfe",
            ]
        )
        http.send(path, bad)
        status, headers = await http.head()
        told = msgspec.json.decode(await http.body(headers))
        if status != 400 or not told["error"]["message"]:
            raise Unexpected(f"status {status} for {str(bad)[:200]}: {told}")
        return "refused with 400"


@dataclass
class State:
    """What a server at rest has."""

    files: int
    threads: int
    tasks: int
    children: int
    memory: float  # MiB of the server process

    def left_over(self, after: State) -> list[str]:
        """What there is more of ``after``."""
        return [
            f"{name}: {getattr(self, name)} before, {getattr(after, name)} after"
            for name in ("files", "threads", "tasks", "children")
            if getattr(after, name) > getattr(self, name)
        ]


class Observer:
    """Asks the server, and the operating system about it."""

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
        told: dict[str, Any] = msgspec.json.decode(await self._get("/server_info"))
        return told

    async def metrics(self) -> dict[tuple[str, str], float]:
        """Values by the sample's name and its first label."""
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families((await self._get("/metrics")).decode()):
            for sample in family.samples:
                key = sample.name, next(iter(sample.labels.values()), "")
                values[key] = values.get(key, 0.0) + sample.value
        return values

    async def rest(self) -> tuple[State, list[str]]:
        """Wait until nothing runs; the state then, and what does not come to rest."""
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
    """Least squares of the second half of the samples: MiB a minute."""
    later = samples[len(samples) // 2 :]
    if len(later) < 2:
        return 0.0
    at = [second for second, _ in later]
    middle, mean = sum(at) / len(at), sum(value for _, value in later) / len(later)
    across = sum((second - middle) ** 2 for second in at)
    return 60 * sum((second - middle) * (value - mean) for second, value in later) / across if across else 0.0


async def traffic(url: str, seconds: float, clients: int, seed: int, ledger: Ledger) -> None:
    """Clients that live for so long."""
    until = time.monotonic() + seconds
    await asyncio.gather(*(Client(url, number, seed, ledger).live(until) for number in range(clients)))


async def kill_workers(observer: Observer, every: float, until: float, ledger: Ledger) -> None:
    """kill -9 of the worker again and again until that monotonic time; the last requests may end much later."""
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


async def settled(observer: Observer, before: State) -> tuple[State, list[str]]:
    """The state at rest; what is left over gets a while to go: connections close, a standby worker is prepared."""
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
    """Run it; the ledger, the state before and after, and everything that is not as it should be."""
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
    after, left = await settled(observer, before)
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
    for name in ("files", "threads", "tasks", "children"):
        print(f"{name}: {getattr(before, name)} before, {getattr(after, name)} after")
    print(f"not as it should be: {len(problems) or 'nothing'}")
    for problem, count in Counter(problems).most_common(20):
        print(f"  {count} x {problem}")
    return 1 if problems else 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds of traffic before the state is noted")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--kill-every",
        type=float,
        default=60.0,
        help="seconds between two kills; 0 for none. More than six in 300 s are a reason to give up, for the engine.",
    )
    parser.add_argument("--model", help="model directory (default: the model in the box)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server")
    return asyncio.run(bench(parser.parse_args(argv)))
