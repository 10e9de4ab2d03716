"""The time of a step with `--moe-a2a-backend none` and `deepep`: how tokens of data-parallel attention reach experts.

    python -m tests.bench expert_exchange --record          # two workers on this CPU, about two minutes
    python -m tests.bench expert_exchange --experts 64 --chosen 2

A model of made-up weights with a shared expert decodes streams in two parts of attention, in an engine without HTTP.
All engines are measured in turn in each round. The time of a step is the time between two tokens of a stream; the time
of a prefill is the time to first token of one long prompt for each part at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any

import uvloop

from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from app.understudy import MODEL_DIR
from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_DEEPEP = {"moe_a2a_backend": "deepep"}
_FORMS: dict[str, dict[str, Any]] = {
    "none": {"enable_expert_parallel": True},
    "low_latency": _DEEPEP | {"deepep_mode": "low_latency"},
    "normal": _DEEPEP | {"deepep_mode": "normal"},
    "auto, overlap": _DEEPEP | {"enable_single_batch_overlap": True},
}


def _model(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_experts": options.experts,
        "num_experts_per_tok": options.chosen,
        "moe_intermediate_size": options.inner,
        "shared_expert_intermediate_size": options.inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


async def _measure(options: argparse.Namespace, form: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a decode, and of the first token of a prompt for each part."""
    async with Engine(
        model=str(MODEL_DIR),
        load_format="dummy",
        json_model_override_args=_model(options),
        tp_size=2,
        data_parallel_size=2,
        enable_dp_attention=True,
        load_balance_method="round_robin",
        disable_radix_cache=True,
        **form,
    ) as engine:

        async def moments(seed: int, length: int, tokens: int) -> list[float]:
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
            begun = time.perf_counter()
            ids = [(seed * 7919 + place * 31) % 400 + 10 for place in range(length)]
            return [begun] + [time.perf_counter() async for _ in engine.generate(ids, params)]

        await asyncio.gather(*(moments(seed, 16, 8) for seed in range(options.streams)))
        decodes = await asyncio.gather(*(moments(seed, 16, options.tokens) for seed in range(options.streams)))
        gaps = [after - before for each in decodes for before, after in itertools.pairwise(each[8:])]
        prompts = [await asyncio.gather(*(moments(2 * n + k, options.prompt, 1) for k in range(2))) for n in range(3)]
        firsts = [max(each[1] - each[0] for each in pair) for pair in prompts]
    return 1e3 * statistics.median(gaps), 1e3 * min(firsts)


async def _run(options: argparse.Namespace) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _FORMS}
    for _ in range(options.rounds):
        for name, form in _FORMS.items():
            found[name].append(await _measure(options, form))
            print(f"{name:>14}: decode {found[name][-1][0]:.2f} ms, prefill {found[name][-1][1]:.1f} ms", flush=True)
    size = f"{options.experts} experts of {options.hidden} by {options.inner}, {options.chosen} of a token"
    for name, rows in found.items():
        point = f"{name}; {options.layers} layers of {size}; {options.streams} streams, prompts of {options.prompt}"
        record(point, "decode", [decode for decode, _ in rows], "ms")
        record(point, "prefill", [prefill for _, prefill in rows], "ms")


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    for name, default, says in (
        ("hidden", 1024, "width of the residual stream"),
        ("inner", 512, "inner width of an expert"),
        ("experts", 32, "of a layer"),
        ("chosen", 4, "experts of a token"),
        ("layers", 4, "of the model"),
        ("streams", 8, "at the same time"),
        ("tokens", 64, "of a stream"),
        ("prompt", 512, "tokens of a long prompt"),
        ("rounds", 3, "measurements of each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=says)
    uvloop.run(_run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
