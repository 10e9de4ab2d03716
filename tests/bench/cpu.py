"""Measure steps of a model runner on the CPU, in process, without a server.

    python -m tests.bench cpu [--models tiny understudy 0.6b moe sinks glm latent] [--against CHECKOUT]
                              [--rounds 5] [--deterministic]

Milliseconds of a decode step at 1, 8 and 32 rows (contexts of 128 tokens and longer), prompt tokens a second of
prefill chunks, and the bytes of weights that a decode step reads a second, beside what this machine's memory gives in
the same run to one thread and to all. Where weights come from memory, so do keys and values: what a step reads of both
is set against what memory gives in the same round, whose reading goes up and down by the minute; medians count.
``tiny`` and ``0.6b`` are Qwen3 shapes with made-up weights, ``moe`` is one of Qwen3-MoE whose tokens take 4 of 32
experts, ``sinks`` one of gpt-oss and ``glm`` one of GLM-4.5 with as many, ``latent`` one of DeepSeek-V2 with
V2-Lite's heads (MLA); ``understudy`` is the included model, and 0.6b-Q8_0.gguf a file of
that shape. ``--against``: another checkout of Troupe, measured in turns with this one; the ratio is old time over new.
``--clock cpu`` counts processor time of all threads, which neighbours on a shared machine disturb less.
``--deterministic``: beside it, in turns, the same checkout with --enable-deterministic-inference; the ratio is the time
with it over that without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench._options import command_line

__all__ = ["SHAPES", "described", "main"]

ROOT = Path(__file__).resolve().parents[2]
DECODES = (1, 8, 32)
PREFILLS = (512, 2048)
PROMPT = 128
_CACHED = 256 << 20  # bytes of weights that may stay in a cache
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "vocab_size": 8192,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "moe": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
    },
    "sinks": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 8192,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "glm": {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    "latent": {
        "hidden_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
    },
}


def described(shape: str) -> dict[str, Any]:
    """The config.json of one of ``SHAPES``."""
    sizes = SHAPES[shape]
    family = ("Qwen3MoeForCausalLM", "qwen3_moe") if "num_experts" in sizes else ("Qwen3ForCausalLM", "qwen3")
    architecture, model_type = ("GptOssForCausalLM", "gpt_oss") if "sliding_window" in sizes else family
    if "n_group" in sizes:
        architecture, model_type = "Glm4MoeForCausalLM", "glm4_moe"
    if "kv_lora_rank" in sizes:
        architecture, model_type = "DeepseekV2ForCausalLM", "deepseek_v2"
    return sizes | {
        "architectures": [architecture],
        "model_type": model_type,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
    }


class _Steps:
    """A model runner in this process, and its timed steps."""

    def __init__(self, path: str, load_format: str, threads: int, clock: str, invariant: bool) -> None:
        from kernels.contract.config import RunnerConfig
        from kernels.execution.runner import ModelRunner

        self.runner = ModelRunner(
            RunnerConfig(
                model_path=path,
                load_format=load_format,
                dtype="bfloat16",
                max_total_tokens=40 * 1024,
                context_length=4096,
                threads=threads,
                invariant=invariant,
            )
        )
        self.info = self.runner.load()
        self.number = 0
        self.clock = time.process_time if clock == "cpu" else time.perf_counter

    def _run(self, counts: list[int], admit: int = 0, release: bool = False) -> float:
        """Seconds of one step of slots 1 .. ``len(counts)``, admitting prompts of ``admit`` tokens first."""
        import numpy as np

        from kernels.contract.step import Admission, SlotSampling, StepBatch

        def pack(values: Any) -> bytes:
            return np.asarray(values, dtype=np.int32).tobytes()

        rows = len(counts)
        each = (self.info.num_pages - 1) // rows
        admitted = []
        for row in range(rows if admit else 0):
            tokens = np.random.default_rng(row).integers(3, 4000, admit)
            pages = range(1 + row * each, 1 + row * each + min(each, 128))
            sampling = SlotSampling(temperature=0.0)
            admitted.append(Admission(row + 1, self.number, pack(tokens), admit, 0, pack(pages), sampling))
            self.generation = self.number
        self.number += 1
        slots = range(1, rows + 1)
        batch = StepBatch(
            self.number,
            pack(slots),
            pack([self.generation] * rows),
            pack(counts),
            admitted=tuple(admitted),
            released=pack(range(1, 41)) if release else b"",
        )
        begun = self.clock()
        result = self.runner.run(batch)
        taken = self.clock() - begun
        assert not result.failed, result.failed
        return taken

    def decode(self, rows: int, steps: int, prompt: int) -> float:
        """Milliseconds of a decode step, the median, behind prompts of so many tokens."""
        left = prompt
        while left:  # chunks of all rows within a step's tokens
            chunk = min(left, 2048 // rows)
            self._run([chunk] * rows, prompt if left == prompt else 0, left == prompt)
            left -= chunk
        return 1e3 * statistics.median(self._run([1] * rows) for _ in range(steps))

    def prefill(self, tokens: int) -> float:
        """Milliseconds of a prompt's only chunk."""
        return 1e3 * self._run([tokens], tokens, release=True)


