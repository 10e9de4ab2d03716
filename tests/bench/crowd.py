"""Open very many streams at once and print how many were admitted, refused and failed, and how the event loop fared.

    python -m tests.bench crowd                                     # its own server, the included model
    python -m tests.bench crowd --streams 2000 -- --max-queued-requests 500

Every stream of ``/v1/completions`` has its own connection, and all connect in the same moment. Admitted: status 200,
and the stream ended with ``[DONE]`` and the output length asked for. Refused: status 429 or 503 with a Retry-After
between 1 and 120 s and an error in JSON. All else is failed, and makes the exit status 1. The loop's lag is the
server's metric ``troupe_loop_lag_seconds``, counted from the first connection to the last answer; ``--max-lag`` bounds
it. Beside it stands the lag of a process that only sleeps: where that is large, the machine was busy with other things.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import sys
import time
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import Client, OwnServer, cpu_name, percentile


@dataclass
class Crowd:
    admitted: int = 0
    refused: dict[int, int] = field(default_factory=dict)  # by status
    failed: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)  # seconds, of those admitted
    refusal_seconds: list[float] = field(default_factory=list)
    retry_after: list[float] = field(default_factory=list)
    tokens: int = 0


def raise_fd_limit(wanted: int) -> None:
    """Raise the limit of file descriptors of this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise SystemExit(
                f"{wanted} file descriptors are needed and the hard limit is {hard}: ask for fewer streams"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Idler:
    """A process that only sleeps, with the interval of the server's sampler: the lag of the machine itself."""

    _CODE = """
import sys, time, select
late = []
while not select.select([sys.stdin], [], [], 0)[0]:
    asked = time.monotonic() + 0.05
    time.sleep(0.05)
    late.append(time.monotonic() - asked)
print(*late)
"""

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._CODE, stdin=pipe, stdout=pipe, limit=1 << 22
        )

    async def stop(self) -> list[float]:
        """Seconds that each sleep was late."""
        reported, _ = await self._process.communicate(b"\n")
        return [float(word) for word in reported.split()]


