"""A GPU from end to end: ``python -m tests.bench device`` checks the kernels and the platform, then measures, and
prints one table.

The checks run first, tests/kernels/cuda with pytest, and nothing is measured when one fails. The measurements drive a
ModelRunner as the scheduler does, with two steps in flight, on made-up weights: the shapes, lengths and settings are
those that vLLM 0.24.0 was measured with on an H200 (2026-11-20). They leave out what the actors cost;
``engine``, the same by an Engine, ``online``, streams over HTTP from client processes, and the start of a server to its
first answer are the whole program's.

Options: ``--only NAME[,NAME...]`` of checks, decode, offline, prefill, engine, online, start; ``--model 8b,0.6b``;
``--only speculative`` says what guessing tokens ahead costs and gains (``device_speculative``), ``--only products``
compares those of few tokens with cuBLAS's; ``--profile DIR`` writes tables of the device's time by kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.step import Admission, ModelInfo, RunnerConfig, SlotSampling, StepBatch
from tests.bench.device_speculative import speculative

if TYPE_CHECKING:
    from kernels.answers import RunningStep
    from kernels.runner import ModelRunner

PAGE_SIZE = 64
STEP_TOKENS = 16384
CONTEXT = 8192
OFFLINE = (64, 256, 512)
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}

# vLLM 0.24.0, the better of its medians or visits, and what issue 6 asks for.
PEER: dict[tuple[str, str], tuple[float, float, str]] = {
    ("8b", "decode 128"): (4.86, 3.7, "ms"),
    ("8b", "decode 4096"): (4.99, 0.0, "ms"),
    ("0.6b", "decode 128"): (1.77, 0.9, "ms"),
    ("0.6b", "decode 4096"): (1.80, 0.0, "ms"),
    ("8b", "offline 64"): (6650, 7000, "tok/s"),
    ("8b", "offline 256"): (9950, 10500, "tok/s"),
    ("8b", "offline 512"): (10400, 11000, "tok/s"),
    ("0.6b", "offline 64"): (19000, 25000, "tok/s"),
    ("0.6b", "offline 256"): (28000, 36000, "tok/s"),
    ("0.6b", "offline 512"): (31600, 40000, "tok/s"),
    ("8b", "engine 64"): (6650, 7000, "tok/s"),
    ("8b", "engine 256"): (9950, 10500, "tok/s"),
    ("8b", "engine 512"): (10400, 11000, "tok/s"),
    ("0.6b", "engine 64"): (19000, 25000, "tok/s"),
    ("0.6b", "engine 256"): (28000, 36000, "tok/s"),
    ("0.6b", "engine 512"): (31600, 40000, "tok/s"),
    ("8b", "prefill"): (41300, 41300, "tok/s"),
    ("0.6b", "prefill"): (334000, 0.0, "tok/s"),
    ("8b", "online 1"): (202, 0.0, "tok/s"),
    ("8b", "online 64"): (5190, 5190, "tok/s"),
    ("8b", "online 64 TTFT p50"): (430, 430, "ms"),
    ("8b", "online 256"): (7000, 7000, "tok/s"),
    ("8b", "online 256 TTFT p50"): (570, 570, "ms"),
    ("0.6b", "online 1"): (513, 0.0, "tok/s"),
    ("0.6b", "online 64"): (14400, 16000, "tok/s"),
    ("0.6b", "online 64 TTFT p50"): (81, 0.0, "ms"),
    ("0.6b", "online 256"): (21900, 21000, "tok/s"),
    ("0.6b", "online 256 TTFT p50"): (117, 0.0, "ms"),
    ("8b", "start"): (72.0, 20.0, "s"),
    ("0.6b", "start"): (69.0, 0.0, "s"),
}


@dataclass(frozen=True)
class Row:
    model: str
    point: str
    values: tuple[float, ...]

    def line(self) -> str:
        peer, goal, unit = PEER.get(
            (self.model, self.point), (0.0, 0.0, "ms" if self.point.endswith("p50") else "tok/s")
        )
        median = statistics.median(self.values)
        digits = 2 if unit in ("ms", "s") else 0
        faster = (peer / median if unit in ("ms", "s") else median / peer) if peer else 0.0
        met = "" if not goal else "yes" if (median <= goal if unit in ("ms", "s") else median >= goal) else "no"
        shown = ", ".join(f"{value:.{digits}f}" for value in self.values)
        ratio = f"{faster:.2f}" if peer else ""
        return f"| {self.model} | {self.point} | {shown} {unit} | {peer or ''} | {ratio} | {goal or ''} | {met} |"


def write_model(name: str, directory: Path) -> Path:
    """A directory with the shape's config.json and nothing else."""
    config = SHAPES[name]
    path = directory / name
    path.mkdir(exist_ok=True)
    kind = MODEL_TYPES[config["architectures"][0]]
    (path / "config.json").write_text(json.dumps(config | {"model_type": kind, "dtype": "bfloat16"}))
    return path


