"""What the control plane takes at many replicas, and how the router's methods compare.

    python -m tests.bench scale [--replicas 1 8 64] [--simulated 1000] [--seconds 60]

1. Decisions of the router: a prompt of 1,000 tokens, of which 700 are shared with others.
2. Steps of schedulers: each replica decodes 256 rows with a worker that costs nothing; all run in one process.
3. A simulation in virtual time (its assumptions: ``tests/bench/_traffic.py``) of each method of --load-balance-method.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.boards.journal import Journal
from actors.requests.router import METHODS, Route, Router
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench._traffic import Traffic, simulate
from tests.bench.planner import measure

_SEQUENCES = 64
"""Live sequences of a replica while the router is measured."""


def decisions(method: str, replicas: int, count: int) -> float:
    """Decisions a second."""
    random = np.random.default_rng(0)
    routes = []
    for number in range(replicas):
        journal = Journal()
        board: Any = SimpleNamespace(worker=(None, 0))
        scheduler: Any = None
        for sequence in range(_SEQUENCES):
            entry: Any = SimpleNamespace(sequence=sequence, prompt_ids=[0] * int(random.integers(1000)), output=[])
            journal.open(entry)
        routes.append(Route(scheduler, journal, board, number=number))
    shared = [random.integers(0, 32000, 700, dtype=np.int32).tobytes() for _ in range(100)]
    own = random.integers(0, 32000, (count, 300), dtype=np.int32)
    prompts = [shared[number % len(shared)] + own[number].tobytes() for number in range(count)]
    router = Router(routes, method)
    begin = time.perf_counter()
    for prompt in prompts:
        router.choose(prompt)
    return count / (time.perf_counter() - begin)


def main(argv: list[str]) -> None:
    """Print three tables."""
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 8, 64], help="of the first two tables")
    parser.add_argument("--count", type=int, default=20_000, help="decisions of each point")
    parser.add_argument("--simulated", type=int, nargs="*", default=[1000], help="replicas of the simulation")
    parser.add_argument("--seconds", type=float, default=60.0, help="of simulated traffic")
    options = parser.parse_args(argv)
    print(f"{'replicas':>8} " + " ".join(f"{method:>15}" for method in METHODS) + "   decisions/s")
    for replicas in options.replicas:
        rates = [decisions(method, replicas, options.count) for method in METHODS]
        print(f"{replicas:>8} " + " ".join(f"{rate:>15,.0f}" for rate in rates))
        for method, rate in zip(METHODS, rates, strict=True):
            record(f"{replicas} replicas, {method}", "decisions", rate, "1/s")
    print(f"\n{'replicas':>8} {'steps/s':>9} {'us a step':>10}   256 rows, planned in turn")
    for replicas in options.replicas:
        steps = [measure(256, 100) for _ in range(replicas)]
        step = statistics.median(statistics.median(plan) + statistics.median(finish) for plan, finish in steps)
        print(f"{replicas:>8} {1 / step:>9,.0f} {step * 1e6:>10.0f}")
        record(f"{replicas} replicas", "step of 256 rows", step * 1e6, "us")
    print("\nsimulated traffic; TTFT in ms")
    print(f"{'replicas':>8} {'method':>15} {'requests':>9} {'hit rate':>9} {'TTFT p50':>9} {'p99':>8} {'imbalance':>9}")
    for replicas in options.simulated:
        for method in METHODS:
            outcome = simulate(method, replicas, Traffic(seconds=options.seconds))
            p50, p99 = outcome.first_token_p50 * 1e3, outcome.first_token_p99 * 1e3
            print(
                f"{replicas:>8} {method:>15} {outcome.requests:>9,} {outcome.hit_rate:>9.2f} {p50:>9.0f} {p99:>8.0f} "
                f"{outcome.imbalance:>9.2f}"
            )
            point = f"{replicas} simulated replicas, {method}"
            record(point, "hit rate", outcome.hit_rate)
            record(point, "TTFT p50", p50, "ms")
            record(point, "TTFT p99", p99, "ms")
            record(point, "imbalance", outcome.imbalance)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
