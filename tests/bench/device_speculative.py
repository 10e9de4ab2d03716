"""Speculative decoding on a GPU: ``python -m tests.bench device --only speculative``.

An EAGLE-3 head of the shape's own sizes (a draft vocabulary of 32000), or the model's own head for the next token but
one where its layers keep states; everything on made-up weights, through a ModelRunner as a scheduler drives it, two
steps in flight. How many tokens a step accepts is fixed, since made-up draft
tokens are never right: ``SpeculativeSettings.fixed_acceptance``, which no flag sets. Printed: milliseconds of a plain
decode step; of a step that verifies so many tokens; tokens a second, and the ratio to plain.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import Admission, SlotSampling, StepBatch
from tests.bench._device_profile import profiled
from tests.bench._device_runner import page_run
from tests.bench._record import record

if TYPE_CHECKING:
    from kernels.contract.runner import RunningStep
    from kernels.execution.runner import ModelRunner

PROMPT, OUTPUT = 128, 512
ACCEPTED = 3.0
SHAPES = ((3, 4, 16), (3, 4, 8), (3, 1, 4), (1, 1, 2))
"""Steps, top-k, tokens of a row in a verify pass."""
CHAINS = ((3, 1, 4), (1, 1, 2))
"""The same where layers keep states."""


def write_draft(config: dict[str, Any], directory: Path) -> Path:
    """An EAGLE-3 head's config.json for a target of ``config``."""
    path = directory / "draft"
    path.mkdir(exist_ok=True)
    head = {**config, "num_hidden_layers": 1, "draft_vocab_size": 32000, "architectures": ["LlamaForCausalLMEagle3"]}
    (path / "config.json").write_text(json.dumps(head | {"model_type": "llama", "dtype": "bfloat16"}))
    return path


