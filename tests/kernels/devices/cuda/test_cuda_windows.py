"""Layers with windows in pages of their own, with caps and with sinks run in graphs on a GPU; by Triton's interpreter a
graph is run again."""

from __future__ import annotations

import pytest

from tests.kernels.devices.cuda.interpreted import install
from tests.kits.executors import find_executor
from tests.kits.planned_runner import Line

OPTIONS = {"device": "cuda", "page_size": 16, "max_slots": 5, "graph_rows": (1, 4), "all_prompt_graphs": True}


@pytest.mark.parametrize("window_pages", [False, True], ids=["all pages", "window pages"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt-oss"])
def test_models_with_windows_run_in_graphs(name, window_pages, device, reference, prompts, monkeypatch):
    if device.type == "cpu":
        if (name, window_pages) not in (("gemma2", False), ("gemma3", True), ("gpt-oss", False)):
            pytest.skip("the interpreter is slow")
        install(monkeypatch)
    model, texts = reference(name), prompts(40, 3, 30) if device.type == "cpu" else prompts(100, 3, 61)
    runner = OPTIONS | {"window_pages": window_pages, "max_total_tokens": 2048, "max_step_tokens": 64}
    line = Line(model.path, runner, max_running=4, step_tokens=64)
    whole = find_executor(line.runner, "WholeStep")
    assert whole is not None
    assert whole._steps.prompts is not None
    assert bool(line.info.bounded_groups) == (window_pages and name not in ("gpt-oss", "gemma2"))
    count = 2 if device.type == "cpu" else 40
    for number, text in enumerate(texts):
        line.submit(number, text, count)
    line.play()
    line.submit(3, texts[0][:32] + texts[1], 3)  # behind cached pages
    line.play()
    assert line.cached[3] > 0
    for number, text in enumerate((*texts, texts[0][:32] + texts[1])):
        length = count if number < 3 else 3
        assert list(text) + line.outputs[number] == model.greedy(text, len(text) + length)
