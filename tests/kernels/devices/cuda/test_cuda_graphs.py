"""How graphs are captured, and which of them pay: with a device that is not there."""

from __future__ import annotations

import gc
import logging
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kernels.devices.cuda.graphs import decode_graphs, prompt_graphs

DEVICE = torch.device("cuda", 0)


class Held:
    """What a run has on the device, in a ring as a model's layers may make one."""

    def __init__(self):
        self.own = self


@pytest.fixture
def reported(monkeypatch):
    """A runtime of graphs that says what is done."""
    reported = []

    class CUDAGraph:
        made: ClassVar = []

        def __init__(self):
            self.made.append(weakref.ref(self))

        def capture_begin(self, pool=None, capture_error_mode="global"):
            reported.append(("begin",) if pool is None else ("begin", pool))

        def capture_end(self):
            reported.append("end")

        def pool(self):
            return "pool"

        def replay(self):
            return None

    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, capture_error_mode: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reported.append("empty"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 100))
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    return reported


def test_memory_is_returned_where_a_capture_would_find_less_than_is_kept(reported, monkeypatch):
    found = decode_graphs.capture_each([2, 1], lambda size: -size, DEVICE, lambda could: could)
    assert reported == ["empty", ("begin",), "end", ("begin", "pool"), "end"]
    assert {size: given for size, (_, given) in found.items()} == {2: -2, 1: -1}
    reported.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (19, 100))
    decode_graphs.capture_each([2], lambda size: None, DEVICE, lambda could: could)
    assert reported == ["empty", "empty", ("begin",), "end"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("kind", [decode_graphs._DECODES, prompt_graphs._KIND])
def test_a_capture_that_fails_names_the_remedy_and_keeps_nothing(kind, error, reported, caplog):
    held = []

    def run(size):
        own = Held()
        held.append(weakref.ref(own))
        if size == (1, 1) and reported[-2:] == ["end", ("begin", "pool")]:
            raise error("too much\nof it")
        return "found"

    def emptied():
        reported.append("empty")
        failed = [*held[2:], torch.cuda.CUDAGraph.made[1]]
        assert not any(own() for own in failed)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_graphs, "_make_room", lambda device: patch.setattr(torch.cuda, "empty_cache", emptied))
            found = decode_graphs.capture_each([(2, 2), (1, 1), (0, 0)], run, DEVICE, lambda could: could, kind)
    finally:
        gc.enable()
    assert list(found) == [(2, 2)]
    assert reported[-1] == "empty"
    (message,) = caplog.messages
    assert f"The {kind.step % '(1, 1)'} could" in message
    assert "(too much); graphs of [(2, 2)] are used. " in message
    assert message.endswith(kind.room if error is torch.OutOfMemoryError else kind.silence)


def test_a_capture_that_is_refused_is_none(reported, caplog):
    assert decode_graphs.capture_each([2, 1], lambda size: size, DEVICE, lambda could: False, prompt_graphs._KIND) == {}
    (message,) = caplog.messages
    assert "steps need the memory), nor 1 smaller; all of them run without a graph." in message
    assert "--piecewise-cuda-graph-max-tokens" in message
    assert "--disable-piecewise-cuda-graph" in message


@pytest.mark.parametrize(
    ("kind", "error", "used"),
    [
        (prompt_graphs._KIND, torch.OutOfMemoryError, [1, 2]),
        (prompt_graphs._KIND, RuntimeError, []),
        (decode_graphs._DECODES, torch.OutOfMemoryError, []),
    ],
)
def test_smaller_steps_with_prompts_are_tried_where_memory_is_short(kind, error, used, reported, caplog):
    tried = []

    def run(size):
        tried.append(size)
        if size > 2:
            raise error("too much")

    assert sorted(decode_graphs.capture_each([4, 3, 2, 1], run, DEVICE, lambda could: could, kind)) == used
    assert tried[:2] == ([4, 3] if used else [4])
    (message,) = caplog.messages
    assert f"The {kind.step % 4} could" in message
    assert ("(too much), nor 1 smaller; graphs of [1, 2] are used." in message) == bool(used)


def test_why_the_largest_step_failed_is_reported_not_why_a_smaller_one_did(reported, caplog):
    def run(size):
        raise torch.OutOfMemoryError("too much") if size == 3 else RuntimeError("odd")

    assert decode_graphs.capture_each([3, 2, 1], run, DEVICE, lambda could: could, prompt_graphs._KIND) == {}
    (message,) = caplog.messages
    assert "The step of (tokens, rows) 3 with prompts could" in message
    assert "(too much), nor 1 smaller; all of them" in message
    assert message.endswith(prompt_graphs._KIND.room)


def test_drafts_that_fail_keep_nothing(reported):
    held = []

    def run():
        own = torch.zeros(1)
        held.append(weakref.ref(own))
        raise RuntimeError("no draft token")

    gc.disable()
    try:
        assert decode_graphs.capture_draft(run, "pool", DEVICE) == ("pool", None)
        assert held[0]() is None
    finally:
        gc.enable()


class Gone:
    """A graph of a model that is gone, in a ring: the interpreter destroys it when it collects."""

    def __init__(self, reported):
        self.reported, self.own = reported, self

    def __del__(self):
        self.reported.append("destroyed")


@pytest.mark.parametrize("draft", [False, True])
def test_no_graph_is_destroyed_while_another_is_captured(draft, reported, monkeypatch):
    def run(size=None):
        Gone(reported)
        for _ in range(3 * gc.get_threshold()[0]):
            kept.append([])  # what makes the interpreter collect
        reported.append("run")

    @contextmanager
    def capturing(graph, pool, capture_error_mode):
        graph.capture_begin()
        yield
        graph.capture_end()

    kept = []
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    if draft:
        decode_graphs.capture_draft(run, None, DEVICE)
    else:
        decode_graphs.capture_each([1], run, DEVICE, lambda could: could)
    begin = reported.index(("begin",))
    assert reported[begin : reported.index("end") + 1] == [("begin",), "run", "end"]
    assert "destroyed" in reported[:begin]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("launching", "running", "pays"),
    [
        ([1, 1], [2, 2], False),
        ([8, 8], [0, 0], True),
        ([1, 8], [9, 2], True),  # the first was held up
        ([7, 6], [3, 4], False),  # about, and no more
    ],
)
def test_a_graph_pays_where_launching_takes_most_of_the_time(launching, running, pays, monkeypatch):
    now, runs = [0.0], []
    waits = {2: running[0], 3: running[1]}  # after the first run, which makes what is needed, and two that count

    def run():
        runs.append(now[0])
        now[0] += 100 if len(runs) == 1 else launching[len(runs) - 2]

    def synchronize(device):
        assert device == DEVICE
        now[0] += waits.pop(len(runs), 0)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(decode_graphs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert decode_graphs.launches_last(run, DEVICE) is pays
    assert not waits