class Decoding:
    """``rows`` greedy requests that decode, each with all the pages that it will need."""

    def __init__(self, runner: ModelRunner, info: ModelInfo, rows: int, prompt: int = PROMPT) -> None:
        self.runner, self.nodes, self.slots = runner, info.speculative_nodes, np.arange(1, rows + 1, dtype=np.int32)
        each = -(-(prompt + 2 * OUTPUT + 128) // info.page_size)
        generator = np.random.default_rng(rows)
        pages = generator.permutation(np.arange(1, info.num_pages, dtype=np.int32))[: rows * each].reshape(rows, each)
        admitted = tuple(
            Admission(
                slot=slot,
                generation=1,
                tokens=generator.integers(0, info.vocab_size, prompt, dtype=np.int32).tobytes(),
                prompt_length=prompt,
                computed=0,
                pages=pages[slot - 1].tobytes(),
                sampling=SlotSampling(temperature=0.0),
                bounded=tuple(page_run(group, slot - 1, each * info.page_size) for group in info.bounded_groups),
            )
            for slot in self.slots.tolist()
        )
        self.number = 0
        self.runner.run(self._batch(prompt, admitted))

    def _batch(self, count: int, admitted: tuple[Admission, ...] = (), drafts: bool = False) -> StepBatch:
        self.number += 1
        rows = len(self.slots)
        return StepBatch(
            number=self.number,
            slots=self.slots.tobytes(),
            generations=np.ones(rows, dtype=np.int32).tobytes(),
            counts=np.full(rows, count, dtype=np.int32).tobytes(),
            admitted=admitted,
            draft_limits=np.full(rows, self.nodes - 1, dtype=np.int32).tobytes() if drafts else b"",
        )

    def steps(self, count: int, speculate: bool) -> tuple[float, int]:
        """Seconds of ``count`` steps, two in flight, and the tokens that they gave."""
        running: deque[RunningStep] = deque()
        tokens = 0
        begun = time.perf_counter()
        for _ in range(count):
            running.append(self.runner.start(self._batch(1, drafts=speculate)))
            if len(running) > 1:
                tokens += _tokens(running.popleft())
        while running:
            tokens += _tokens(running.popleft())
        return time.perf_counter() - begun, tokens

    def close(self) -> None:
        self.number += 1
        self.runner.run(StepBatch(self.number, b"", b"", b"", released=self.slots.tobytes()))


def _tokens(step: RunningStep) -> int:
    result = step.result()
    assert not result.failed, result.failed
    return len(result.tokens) // 4


def speculative(path: Path, config: dict[str, Any], directory: Path, rows: tuple[int, ...] = (1, 4)) -> None:
    """Measure and print each shape, in turns with plain decoding by another runner."""
    import torch

    plain, plain_info = _load(path, None, rows)
    if plain_info.bounded_groups:
        for steps, topk, nodes in CHAINS:
            settings = SpeculativeSettings("MTP", "", steps, topk, nodes, fixed_acceptance=min(ACCEPTED, steps + 1))
            runner, info = _load(path, settings, rows)
            for count in rows:
                name = f"steps {steps} top-k {topk} tokens {nodes}"
                ratio = _compare(name, runner, info, plain, plain_info, count)
                record(f"{path.name} {name}, {count} rows", "tokens/s, of plain", ratio)
            print(_profile(runner, info), flush=True)
            runner.close()
            del runner
            gc.collect()
            torch.cuda.empty_cache()
        plain.close()
        return
    draft = write_draft(config, directory)
    _times("plain", plain, ((1, False), (2, True), (4, True), (8, True), (16, True)))
    for steps, topk, nodes in SHAPES:
        settings = SpeculativeSettings(
            "EAGLE3", str(draft), steps, topk, nodes, load_format="dummy", fixed_acceptance=min(ACCEPTED, steps + 1)
        )
        begun = time.perf_counter()
        runner, info = _load(path, settings, rows)
        name = f"steps {steps} top-k {topk} tokens {nodes}"
        print(f"{name}: loaded in {time.perf_counter() - begun:.1f} s", flush=True)
        for count in rows:
            ratio = _compare(name, runner, info, plain, plain_info, count)
            record(f"{path.name} {name}, {count} rows", "tokens/s, of plain", ratio)
        if topk > 1 and nodes == 16:
            print(_profile(runner, info), flush=True)
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    plain.close()


def _load(path: Path, settings: SpeculativeSettings | None, rows: tuple[int, ...]) -> tuple[ModelRunner, ModelInfo]:
    from kernels.execution.runner import ModelRunner

    runner = ModelRunner(
        RunnerConfig(
            model_path=str(path),
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            context_length=8192,
            max_slots=17,
            page_size=64,
            max_step_tokens=2048,
            max_total_tokens=1 << 16,
            graph_rows=rows,
            speculation=settings,
        )
    )
    return runner, runner.load()


def _milliseconds(run: Callable[[], object], count: int = 30) -> float:
    """Milliseconds of one call on the device."""
    import torch

    with torch.inference_mode():
        run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / count


def _times(name: str, runner: ModelRunner, shapes: tuple[tuple[int, bool], ...]) -> None:
    """Print the time of the forward pass and the logits of one row's tokens behind 512, for each number of tokens."""
    import torch

    from kernels.core.attention_rows import AttentionRows
    from kernels.core.batch import ForwardBatch
    from kernels.core.tree import chain_bits
    from kernels.devices.capture import CaptureRequest

    device, model = runner._device, runner._loaded.model

    @torch.inference_mode()
    def forward(batch: ForwardBatch) -> torch.Tensor:
        return model.logits(model.split(model.forward(batch, runner._loaded.caches))[0])

    for tokens, tree in shapes:
        graphs = device.capture.decodes(CaptureRequest(
            forward,
            sorted(runner._loaded.windows), 1, 129, lambda could: could, tokens, tree,
        ))  # fmt: skip
        assert graphs is not None
        starts, at = np.array([512]), device.memory.put(512 + np.arange(tokens))
        pages = np.arange(1, 18, dtype=np.int32)[None]
        bits = chain_bits(tokens, device.torch_device)[None] if tree else None
        rows = AttentionRows(starts, np.array([tokens]), pages, int(not tree), int(tree), bits)
        plans = {window: device.attention.plan(rows, window) for window in runner._loaded.windows}
        batch = ForwardBatch(device.memory.put(np.zeros(tokens, dtype=np.int64)), at, at + 64, plans)
        took = _milliseconds(partial(graphs.run, batch))
        print(f"{name}: {tokens} tokens of one row: {took:.3f} ms on the device", flush=True)


def _compare(
    name: str, runner: ModelRunner, info: ModelInfo, plain: ModelRunner, plain_info: ModelInfo, rows: int
) -> float:
    """Measure both runners twice, in turns, and print the row; tokens a second over those of plain decoding."""
    found: dict[str, list[float]] = {"plain": [], "speculating": []}
    lengths = []
    for _ in range(2):
        base = Decoding(plain, plain_info, rows)
        base.steps(10, False)
        seconds, _ = base.steps(100, False)
        base.close()
        found["plain"].append(seconds / 100 * 1e3)
        speculating = Decoding(runner, info, rows)
        speculating.steps(10, True)
        seconds, tokens = speculating.steps(100, True)
        speculating.close()
        found["speculating"].append(seconds / 100 * 1e3)
        lengths.append(tokens / 100 / rows)
    one, many = statistics.median(found["plain"]), statistics.median(found["speculating"])
    length = statistics.median(lengths)
    print(
        f"| {name} | {rows} | {one:.2f} | {many:.2f} | {length:.2f} | {rows / one * 1e3:.0f} | "
        f"{rows * length / many * 1e3:.0f} | {length * one / many:.2f} |  ({found})",
        flush=True,
    )
    return length * one / many


def _profile(runner: ModelRunner, info: ModelInfo) -> str:
    """The device's time by kernel over ten steps that draft."""
    decoding = Decoding(runner, info, 1)
    decoding.steps(10, True)
    seconds: list[float] = []
    busy, kernels = profiled(lambda: seconds.append(decoding.steps(10, True)[0]))
    decoding.close()
    return "\n".join((f"10 steps: {seconds[0] * 1e3:.1f} ms, {busy}", *kernels))
