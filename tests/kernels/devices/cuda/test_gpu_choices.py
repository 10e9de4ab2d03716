"""Which product of a GPU is taken, by what they say and how long they take."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kernels.devices.cuda.launch import precompiling
from kernels.devices.cuda.matmul import autotune
from kernels.devices.cuda.matmul.autotune import Choices, agreeing, choose, in_a_row, made


def test_the_first_is_left_for_what_is_clearly_quicker():
    assert choose(("plain", 16), {"cuBLAS": 10.0, "skinny": 9.8}) == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 10.0, "narrow": 9.5, "skinny": 9.0}) == "skinny"


def test_what_is_preferred_has_to_be_beaten_where_it_is_there():
    assert choose(("plain", 16), {"cuBLAS": 10.0, "bulk": 10.2}, "bulk", 3) == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 34.6, "bulk": 38.0}, "bulk", 3) == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 200.0, "bulk": 206.0}, "bulk", 3) == "bulk"
    assert choose(("plain", 16), {"cuBLAS": 34.6, "bulk": 42.0}, "bulk", 3) == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 200.0, "bulk": 213.0}, "bulk", 3) == "cuBLAS"
    assert choose(("plain", 16), {"cuBLAS": 10.0, "skinny": 9.8}, "bulk", 3) == "cuBLAS"


class Clock:
    """In place of ``torch.cuda.Event``: ways say how long they take."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.mark.parametrize(("layers", "chosen"), [(1, "cuBLAS"), (3, "bulk")])
def test_what_is_preferred_saves_as_much_for_each_product_of_a_trial(layers, chosen, monkeypatch):
    """3 us less for one are much, and for three in a row they are not."""

    def taking(microseconds):
        def way():
            Clock.now += microseconds / 1e3
            return torch.ones(1)

        return way

    row = in_a_row([{"cuBLAS": taking(17.0 / layers), "bulk": taking(20.0 / layers)}] * layers, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(autotune, "_FLUSHED", 1)
    assert Choices(torch.device("cpu")).name(("plain", 16), lambda: row, "bulk") == chosen


@pytest.mark.parametrize("ahead", [True, False])
def test_short_memory_is_not_reported_as_a_product_that_cannot_be_made(ahead, caplog):
    def short():
        raise torch.OutOfMemoryError("no memory")

    ways = {"cuBLAS": lambda: torch.ones(1), "bulk": short, "narrow": lambda: torch.ones(1)}
    with precompiling() if ahead else nullcontext():
        assert list(made(("plain", 16), ways)) == ["cuBLAS", "narrow"]
        with pytest.raises(torch.OutOfMemoryError):
            made(("plain", 16), {"cuBLAS": short})
    reported = "GEMM plain x 16: candidate bulk was skipped: out of memory."
    assert [record.getMessage() for record in caplog.records] == ([] if ahead else [reported])


def test_a_product_that_differs_is_not_taken(caplog):
    torch.manual_seed(0)
    right = torch.randn(4, 64)
    products = {"cuBLAS": right, "rounded": right * (1 + 0.03 * torch.randn(4, 64)), "wrong": right.flip(0)}
    with caplog.at_level(logging.WARNING):
        assert agreeing(("plain", 16, 64), products) == ["cuBLAS", "rounded"]
    assert "GEMM plain x 16 x 64: candidate wrong was skipped: it differs from cuBLAS." in caplog.text
    caplog.clear()
    products["wrong"] = torch.full((4, 64), torch.nan)
    assert agreeing(("plain", 16, 64), products) == ["cuBLAS", "rounded"]
    assert "wrong" in caplog.text


def test_nothing_is_reported_of_products_that_cannot_be_compared(caplog):
    assert agreeing(("plain",), {"cuBLAS": torch.full((2,), torch.inf), "skinny": torch.ones(2)}) == ["cuBLAS"]
    assert not caplog.records


def test_every_way_is_made_once_while_looking_ahead():
    choices, called = Choices(torch.device("cpu")), []

    def ways():
        return {name: lambda name=name: called.append(name) or torch.full((1,), torch.nan) for name in ("one", "other")}

    with precompiling():
        assert choices.name(("plain", 16), ways) is None
        assert choices.name(("plain", 16), ways) is None
    assert called == ["one", "other"]  # and nothing is said of what they gave


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    refuses = False
    events: ClassVar[list[str]] = []

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads compile meanwhile
        assert not gc.isenabled()  # a graph that is destroyed meanwhile makes the capture fail
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.events.append("begin")

    def capture_end(self):
        self.events.append("end")

    def replay(self):
        self.events.append("replay")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("Stream", "current_stream"):
        stream = SimpleNamespace(wait_stream=lambda _, name=name: Graph.events.append(f"{name} waits"))
        monkeypatch.setattr(torch.cuda, name, lambda _, stream=stream: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr(Graph, "events", [])
    return Choices(torch.device("cuda"))


def test_ways_are_timed_as_graphs(recorder):
    timed = recorder._captured(lambda: Graph.events.append("way"))
    timed()
    assert Graph.events == ["Stream waits", "way", "begin", "way", "end", "current_stream waits", "replay"]


def test_what_cannot_be_captured_is_timed_as_it_is(recorder, monkeypatch):
    monkeypatch.setattr(Graph, "refuses", True)

    def way():
        Graph.events.append("way")

    assert recorder._captured(way) is way
    assert Graph.events == ["Stream waits", "way", "current_stream waits"]
    monkeypatch.setattr(Graph, "refuses", False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert recorder._captured(way) is way
    assert Choices(torch.device("cpu"))._captured(way) is way
