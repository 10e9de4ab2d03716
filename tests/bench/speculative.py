"""Measure speculative decoding of the included model, for each algorithm.

    python -m tests.bench speculative [--algorithms EAGLE3 NGRAM] [--batches 1 4 16] [--rounds 5] [--pairs 1]

Two engines in this process, one that speculates and one that does not, answer the same prompts in turns; each round
begins with the other one. Nothing is asked twice, so that n-grams cannot know the answer. Printed for each algorithm
and batch size: the acceptance length (tokens a verification gives), the share of draft tokens accepted, tokens a second
of both and their ratio, the median of the rounds' ratios, where a short answer, which is mostly its prompt, weighs as
much as a long one, and how many answers differ (greedy ones may, where sums are taken in another order).

Two engines that are alike are not equally fast, and stay so for as long as they live. ``--pairs`` says how many times
both are started anew for each algorithm, the other one first each time; the range beside the median is then that of the
pairs' own. ``--algorithms NONE`` has a second engine that does not draft either: what it differs by is chance.

``--hostile`` takes prompts of random tokens that are continued at a high temperature, where hardly a draft token can be
right; ``--adaptive`` adds --speculative-adaptive to each algorithm. ``--both=ARGUMENT`` is an argument of both engines:
with ``--both=--enable-deterministic-inference`` no answer may differ on a GPU. Other arguments of the engine that
draft tokens follow after ``--``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from actors.engine.engine import Engine
from actors.options import Arguments
from actors.protocol.requests import Chat, SamplingParams
from app.cli.arguments import load_arguments
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.serving import cpu_name

__all__ = ["main"]

NONE = "NONE"
ALGORITHMS = ("EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM")

COUNTRIES = (
    *("France", "Japan", "Brazil", "Kenya", "Norway", "Peru", "Italy", "Egypt", "Canada", "Poland", "Chile", "Spain"),
    *("India", "Greece", "Cuba", "Ghana", "Finland", "Austria", "Mexico", "Nepal", "Ireland", "Turkey", "Portugal"),
)
THINGS = (
    *("a fox", "a river", "a girl who finds a key", "an old lighthouse", "a lost dog", "a clever crow", "a snowman"),
    *("two brothers", "a small boat", "a baker", "a talking tree", "a rainy day", "a brave mouse", "a red kite"),
    *("a king who cannot sleep", "the first day of school", "a garden", "a broken clock", "a long walk", "a bear"),
)
QUESTION_FORMS = (
    "What is the capital of {}?",
    "Which countries border {}?",
    "What is the currency of {}?",
    "What language do people speak in {}?",
)
SINGLE = 8
"""Questions of a round at batch 1, one after the other."""


def _questions() -> list[str]:
    """Distinct prompts in a fixed order: an engine gets none twice."""
    every = [form.format(country) for form in QUESTION_FORMS for country in COUNTRIES]
    every += [f"Tell me a short story about {thing}." for thing in THINGS]
    every += [f"Write a few sentences about {thing}." for thing in THINGS]
    every += [f"What is {a} plus {b}?" for a in range(11, 60, 7) for b in range(13, 70, 9)]
    random.Random(5).shuffle(every)
    return every


class Round(NamedTuple):
    seconds: float
    tokens: int
    outputs: list[list[int]]
    steps: int
    drafted: int
    accepted: int


Pair: TypeAlias = tuple[Round, Round]
"""Without draft tokens, and with them."""


async def _answer(engine: Engine, prompt: Chat | list[int], params: SamplingParams) -> tuple[list[int], object]:
    tokens: list[int] = []
    usage = None
    async for delta in engine.generate(prompt, params):
        tokens += delta.token_ids
        usage = delta.usage
    return tokens, usage


async def _round(engine: Engine, prompts: Sequence[Chat | list[int]], params: SamplingParams) -> Round:
    begun = time.perf_counter()
    seeds = [msgspec.structs.replace(params, seed=number) for number in range(len(prompts))]
    answers = await asyncio.gather(
        *(_answer(engine, prompt, each) for prompt, each in zip(prompts, seeds, strict=True))
    )
    seconds = time.perf_counter() - begun
    found = [usage.acceptance for _, usage in answers if usage is not None and usage.acceptance is not None]
    return Round(
        seconds,
        sum(len(tokens) for tokens, _ in answers),
        [tokens for tokens, _ in answers],
        sum(each.steps for each in found),
        sum(each.drafted for each in found),
        sum(each.accepted for each in found),
    )


def _prompts(first: int, count: int, hostile: bool) -> list[Chat | list[int]]:
    """``count`` prompts from number ``first`` on."""
    if hostile:
        draw = random.Random(first)
        return [[draw.randrange(300, 4096) for _ in range(24)] for _ in range(count)]
    questions = _questions()
    chosen = [questions[number % len(questions)] for number in range(first, first + count)]
    return [Chat(messages=[{"role": "user", "content": question}]) for question in chosen]


async def _rounds(plain: Engine, drafting: Engine, batch: int, first: int, args: argparse.Namespace) -> list[Pair]:
    """Answers of both engines to the prompts from number ``first`` on."""
    params = SamplingParams(
        max_tokens=args.tokens, temperature=args.temperature, ignore_eos=args.hostile, top_p=1.0, repetition_penalty=1.0
    )
    rounds: list[Pair] = []
    count = SINGLE if batch == 1 else batch
    for number in range(args.rounds + 1):
        chosen = _prompts(first + number * count, count, args.hostile)
        sets = [[prompt] for prompt in chosen] if batch == 1 else [chosen]
        for prompts in sets:
            order = (plain, drafting) if number % 2 else (drafting, plain)
            results = {id(engine): await _round(engine, prompts, params) for engine in order}
            if number:  # the first one warms up
                rounds.append((results[id(plain)], results[id(drafting)]))
    return rounds


def _median(rounds: Sequence[Pair]) -> float:
    return statistics.median((b.tokens / b.seconds) / (a.tokens / a.seconds) for a, b in rounds)


def _record(
    algorithm: str,
    batch: int,
    args: argparse.Namespace,
    rounds: Sequence[Pair],
    speeds: tuple[float, float],
    different: int,
) -> None:
    """Keep a row. The point names the device, the prompts and --adaptive where they are not the default."""
    kinds = [args.device] if args.device != "cpu" else []
    kinds += [name for name in ("hostile", "adaptive") if getattr(args, name)] + args.both
    point = ", ".join([*kinds, f"{algorithm} batch {batch}"])
    record(point, "plain, tokens/s", speeds[0])
    record(point, "tokens/s", speeds[1])
    record(point, "tokens/s, of plain", speeds[1] / speeds[0])
    record(point, "median of the rounds, of plain", _median(rounds))
    record(point, "answers that differ", different)


def _report(algorithm: str, batch: int, pairs: Sequence[list[Pair]], args: argparse.Namespace) -> None:
    """``pairs``: the rounds of each pair of engines."""
    rounds = [each for pair in pairs for each in pair]
    without, with_ = ([each[side] for each in rounds] for side in (0, 1))
    steps, drafted, accepted = (sum(getattr(each, name) for each in with_) for name in ("steps", "drafted", "accepted"))
    different = sum(x != y for a, b in rounds for x, y in zip(a.outputs, b.outputs, strict=True))
    speeds = [sum(each.tokens for each in side) / sum(each.seconds for each in side) for side in (without, with_)]
    medians = [_median(pair) for pair in pairs]
    spread = f" ({min(medians):.2f} to {max(medians):.2f})" if len(medians) > 1 else ""
    if args.record:
        _record(algorithm, batch, args, rounds, (speeds[0], speeds[1]), different)
    print(
        f"| {algorithm} | {batch} | {1 + accepted / max(steps, 1):.2f} | {accepted / max(drafted, 1):.0%} "
        f"| {speeds[0]:.0f} | {speeds[1]:.0f} | {speeds[1] / speeds[0]:.2f} | {_median(rounds):.2f}{spread} "
        f"| {different}/{len(rounds) * batch} |",
        flush=True,
    )


def _arguments(words: Sequence[str]) -> Arguments:
    return load_arguments([*words, "--max-total-tokens", "32768", "--disable-radix-cache"], {})


async def _compare(algorithm: str, args: argparse.Namespace) -> None:
    common = ["--device", args.device, *args.both]
    words = common
    if algorithm != NONE:
        adaptive = ["--speculative-adaptive"] if args.adaptive else []
        words = [*common, "--speculative-algorithm", algorithm, *adaptive, *args.rest]
    found: dict[int, list[list[Pair]]] = {batch: [] for batch in args.batches}
    offset = 0
    for number in range(args.pairs):
        kinds = (common, words)[:: -1 if number % 2 else 1]
        async with Engine(arguments=_arguments(kinds[0])) as first, Engine(arguments=_arguments(kinds[1])) as second:
            plain, drafting = (second, first) if number % 2 else (first, second)
            for batch in args.batches:
                found[batch].append(await _rounds(plain, drafting, batch, offset, args))
                offset += (args.rounds + 1) * (SINGLE if batch == 1 else batch)
    for batch, pairs in found.items():
        _report(algorithm, batch, pairs, args)


async def _run(args: argparse.Namespace) -> None:
    for algorithm in args.algorithms:
        try:
            await _compare(algorithm, args)
        except (ValueError, RuntimeError) as error:  # an algorithm whose draft is not here
            print(f"| {algorithm} | not measured: {error} |", flush=True)


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), help="of speculative decoding, or NONE")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16], help="prompts at once")
    parser.add_argument("--rounds", type=int, default=5, help="answers of both engines to each batch")
    parser.add_argument("--pairs", type=int, default=1, help="times that both engines are started anew")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument(
        "--temperature", type=float, default=None, help="of sampling; without it greedy, or high for hostile prompts"
    )
    parser.add_argument(
        "--hostile", action="store_true", help="prompts of random tokens, continued at a high temperature"
    )
    parser.add_argument("--adaptive", action="store_true", help="adds --speculative-adaptive")
    parser.add_argument("--device", default="cpu", help="that runs the model")
    parser.add_argument("--both", action="append", default=[], metavar="ARGUMENT", help="of both engines")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.rest = argv[cut + 1 :]
    if min(args.rounds, args.pairs, *args.batches) < 1:
        parser.error("--rounds, --pairs and --batches must be at least 1")
    if args.temperature is None:
        args.temperature = 2.0 if args.hostile else 0.0
    print(f"{cpu_name()}, {args.device}; {args.tokens} tokens an answer, temperature {args.temperature:g}")
    print(
        "| algorithm | batch | acceptance length | accepted | plain tokens/s | drafting | ratio | median of the rounds "
        "| answers that differ |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    asyncio.run(_run(args))
