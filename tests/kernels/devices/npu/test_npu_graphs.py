"""Decodes in captured graphs: what is replayed, what is fed, what runs without, and what is said when capture fails."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernels.contract.step import SlotSampling, StepBatch
from kernels.devices.graphs import graph_sizes
from kernels.devices.npu.errors import DeviceError
from tests.kits.driver import VOCAB, pack

PAGE = 128
OPTIONS = {
    "device": "npu",
    "dtype": "bfloat16",
    "page_size": PAGE,
    "max_step_tokens": 256,
    "max_total_tokens": 16 * PAGE,
}
SCORED = SlotSampling(temperature=0.0, logprobs=VOCAB)


@pytest.mark.parametrize(
    ("requested", "most", "rows", "expected"),
    [
        ((), 16, 256, [1, 2, 4, 8, 16]),
        ((), 100, 256, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
        ((), 16, 3, [1, 2, 4]),
        ((), 3, 256, [1, 2, 3]),
        ((6, 1, 6), 16, 256, [1, 6]),
        ((6, 1, 300), 16, 5, [1, 6]),
    ],
)
def test_sizes(requested, most, rows, expected):
    assert graph_sizes(requested, most, rows) == expected


@pytest.fixture
def replays(monkeypatch):
    """How many graphs are replayed."""
    counted = []
    replay = torch.npu.NPUGraph.replay
    monkeypatch.setattr(torch.npu.NPUGraph, "replay", lambda self: (counted.append(1), replay(self)))
    return counted


def run(driver, prompts, lengths, steps):
    """Prompts one by one, then decodes together; -> tokens by slot, and the last step's log-probabilities."""
    texts = prompts(*lengths, seed=4)
    for slot, text in enumerate(texts, start=1):
        driver.admit(slot, text, sampling=SCORED)
        driver.step([(slot, len(text))])
    for _ in range(steps):
        result = driver.step([(slot, 1) for slot in range(1, len(texts) + 1)])
        assert not result.failed
    order = np.frombuffer(result.top_ids, dtype=np.int32).reshape(-1, VOCAB)
    scores = np.zeros((len(texts), VOCAB), dtype=np.float32)
    np.put_along_axis(scores, order, np.frombuffer(result.top_logprobs, dtype=np.float32).reshape(-1, VOCAB), axis=1)
    return driver.tokens, scores


@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen2-window"])
def test_a_replay_is_the_step_itself(name, reference, drive, prompts, replays):
    """Lengths grow over a page's end, and pages are granted between replays."""
    path, lengths = reference(name).path, (3, 120, 129, 60)
    eager, eager_scores = run(drive(path, disable_graphs=True, **OPTIONS), prompts, lengths, 12)
    assert not replays
    graphs, graph_scores = run(drive(path, **OPTIONS), prompts, lengths, 12)
    assert len(replays) == 12
    assert graphs == eager
    np.testing.assert_array_equal(graph_scores, eager_scores)


def test_rows_are_filled_up_to_a_graph(reference, drive, prompts, replays):
    path, lengths = reference("qwen3").path, (3, 120, 40)
    _, eager = run(drive(path, disable_graphs=True, **OPTIONS), prompts, lengths, 1)
    padded = drive(path, graph_rows=(8,), **OPTIONS)
    assert padded.info.graph_rows == (8,)
    _, scores = run(padded, prompts, lengths, 1)
    assert len(replays) == 1
    np.testing.assert_allclose(scores, eager, atol=0.3)  # sums of other shapes, in bfloat16
    assert padded.step([(slot, 1) for slot in (1, 2, 3)]).timing.graph_rows == 3


def test_without_padding_only_its_own_size_is_replayed(reference, drive, prompts, replays):
    driver = drive(reference("qwen3").path, graph_rows=(1, 4), disable_graph_padding=True, **OPTIONS)
    run(driver, prompts, (5, 6, 7), 3)
    assert not replays
    for slot in (1, 2, 3):
        driver.release(slot)
    run(driver, prompts, (5,), 3)
    assert len(replays) == 3


def test_more_rows_than_any_graph_run_without(reference, drive, prompts, replays):
    driver = drive(reference("qwen3").path, graph_rows=(1, 2), **OPTIONS)
    run(driver, prompts, (5, 6, 7), 3)
    assert not replays


def test_the_largest_graph_is_as_large_as_requested(reference, drive):
    assert drive(reference("qwen3").path, graph_max_rows=3, **OPTIONS).info.graph_rows == (1, 2, 3)


def test_lengths_that_are_not_fed_give_a_wrong_answer(reference, drive, prompts, monkeypatch):
    """The graph knows the lengths of its capture, and nothing else, until it is fed others."""
    path, lengths = reference("qwen3").path, (3, 120, 129, 60)
    _, right = run(drive(path, **OPTIONS), prompts, lengths, 3)
    update = torch.npu.NPUGraph.update
    feed = [{"actual_seq_lengths_kv": [1] * len(lengths)}]
    monkeypatch.setattr(torch.npu.NPUGraph, "update", lambda self, cpu_update_input: update(self, feed))
    _, wrong = run(drive(path, **OPTIONS), prompts, lengths, 3)
    assert np.abs(right - wrong).max() > 0.5