async def one(host: str, port: int, body: bytes, length: int, crowd: Crowd) -> None:
    """Run one stream from its connection to its end and count its outcome."""
    began = time.perf_counter()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(600):
            reader, writer = await asyncio.open_connection(host, port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            status = int(lines[0].split()[1])
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            if status != 200:
                answer = await reader.read()
                retry = float(headers.get("retry-after", "nan"))
                error = msgspec.json.decode(answer)["error"]["message"]
                if status not in (429, 503) or not 1 <= retry <= 120:
                    raise ValueError(f"{status}, Retry-After {retry}: {error}")
                crowd.refused[status] = crowd.refused.get(status, 0) + 1
                crowd.retry_after.append(retry)
                crowd.refusal_seconds.append(time.perf_counter() - began)
                return
            await reader.readuntil(b'"choices":[{')
            crowd.ttft.append(time.perf_counter() - began)
            tail = b""
            while piece := await reader.read(65536):
                tail = (tail + piece)[-1024:]
            if b"data: [DONE]" not in tail or b'"completion_tokens":%d' % length not in tail:
                raise ValueError(f"the stream ended with {tail[-200:]!r}")
            crowd.admitted += 1
            crowd.tokens += length
    except (OSError, ValueError, KeyError, IndexError, EOFError, TimeoutError, msgspec.DecodeError) as error:
        crowd.failed.append(f"{type(error).__name__}: {error}")
    finally:
        if writer is not None:
            writer.close()


async def lag(client: Client) -> dict[float, float]:
    """Samples of the server's loop lag so far, by the upper bound of their bucket in seconds."""
    counts = {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(await client.text("/metrics"))
        for sample in family.samples
        if sample.name == "troupe_loop_lag_seconds_bucket"
    }
    below = 0.0
    samples = {}
    for bound in sorted(counts):
        samples[bound], below = counts[bound] - below, counts[bound]
    return samples


def quantile(samples: dict[float, float], share: float) -> float:
    """The bucket's upper bound in seconds under which this share of the samples is."""
    total, seen = sum(samples.values()), 0.0
    for bound, count in sorted(samples.items()):
        seen += count
        if total and seen >= share * total:
            return bound
    return float("nan")


async def bench(options: argparse.Namespace) -> int:
    raise_fd_limit(2 * options.streams + 512)
    server = OwnServer(options.model, options.server_args)
    try:
        await server.wait_ready()
        client = Client(server.url)
        host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
        rng = random.Random(options.seed)
        bodies = [
            msgspec.json.encode(
                {
                    "prompt": [rng.randrange(300, 3000) for _ in range(options.input_len)],
                    "max_tokens": options.output_len,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
            for _ in range(options.streams)
        ]
        resident, before = server.resident(), await lag(client)
        crowd, idler = Crowd(), Idler()
        await idler.start()
        began = time.perf_counter()
        await asyncio.gather(*(one(host, port, body, options.output_len, crowd) for body in bodies))
        wall = time.perf_counter() - began
        idle = await idler.stop()
        after = await lag(client)
        samples = {bound: after[bound] - before[bound] for bound in after}
        worst = max((bound for bound, count in samples.items() if count), default=0.0)
        refused = sum(crowd.refused.values())
        print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}")
        print(
            f"{options.streams} streams at once, {options.input_len} prompt and {options.output_len} output tokens: "
            f"{wall:.1f} s, {crowd.tokens / wall:.0f} output tokens/s"
        )
        print(f"admitted {crowd.admitted}, refused {refused} {crowd.refused or ''}, failed {len(crowd.failed)}")
        print(
            f"TTFT of the admitted: p50 {percentile(crowd.ttft, 0.5):.2f} s, p99 {percentile(crowd.ttft, 0.99):.2f} s; "
            f"refusals after p50 {percentile(crowd.refusal_seconds, 0.5):.2f} s, "
            f"p99 {percentile(crowd.refusal_seconds, 0.99):.2f} s, "
            f"Retry-After {min(crowd.retry_after, default=0):.0f} to {max(crowd.retry_after, default=0):.0f} s"
        )
        print(
            f"loop lag ({sum(samples.values()):.0f} samples, at most): p50 {quantile(samples, 0.5) * 1e3:g} ms, "
            f"p99 {quantile(samples, 0.99) * 1e3:g} ms, max {worst * 1e3:g} ms"
        )
        print(
            f"lag of an idle process meanwhile: p50 {percentile(idle, 0.5) * 1e3:.1f} ms, "
            f"p99 {percentile(idle, 0.99) * 1e3:.1f} ms, max {max(idle) * 1e3:.1f} ms"
        )
        point = " ".join(options.server_args) or "default arguments"
        record(point, "admitted", crowd.admitted)
        record(point, "refused", refused)
        record(point, "failed", len(crowd.failed))
        record(point, "tokens/s", crowd.tokens / wall)
        record(point, "TTFT p50", percentile(crowd.ttft, 0.5), "s")
        record(point, "TTFT p99", percentile(crowd.ttft, 0.99), "s")
        record(point, "loop lag p99", quantile(samples, 0.99) * 1e3, "ms")
        record(point, "loop lag, largest", worst * 1e3, "ms")
        print(f"resident: {resident:.0f} MiB before, {server.resident():.0f} MiB after")
        for message in sorted(set(crowd.failed))[:5]:
            print(f"  {crowd.failed.count(message)} x {message[:300]}")
        await client.close()
        late = worst > options.max_lag
        if late:
            print(f"the loop's lag went over {options.max_lag * 1e3:g} ms")
        return 1 if crowd.failed or late else 0
    finally:
        server.stop()


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--model", help="model directory (default: the included model)")
    parser.add_argument("--streams", type=int, default=2000, help="open at once")
    parser.add_argument("--input-len", type=int, default=16, help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=32, help="output tokens")
    parser.add_argument("--max-lag", type=float, default=float("inf"), help="seconds; more makes the exit status 1")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server")
    return asyncio.run(bench(parser.parse_args(argv)))
