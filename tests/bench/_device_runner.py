"""Measure a GPU through a ModelRunner that is driven as the scheduler drives it."""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.contract.caches import GroupPages, PageRun
from kernels.contract.config import RunnerConfig
from kernels.contract.info import ModelInfo
from kernels.contract.step import Admission, SlotSampling, StepBatch
from tests.bench._device_profile import profiled
from tests.bench._device_ranks import Ranks
from tests.bench._device_rows import CONTEXT, OFFLINE, PAGE_SIZE, STEP_ROWS, STEP_TOKENS, Row, write_model
from tests.bench._skewed_routing import skewed_routing

if TYPE_CHECKING:
    from kernels.contract.runner import RunningStep
    from kernels.execution.runner import ModelRunner

__all__ = ["Requests", "load", "measure", "page_run"]


def page_run(group: GroupPages, slot: int, tokens: int) -> PageRun:
    """The pages of a slot for so many tokens, in a bounded group."""
    each = -(-tokens // group.page_tokens)
    if (slot + 1) * each >= group.num_pages:
        raise SystemExit(f"a cache group has {group.num_pages} pages, and slot {slot} needs {each} more")
    return PageRun(0, np.arange(1 + slot * each, 1 + (slot + 1) * each, dtype=np.int32).tobytes())


class Requests:
    """Acts as the scheduler: prompts of one length at once; decodes first, then prefills, two steps in flight.

    Each sequence has its pages from the start, scattered over memory. ``adapters``: as many are used, in turn. Each
    part of data-parallel attention runs the same steps.
    """

    def __init__(
        self, runner: ModelRunner, info: ModelInfo, count: int, prompt: int, output: int, adapters: int = 0
    ) -> None:
        self.runner, self.prompt, self.output = runner, prompt, output
        self.parts = runner._config.dp_size
        each = -(-(prompt + output + 2) // PAGE_SIZE)
        if count * each >= info.num_pages:
            raise SystemExit(f"the cache has {info.num_pages} pages and {count * each} are needed")
        generator = np.random.default_rng(count)
        order = generator.permutation(np.arange(1, info.num_pages, dtype=np.int32))[: count * each].reshape(count, each)
        self.admissions = [
            Admission(
                slot=slot + 1,
                generation=1,
                tokens=generator.integers(0, info.vocab_size, prompt, dtype=np.int32).tobytes(),
                prompt_length=prompt,
                computed=0,
                pages=order[slot].tobytes(),
                sampling=SlotSampling(temperature=0.0),
                bounded=tuple(page_run(group, slot, prompt + output + 2) for group in info.bounded_groups),
                adapter=1 + slot % adapters if adapters else 0,
            )
            for slot in range(count)
        ]
        self.left = np.full(count, prompt)  # of the prompt
        self.made = np.zeros(count, dtype=np.int64)
        self.number = 0

    def batches(self) -> Iterator[StepBatch]:
        released = np.empty(0, dtype=np.int32)
        budget_each = STEP_TOKENS
        admitted = 0
        while True:
            decoding = np.flatnonzero((self.left == 0) & (self.made < self.output))
            budget = budget_each - len(decoding)
            chunks: list[tuple[int, int]] = []
            for slot in np.flatnonzero(self.left > 0).tolist():
                if budget <= 0:
                    break
                chunks.append((slot, min(budget, int(self.left[slot]))))
                budget -= chunks[-1][1]
            if not len(decoding) and not chunks:
                break
            new = [self.admissions[slot] for slot, _ in chunks if slot >= admitted]
            admitted += len(new)
            slots = np.array([*decoding.tolist(), *(slot for slot, _ in chunks)], dtype=np.int32)
            counts = np.array([1] * len(decoding) + [count for _, count in chunks], dtype=np.int32)
            yield StepBatch(
                number=self.number,
                slots=(slots + 1).tobytes(),
                generations=np.ones(len(slots), dtype=np.int32).tobytes(),
                counts=counts.tobytes(),
                admitted=tuple(new),
                released=released.tobytes(),
                pass_tokens=self._tokens(int(counts.sum())),
            )
            self.number += 1
            self.made[decoding] += 1
            for slot, count in chunks:
                self.left[slot] -= count
                self.made[slot] += self.left[slot] == 0

    def run(self) -> float:
        """Run all requests; the seconds that they took."""
        running: deque[RunningStep] = deque()
        begun = time.perf_counter()
        produced = 0
        for batch in self.batches():
            running.append(self.runner.start(batch))
            if len(running) > 1:
                produced += self._take(running.popleft())
        while running:
            produced += self._take(running.popleft())
        seconds = time.perf_counter() - begun
        assert produced == len(self.left) * self.output, (produced, len(self.left) * self.output)
        slots = np.arange(1, len(self.left) + 1, dtype=np.int32)
        self.runner.run(
            StepBatch(
                number=self.number,
                slots=b"",
                generations=b"",
                counts=b"",
                released=slots.tobytes(),
                pass_tokens=self._tokens(0),
            )
        )
        return seconds

    def _tokens(self, count: int) -> tuple[int, ...]:
        return (count,) * self.parts if self.parts > 1 else ()

    @staticmethod
    def _take(step: RunningStep) -> int:
        result = step.result()
        assert not result.failed, result.failed
        return len(result.tokens) // 4


def load(path: Path, **options: Any) -> tuple[ModelRunner, ModelInfo]:
    from kernels.execution.runner import ModelRunner

    config = RunnerConfig(
        model_path=str(path),
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        context_length=CONTEXT,
        max_slots=513,
        page_size=PAGE_SIZE,
        max_step_tokens=STEP_TOKENS,
        **options,
    )
    runner = ModelRunner(config)
    return runner, runner.load()


def decode(runner: ModelRunner, info: ModelInfo, prompt: int, repeats: int = 3, rows: int = 1) -> tuple[float, ...]:
    """Milliseconds a step of ``rows`` rows: (256 tokens - 1 token) / 255."""
    found = []
    for _ in range(repeats):
        whole = Requests(runner, info, rows, prompt, 256).run()
        first = Requests(runner, info, rows, prompt, 1).run()
        found.append((whole - first) / 255 * 1e3)
    return tuple(found)


def offline(runner: ModelRunner, info: ModelInfo, count: int, repeats: int = 2) -> tuple[float, ...]:
    """Output tokens a second, 512 in and 256 out, of ``count`` requests."""
    parts = runner._config.dp_size
    return tuple(count * 256 / Requests(runner, info, count // parts, 512, 256).run() for _ in range(repeats))


def prefill(runner: ModelRunner, info: ModelInfo, repeats: int = 2) -> tuple[float, ...]:
    """Prompt tokens a second, 32 prompts of 4096 tokens, 1 out."""
    parts = runner._config.dp_size
    return tuple(32 * 4096 / Requests(runner, info, 32 // parts, 4096, 1).run() for _ in range(repeats))


def profile(runner: ModelRunner, info: ModelInfo, count: int, prompt: int, output: int) -> str:
    """The device's time by kernel."""
    requests = Requests(runner, info, count, prompt, output)
    seconds: list[float] = []
    busy, kernels = profiled(lambda: seconds.append(requests.run()))
    return "\n".join((f"{count} x {prompt} in, {output} out: {seconds[0] * 1e3:.1f} ms, {busy}", *kernels))


def _launch_in_turn() -> None:
    """The profiler and kernels that start before their predecessors end do not go together: they fail at a bad program
    counter (driver 580, torch 2.11).
    """
    import kernels.devices.cuda.device  # noqa: F401 - loads all that launch

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.devices.cuda.") and hasattr(module, "overlapping"):
            module.overlapping = lambda device: False  # type: ignore[attr-defined]


def measure(
    name: str,
    directory: Path,
    points: Sequence[str],
    profiles: Path | None,
    done: Callable[[list[Row]], None],
    *,
    invariant: bool = False,
    zipf: float = 0.0,
    quantization: str = "",
    eager: bool = False,
    counts: Sequence[int] = OFFLINE,
    ranks: Ranks,
) -> None:
    """Measure a model; ``done`` gets each row as soon as it exists. ``invariant`` is RunnerConfig's. ``zipf``: the
    exponent of the law that tokens are routed to experts by, 0: by their routers. ``quantization`` is RunnerConfig's
    and follows the model's name, as do ``eager``, without graphs, and the number of ``ranks``. ``counts``: requests of
    offline."""
    path = write_model(name, directory)
    from tests.bench._device_memory import read_rate  # with Triton, which only a GPU's machine has

    rate = read_rate()
    if profiles is not None:
        _launch_in_turn()
    begun = time.perf_counter()
    with skewed_routing(zipf, STEP_TOKENS) if zipf else nullcontext():
        runner, info = load(
            path, invariant=invariant, quantization=quantization, disable_graphs=eager, **ranks.config(name)
        )
    name = f"{name} {quantization}".strip() + ranks.suffix + (" eager" if eager else "")
    Requests(runner, info, 1, 128, 1).run()
    took = time.perf_counter() - begun
    print(f"{name}: {rate / 1e12:.2f} TB/s of memory are read here at most")
    print(f"{name}: loaded in {took:.1f} s ({info.load_seconds}), {info.num_pages} pages, graphs {info.graph_rows}")
    Requests(runner, info, 64, 512, 16).run()  # compiles what is compiled at first use

    def found(point: str, values: tuple[float, ...]) -> None:
        row = Row(name, point, values, f"zipf {zipf:g}" if zipf else "")
        print(row.line(), flush=True)
        done([row])

    if "decode" in points:
        for prompt in (128, 4096):
            found(f"decode {prompt}", decode(runner, info, prompt))
    if "steps" in points:
        for rows in STEP_ROWS:
            found(f"step {rows}", decode(runner, info, 512, 2, rows))
    if "offline" in points:
        for count in counts:
            found(f"offline {count}", offline(runner, info, count))
    if "prefill" in points:
        found("prefill", prefill(runner, info))
    if profiles is not None:
        text = [profile(runner, info, *shape) for shape in ((1, 128, 32), (64, 512, 32), (512, 512, 32), (8, 4096, 1))]
        profiles.mkdir(parents=True, exist_ok=True)
        (profiles / f"profile-{name.replace(' ', '-')}{f'-zipf-{zipf:g}' if zipf else ''}.txt").write_text(
            "\n\n".join(text)
        )
    runner.close()
    del runner
    gc.collect()
    import torch

    torch.cuda.empty_cache()
