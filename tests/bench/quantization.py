"""What quantization costs in accuracy and gains in bytes and speed, in process, without a server.

    python -m tests.bench quantization [--schemes int8 fp8] [--checkpoints gptq-4] [--shapes understudy 0.6b]
                                            [--caches int8 fp8_e4m3 fp8_e4m3:none]

``--schemes``: values of --quantization, and of shapes with made-up weights checkpoints, too: w4a16 and w8a16 (GPTQ in
groups of 128), compressed-w8a8, and gguf-q4_k_m and the like. ``--checkpoints``: layouts that the model in the box is
written in first; see ``CHECKPOINTS``, "all" for each. They are made by rounding alone, without calibration.

First table: the model in the box under every scheme: perplexity of held-out documents (a seed that no training saw; the
parts that training counts), how much worse it is than that of bf16 and may be at most (1 % at 6 to 8 bits, 5 % at 4 and
5), and the share of the held-out capital questions answered rightly. Second: bytes of weights, and tokens a second of
decodes at batch 1 and 16, schemes in turns in one process each; ``0.6b`` is a Qwen3 shape with made-up weights, and
``moe`` one of Qwen3-MoE.
``--device``: cpu or cuda. ``--clock cpu`` counts processor time of all threads, which neighbours disturb less.

``--caches``: values of --kv-cache-dtype, with ":none" by scale 1.0 and else by a scale for each token and head: the
same of the model in the box, with bytes of a token in the cache and decodes behind a long prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.understudy import MODEL_DIR
from app.understudy.corpus import documents
from app.understudy.evaluate import CAPITALS, LIMIT
from app.understudy.examination import questions
from tests.bench._checkpoints import CHECKPOINTS, limit_of, made_up_gguf, write
from tests.bench.cpu import SHAPES, described

if TYPE_CHECKING:
    from kernels.answers import RunningStep

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT_SEED = 20_261_121
DOCUMENTS = 150
CONTEXT = 1024
SLOTS = 65
GRAPH_ROWS = (1, 16)
FLOATS = "bf16"
ONLINE = ("int8", "fp8")
CACHES = ("int8", "fp8_e4m3", "fp8_e4m3:none", "fp8_e5m2", "fp8_e5m2:none")
LONG = 3584
MADE_UP: dict[str, dict[str, Any]] = {
    f"w{bits}a16": {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True}
    for bits in (4, 8)
}
_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
MADE_UP["compressed-w8a8"] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": _GROUP},
    "ignore": ["lm_head"],
}
"""quantization_config of schemes that only checkpoints have."""
FILES = {"gguf-q8": "Q8_0", "gguf-q6_k": "Q6_K", "gguf-q5_k_m": "Q5_K_M", "gguf-q4_k_m": "Q4_K_M", "gguf-q4": "Q4_0"}
"""Mixtures of types that made-up files have, of Qwen3 shapes."""
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


class _Engine:
    """A model runner in this process, and the scheduler's part in words."""

    def __init__(
        self,
        path: str,
        scheme: str,
        device: str,
        load_format: str = "auto",
        cache: str = "",
        context: int = CONTEXT,
        threads: int = 0,
        clock: str = "wall",
    ) -> None:
        from kernels.runner import ModelRunner
        from kernels.step import RunnerConfig

        self.runner = ModelRunner(
            RunnerConfig(
                model_path=path,
                device=device,
                load_format=load_format,
                dtype="bfloat16",
                quantization=scheme if scheme in ONLINE else "",
                kv_cache_dtype=cache.partition(":")[0],
                kv_cache_quant_method=cache.partition(":")[2],
                max_total_tokens=SLOTS * CONTEXT,
                max_slots=SLOTS,
                context_length=context,
                page_size=64,
                max_step_tokens=8192,
                graph_rows=GRAPH_ROWS,
                threads=threads,
            )
        )
        self.now = time.process_time if clock == "cpu" else time.perf_counter
        self.info = self.runner.load()
        self.number, self.context, self.ahead = 0, context, device == "cuda"

    def step(self, slots: list[int], counts: list[int], admitted: list[Any] | None = None, released: Any = ()) -> Any:
        result = self.runner.run(self._batch(slots, counts, admitted, released))
        assert not result.failed, result.failed
        return result

    def _batch(self, slots: list[int], counts: list[int], admitted: list[Any] | None = None, released: Any = ()) -> Any:
        from kernels.step import StepBatch

        def pack(values: Any) -> bytes:
            return np.asarray(list(values), np.int32).tobytes()

        self.number += 1
        return StepBatch(
            self.number,
            pack(slots),
            pack([self.generation] * len(slots)),
            pack(counts),
            admitted=tuple(admitted or ()),
            released=pack(released),
        )

    def admissions(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        from kernels.step import Admission, SlotSampling

        self.generation = self.number + 1
        pages = self.context // self.info.page_size
        return [
            Admission(
                slot,
                self.generation,
                np.asarray(prompt, np.int32).tobytes(),
                len(prompt),
                0,
                np.arange(1 + (slot - 1) * pages, 1 + slot * pages, dtype=np.int32).tobytes(),
                SlotSampling(temperature=0.0, **sampling),
            )
            for slot, prompt in enumerate(prompts, 1)
        ]

    def likelihoods(self, tokens: list[int]) -> Any:
        """float32 [tokens - 1], log probabilities of all but the first."""
        admitted = self.admissions([tokens], prompt_logprobs=0)
        result = self.step([1], [len(tokens)], admitted, range(1, SLOTS))
        return np.frombuffer(result.prompt_logprobs, np.float32)

    def greedy(self, prompts: list[list[int]], ends: set[int], most: int) -> list[list[int]]:
        """What follows each prompt."""
        admitted = self.admissions(prompts)
        slots = list(range(1, len(prompts) + 1))
        counts = [len(prompt) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        for at in range(most):
            if not slots:
                break
            result = self.step(slots, counts, admitted if at == 0 else None, range(1, SLOTS) if at == 0 else ())
            for slot, token in zip(list(slots), np.frombuffer(result.tokens, np.int32).tolist(), strict=True):
                if token in ends:
                    slots.remove(slot)
                else:
                    found[slot - 1].append(token)
            counts = [1] * len(slots)
        return found

    def decode(self, rows: int, steps: int, held: int = 128) -> float:
        """Tokens a second of decodes of so many rows behind ``held`` tokens each: of the median step; on a GPU, of all
        steps, the host being one ahead.
        """
        rng = random.Random(rows)
        prompts = [[rng.randrange(3, 4000) for _ in range(held)] for _ in range(rows)]
        slots = list(range(1, rows + 1))
        self.step(slots, [held] * rows, self.admissions(prompts), range(1, SLOTS))
        if self.ahead:
            return self._overlapped(slots, steps)
        times = []
        for _ in range(steps):
            begun = self.now()
            self.step(slots, [1] * rows)
            times.append(self.now() - begun)
        return rows / statistics.median(times[4:])

    def _overlapped(self, slots: list[int], steps: int) -> float:
        running: deque[RunningStep] = deque()
        begun = 0.0
        for at in range(steps):
            if at == 4:
                begun = self.now()
            running.append(self.runner.start(self._batch(slots, [1] * len(slots))))
            if len(running) > 1:
                running.popleft().result()
        while running:
            running.popleft().result()
        return len(slots) * (steps - 4) / (self.now() - begun)


def _held_out(tokenizer: Any) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokens of each document, and which of them count."""
    for segments in documents(HELD_OUT_SEED, DOCUMENTS):
        tokens: list[int] = []
        counts: list[bool] = []
        for segment in segments:
            ids = tokenizer.encode(segment.text).ids
            tokens += ids
            counts += [segment.learn] * len(ids)
        yield tokens[: CONTEXT - 2], counts[: CONTEXT - 2]


def _accuracy(scheme: str, path: str, device: str, cache: str) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    engine = _Engine(path, scheme, device, cache=cache)
    total, number = 0.0, 0
    for tokens, counts in _held_out(tokenizer.backend_tokenizer):
        learnt = np.array(counts[1:])
        total += float(engine.likelihoods(tokens)[learnt].sum(dtype=np.float64))
        number += int(learnt.sum())
    asked = [question for question in questions() if question.subject in CAPITALS]
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
            ),
            add_special_tokens=False,
        )
        for question in asked
    ]
    right = 0
    for begin in range(0, len(asked), SLOTS - 1):
        replies = engine.greedy(prompts[begin : begin + SLOTS - 1], {0, 2}, LIMIT)
        for question, reply in zip(asked[begin:], replies, strict=False):
            right += question.right(tokenizer.decode(reply, skip_special_tokens=True))
    return {"perplexity": math.exp(-total / number), "tokens": number, "right": right, "asked": len(asked)}


def _child(task: dict[str, Any]) -> None:
    """Answer one task, then decode points as they are asked for."""
    if task["device"] == "cpu":
        from kernels.cpu.native.library import build

        build()
    if task["what"] == "accuracy":
        print(json.dumps(_accuracy(task["scheme"], task["path"], task["device"], task.get("cache", ""))), flush=True)
        return
    cache, context = task.get("cache", ""), task.get("context", CONTEXT)
    how = task["threads"], task["clock"]
    engine = _Engine(task["path"], task["scheme"], task["device"], task["load_format"], cache, context, *how)
    print(json.dumps({"bytes": engine.info.weight_bytes, "token": engine.info.cache_token_bytes}), flush=True)
    for line in sys.stdin:
        rows, held = map(int, line.split())
        print(json.dumps({"rate": engine.decode(rows, task["steps"], held)}), flush=True)


class _Process:
    """A child that holds one model."""

    def __init__(self, **task: Any) -> None:
        command = [sys.executable, "-m", "tests.bench", "quantization", "--child", json.dumps(task)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first = self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a measured process died; its error stands above")
        found: dict[str, float] = json.loads(line)
        return found

    def decode(self, rows: int, held: int = 128) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows} {held}\n")
        self._process.stdin.flush()
        return self._answer()["rate"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _model(shape: str, scheme: str, directory: Path) -> tuple[str, str]:
    """Path and load format."""
    if shape == "understudy":
        return str(MODEL_DIR), "auto"
    config = LLAMA_8B
    if shape in SHAPES:
        config = described(shape)
    if scheme in FILES:
        return str(made_up_gguf(config, FILES[scheme], directory / f"{shape}-{scheme}.gguf")), "auto"
    if scheme in MADE_UP:
        config = config | {"quantization_config": MADE_UP[scheme]}
    path = directory / f"{shape}-{scheme}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path), "dummy"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="quantization", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--schemes", nargs="*", default=list(ONLINE), choices=[*ONLINE, *MADE_UP, *FILES])
    parser.add_argument("--checkpoints", nargs="*", default=[], choices=["all", *CHECKPOINTS])
    parser.add_argument("--shapes", nargs="*", default=["understudy", "0.6b"], choices=[*SHAPES, "understudy", "8b"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--caches", nargs="*", default=[], choices=CACHES)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU's operators; 0: one a core")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--skip-accuracy", action="store_true")
    given = parser.parse_args(argv)
    if given.child:
        _child(json.loads(given.child))
        return 0
    schemes = [FLOATS, *given.schemes]
    layouts = list(CHECKPOINTS) if given.checkpoints == ["all"] else given.checkpoints
    with tempfile.TemporaryDirectory() as directory:
        box = {name: write(name, Path(directory) / name) for name in layouts}
        if not given.skip_accuracy:
            _scores([*(scheme for scheme in schemes if scheme not in MADE_UP | FILES), *box], box, given.device)
        if given.shapes:
            points = "".join(f" tokens/s at batch {rows} | of bf16 |" for rows in given.rows)
            print(f"\n| model | scheme | weights, MB |{points}\n|---|---|---|{'---|---|' * len(given.rows)}")
        for shape in given.shapes:
            also = box if shape == "understudy" else {}
            own = [scheme for scheme in schemes if shape != "understudy" or scheme not in MADE_UP | FILES]
            places = {scheme: _model(shape, scheme, Path(directory)) for scheme in own}
            places |= {scheme: (str(path), "auto") for scheme, path in also.items()}
            _speed(shape, places, given)
    if given.caches:
        if not given.skip_accuracy:
            _cache_scores(given.caches, given.device)
        _cache_speed(given)
    return 0


def _scores(schemes: list[str], box: dict[str, Path], device: str) -> None:
    print("| scheme | perplexity | worse by | at most | capital questions right |\n|---|---|---|---|---|")
    base = 0.0
    for scheme in schemes:
        process = _Process(what="accuracy", scheme=scheme, path=str(box.get(scheme, MODEL_DIR)), device=device)
        process.close()
        found = process.first
        base = base or found["perplexity"]
        worse = 100 * (found["perplexity"] / base - 1)
        limit = None if scheme == FLOATS else limit_of(scheme)
        told = "" if limit is None else f"{limit:g} %" if worse <= limit else f"{limit:g} %: missed"
        share = 100 * found["right"] / found["asked"]
        print(
            f"| {scheme} | {found['perplexity']:.4f} | {worse:+.2f} % | {told} | {found['right']} of {found['asked']} "
            f"({share:.1f} %) |",
            flush=True,
        )


def _cache_scores(caches: list[str], device: str) -> None:
    print("\n| cache | perplexity | worse by | capital questions right |\n|---|---|---|---|")
    base = 0.0
    for cache in ["", *caches]:
        process = _Process(what="accuracy", scheme=FLOATS, path=str(MODEL_DIR), device=device, cache=cache)
        process.close()
        found = process.first
        base = base or found["perplexity"]
        share = 100 * found["right"] / found["asked"]
        print(
            f"| {cache or FLOATS} | {found['perplexity']:.4f} | {100 * (found['perplexity'] / base - 1):+.2f} % | "
            f"{found['right']} of {found['asked']} ({share:.1f} %) |",
            flush=True,
        )


def _cache_speed(given: argparse.Namespace) -> None:
    """Decodes of the model in the box, caches in turns."""
    points = [*((rows, 128) for rows in given.rows), (1, LONG)]
    heads = "".join(f" tokens/s at batch {rows}, {held} tokens | of bf16 |" for rows, held in points)
    print(f"\n| cache | bytes of a token |{heads}\n|---|---|{'---|---|' * len(points)}")
    names = ["", *given.caches]
    common = _common(given) | {"scheme": FLOATS, "path": str(MODEL_DIR), "load_format": "auto"}
    sides = [_Process(cache=cache, context=LONG + 256, **common) for cache in names]
    rates: dict[tuple[int, int, int], list[float]] = {}
    for _ in range(given.rounds):
        for rows, held in points:
            for at, side in enumerate(sides):
                rates.setdefault((at, rows, held), []).append(side.decode(rows, held))
    for at, (cache, side) in enumerate(zip(names, sides, strict=True)):
        cells = ""
        for rows, held in points:
            pairs = zip(rates[at, rows, held], rates[0, rows, held], strict=True)
            against = statistics.median(mine / theirs for mine, theirs in pairs)
            cells += f" {statistics.median(rates[at, rows, held]):.0f} | {against:.2f} |"
        print(f"| {cache or FLOATS} | {side.first['token']:.0f} |{cells}", flush=True)
        side.close()


def _common(given: argparse.Namespace) -> dict[str, Any]:
    """What all tasks of a run that measures speed share."""
    names = "device", "steps", "threads", "clock"
    return {"what": "speed"} | {name: getattr(given, name) for name in names}


def _speed(shape: str, places: dict[str, tuple[str, str]], given: argparse.Namespace) -> None:
    """``places``: path and load format of each scheme."""
    schemes = list(places)
    sides = [
        _Process(scheme=scheme, path=path, load_format=load_format, **_common(given))
        for scheme, (path, load_format) in places.items()
    ]
    rates: dict[tuple[int, int], list[float]] = {}
    for _ in range(given.rounds):
        for rows in given.rows:
            for at, side in enumerate(sides):
                rates.setdefault((at, rows), []).append(side.decode(rows))
    for at, (scheme, side) in enumerate(zip(schemes, sides, strict=True)):
        cells = ""
        for rows in given.rows:
            against = statistics.median(
                mine / theirs for mine, theirs in zip(rates[at, rows], rates[0, rows], strict=True)
            )
            cells += f" {statistics.median(rates[at, rows]):.0f} | {against:.2f} |"
        print(f"| {shape} | {scheme} | {side.first['bytes'] / 1e6:.1f} |{cells}", flush=True)
        side.close()


if __name__ == "__main__":
    main()