class Requests:
    """Plays the scheduler: prompts of one length, all handed over at once; decodes first, then prefills, two steps in
    flight. Each sequence has its pages from the start, in an order that is not that of memory."""

    def __init__(self, runner: ModelRunner, info: ModelInfo, count: int, prompt: int, output: int) -> None:
        self.runner, self.prompt, self.output = runner, prompt, output
        each = -(-(prompt + output + 2) // PAGE_SIZE)
        if count * each >= info.num_pages:
            raise SystemExit(f"the cache has {info.num_pages} pages and {count * each} are needed")
        generator = np.random.default_rng(count)
        order = generator.permutation(np.arange(1, info.num_pages, dtype=np.int32))[: count * each].reshape(count, each)
        self.admissions = [
            Admission(
                slot=slot + 1,
                generation=1,
                tokens=generator.integers(0, info.vocab_size, prompt, dtype=np.int32).tobytes(),
                prompt_length=prompt,
                computed=0,
                pages=order[slot].tobytes(),
                sampling=SlotSampling(temperature=0.0),
            )
            for slot in range(count)
        ]
        self.left = np.full(count, prompt)  # of the prompt
        self.made = np.zeros(count, dtype=np.int64)
        self.number = 0

    def batches(self) -> Iterator[StepBatch]:
        released = np.empty(0, dtype=np.int32)
        budget_each = STEP_TOKENS
        admitted = 0
        while True:
            decoding = np.flatnonzero((self.left == 0) & (self.made < self.output))
            budget = budget_each - len(decoding)
            chunks: list[tuple[int, int]] = []
            for slot in np.flatnonzero(self.left > 0).tolist():
                if budget <= 0:
                    break
                chunks.append((slot, min(budget, int(self.left[slot]))))
                budget -= chunks[-1][1]
            if not len(decoding) and not chunks:
                break
            new = [self.admissions[slot] for slot, _ in chunks if slot >= admitted]
            admitted += len(new)
            slots = np.array([*decoding.tolist(), *(slot for slot, _ in chunks)], dtype=np.int32)
            counts = np.array([1] * len(decoding) + [count for _, count in chunks], dtype=np.int32)
            yield StepBatch(
                number=self.number,
                slots=(slots + 1).tobytes(),
                generations=np.ones(len(slots), dtype=np.int32).tobytes(),
                counts=counts.tobytes(),
                admitted=tuple(new),
                released=released.tobytes(),
            )
            self.number += 1
            self.made[decoding] += 1
            for slot, count in chunks:
                self.left[slot] -= count
                self.made[slot] += self.left[slot] == 0

    def run(self) -> float:
        """Seconds for all of it."""
        running: deque[RunningStep] = deque()
        begun = time.perf_counter()
        produced = 0
        for batch in self.batches():
            running.append(self.runner.start(batch))
            if len(running) > 1:
                produced += self._take(running.popleft())
        while running:
            produced += self._take(running.popleft())
        seconds = time.perf_counter() - begun
        assert produced == len(self.left) * self.output, (produced, len(self.left) * self.output)
        slots = np.arange(1, len(self.left) + 1, dtype=np.int32)
        self.runner.run(StepBatch(number=self.number, slots=b"", generations=b"", counts=b"", released=slots.tobytes()))
        return seconds

    @staticmethod
    def _take(step: RunningStep) -> int:
        result = step.result()
        assert not result.failed, result.failed
        return len(result.tokens) // 4


def load(path: Path, **options: Any) -> tuple[ModelRunner, ModelInfo]:
    from kernels.runner import ModelRunner

    config = RunnerConfig(
        model_path=str(path),
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        context_length=CONTEXT,
        max_slots=513,
        page_size=PAGE_SIZE,
        max_step_tokens=STEP_TOKENS,
        **options,
    )
    runner = ModelRunner(config)
    return runner, runner.load()


def decode(runner: ModelRunner, info: ModelInfo, prompt: int, repeats: int = 3) -> tuple[float, ...]:
    """Milliseconds a token at batch 1: (256 tokens - 1 token) / 255."""
    found = []
    for _ in range(repeats):
        whole = Requests(runner, info, 1, prompt, 256).run()
        first = Requests(runner, info, 1, prompt, 1).run()
        found.append((whole - first) / 255 * 1e3)
    return tuple(found)


def offline(runner: ModelRunner, info: ModelInfo, count: int, repeats: int = 2) -> tuple[float, ...]:
    """Output tokens a second, 512 in and 256 out."""
    return tuple(count * 256 / Requests(runner, info, count, 512, 256).run() for _ in range(repeats))


def prefill(runner: ModelRunner, info: ModelInfo, repeats: int = 2) -> tuple[float, ...]:
    """Prompt tokens a second, 32 prompts of 4096 tokens, 1 out."""
    return tuple(32 * 4096 / Requests(runner, info, 32, 4096, 1).run() for _ in range(repeats))


def profile(runner: ModelRunner, info: ModelInfo, count: int, prompt: int, output: int) -> str:
    """The device's time by kernel."""
    import torch
    from torch.profiler import ProfilerActivity

    requests = Requests(runner, info, count, prompt, output)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = requests.run()
        torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    spans = []
    for event in found.events():
        total, calls = times.get(event.name, (0.0, 0))
        times[event.name] = (total + event.device_time_total, calls + 1)
        spans.append((event.time_range.start, event.time_range.end))
    busy, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    lines = [f"{count} x {prompt} in, {output} out: {seconds * 1e3:.1f} ms, device busy {busy / 1e3:.1f} ms"]
    for name, (total, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:28]:
        lines.append(f"{total / 1e3:10.2f} ms {calls:7d} {total / calls:9.2f} us  {name[:90]}")
    return "\n".join(lines)


def _launch_in_turn() -> None:
    """The profiler and kernels that start before their predecessors end do not go together: they fail at a bad program
    counter (driver 580, torch 2.11).
    """
    import kernels.platforms.cuda  # noqa: F401 - loads all that launch

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.cuda.") and hasattr(module, "overlapping"):
            module.overlapping = lambda device: False  # type: ignore[attr-defined]


def checks() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/cuda"]
    return subprocess.run(command, check=False).returncode == 0


def measure(name: str, directory: Path, points: Sequence[str], profiles: Path | None) -> list[Row]:
    path = write_model(name, directory)
    rows: list[Row] = []
    if profiles is not None:
        _launch_in_turn()
    begun = time.perf_counter()
    runner, info = load(path)
    Requests(runner, info, 1, 128, 1).run()
    took = time.perf_counter() - begun
    print(f"{name}: loaded in {took:.1f} s ({info.load_seconds}), {info.num_pages} pages, graphs {info.graph_rows}")
    Requests(runner, info, 64, 512, 16).run()  # compiles what is compiled at first use
    if "decode" in points:
        for prompt in (128, 4096):
            rows.append(Row(name, f"decode {prompt}", decode(runner, info, prompt)))
            print(rows[-1].line(), flush=True)
    if "offline" in points:
        for count in OFFLINE:
            rows.append(Row(name, f"offline {count}", offline(runner, info, count)))
            print(rows[-1].line(), flush=True)
    if "prefill" in points:
        rows.append(Row(name, "prefill", prefill(runner, info)))
        print(rows[-1].line(), flush=True)
    if profiles is not None:
        text = [profile(runner, info, *shape) for shape in ((1, 128, 32), (64, 512, 32), (512, 512, 32), (8, 4096, 1))]
        (profiles / f"profile-{name}.txt").write_text("\n\n".join(text))
    runner.close()
    del runner
    gc.collect()
    import torch

    torch.cuda.empty_cache()
    return rows


def products(name: str, directory: Path) -> list[Row]:
    """``offline`` of few sequences, in turn with products of few tokens of our own and with cuBLAS alone."""
    import torch

    from kernels.cuda import narrow

    path, suits = write_model(name, directory), narrow.suits
    few = (8, 16, 32, 64)
    found: dict[str, list[float]] = {}
    for way in ("own", "cublas") * 2:
        narrow.suits = suits if way == "own" else lambda x, weight, gated: False
        try:
            runner, info = load(path, graph_rows=few)
            Requests(runner, info, 64, 512, 16).run()
            for count in few:
                found.setdefault(f"offline {count}, {way}", []).extend(offline(runner, info, count, 1))
        finally:
            narrow.suits = suits
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    rows = [Row(name, point, tuple(values)) for point, values in found.items()]
    for row in rows:
        print(row.line(), flush=True)
    return rows


def engine(name: str, directory: Path, repeats: int = 2) -> list[Row]:
    """``offline`` once more, by the whole engine without HTTP: the scheduler and all other actors take part."""
    import uvloop

    from actors.engine import Engine
    from actors.requests import SamplingParams

    path = write_model(name, directory)
    params = SamplingParams(max_tokens=256, temperature=0, ignore_eos=True)

    async def sequence(running: Engine, prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in running.generate(prompt, params)])

    async def measure_all() -> list[Row]:
        options: dict[str, Any] = {"context_length": CONTEXT, "max_running_requests": 512}
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
            for count in OFFLINE:
                found = []
                for _ in range(repeats + 1):  # the first warms up
                    prompts = generator.integers(0, SHAPES[name]["vocab_size"], (count, 512)).tolist()
                    begun = time.perf_counter()
                    made = sum(await asyncio.gather(*(sequence(running, prompt) for prompt in prompts)))
                    assert made == count * 256, made
                    found.append(made / (time.perf_counter() - begun))
                rows.append(Row(name, f"engine {count}", tuple(found[1:])))
                print(rows[-1].line(), flush=True)
        return rows

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure_all())


