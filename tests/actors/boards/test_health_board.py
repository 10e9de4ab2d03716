"""The health boards of several replicas, read as one."""

from __future__ import annotations

import msgspec
import pytest

from actors.boards.health_board import HealthBoard, HealthBoards
from actors.protocol import CacheUsage, GroupUsage, SchedulerLoad
from actors.scheduling.testing import model_info
from kernels.contract.step import StepResult
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.steps import StepMetrics, StepShape


def answer(board: HealthBoard, sent: float, at: float) -> None:
    board.step_sent(StepShape(sent, decodes=2))
    board.step_finished(at, StepResult(1, accepted=b"", tokens=b""), 2)


def test_inter_token_latency_is_counted_within_a_replica() -> None:
    counted, latency = StepMetrics(), Histogram((1.0, 10.0))
    counted.inter_token = [latency]
    first, second = HealthBoard(counted, 0), HealthBoard(counted, 1)
    answer(first, 0.0, 1.0)
    answer(second, 0.0, 1.5)
    assert latency.count == 0
    answer(first, 4.0, 6.0)
    assert (latency.count, latency.total) == (2, 2 * 5.0)
    second.forget_steps()
    answer(first, 6.0, 7.0)
    assert (latency.count, latency.total) == (4, 2 * 5.0 + 2 * 1.0)
    answer(second, 6.0, 8.0)
    assert latency.count == 4
    assert HealthBoards([first, second]).steps == 5


def test_stages_compute_in_a_part_of_the_time_with_steps_in_flight() -> None:
    counted = StepMetrics()
    board, other = HealthBoard(counted, 1), HealthBoard(counted, 0)
    assert not [name for name in counted.readings() if "pipeline" in name]
    answer(other, 0.0, 1.0)
    board.step_sent(StepShape(10.0, decodes=2))
    board.step_sent(StepShape(11.0, decodes=2))
    for at in (13.0, 14.0):
        board.step_finished(at, StepResult(1, accepted=b"", tokens=b""), 2)
        board.stage_ran("worker-2", 1.5)
    answer(board, 100.0, 101.0)
    board.stage_ran("worker-3", 0.0)
    readings = counted.readings()
    assert readings["troupe_pipeline_seconds_total"] == {("1",): 5.0}
    assert readings["troupe_pipeline_stage_seconds_total"] == {("1", "worker-2"): 3.0}


def test_loads_and_caches_are_summed() -> None:
    first, second = boards = HealthBoard(), HealthBoard()
    both = HealthBoards(boards)
    assert (both.scheduler, both.cache(), both.worker, both.oldest_step_sent) == (None, None, None, None)
    load = SchedulerLoad(
        running=1, waiting=2, waiting_tokens=3, steps=4, steps_in_flight=1, preemptions=5, last_step_age=6.0
    )
    first.load(load, 0.0)
    assert both.scheduler is load
    second.load(msgspec.structs.replace(load, running=10, last_step_age=1.0), 0.0)
    assert both.scheduler == SchedulerLoad(
        running=11, waiting=4, waiting_tokens=6, steps=8, steps_in_flight=2, preemptions=10, last_step_age=6.0
    )
    assert both.progress_age(1.0) == pytest.approx(7.0)
    first.load(msgspec.structs.replace(load, paused=True), 0.0)
    assert (both.scheduler.paused, both.progress_age(1.0)) == (True, 2.0)
    first.load(load, 0.0)
    window = GroupUsage("window", total=4, free=1, evictable=1, used=2, evicted=3)
    first.read_cache = lambda: CacheUsage(page_size=16, total=8, free=3, bounded=(window,))
    second.read_cache = lambda: CacheUsage(page_size=16, total=8, free=8, bounded=(window,))
    usage = both.cache()
    assert usage is not None
    assert (usage.page_size, usage.total, usage.free) == (16, 16, 11)
    assert usage.bounded == (GroupUsage("window", total=8, free=2, evictable=2, used=4, evicted=6),)
    assert list(usage.groups()) == ["main", "window"]
    second.worker = (model_info(num_pages=9, page_size=16), 3)
    assert both.worker == second.worker
    second.step_sent(StepShape(2.0))
    assert (both.oldest_step_sent, both.step_age(5.0)) == (2.0, 3.0)


def test_groups_of_one_kind_have_different_names() -> None:
    window = GroupUsage("window", total=4, free=1, evictable=1, used=2, evicted=3)
    usage = CacheUsage(total=8, free=3, used=5, bounded=(window, msgspec.structs.replace(window, kind="state"), window))
    assert {name: group.used for name, group in usage.groups().items()} == {
        "main": 5,
        "window": 2,
        "state": 2,
        "window-2": 2,
    }
    assert CacheUsage(total=8).groups() == {}
