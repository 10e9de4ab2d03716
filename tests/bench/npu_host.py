"""How long a decode step keeps the host on an NPU in graph mode: preparing it, and feeding the attention's lengths.

    python -m tests.bench npu_host [--rows 1 8 64] [--steps 200] [--layers 28]

The NPU is simulated, and its operators, copies and replays cost nothing: what is measured is Python. ``prepare`` is
Troupe's own, from the step's message to its launch. ``feed`` is torch_npu's: it calls the attention of each layer again
for the new lengths, behind the replay, while the device runs the operators in front of the first; on a device each of
these calls also plans its tiles. ``read`` makes the step's answer from the tokens that came back.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.step import Admission, StepBatch
from tests.bench._needs import need_npu
from tests.bench._npu_counts import KINDS, SAMPLINGS
from tests.bench._options import command_line
from tests.bench._record import record

if TYPE_CHECKING:
    from kernels.execution.runner import ModelRunner

PROMPT = 16
PAGE_SIZE = 128


def main(argv: list[str]) -> None:
    """Print a table: microseconds a step, medians."""
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="that decode, of each point")
    parser.add_argument("--steps", type=int, default=200, help="of each point")
    parser.add_argument("--layers", type=int, default=28, help="of the model")
    options = parser.parse_args(argv)
    need_npu(simulated=True)
    from kernels.devices.npu_simulator.activate import activate

    activate("A2")
    print(f"{'rows':>5} {'sampling':>30} {'prepare us':>11} {'read us':>8} {'feed us':>8}")
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            for name, (prepare, read, feed) in measure(Path(folder), rows, options.steps, options.layers).items():
                print(f"{rows:>5} {name:>30} {prepare:>11.0f} {read:>8.0f} {feed:>8.0f}", flush=True)
                point = f"{rows} rows, {name}"
                for metric, value in (("prepare", prepare), ("read", read), ("feed", feed)):
                    record(point, metric, value, "us")


def measure(folder: Path, rows: int, steps: int, layers: int) -> dict[str, tuple[float, float, float]]:
    """Microseconds of ``prepare``, ``read`` and ``feed``, for each way of sampling."""
    from kernels.execution.runner import ModelRunner

    config = KINDS["Qwen3, bf16"][0] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    pages = 1 + (PROMPT + 2 * steps) // PAGE_SIZE
    runner = ModelRunner(
        RunnerConfig(
            model_path=str(folder),
            device="npu",
            page_size=PAGE_SIZE,
            graph_rows=(rows,),
            load_format="dummy",
            max_total_tokens=PAGE_SIZE * rows * pages,
            max_slots=rows + 1,
            max_step_tokens=rows * PROMPT,
        )
    )
    runner.load()
    result = dict[str, tuple[float, float, float]]()
    for generation, (name, sampling) in enumerate(SAMPLINGS.items(), start=1):
        prompts = tuple(
            Admission(
                slot,
                generation,
                _pack(range(3, 3 + PROMPT)),
                PROMPT,
                0,
                _pack(range(1 + (slot - 1) * pages, 1 + slot * pages)),
                sampling,
            )
            for slot in range(1, rows + 1)
        )
        runner.run(_step(rows, generation, PROMPT, prompts))
        with _costless(feeds=False):
            prepare, read = _timed(runner, rows, generation, steps)
        with _costless(feeds=True):
            fed, _ = _timed(runner, rows, generation, steps // 2)
        result[name] = prepare, read, fed - prepare
    return result


def _pack(values: Iterable[int]) -> bytes:
    return np.array(list(values), np.int32).tobytes()


def _step(rows: int, generation: int, count: int, admitted: tuple[Admission, ...] = ()) -> StepBatch:
    """A step of ``count`` tokens of each row; those ``admitted`` replace the rows before."""
    slots = range(1, rows + 1)
    counts, generations = _pack([count] * rows), _pack([generation] * rows)
    return StepBatch(next(_numbers), _pack(slots), generations, counts, admitted=admitted)


_numbers = itertools.count(1)


def _timed(runner: ModelRunner, rows: int, generation: int, steps: int) -> tuple[float, float]:
    """Medians, in microseconds, of launching a step and of reading its answer."""
    launched, read = list[float](), list[float]()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        batch = _step(rows, generation, 1)
        start = time.perf_counter()
        running = runner.start(batch)
        middle = time.perf_counter()
        answer = running.result()
        read.append(time.perf_counter() - middle)
        launched.append(middle - start)
        if answer.failed or answer.timing.graph_rows != rows:
            raise RuntimeError(f"the step did not run in a graph: {answer.failed}")
    gc.unfreeze()
    return statistics.median(launched) * 1e6, statistics.median(read) * 1e6


@contextmanager
def _costless(feeds: bool) -> Iterator[None]:
    """Operators, copies and replays return at once. ``feeds``: whether torch_npu still feeds the lengths."""
    import torch
    from torch_npu.npu import graphs

    from kernels.devices.npu_simulator.dispatch import Operator

    call = Operator.__call__

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def at_once(operator: Operator, *args: Any, **kwargs: Any) -> Any:
        if operator.name == "aten.copy_.default":
            return args[0] if args[0].device.type == "npu" else args[0].zero_()
        return kwargs["out"] if "out" in kwargs else call(operator, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(Operator, "__call__", at_once))
        patches.enter_context(patch.object(torch.npu.NPUGraph, "replay", nothing))
        if not feeds:
            patches.enter_context(patch.object(torch.npu.NPUGraph, "update", nothing))
        for name in ("graph_task_update_begin", "graph_task_update_end"):
            patches.enter_context(patch.object(graphs, name, nothing))
        patches.enter_context(patch.object(torch.npu.ExternalEvent, "record", nothing))
        yield
