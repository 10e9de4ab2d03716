"""What a grammar costs: tokens a second and time to the first token with a JSON schema, against none.

    python -m tests.bench grammar                                  # its own server, the included model
    python -m tests.bench grammar --points 1:32:128,32:32:128 -- --grammar-backend xgrammar
    python -m tests.bench grammar --schema long-texts              # which the included model would end much earlier
    python -m tests.bench grammar --schema long-texts --shape 8b --points 1:512:128,64:512:128    # a GPU, made-up
                                                                   # weights and vocabulary

A point is ``concurrency:input tokens:output tokens``. Each round runs it three times, one after the other: without a
grammar, with one schema of ten fields for all requests, and with a new schema in every request. All answers have the
same number of tokens.

Prompts are random tokens. ``--schema fields``: ten ordinary fields of a customer, without bounds; their names alone
take 127 tokens of the included model. ``--schema long-texts``: ten texts of at least 100 characters, which the included
model would end earlier, so that the grammar refuses a quarter of its tokens.

The processor time of the server's processes says more than its speed where other programs run beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from tests.bench._device_rows import CONTEXT, SHAPES, write_model
from tests.bench._device_server import write_tokenizer
from tests.bench._options import server_command_line
from tests.bench._record import record
from tests.bench.serving import Client, OwnServer, Point, Sample

__all__ = ["main"]

NONE, SAME, NEW = "no grammar", "one schema", "a new schema each"
FIELDS = {
    "customer_first_name": "string",
    "customer_last_name": "string",
    "email_address": "string",
    "telephone_number": "string",
    "street_and_house_number": "string",
    "postal_code": "string",
    "date_of_birth": "string",
    "number_of_orders": "integer",
    "account_balance_in_euros": "number",
    "receives_newsletter": "boolean",
}


def fields(number: int) -> dict[str, object]:
    """A schema of ten ordinary fields; their names differ by ``number``."""
    return _object({f"{name}_{number}": {"type": kind} for name, kind in FIELDS.items()})


def long_texts(number: int) -> dict[str, object]:
    """A schema of ten texts of 100 characters; its fields' names differ by ``number``."""
    text = {"type": "string", "minLength": 100, "maxLength": 200}
    return _object({f"field_{number}_{field}": text for field in range(10)})


def _object(properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMAS = {"fields": fields, "long-texts": long_texts}


async def run(url: str, model: str, point: Point, form: Callable[[], object], requests: int, seed: str) -> list[float]:
    """Tokens a second, and the median seconds to the first token."""
    rng = random.Random(seed)
    clients = [Client(url) for _ in range(point.concurrency)]

    async def work(client: Client) -> list[Sample]:
        found = []
        for _ in range(requests):
            body: dict[str, object] = {
                "model": model,
                "prompt": [rng.randrange(300, 3000) for _ in range(point.input_len)],
                "max_tokens": point.output_len,
                "temperature": 0.8,
                "seed": rng.randrange(1 << 30),
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "guided_json": form(),
            }
            found.append(await client.complete(body, point.output_len))
        return found

    begun = time.perf_counter()
    samples = [one for many in await asyncio.gather(*map(work, clients)) for one in many]
    seconds = time.perf_counter() - begun
    for client in clients:
        await client.close()
    if errors := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    if any(sample.tokens != point.output_len for sample in samples):
        raise SystemExit(f"an answer was complete before its token {point.output_len}; ask for fewer")
    return [sum(sample.tokens for sample in samples) / seconds, statistics.median(sample.ttft for sample in samples)]


def _processor_seconds(server: OwnServer | None) -> float:
    return 0.0 if server is None else sum(sum(each.cpu_times()[:2]) for each in server.family())


async def measure(points: list[Point], model: str | None, url: str | None, options: argparse.Namespace) -> None:
    numbers = itertools.count(1)
    schema = SCHEMAS[options.schema]
    forms: dict[str, Callable[[], object]] = {
        NONE: lambda: None,
        SAME: lambda: schema(0),
        NEW: lambda: schema(next(numbers)),
    }
    server = None if url else OwnServer(model, options.server_args)
    try:
        if server is not None:
            await server.wait_ready(options.start_limit)
        address = url or server.url  # type: ignore[union-attr]
        client = Client(address)
        _, models = await client.json("GET", "/v1/models")
        name = models["data"][0]["id"]  # type: ignore[index]
        await client.close()
        print(f"| point | form | tokens/s | of none | first token ms | processor time, none of it |\n|{'---|' * 6}")
        for point in points:
            found: dict[str, list[list[float]]] = {form: [] for form in forms}
            for form, make in forms.items():
                await run(address, name, point, make, 1, f"warm {form}")
            for number in range(options.rounds):
                for form, make in forms.items():
                    seed = f"{number} {form} {point}"
                    begun = _processor_seconds(server)
                    measured = await run(address, name, point, make, options.requests, seed)
                    found[form].append([*measured, _processor_seconds(server) - begun])
            for form, rounds in found.items():
                speeds, firsts, seconds = ([each[place] for each in rounds] for place in (0, 1, 2))
                ratios = [speed / none[0] for speed, none in zip(speeds, found[NONE], strict=True)]
                times = [none[2] / one if one else math.nan for one, none in zip(seconds, found[NONE], strict=True)]
                row = (statistics.median(each) for each in (speeds, ratios, firsts, times))
                speed, ratio, first, busy = row
                print(f"| {point} | {form} | {speed:.0f} | {ratio:.2f} | {1e3 * first:.2f} | {busy:.2f} |", flush=True)
                form = form if schema is long_texts else f"{form}, ten fields"
                if server is not None:
                    record(f"{point}, {form}", "of the processor time without", times, "")
                record(f"{point}, {form}", "tokens/s", speeds, "")
                record(f"{point}, {form}", "of the speed without", ratios, "")
                record(f"{point}, {form}", "time to first token", [1e3 * each for each in firsts], "ms")
    finally:
        if server is not None:
            server.stop()


def main(argv: list[str]) -> int:
    parser = server_command_line(__name__, __doc__, "1:32:128,32:32:128", 5)
    parser.add_argument("--schema", choices=sorted(SCHEMAS), default="fields", help="see above")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="serve this shape with made-up weights on a GPU")
    options = parser.parse_args(argv)
    points = [Point.parse(text) for text in options.points.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        if options.shape:
            path = write_model(options.shape, Path(directory))
            write_tokenizer(options.shape, path)
            options.model = str(path)
            options.server_args += ["--load-format", "dummy", "--device", "cuda", "--context-length", str(CONTEXT)]
        uvloop.run(measure(points, options.model, options.url, options))
    return 0
