"""How much of the ranks' all-reduces two micro-batches hide, over gloo and over a simulated link.

    python -m tests.bench overlap [--tokens 128 256 512 1024] [--links 0 4 1 0.25] [--rounds 7] [--layers 4] [--norms]

Two ranks of one thread each, on this machine, run steps of one prompt of so many tokens, as one batch and as two in
turns. The model has random weights of Qwen3-0.6B's widths. ``--links``: GB/s of a simulated link. An all-reduce of
B bytes occupies it for B / link seconds, during which the processor is free; all-reduces queue for the link. 0: no
simulated link, only gloo, whose copies need the processor. gloo computes the sum in any case.

``--norms`` measures, over gloo only, an all-reduce and the norm of all rows against a reduce-scatter, the norm of this
rank's rows and an all-gather.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench._options import command_line
from tests.bench._record import record
from tests.kits.tiny_model import make_tiny_model

__all__ = ["main"]

Times = tuple[list[float], list[float]]
"""Seconds of each round in the first way and in the second."""

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


class _Link:
    """A link of ``speed`` GB/s: sums wait for it, one after the other."""

    def __init__(self, speed: float) -> None:
        import torch.distributed as dist

        self._real, self._speed, self._free = dist.all_reduce, speed, 0.0
        dist.all_reduce = self

    def __call__(self, x: Any, group: Any = None, async_op: bool = False) -> Any:
        now = time.perf_counter()
        self._free = max(now, self._free) + x.nbytes / self._speed / 1e9
        work = _Work(self._real(x, group=group, async_op=True), self._free)
        return work if async_op else work.wait()


class _Work:
    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


def _rank(rank: int, folder: str, options: argparse.Namespace, link: float, answers: Any) -> None:
    import torch

    from kernels.contract.config import RunnerConfig
    from kernels.execution.runner import ModelRunner
    from tests.kits.driver import Driver

    torch.set_num_threads(1)
    most = max(options.tokens)
    config = RunnerConfig(
        model_path=folder,
        dtype=options.dtype,
        tp_rank=rank,
        tp_size=2,
        rendezvous=f"{folder}/store {link}",
        threads=1,
        max_slots=2,
        max_step_tokens=most,
        max_total_tokens=2 * most,
        op_timeout=90.0,
        two_batch_threshold=0.48,
    )
    runner = ModelRunner(config)
    info = runner.load()
    runner._device.finish_operators()
    if link:
        _Link(link)
    if options.norms:
        answers.put((rank, {tokens: _norms(runner, options, tokens) for tokens in options.tokens}))
        runner._group.minimum(0)
        return runner.close()
    driver = Driver(runner, info)
    whole, divided = runner._executors[1:], runner._executors
    found: dict[int, Times] = {}
    for tokens in options.tokens:
        times: Times = ([], [])
        for number in range(2 * options.rounds + 2):
            runner._executors = (whole, divided)[number % 2]
            driver.admit(1, [3 + (7 * place + number) % 500 for place in range(tokens)])
            runner._group.all_reduce(torch.zeros(1))
            begun = time.perf_counter()
            driver.step([(1, tokens)])
            if number > 1:
                times[number % 2].append(time.perf_counter() - begun)
            driver.release(1)
        found[tokens] = times
    answers.put((rank, found))
    runner._group.minimum(0)
    runner.close()


def _norms(runner: Any, options: argparse.Namespace, tokens: int) -> Times:
    """Seconds of a norm of all rows, and of one divided over the ranks, with their collectives."""
    import torch

    group, norm = runner._group, runner._loaded.model.norm
    x = torch.ones(tokens, SIZES["hidden_size"], dtype=getattr(torch, options.dtype))
    part = x[: tokens // 2]

    def whole() -> None:
        norm.add(group.all_reduce(x.clone()), x.clone())

    def divided() -> None:
        group.all_gather_rows(norm.add(group.reduce_scatter(x.clone()), part.clone())[0])

    times: Times = ([], [])
    with torch.inference_mode():
        for number in range(2 * options.rounds + 2):
            group.all_reduce(torch.zeros(1))
            begun = time.perf_counter()
            for _ in range(10):
                (whole, divided)[number % 2]()
            if number > 1:
                times[number % 2].append((time.perf_counter() - begun) / 10)
    return times


def _measured(options: argparse.Namespace, folder: Path, link: float) -> dict[int, Times]:
    """Seconds of each step of rank 0, as one batch and as two, by tokens."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(folder), options, link, answers)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    finally:
        for process in ranks:
            process.kill()
    result: dict[int, Times] = found[0]
    return result


def main(words: Sequence[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048], help="of each step")
    parser.add_argument("--links", type=float, nargs="+", default=[0.0, 1.25, 0.3125, 0.125], help="GB/s")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each point")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    parser.add_argument("--norms", action="store_true", help="measure norms instead")
    options = parser.parse_args(words)
    ways = ("norms of all rows", "norms of a part") if options.norms else ("as one batch", "as two batches")
    print(f"| link | tokens | {ways[0]}, ms | {ways[1]}, ms | second of first |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder), **SIZES, num_hidden_layers=options.layers)
        for link in (0.0,) if options.norms else options.links:
            name = f"a link of {link:g} GB/s" if link else "gloo alone"
            for tokens, times in _measured(options, Path(folder), link).items():
                ratios = [second / first for first, second in zip(*times, strict=True)]
                point = f"{tokens} tokens, {options.dtype}, {name}"
                for way, seconds in zip(ways, times, strict=True):
                    record(point, way, [1000 * each for each in seconds], "ms")
                record(point, f"{ways[1]}, of {ways[0]}", ratios)
                medians = " | ".join(f"{1000 * statistics.median(each):.1f}" for each in times)
                print(f"| {name} | {tokens} | {medians} | {statistics.median(ratios):.3f} |", flush=True)