def write_tokenizer(name: str, path: Path) -> None:
    """The tokenizer of the model in the box, with a word for every id that the shape's head can pick."""
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


def start(name: str, directory: Path) -> Row:
    """Seconds from the start of a server to its first answer, with every kernel compiled anew."""
    path = write_model(name, directory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = [sys.executable, "-m", "app", "serve", "--model-path", str(path), "--load-format", "dummy"]
    server += ["--skip-tokenizer-init", "--device", "cuda", "--context-length", str(CONTEXT), "--port", str(port)]
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with tempfile.TemporaryDirectory() as cache, (directory / "server.log").open("w") as log:
        begun = time.perf_counter()
        process = subprocess.Popen(
            server, env={**os.environ, "TRITON_CACHE_DIR": cache}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                if process.poll() is not None or time.perf_counter() - begun > 180:
                    raise SystemExit(f"the server did not answer:\n{(directory / 'server.log').read_text()[-3000:]}")
                try:
                    urllib.request.urlopen(request, timeout=60).read()
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.05)
            seconds = time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait()
    return Row(name, "start", (seconds,))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench device", description=__doc__)
    parser.add_argument("--only", default="checks,decode,offline,prefill,engine,online,start")
    parser.add_argument("--model", default="8b,0.6b")
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args(arguments)
    points = given.only.split(",")
    if "checks" in points and not checks():
        sys.exit("a check failed: nothing is measured")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in given.model.split(","):
            if {"decode", "offline", "prefill"} & set(points) or given.profile is not None:
                rows += measure(name, Path(directory), points, given.profile)
            if "products" in points:
                rows += products(name, Path(directory))
            if "speculative" in points:
                speculative(write_model(name, Path(directory)), SHAPES[name], Path(directory))
            if "engine" in points:
                rows += engine(name, Path(directory))
            if "online" in points:
                rows += online(name, Path(directory))
            if "start" in points:
                rows.append(start(name, Path(directory)))
    print("\n| model | point | measured | vLLM 0.24.0 | times vLLM | goal | met |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row.line())