def test_no_garbage_is_collected_during_a_capture(reference, drive, monkeypatch):
    """A collection may destroy another graph, in the midst of this one's capture."""
    seen = []
    for name in ("capture_begin", "capture_end"):
        plain = getattr(torch.npu.NPUGraph, name)
        monkeypatch.setattr(
            torch.npu.NPUGraph,
            name,
            lambda self, *args, plain=plain, **kwargs: (seen.append(gc.isenabled()), plain(self, *args, **kwargs))[1],
        )
    assert drive(reference("qwen3").path, graph_rows=(1, 2), **OPTIONS).info.graph_rows == (1, 2)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_prefills_do_not_use_graphs(reference, drive, prompts, replays):
    driver = drive(reference("qwen3").path, **OPTIONS)
    (text,) = prompts(90)
    driver.admit(1, text)
    driver.step([(1, 60)])
    driver.step([(1, 30)])
    assert not replays


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Alloc sq cq fail, error code is 207008", "--cuda-graph-max-bs"),
        ("operation not supported while capturing, error code is 107030", "--disable-cuda-graph"),
    ],
)
def test_a_failed_capture_ends_in_eager_mode(message, advice, reference, drive, prompts, replays, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    whole = torch.npu.graph

    class Refusing(whole):
        captured = 0

        def __enter__(self):
            type(self).captured += 1
            if self.captured > 1:
                raise RuntimeError(message)
            return super().__enter__()

    monkeypatch.setattr(torch.npu, "graph", Refusing)
    driver = drive(reference("qwen3").path, graph_rows=(1, 2, 4), **OPTIONS)
    assert driver.info.graph_rows == (4,)
    run(driver, prompts, (5, 6, 7), 3)
    assert len(replays) == 3
    (record,) = [record for record in caplog.records if "could not be captured" in record.message]
    assert "2 rows" in record.message
    assert message.split(",")[0] in record.message
    assert advice in record.message


def test_a_capture_that_raises_leaves_no_stream_and_no_mode_behind(reference, drive, prompts, simulator):
    left, before = simulator.cann.streams_left(0), torch.npu.current_stream()
    simulator.faults.scarce_streams(0, 0)
    try:
        driver = drive(reference("qwen3").path, graph_rows=(1, 2), **OPTIONS)
    finally:
        simulator.faults.scarce_streams(0, left)
    assert len(driver.info.graph_rows) < 2
    assert torch.npu.current_stream() == before
    assert _get_current_dispatch_mode_stack() == []
    run(driver, prompts, (5, 6), 3)


def test_no_graphs_while_launches_block(reference, drive, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    assert drive(reference("qwen3").path, **OPTIONS).info.graph_rows == ()
    assert "ASCEND_LAUNCH_BLOCKING" in caplog.text


def test_lengths_that_are_never_fed_stop_the_step(reference, drive, prompts, replays, simulator, monkeypatch):
    monkeypatch.setattr(simulator.graphs.replays, "patience", 0.3)
    driver = drive(reference("qwen3").path, **OPTIONS)
    monkeypatch.setattr(torch.npu.NPUGraph, "update", lambda self, cpu_update_input: None)
    with pytest.raises(DeviceError, match="507046"):
        run(driver, prompts, (3, 120), 1)
    assert len(replays) == 1
    driver.runner.close()
    del driver
    gc.collect()  # the graph goes, and what still waited of it
    assert not simulator.graphs.replays.waits(torch.npu.current_stream().npu_stream)
    simulator.faults.clear()
    torch.npu.synchronize()


def test_a_capture_that_nothing_would_update_is_not_used(reference, drive, prompts, replays, caplog, monkeypatch):
    """As after a capture that failed and left its mode on: torch_npu then records no task groups, and feeds lengths to
    nothing, without a word."""
    monkeypatch.setattr(logging.getLogger("troupe"), "propagate", True)
    path, lengths = reference("qwen3").path, (3, 120, 129, 60)
    _, right = run(drive(path, disable_graphs=True, **OPTIONS), prompts, lengths, 3)
    monkeypatch.setattr(torch_npu.npu.graphs, "_NPU_GRAPH_OP_HANDLERS", {})
    driver = drive(path, **OPTIONS)
    assert driver.info.graph_rows == ()
    assert "outside a task group" in caplog.text
    monkeypatch.setattr("kernels.devices.npu_simulator.graphs._GraphDispatchMode", int)  # a device would not notice
    assert drive(path, **OPTIONS).info.graph_rows == ()
    assert "no update would change" in caplog.text
    _, scores = run(driver, prompts, lengths, 3)
    assert not replays
    np.testing.assert_array_equal(scores, right)


@pytest.mark.parametrize("fenced", [True, False])
def test_an_update_does_not_overtake_the_replay_before(fenced, reference, drive, prompts, monkeypatch, simulator):
    driver = drive(reference("qwen3").path, **OPTIONS)
    (text,) = prompts(10)
    driver.admit(1, text)
    driver.step([(1, 10)])
    if not fenced:
        monkeypatch.setattr(simulator.graphs.replays, "patience", 0.3)
        monkeypatch.setattr(torch.npu.Stream, "wait_event", lambda self, event: None)
    batch = StepBatch(number=50, slots=pack([1]), generations=pack([1]), counts=pack([1]))
    first = driver.runner.start(batch)
    if fenced:
        assert not driver.runner.start(batch).result().failed
        assert not first.result().failed
    else:
        with pytest.raises(RuntimeError, match="107040"):
            driver.runner.start(batch)
    del driver, first
    gc.collect()