class _Memory:
    """``size`` bytes in large pages, read by ``threads`` threads to measure the memory's rate."""

    def __init__(self, threads: int, size: int = 1 << 30) -> None:
        import torch

        torch.set_num_threads(threads)
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory, self._size = torch.frombuffer(pages, dtype=torch.int32).fill_(1), size

    def rate(self) -> float:
        """Bytes a second, the best of several times."""
        best = 1e9
        for _ in range(4):
            begun = time.perf_counter()
            self._memory.amax()
            best = min(best, time.perf_counter() - begun)
        return self._size / best


def _shape(name: str) -> str:
    """The shape of a model, or of a GGUF file such as 0.6b-Q8_0."""
    return name.split("-")[0]


def _read(name: str, rows: int, steps: int, prompt: int) -> float:
    """Bytes of keys and values that a decode step reads."""
    sizes = SHAPES[_shape(name)]
    token = sizes["num_hidden_layers"] * 2 * sizes["num_key_value_heads"] * sizes["head_dim"] * 2
    return token * rows * (prompt + (steps + 1) / 2)


def _child(path: str, load_format: str, threads: int, clock: str, invariant: bool) -> None:
    """Answer each line of the input, a point, with its milliseconds."""
    with contextlib.suppress(ImportError):  # an older checkout has no native operators
        from kernels.contract.cpu_isa import chosen_isa
        from kernels.devices.cpu.native.library import OPERATORS, build

        if chosen_isa() in OPERATORS:
            build()
    steps = _Steps(path, load_format, threads, clock, invariant)
    print(steps.info.weight_bytes, flush=True)
    for line in sys.stdin:
        what, size, count = line.rsplit(maxsplit=2)
        if what == "prefill":
            print(steps.prefill(int(size)), flush=True)
        else:
            print(steps.decode(int(size), int(count), int(what.rpartition(" ")[2])), flush=True)


def _models(names: list[str], directory: Path) -> list[tuple[str, str, str]]:
    """Name, path and load format of each."""
    found = []
    for name in names:
        if name.endswith(".gguf"):
            found.append((Path(name).stem, name, "auto"))
            continue
        if name not in SHAPES:
            found.append((name, str(ROOT / "app" / "understudy" / "model"), "auto"))
            continue
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(described(name)))
        found.append((name, str(directory / name), "dummy"))
    return found


def _model(name: str) -> str:
    if name in SHAPES or name == "understudy" or (name.endswith(".gguf") and _shape(Path(name).name) in SHAPES):
        return name
    raise argparse.ArgumentTypeError(f"{name!r} is no shape, not understudy, and no SHAPE-KIND.gguf")


