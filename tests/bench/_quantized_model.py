"""A model in a child process, for benchmarks of quantization: its answers and its tokens a second."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.understudy import MODEL_DIR
from tests.understudy.corpus import documents
from tests.understudy.evaluate import CAPITALS, LIMIT
from tests.understudy.examination import questions

if TYPE_CHECKING:
    from kernels.contract.runner import RunningStep

__all__ = ["ONLINE", "Process", "answer"]

ROOT = Path(__file__).resolve().parents[2]
ONLINE = ("int8", "fp8")
HELD_OUT_SEED = 20_261_121
DOCUMENTS = 150
CONTEXT = 1024
SLOTS = 65
GRAPH_ROWS = (1, 16)


class _Engine:
    """A model runner in this process, driven directly."""

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
        from kernels.contract.config import RunnerConfig
        from kernels.execution.runner import ModelRunner

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
        from kernels.contract.step import StepBatch

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
        from kernels.contract.step import Admission, SlotSampling

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

    def likelihoods(self, tokens: list[int], chunk: int) -> Any:
        """float32 [tokens - 1], log probabilities of all but the first. ``chunk``: tokens of a step, 0: all."""
        admitted = self.admissions([tokens], prompt_logprobs=0)
        found = []
        for begin in range(0, len(tokens), chunk or len(tokens)):
            count = min(chunk or len(tokens), len(tokens) - begin)
            result = self.step([1], [count], admitted if begin == 0 else None, range(1, SLOTS) if begin == 0 else ())
            found.append(np.frombuffer(result.prompt_logprobs, np.float32))
        return np.concatenate(found)

    def greedy(self, prompts: list[list[int]], ends: set[int], max_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt."""
        admitted = self.admissions(prompts)
        slots = list(range(1, len(prompts) + 1))
        counts = [len(prompt) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        for at in range(max_tokens):
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
    """Tokens of each document, and a mask of those that count."""
    for segments in documents(HELD_OUT_SEED, DOCUMENTS):
        tokens: list[int] = []
        counts: list[bool] = []
        for segment in segments:
            ids = tokenizer.encode(segment.text).ids
            tokens += ids
            counts += [segment.learn] * len(ids)
        yield tokens[: CONTEXT - 2], counts[: CONTEXT - 2]


def _accuracy(scheme: str, path: str, device: str, cache: str, chunk: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    engine = _Engine(path, scheme, device, cache=cache)
    total, number = 0.0, 0
    for tokens, counts in _held_out(tokenizer.backend_tokenizer):
        learnt = np.array(counts[1:])
        total += float(engine.likelihoods(tokens, chunk)[learnt].sum(dtype=np.float64))
        number += int(learnt.sum())
    capitals = [question for question in questions() if question.subject in CAPITALS]
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
            ),
            add_special_tokens=False,
        )
        for question in capitals
    ]
    right = 0
    for begin in range(0, len(capitals), SLOTS - 1):
        replies = engine.greedy(prompts[begin : begin + SLOTS - 1], {0, 2}, LIMIT)
        for question, reply in zip(capitals[begin:], replies, strict=False):
            right += question.right(tokenizer.decode(reply, skip_special_tokens=True))
    return {"perplexity": math.exp(-total / number), "tokens": number, "right": right, "questions": len(capitals)}


def answer(task: dict[str, Any]) -> None:
    """Answer one task, then measure decode points as lines of the input name them."""
    if task["device"] == "cpu":
        from kernels.devices.cpu.native.library import build

        build()
    if task["what"] == "accuracy":
        how = task["scheme"], task["path"], task["device"], task.get("cache", ""), task.get("chunk", 0)
        print(json.dumps(_accuracy(*how)), flush=True)
        return
    cache, context = task.get("cache", ""), task.get("context", CONTEXT)
    how = task["threads"], task["clock"]
    engine = _Engine(task["path"], task["scheme"], task["device"], task["load_format"], cache, context, *how)
    print(json.dumps({"bytes": engine.info.weight_bytes, "token": engine.info.cache_token_bytes}), flush=True)
    for line in sys.stdin:
        rows, held = map(int, line.split())
        print(json.dumps({"rate": engine.decode(rows, task["steps"], held)}), flush=True)


class Process:
    """A child process with one model."""

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
