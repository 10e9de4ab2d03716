"""Measure how long one API key's chats take while another key sends bodies that are small to send and costly to answer.

    python -m tests.bench neighbours                                # its own server, the included model
    python -m tests.bench neighbours --attacks stream,tools --seconds 10

The victim asks for short chats, one after the other. The attacks, each for so many seconds, by another key:

    none     no attack
    stream   streams of /generate with the log-probabilities of the prompt, 20 alternatives each
    scores   completions of a long prompt with its log-probabilities and 128 choices
    tools    24 chats at a time, each with 7 MB of tools
    uploads  the same, and each connection is closed before the last byte of the body

Printed for each: the victim's chats, the median and the largest of their latencies (a chat that has begun is waited
for, 120 s at most), what the attacker's requests were answered with, and the bytes it got.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import msgspec

from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import OwnServer, cpu_name

VICTIM, ATTACKER = "bench-victim", "bench-attacker"
PATIENCE = 120.0


class Attack(NamedTuple):
    """``aborts``: whether the connection is closed before the last byte of the body."""

    connections: int
    path: str
    body: dict[str, Any]
    aborts: bool = False


class Aborted(Exception):
    """An upload ends here."""


async def unfinished(body: bytes) -> AsyncIterator[bytes]:
    """All of ``body`` but its last byte, and then no more."""
    yield body[:-1]
    raise Aborted


def attacks(model: str, prompt_tokens: int) -> dict[str, Attack]:
    prompt = list(range(300, 300 + prompt_tokens))
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": "x" * 14_000, "parameters": {}}}
        for n in range(500)
    ]
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 1}
    return {
        "none": Attack(0, "", {}),
        "stream": Attack(
            1,
            "/generate",
            {
                "input_ids": prompt,
                "stream": True,
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 20,
                "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
            },
        ),
        "scores": Attack(
            1,
            "/v1/completions",
            {"model": model, "prompt": prompt, "n": 128, "prompt_logprobs": 0, "max_tokens": 1},
        ),
        "tools": Attack(24, "/v1/chat/completions", chat),
        "uploads": Attack(24, "/v1/chat/completions", chat, aborts=True),
    }


async def _attack(url: str, attack: Attack, seconds: float) -> tuple[Counter[str], int]:
    answers: Counter[str] = Counter()
    received = 0
    end = time.monotonic() + seconds
    body = msgspec.json.encode(attack.body)
    headers = {
        "authorization": f"Bearer {ATTACKER}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal received
        while time.monotonic() < end:
            try:
                content = unfinished(body) if attack.aborts else body
                async with client.stream("POST", url + attack.path, content=content, headers=headers) as response:
                    async for piece in response.aiter_raw():
                        received += len(piece)
                    answers[str(response.status_code)] += 1
                if response.status_code >= 400:
                    await asyncio.sleep(0.05)
            except (Aborted, httpx.HTTPError) as error:
                answers[type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=None) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(one(client) for _ in range(attack.connections)))
    return answers, received


def _attacker(url: str, attack: Attack, seconds: float, results: Any) -> None:
    """Run an attack in its own process, so that it takes no time of the victim's client."""
    results.put(asyncio.run(_attack(url, attack, seconds)))


async def _victim(url: str, model: str, seconds: float) -> list[float]:
    """Latencies of chats, in seconds."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    headers = {"authorization": f"Bearer {VICTIM}"}
    found = []
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=PATIENCE, headers=headers) as client:
        while time.monotonic() < end:
            begun = time.perf_counter()
            with contextlib.suppress(httpx.TimeoutException):
                (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
            found.append(time.perf_counter() - begun)
            await asyncio.sleep(0.02)
    return found


async def bench(options: argparse.Namespace) -> None:
    keys = ["--api-key", f"{VICTIM},{ATTACKER}"]
    spawn = multiprocessing.get_context("spawn")
    print(f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d')}")
    print(f"{'attack':<8} {'chats':>6} {'median ms':>10} {'largest ms':>11}  attacker")
    for name in options.attacks.split(","):
        server = OwnServer(options.model, [*keys, *options.server_args])  # a fresh one: no attack outlives its row
        try:
            await server.wait_ready()
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {VICTIM}"}) as client:
                model = (await client.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
            attack = attacks(model, options.prompt_tokens)[name]
            await _victim(server.url, model, 1.0)  # warm-up
            results = spawn.Queue()
            process = spawn.Process(target=_attacker, args=(server.url, attack, options.seconds + 2, results))
            process.start()
            await asyncio.sleep(2.0)  # the attacker's process starts
            latencies = [1000 * one for one in await _victim(server.url, model, options.seconds)]
            answers, received = await asyncio.to_thread(results.get)
            process.join()
            summary = " ".join(f"{count}x{status}" for status, count in sorted(answers.items())) or "no answer"
            size = len(msgspec.json.encode(attack.body))
            what = f"{size:,} bytes a body, {summary}, {received / 1e6:.1f} MB received" if attack.connections else ""
            print(
                f"{name:<8} {len(latencies):>6} {statistics.median(latencies):>10.1f} {max(latencies):>11.1f}  {what}"
            )
            record(name, "chats", len(latencies))
            record(name, "chat, median", statistics.median(latencies), "ms")
            record(name, "chat, largest", max(latencies), "ms")
        finally:
            server.stop()


def main(arguments: list[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--model", help="directory of the model; without it the included model")
    parser.add_argument(
        "--attacks", default="none,stream,scores,tools,uploads", help="names from above, separated by commas"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each attack")
    parser.add_argument("--prompt-tokens", type=int, default=500, help="of the prompts of stream and scores")
    parser.add_argument("server_args", nargs="*", help="after --: more arguments for the server that is started")
    asyncio.run(bench(parser.parse_args(arguments)))