def _measure(name: str, path: str, load_format: str, arguments: argparse.Namespace, memory: _Memory) -> None:
    from tests.bench._checkout import Checkout  # which another checkout may not have

    given = __file__, path, load_format, arguments.threads, arguments.clock
    sides = [Checkout(ROOT, *given, "")]
    if arguments.deterministic:
        sides.append(Checkout(ROOT, *given, "invariant"))
    elif arguments.against is not None:
        sides.append(Checkout(arguments.against.resolve(), *given, ""))
    points = [("decode", rows) for rows in arguments.rows]
    points += [("prefill", tokens) for tokens in arguments.prefill]
    from tests.bench._record import record  # which another checkout may not have

    for what, size in points:
        times: list[list[float]] = [[] for _ in sides]
        sizes = SHAPES.get(_shape(name), {})
        sparse = "num_experts_per_tok" in sizes  # a step reads some of its weights
        by_bytes = what == "decode" and not sparse
        from_memory = by_bytes and bool(sizes) and sides[0].weight_bytes > _CACHED
        rates: list[float] = []
        for turn in range(arguments.rounds):
            asked = what if what == "prefill" else f"{what} behind {arguments.prompt}"
            for side in (range(len(sides)), reversed(range(len(sides))))[turn % 2]:
                times[side].append(sides[side].ask(asked, size, arguments.steps))
            rates += [memory.rate()] if from_memory else []
        new = statistics.median(times[0])
        rate = sides[0].weight_bytes / new / 1e6 if by_bytes else size / new * 1e3
        ratios = [old / now for now, old in zip(times[0], times[-1], strict=True)]
        against = f" {statistics.median(times[1]):.2f} | {statistics.median(ratios):.2f} |" if len(sides) > 1 else ""
        unit = "GB/s" if by_bytes else "tokens/s"
        if from_memory:
            read = sides[0].weight_bytes + _read(name, size, arguments.steps, arguments.prompt)
            shares = [1e5 * read / taken / held for taken, held in zip(times[0], rates, strict=True)]
            unit += f", {statistics.median(shares):.0f} % of memory's"
        behind = f" behind {arguments.prompt}" if what == "decode" and arguments.prompt != PROMPT else ""
        print(f"| {name} | {what} {size}{behind} | {new:.2f} | {rate:.{1 if by_bytes else 0}f} {unit} |{against}")
        point, clock = f"{name} {what} {size}{behind}", "processor time" if arguments.clock == "cpu" else "time"
        record(point, clock, times[0], "ms")
        if from_memory:
            record(point, "of the memory's rate", shares, "%")
        if arguments.deterministic:
            record(point, f"deterministic, {clock}", times[1], "ms")
            record(point, "deterministic, of the default", ratios, "times")
    for side in sides:
        side.close()


def main(argv: list[str] | None = None) -> int:
    if argv is None and sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6] == "invariant")
        return 0
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["tiny", "understudy"],
        type=_model,
        help=f"of {', '.join(SHAPES)}, understudy, or the path of SHAPE-KIND.gguf",
    )
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--against", type=Path, help="another checkout of Troupe")
    other.add_argument("--deterministic", action="store_true", help="with --enable-deterministic-inference as well")
    parser.add_argument("--rows", type=int, nargs="*", default=DECODES, help="of each decode step")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens that each row has before it decodes")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILLS, help="tokens of each chunk")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement; medians count")
    parser.add_argument("--steps", type=int, default=30, help="decode steps a round; their median counts")
    parser.add_argument("--threads", type=int, default=0, help="0: the platform's choice")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="wall: elapsed time; cpu: processor time"
    )
    arguments = parser.parse_args(argv)
    for threads in (1, arguments.threads or len(os.sched_getaffinity(0))):
        memory = _Memory(threads)
        print(f"memory, {threads} threads: {memory.rate() / 1e9:.1f} GB/s")
    ratio = " old ms | old/new |" if arguments.against else ""
    ratio = " deterministic ms | ratio |" if arguments.deterministic else ratio
    print(f"| model | point | ms | |{ratio}\n|---|---|---|---|{'---|---|' if ratio else ''}")
    with tempfile.TemporaryDirectory() as directory:
        for name, path, load_format in _models(arguments.models, Path(directory)):
            _measure(name, path, load_format, arguments, memory)
    return 0


if __name__ == "__main__":
    main()
