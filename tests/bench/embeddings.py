"""Embeddings over HTTP: inputs a second, and what each costs the server's main process.

    python -m tests.bench embeddings --shape 0.6b -- --device cuda     # made-up weights of Qwen3-Embedding-0.6B's shape
    python -m tests.bench embeddings --costless                        # a costless worker: the front end alone

A point is ``streams:inputs of a request``: clients that each send their next request when the last is answered. Inputs
are random token ids, or with ``--texts`` the texts of such ids in the included model's tokenizer; answers are in base64
unless ``--floats``. A point's first round warms the server up and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from app.understudy import MODEL_DIR
from tests.bench._costless import CONTEXT, VECTOR_SIZE
from tests.bench._device_rows import SHAPES, write_model
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import Client, OwnServer, cpu_name, percentile

__all__ = ["main"]

_IDS = (300, 3000)  # of the included model's tokenizer, which other shapes are served with, too
_START_SECONDS = 300


@dataclass(frozen=True)
class Round:
    """``rate``: inputs a second. ``latency``: median milliseconds of a request. ``main``, ``worker``: microseconds of
    processor time an input."""

    rate: float
    latency: float
    main: float
    worker: float


def bodies(options: argparse.Namespace, requests: int, inputs: int, seed: int) -> Iterator[bytes]:
    """JSON of so many requests; no two inputs are alike."""
    from tokenizers import Tokenizer

    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")) if options.texts else None
    for _ in range(requests):
        ids = [[rng.randrange(*_IDS) for _ in range(options.tokens)] for _ in range(inputs)]
        prompts = ids if tokenizer is None else tokenizer.decode_batch(ids)
        body = {"input": prompts, "encoding_format": "float" if options.floats else "base64"}
        yield msgspec.json.encode(body)


def _numbers(embedding: Sequence[float] | str) -> int:
    return len(base64.b64decode(embedding)) // 4 if isinstance(embedding, str) else len(embedding)


async def run_round(server: OwnServer, streams: int, inputs: int, size: int, prompts: list[bytes]) -> Round:
    waiting, times = iter(prompts), list[float]()

    async def stream() -> None:
        client = Client(server.url)
        for body in waiting:
            begun = time.perf_counter()
            status, headers, reader = await client._send("POST", "/v1/embeddings", body)
            answer = b"".join([chunk async for chunk in client._chunks(headers, reader)])
            times.append(time.perf_counter() - begun)
            if status != 200:
                raise SystemExit(f"the server answered {status}: {answer[:400]!r}")
            if len(times) == 1:  # of others the client's time counts
                data = msgspec.json.decode(answer)["data"]
                assert [_numbers(one["embedding"]) for one in data] == [size] * inputs
        await client.close()

    def used() -> tuple[float, float]:
        spent = [process.cpu_times() for process in server.family()]
        each = [times.user + times.system for times in spent]
        return each[0], sum(each[1:])

    before, begun = used(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    wall, after = time.perf_counter() - begun, used()
    count = len(prompts) * inputs
    main, worker = (1e6 * (late - early) / count for early, late in zip(before, after, strict=True))
    return Round(count / wall, percentile(times, 0.5) * 1e3, main, worker)


def main(argv: list[str]) -> int:
    parser = command_line(__name__, __doc__, records=True)
    names = [name for name in SHAPES if "Qwen3For" in str(SHAPES[name])]
    parser.add_argument("--shape", default="0.6b", choices=names, help="of the made-up model")
    parser.add_argument("--costless", action="store_true", help="a worker that costs nothing, in place of the model")
    parser.add_argument("--points", default="64:1,1:1,4:64", help="streams:inputs of a request, separated by commas")
    parser.add_argument("--tokens", type=int, default=512, help="of each input")
    parser.add_argument("--inputs", type=int, default=1024, help="of each round; at one stream an eighth")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each point")
    parser.add_argument("--texts", action="store_true", help="send texts in place of token ids")
    parser.add_argument("--floats", action="store_true", help="ask for lists of numbers in place of base64")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        server = _server(options, Path(folder))
        try:
            asyncio.run(server.wait_ready(_START_SECONDS))
            _measure(options, server)
        finally:
            server.stop()
    return 0


def _server(options: argparse.Namespace, folder: Path) -> OwnServer:
    if options.costless:
        context = ["--context-length", str(CONTEXT)]
        override = ["--json-model-override-args", f'{{"max_position_embeddings": {CONTEXT}}}']
        arguments = ["--is-embedding", *context, *override, "--log-level", "warning", *options.server_args]
        return OwnServer(None, arguments, serve=("tests.bench._costless", "0"))
    from tests.bench._device_server import write_tokenizer

    path = write_model(options.shape, folder)
    write_tokenizer(options.shape, path)
    return OwnServer(str(path), ["--load-format", "dummy", "--is-embedding", *options.server_args])


def _device(options: argparse.Namespace) -> str:
    if options.costless:
        return cpu_name()
    import torch  # so that rows name the GPU, too

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu_name()


def _measure(options: argparse.Namespace, server: OwnServer) -> None:
    size = VECTOR_SIZE if options.costless else SHAPES[options.shape]["hidden_size"]
    model = "costless" if options.costless else options.shape
    form = f"{options.tokens} {'tokens as text' if options.texts else 'tokens'}{', floats' if options.floats else ''}"
    cores = len(os.sched_getaffinity(0))
    print(f"{_device(options)}, {cores} cores, {psutil.cpu_percent(0.2):.0f} % busy; {model}, {form}")
    print(
        "| streams:inputs | inputs/s | request p50 ms | main us an input | others us an input |\n|---|---|---|---|---|"
    )
    for point in options.points.split(","):
        streams, inputs = map(int, point.split(":"))
        rounds = []
        for number in range(options.rounds + 1):
            wanted = options.inputs // 8 if streams == inputs == 1 else options.inputs
            count = max(streams, wanted // inputs if number else streams)
            prompts = list(bodies(options, count, inputs, 1000 * number + streams * inputs))
            rounds.append(asyncio.run(run_round(server, streams, inputs, size, prompts)))
        rounds = rounds[1:]
        middle = [
            statistics.median(getattr(one, name) for one in rounds) for name in ("rate", "latency", "main", "worker")
        ]
        print(f"| {point} | {' | '.join(f'{value:.{max(0, 3 - len(str(int(value))))}f}' for value in middle)} |")
        name = f"{model} {point}, {form}"
        record(name, "inputs/s", [one.rate for one in rounds])
        record(name, "request p50", [one.latency for one in rounds], "ms")
        record(name, "main process, an input", [one.main for one in rounds], "us")
