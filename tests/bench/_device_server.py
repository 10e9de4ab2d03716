"""Measure a GPU with the whole program: the engine in process, a server over HTTP, and a server's start."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench._device_ranks import Ranks
from tests.bench._device_rows import CONTEXT, SHAPES, STEP_TOKENS, Row, write_model

__all__ = ["engine", "online", "start"]


def engine(
    name: str, directory: Path, ranks: Ranks, counts: Sequence[int], *, eager: bool = False, repeats: int = 2
) -> list[Row]:
    """Output tokens a second of ``offline`` through the whole engine with all its actors, without HTTP. ``ranks``: its
    workers. ``eager``: without graphs."""
    import uvloop

    from actors.engine.engine import Engine
    from actors.protocol.requests import SamplingParams

    path = write_model(name, directory)
    params = SamplingParams(max_tokens=256, temperature=0, ignore_eos=True)

    async def sequence(running: Engine, prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in running.generate(prompt, params)])

    async def measure_all() -> list[Row]:
        width = ranks.size // ranks.stages
        options: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 512}
        options |= {"tensor_parallel_size": width, "pipeline_parallel_size": ranks.stages}
        options |= {"expert_parallel_size": ranks.parts, "disable_cuda_graph": eager}
        if ranks.apart:
            options |= {"data_parallel_size": width, "enable_dp_attention": True}
        rows = []
        async with Engine(
            model=str(path),
            device="cuda",
            load_format="dummy",
            skip_tokenizer_init=True,
            chunked_prefill_size=STEP_TOKENS,
            **options,
        ) as running:
            generator = np.random.default_rng(7)
            for count in counts:
                found = []
                for _ in range(repeats + 1):  # the first warms up
                    prompts = generator.integers(0, SHAPES[name]["vocab_size"], (count, 512)).tolist()
                    begun = time.perf_counter()
                    made = sum(await asyncio.gather(*(sequence(running, prompt) for prompt in prompts)))
                    assert made == count * 256, made
                    found.append(made / (time.perf_counter() - begun))
                shown = name + ranks.suffix + (" eager" if eager else "")
                rows.append(Row(shown, f"engine {count}", tuple(found[1:])))
                print(rows[-1].line(), flush=True)
        return rows

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure_all())


def write_tokenizer(name: str, path: Path) -> None:
    """Write the tokenizer of the included model, extended to every id of the shape's vocabulary."""
    box = Path(__file__).parents[2] / "app" / "understudy" / "model"
    tokenizer = json.loads((box / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    taken = {*known.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    # A space is spelled as a G with a dot in byte-level vocabularies.
    known.update({f"\u0120w{token}": token for token in range(SHAPES[name]["vocab_size"]) if token not in taken})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text((box / "tokenizer_config.json").read_text())


def online(name: str, directory: Path, rounds: int = 2) -> list[Row]:
    """Output tokens a second and milliseconds to the first, 512 in and 128 out, streams that each send their next
    request when the last has ended: 8, 4 and 4 requests a stream, as vLLM was measured.
    """
    from tests.bench.online import run_point
    from tests.bench.serving import OwnServer, Point

    path = write_model(name, directory)
    write_tokenizer(name, path)
    options = ["--load-format", "dummy", "--device", "cuda", "--context-length", str(CONTEXT)]
    server = OwnServer(str(path), [*options, "--served-model-name", name])
    rows = []
    try:
        asyncio.run(server.wait_ready(180))
        for count, each in ((1, 8), (64, 4), (256, 4)):
            found = []
            for number in range(rounds + 1):  # the first warms up
                requests = count * (each if number else 1)
                point = Point(count, 512, 128)
                found.append(run_point(server.url, name, point, requests, (300, 8000), number, 4, server.process.pid))
            print(f"{name} online {count}: {found[1:]}", flush=True)
            if errors := [error for one in found for error in one.errors]:
                raise SystemExit(f"{len(errors)} requests failed: {errors[0]}\n{server.log_text()[-3000:]}")
            rows.append(Row(name, f"online {count}", tuple(one.rate for one in found[1:])))
            rows.append(Row(name, f"online {count} TTFT p50", tuple(one.ttft50 for one in found[1:])))
            rows.append(Row(name, f"online {count} ITL p50", tuple(one.itl50 for one in found[1:])))
    finally:
        server.stop()
    return rows


def start(name: str, directory: Path) -> list[Row]:
    """Seconds from a server's start to its first answer, with no kernel compiled before, and of a second start."""
    path = write_model(name, directory)
    with tempfile.TemporaryDirectory() as cache:
        return [
            Row(name, point, (_start(path, directory / "server.log", cache),)) for point in ("start", "start again")
        ]


def _start(path: Path, log: Path, cache: str) -> float:
    """``cache``: the folder of compiled kernels."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = [sys.executable, "-m", "app", "serve", "--model-path", str(path), "--load-format", "dummy"]
    server += ["--skip-tokenizer-init", "--device", "cuda", "--context-length", str(CONTEXT), "--port", str(port)]
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with log.open("w") as file:
        begun = time.perf_counter()
        process = subprocess.Popen(
            server, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while True:
                if process.poll() is not None or time.perf_counter() - begun > 180:
                    raise SystemExit(f"the server did not answer:\n{log.read_text()[-3000:]}")
                try:
                    urllib.request.urlopen(request, timeout=60).read()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.05)
            seconds = time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait()
    for line in log.read_text().splitlines():
        if any(word in line for word in ("loading: ", "kernels are ready", "is ready after")):
            print(line, flush=True)
    return seconds
