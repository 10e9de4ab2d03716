"""How long a step waits while experts move between two ranks (EPLB), beside the time of a step.

    python -m tests.bench expert_moves --record             # two workers on this CPU, about a minute
    python -m tests.bench expert_moves --hidden 512 --inner 512 --experts 32

A model of made-up weights decodes one stream in an engine without HTTP, and EPLB rebalances again and again. For
each rebalance that moved experts the engine reports the longest wait of one step. The goal is at most the time of a
step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import uvloop

from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from app.understudy import MODEL_DIR
from kernels.contract.step import Rebalanced
from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]


async def _measure(options: argparse.Namespace) -> None:
    model = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_experts": options.experts,
        "num_experts_per_tok": options.chosen,
        "moe_intermediate_size": options.inner,
        "norm_topk_prob": True,
    }
    moves = {"enable_eplb": True, "eplb_rebalance_num_iterations": options.iterations}
    copies = {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic"}
    ratios, gaps, seen = list[float](), list[float](), list[Rebalanced]()
    async with Engine(
        model=str(MODEL_DIR),
        load_format="dummy",
        json_model_override_args=model,
        tp_size=2,
        ep_size=2,
        **moves,
        **copies,
    ) as engine:
        (board,) = engine.board.all
        for number in range(options.rounds):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=options.tokens, ignore_eos=True)
            moments, found = list[float](), list[Rebalanced]()
            async for _ in engine.generate(list(range(300 + number, 316 + number)), params):
                moments.append(time.perf_counter())
                last = board.rebalanced
                if last is not None and last.moved and all(last is not one for one in seen):
                    seen.append(last)
                    found.append(last)
            gaps = [after - before for before, after in itertools.pairwise(moments[8:])]
            step = statistics.median(gaps)
            ratios += [one.seconds / step for one in found]
            print(
                f"step {1e3 * step:.2f} ms, longest {1e3 * max(gaps):.2f}; moves of "
                f"{', '.join(f'{one.moved} experts: {1e3 * one.seconds:.2f} ms' for one in found) or 'none'}",
                flush=True,
            )
    size = 6 * options.hidden * options.inner / 1e6
    name = f"ep 2, {options.layers} layers of {options.experts} experts of {size:.1f} MB, {options.chosen} of a token"
    if ratios:
        record(name, "longest wait of a step for moves, of a step", ratios, "times")
        print(f"{name}: longest wait {statistics.median(ratios):.2f} (to {max(ratios):.2f}) times a step")


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    for name, default, says in (
        ("hidden", 1024, "width of the residual stream"),
        ("inner", 1024, "inner width of an expert"),
        ("experts", 30, "of a layer"),
        ("chosen", 8, "experts of a token"),
        ("layers", 4, "of the model"),
        ("iterations", 64, "steps between two rebalances"),
        ("tokens", 256, "of a request"),
        ("rounds", 4, "requests, one after the other"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=says)
    uvloop.run(_measure(parser.parse_args(argv)))
    return 0
