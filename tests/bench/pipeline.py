"""Bubbles of pipeline stages, without a scheduler: decodes in micro-batches, and chunks of a long prompt.

    python -m tests.bench pipeline [--tokens 4096] [--chunks 256 512 1024]

Each of two stages is a process with one thread. The model has 8 layers with random weights. ``dynamic`` chunks begin
with the largest size and shrink, so that all take as long as the first.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_STAGES = 2
_LAYERS, _HIDDEN, _INNER = 8, 512, 1024
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65536,
}
_ROWS, _PROMPT, _TURNS = 16, 64, 40


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of the long prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024], help="tokens of a chunk")
    parser.add_argument("--dtype", default="float32", help="a CPU runs programs of native operators in bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="measurements; all count")
    options = parser.parse_args(argv)
    largest = max(options.chunks)
    prompts: dict[str, tuple[list[int], int]] = {}
    for size in options.chunks:
        sizes = [min(size, options.tokens - first) for first in range(0, options.tokens, size)]
        prompts[f"chunks of {size}, one at a time"] = sizes, 0
        prompts[f"chunks of {size}"] = sizes, _STAGES - 1
    prompts[f"dynamic chunks from {largest}"] = dynamic_chunks(options.tokens, largest), _STAGES - 1
    print(f"{'':<36}{'s':>10}{'stage waits':>14}{'':>8}")
    for name, seconds, waits in _measure(options.tokens, largest, prompts, options.rounds, options.dtype):
        record(name, "time", seconds, "s")
        for stage, shares in enumerate(waits):
            record(name, f"stage {stage} waits", shares, "%")
        print(f"{name:<36}{min(seconds):>10.2f}" + "".join(f"{min(shares):>10.0f} %" for shares in waits), flush=True)
    return 0


def dynamic_chunks(tokens: int, first: int) -> list[int]:
    """Sizes of chunks that take as many operations as the ``first``."""
    linear = 2.0 * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _INNER)
    square = 2.0 * _HIDDEN  # of a token, for each that it attends to, halved

    def done(position: float) -> float:
        return linear * position + square * position * position

    sizes, share, begun = [], done(first), 0
    while begun < tokens:
        goal = done(begun) + share
        end = (-linear + math.sqrt(linear * linear + 4 * square * goal)) / (2 * square)
        size = min(max(16, round((end - begun) / 16) * 16), tokens - begun)
        sizes.append(size)
        begun += size
    return sizes


def _measure(
    tokens: int, largest: int, prompts: dict[str, tuple[list[int], int]], rounds: int, dtype: str
) -> list[tuple[str, list[float], list[list[float]]]]:
    """Name, seconds, and for each stage percent of them in which it waits; of each round."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        config: dict[str, Any] = {
            "model_path": folder,
            "dtype": dtype,
            "load_format": "dummy",
            "max_slots": _ROWS + 1,
            "max_total_tokens": max(tokens, _ROWS * (_PROMPT + _TURNS * 6)) + 1024,
            "max_step_tokens": max(largest, _ROWS * _PROMPT),
            "threads": 1,
            "pp_size": _STAGES,
            "rendezvous": f"{folder}/store",
        }
        pipes = [spawn.Pipe() for _ in range(_STAGES)]
        processes = [
            spawn.Process(target=_stage, args=(stage, config, tokens, prompts, rounds, pipes[stage][1]), daemon=True)
            for stage in range(_STAGES)
        ]
        for process in processes:
            process.start()
        for _, there in pipes:
            there.close()
        try:
            stages = [here.recv() for here, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [(name, stages[-1][name][0], [stage[name][1] for stage in stages]) for name in stages[-1]]


def _stage(
    index: int,
    config: dict[str, Any],
    tokens: int,
    prompts: dict[str, tuple[list[int], int]],
    rounds: int,
    answer: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    from kernels.contract.config import RunnerConfig
    from kernels.contract.step import StepBatch, StepResult
    from kernels.execution.runner import ModelRunner
    from tests.kits.driver import Driver

    class Stage(ModelRunner):
        def run(self, batch: StepBatch) -> StepResult:
            """Wait for the results of the last stage alone: others go on to the next step."""
            running = self.start(batch)
            if index == _STAGES - 1:
                return running.result()
            return StepResult(batch.number, accepted=bytes(len(batch.slots)), tokens=b"")

    runner = Stage(RunnerConfig(**config, pp_rank=index))
    driver = Driver(runner, runner.load())
    stage = runner._loaded.model.stage
    draws = random.Random(1)
    found: dict[str, tuple[list[float], list[float]]] = {}

    def steps(name: str, rows: list[list[tuple[int, int]]], ahead: int) -> None:
        """Run the steps, with the results of ``ahead`` of them unknown; the result of the last one ends the time."""
        dist.barrier()
        begun, waited = time.perf_counter(), stage.waited
        for number, step in enumerate(rows):
            driver.unanswered = min(number, ahead)
            driver.step(step)
        for each in list(runner._context.unsettled):
            with torch.inference_mode():
                each.result()
        seconds, driver.unanswered = time.perf_counter() - begun, 0
        times, shares = found.setdefault(name, ([], []))
        times.append(seconds)
        shares.append(100 * (stage.waited - waited) / seconds)

    for _ in range(rounds):
        for slot in range(1, _ROWS + 1):
            driver.admit(slot, [draws.randrange(2048) for _ in range(_PROMPT)])
        driver.step([(slot, _PROMPT) for slot in range(1, _ROWS + 1)])
        for parts in (1, 2, 4):
            groups = [[(slot, 1) for slot in range(part + 1, _ROWS + 1, parts)] for part in range(parts)]
            name = f"{_ROWS} rows decode, {parts} micro-batch{'es' * (parts > 1)}"
            steps(name, groups * _TURNS, parts - 1)
        for slot in range(1, _ROWS + 1):
            driver.release(slot)
        for name, (sizes, ahead) in prompts.items():
            driver.admit(1, [draws.randrange(2048) for _ in range(tokens)])
            steps(name, [[(1, size)] for size in sizes], ahead)
            driver.release(1)
    answer.send(found)
    dist.barrier()


if __name__ == "__main__":
    raise SystemExit(main())
