"""What a step costs the scheduler in Python: planning it, asking the prefix cache, and reading its result.

    python -m tests.bench planner [--rows 1 32 256] [--steps 2000]

Every row decodes; two steps are in flight, as in the engine. Pages are asked for and committed as they fill, so a step
of 256 rows asks for 16 pages of 16 tokens on average. Sending the messages is not in the numbers.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from actors.caching import PrefixCache
from actors.protocol import SequenceSpec
from actors.scheduling import Planner, PlannerConfig
from actors.scheduling.testing import drive, model_info
from kernels.contract.step import SlotSampling, StepBatch, StepResult
from tests.bench._options import command_line
from tests.bench._record import record

PAGE_SIZE = 16
PROMPT = 100


def _answer(batch: StepBatch, token: bytes) -> StepResult:
    rows = len(batch.slots) // 4
    return StepResult(number=batch.number, accepted=np.ones(rows, np.int32).tobytes(), tokens=token * rows)


def measure(
    rows: int,
    steps: int,
    *,
    prompt: int = PROMPT,
    seen: Callable[[StepBatch, StepResult], None] = lambda batch, result: None,
) -> tuple[list[float], list[float]]:
    """Seconds of planning, the cache's answers included, and of finishing, for each step.

    ``prompt``: tokens of each sequence before the first step. ``seen``: gets each step and its answer.
    """
    pages = rows * ((prompt + steps + 8) // PAGE_SIZE + 2) + 1
    info = model_info(num_pages=pages, page_size=PAGE_SIZE, context_length=1 << 20)
    room = rows * (prompt + PAGE_SIZE)  # all prompts run in one step, then every row decodes
    config = PlannerConfig(
        max_running=rows, max_slots=rows + 1, step_tokens=room, max_prefill_tokens=room, conservativeness=0.0
    )
    planner = Planner(config)
    cache = PrefixCache(pages, PAGE_SIZE)
    planner.worker_ready(info, 0.0)
    random = np.random.default_rng(0)
    specs = [
        SequenceSpec(
            sequence=i,
            prompt=random.integers(0, 32000, prompt + i % PAGE_SIZE, dtype=np.int32).tobytes(),
            sampling=SlotSampling(),
            max_tokens=steps + 8,
            stop_ids=(2, 3),
        )
        for i in range(rows)
    ]
    planner.submit(specs, 0.0)
    token = np.array([7], dtype=np.int32).tobytes()
    sent: deque[StepResult] = deque()
    plan_seconds: list[float] = []
    finish_seconds: list[float] = []
    gc.collect()
    gc.freeze()
    while len(finish_seconds) < steps:
        start = time.perf_counter()
        plan = drive(planner.plan(0.0), cache)
        middle = time.perf_counter()
        if plan is not None and plan.batch is not None:
            plan_seconds.append(middle - start)
            sent.append(_answer(plan.batch, token))
            seen(plan.batch, sent[-1])
        if planner.can_send:
            continue
        result = sent.popleft()
        start = time.perf_counter()
        planner.finish_step(result, 0.0)
        finish_seconds.append(time.perf_counter() - start)
    gc.unfreeze()
    return plan_seconds[4:], finish_seconds[4:]


def main(argv: list[str]) -> None:
    """Print a table: microseconds a step, median and 99th percentile."""
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="that decode, of each point")
    parser.add_argument("--steps", type=int, default=2000, help="of each point")
    options = parser.parse_args(argv)
    print(f"{'rows':>5} {'plan us':>9} {'p99':>7} {'finish us':>10} {'p99':>7} {'step us':>9} {'a row us':>9}")
    for rows in options.rows:
        plan, finish = measure(rows, options.steps)
        plan_us, finish_us = statistics.median(plan) * 1e6, statistics.median(finish) * 1e6
        both = plan_us + finish_us
        print(
            f"{rows:>5} {plan_us:>9.1f} {np.percentile(plan, 99) * 1e6:>7.0f} {finish_us:>10.1f} "
            f"{np.percentile(finish, 99) * 1e6:>7.0f} {both:>9.1f} {both / rows:>9.2f}"
        )
        record(f"{rows} rows", "step", both, "us")
        record(f"{rows} rows", "step, a row", both / rows, "us")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
