"""Every family at sizes that the GPU's kernels take, on a GPU of compute capability 9.0, against the CPU in float32.

In float32 both find the same but for the order of sums. In bfloat16 each number is rounded to 8 bits, in another order
on each device, and a choice of experts or of indexed tokens that turns with the last bit changes what follows. So the
bound is what the CPU itself loses in bfloat16: over all positions the GPU is at most ``MOST`` times as far from
float32, on average and at the median position. A kind of step has few positions, of which one such choice may be a
third: its bound is no less than ``SHARE`` of how far the predictions of other positions are, as those of wrong tokens
would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.contract.caches import State
from kernels.contract.info import ModelInfo
from kernels.contract.step import SlotSampling
from kernels.models.config_loader import read_config
from tests.kits.driver import Driver
from tests.kits.families import COMPARED
from tests.kits.wide_families import WIDE_VOCAB, save_wide

DEVICE = "cuda"
OPTIONS = {"page_size": 64, "max_step_tokens": 768, "max_slots": 17, "max_total_tokens": 4096}
GRAPHS = {"graph_rows": (1, 16), "graph_tokens": (256,), "graph_max_tokens": 256, "all_prompt_graphs": True}
MOST, LEAST, SHARE = 2.5, 2e-3, 0.25
FLOAT32 = 2e-3
KINDS = ("whole prompt", "chunks", "several prompts", "one row", "ten rows", "mixed batch")

Logprobs = npt.NDArray[np.float32]
Found = dict[str, Logprobs]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="no GPU of compute capability 9.0",
)


def texts() -> list[list[int]]:
    """A prompt longer than windows, chunks and what indexers choose; then ten of many lengths."""
    generator = np.random.default_rng(3)
    return [generator.integers(0, WIDE_VOCAB, length).tolist() for length in (300, *range(20, 120, 10))]


def has_states(info: ModelInfo) -> bool:
    """Whether no step with prompts is captured."""
    return any(isinstance(group.group.spec, State) for group in info.bounded_groups)


class Scores:
    """What the steps of ``driver`` find, by kind of step: log-probabilities float32 [positions, vocab]."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.found = driver, dict[str, list[Logprobs]]()
        self.graph_rows = dict[str, int]()

    def admit(self, slot: int, text: Sequence[int], prompts: bool = True) -> None:
        """``prompts``: each token is scored, not the last alone."""
        scored = WIDE_VOCAB if prompts else -1
        self.driver.admit(slot, text, sampling=SlotSampling(0.0, logprobs=WIDE_VOCAB, prompt_logprobs=scored))

    def step(self, kind: str, rows: Sequence[tuple[int, int]]) -> None:
        """Run ``(slot, count)`` rows, decodes first."""
        result = self.driver.step(rows)
        assert not result.failed
        self.graph_rows[kind] = result.timing.graph_rows
        parts = self.found.setdefault(kind, [])
        for ids, logprobs in (
            (result.prompt_top_ids, result.prompt_top_logprobs),
            (result.top_ids, result.top_logprobs),
        ):
            order = np.frombuffer(ids, dtype=np.int32).reshape(-1, WIDE_VOCAB)
            part = np.full(order.shape, np.nan, dtype=np.float32)
            np.put_along_axis(part, order, np.frombuffer(logprobs, dtype=np.float32).reshape(order.shape), axis=1)
            parts.append(part)


def play(driver: Driver) -> tuple[Found, dict[str, int]]:
    """One prompt whole and in chunks, ten prompts in one step, and decodes of tokens that are known, alone, together
    and beside a prompt."""
    scores, (long, *short) = Scores(driver), texts()
    scores.admit(1, long)
    scores.step("whole prompt", [(1, 300)])
    driver.release(1)
    scores.admit(2, long)
    for count in (70, 129, 1, 90):
        scores.step("chunks", [(2, count)])
    for _ in range(10):
        scores.step("one row", [(2, 1)])
    driver.release(2)
    slots = list(enumerate(short, start=3))
    for slot, text in slots:
        scores.admit(slot, text)
    scores.step("several prompts", [(slot, len(text) - 9) for slot, text in slots])
    for _ in range(8):
        scores.step("ten rows", [(slot, 1) for slot, _ in slots])
    scores.admit(1, long[:150], prompts=False)
    scores.step("mixed batch", [*((slot, 1) for slot, _ in slots), (1, 150)])
    for _ in range(3):
        assert not driver.step([(slot, 1) for slot, _ in slots]).failed
    return {kind: np.concatenate(parts) for kind, parts in scores.found.items()}, scores.graph_rows


class Wide:
    """A family's model at ``path``, and what a CPU finds with it."""

    def __init__(self, name: str, path: Path) -> None:
        save_wide(name, path)
        self.path, self._found = path, dict[str, Found]()
        self.options = OPTIONS | ({} if read_config(path).recurrence is None else {"max_states": 128})

    def on_cpu(self, drive: Callable[..., Driver], dtype: str) -> Found:
        """Found once for both tests."""
        if dtype not in self._found:
            self._found[dtype] = play(drive(self.path, **self.options, dtype=dtype))[0]
        return self._found[dtype]


@pytest.fixture(scope="module", params=COMPARED["cuda"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wide]:
    """A family's model; its tests run one after the other."""
    path = tmp_path_factory.mktemp(request.param)
    yield Wide(request.param, path)
    rmtree(path)  # all are two gigabytes


def test_bfloat16_is_as_close_to_float32_as_on_a_cpu(wide: Wide, drive: Any) -> None:
    """With captured graphs, where the family has some."""
    exact, rounded = wide.on_cpu(drive, "float32"), wide.on_cpu(drive, "bfloat16")
    driver = drive(wide.path, **wide.options, **GRAPHS, device=DEVICE, dtype="bfloat16")
    loaded = driver.runner._loaded
    captured = loaded.groups.is_captured and not loaded.model.reads_rows and not loaded.device.experts.reads_back
    assert driver.info.graph_rows == (GRAPHS["graph_rows"] if captured else ())
    found, graph_rows = play(driver)
    for kind, rows in {"one row": 1, "ten rows": 10, "mixed batch": 0 if has_states(driver.info) else 11}.items():
        assert graph_rows[kind] == (rows if captured else 0), kind
    ours, theirs = ({kind: np.abs(some[kind] - exact[kind]).mean(1) for kind in KINDS} for some in (found, rounded))
    several = np.concatenate(list(exact.values()))
    spread = np.abs(several - several.mean(0)).mean()
    far = {
        kind: f"{off.mean():.4f}"
        for kind, off in ours.items()
        if not off.mean() < max(SHARE * spread, MOST * theirs[kind].mean())
    }
    assert not far, f"of {spread:.4f}; the CPU {[f'{kind}: {theirs[kind].mean():.4f}' for kind in far]}"
    for measure in (np.mean, np.median):
        ours_off, theirs_off = (float(measure(np.concatenate(list(some.values())))) for some in (ours, theirs))
        assert ours_off < MOST * theirs_off + LEAST, measure.__name__


def test_float32_is_that_of_a_cpu(wide: Wide, drive: Any) -> None:
    """Run eagerly: graphs have the same kernels."""
    exact = wide.on_cpu(drive, "float32")
    found, _ = play(drive(wide.path, **wide.options, device=DEVICE, dtype="float32", disable_graphs=True))
    far = {kind: float(np.abs(found[kind] - exact[kind]).max()) for kind in KINDS}
    assert not {kind: off for kind, off in far.items() if not off < FLOAT32}
