"""Decodes of layers with states run in graphs on a GPU; by Triton's interpreter a graph is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.contract.caches import State
from kernels.contract.speculation import SpeculativeSettings
from kernels.devices.cuda import delta_rule
from kernels.devices.cuda.capture import CudaCapture
from kernels.devices.cuda.convolution import convolve_tokens
from kernels.devices.state_cache import captured_segments, plan_segments
from kernels.state import group_sizes
from tests.kernels.devices.cuda import interpreted
from tests.kernels.devices.cuda.interpreted import install
from tests.kits.driver import HYBRID
from tests.kits.executors import find_executor
from tests.kits.planned_runner import Line
from tests.kits.speculation.oracles import Oracle, draft_with

OPTIONS = {"device": "cuda", "page_size": 16, "max_slots": 5, "graph_rows": (1, 4)}
INTERPRETED = ("falcon-h1", "lfm2", "qwen3.5")
CPU = torch.device("cpu")


def make_line(path: Path, **options: Any) -> Line:
    settings = OPTIONS | {"max_total_tokens": 1024, "max_step_tokens": 64} | options
    return Line(path, settings, max_running=3, step_tokens=64, priority_scheduling=True)


def texts_of(line: Line) -> list[list[int]]:
    """Prompts, of which the first two share a snapshot, and the third ends shortly before one."""
    (snapshot,) = (group.page_tokens for group in line.info.bounded_groups if isinstance(group.group.spec, State))
    shared = [(7 * at + 3 * at * at) % 211 for at in range(snapshot)]
    return [[*shared, 5, 9, 2], [*shared, 1, 1], shared[:1:-1], [5, 9]]


def play(line: Line, texts: list[list[int]], count: int) -> None:
    """Chunks beside decodes, a prefix from a snapshot, a preemption, and a new worker in the middle."""
    line.submit(0, texts[0], count)
    line.play()
    line.submit(1, texts[1], count)
    line.submit(2, texts[2], count)
    for _ in range(3):
        line.step()
    line.submit(3, texts[3], 3, priority=100)
    line.step()
    line.start_worker()
    line.play()


@pytest.mark.parametrize("whole", [True, False], ids=["steps", "passes"])
@pytest.mark.parametrize("name", HYBRID)
def test_captured_decodes_of_states_give_the_same_tokens(
    name: str, whole: bool, device: torch.device, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        if name not in INTERPRETED:
            pytest.skip("the interpreter is slow")
        install(monkeypatch)
        monkeypatch.setattr(group_sizes, "_MAX_SNAPSHOT_PAGES", 1)
    if not whole:
        monkeypatch.setattr(CudaCapture, "steps", lambda self, request: None)
    model = reference(name)
    line = make_line(model.path)
    loaded = line.runner._loaded
    if not loaded.model.reads_rows and not loaded.device.experts.reads_back:
        assert line.info.graph_rows == (1, 4)
        assert find_executor(line.runner, "WholeStep" if whole else "CapturedPass") is not None
    texts, count = texts_of(line), 5 if device.type == "cpu" else 24
    play(line, texts, count)
    assert line.cached[1] == line.info.bounded_groups[0].page_tokens
    for number, text in enumerate(texts):
        length = len(text) + (count if number < 3 else 3)
        assert text + line.outputs[number] == model.greedy(text, length)


@pytest.mark.parametrize("name", HYBRID)
def test_draft_tokens_change_no_token(
    name: str, device: torch.device, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of decodes and of rows that verify are captured; right and wrong drafts end on both sides of snapshots."""
    if device.type == "cpu":
        if name != "qwen3.5":
            pytest.skip("the interpreter is slow")
        install(monkeypatch)
        monkeypatch.setattr(group_sizes, "_MAX_SNAPSHOT_PAGES", 1)
    model, oracle = reference(name), Oracle(3, 1, lambda position: position % 5 > 0, 211)
    draft_with(monkeypatch, oracle)
    line = make_line(model.path, speculation=SpeculativeSettings("STANDALONE", num_draft_tokens=4))
    texts, count = texts_of(line), 5 if device.type == "cpu" else 24
    oracle.truths = [model.greedy(text, len(text) + count + 6) for text in texts]
    play(line, texts, count)
    for number, text in enumerate(texts):
        assert text + line.outputs[number] == oracle.truths[number][: len(text) + (count if number < 3 else 3)]
    assert sum(oracle.accepted) > 5


def test_the_form_for_accepted_tokens_is_compiled_at_load(
    device: torch.device, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes states, of rows with lengths: no pass has it."""
    if device.type == "cpu":
        install(monkeypatch)
        monkeypatch.setattr(interpreted._Memory, "measure_step", lambda self, step: step() or 0)
    forms: set[tuple[bool, bool]] = set()

    def convolve(*arguments: Any, **options: Any) -> torch.Tensor:
        segment = arguments[3]
        forms.add((segment.targets is not None, segment.lengths is not None and segment.few))
        return convolve_tokens(*arguments, **options)

    monkeypatch.setattr(delta_rule, "convolve_tokens", convolve)
    draft_with(monkeypatch, Oracle(3, 1, lambda position: False, 211))
    make_line(reference("qwen3.5").path, speculation=SpeculativeSettings("STANDALONE", num_draft_tokens=4))
    assert (True, True) in forms


def test_pages_of_states_are_looked_up_on_the_device() -> None:
    """As the host does it: at a border, within a page, and where a row begins; padding writes to the null page."""
    pages = torch.tensor([[5, 7, 0], [0, 6, 9], [3, 0, 0], [0, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([4, 9, 0, 0])
    (looked_up,) = captured_segments(pages, starts, 4)
    (expected,) = plan_segments(starts.numpy(), torch.ones_like(starts).numpy(), pages.numpy(), 4, torch.from_numpy)
    assert torch.equal(looked_up.tokens, expected.tokens)
    assert looked_up.sources.tolist() == expected.sources.tolist() == [5, 9, 0, 0]
    assert looked_up.targets.tolist() == expected.targets.tolist() == [7, 9, 3, 0]
    assert looked_up.fresh
