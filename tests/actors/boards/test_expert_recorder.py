"""The recorder of expert distribution, without an engine."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from actors.boards.expert_recorder import ExpertRecord, ExpertRecorder, RecorderMode, balancedness, write_record
from kernels.contract.step import ExpertCounts, StepResult, TokenValues

SHAPE = 2, 1  # layers, chosen


def result(number: int, counts: list[list[int]], routes: list[list[list[int]]] | None = None) -> StepResult:
    values = None
    if routes is not None:
        rows, tokens = (np.array(each, np.int32).tobytes() for each in ([0], [len(routes)]))
        values = TokenValues(rows, tokens, np.array(routes, np.int16).tobytes())
    counted = np.array(counts, np.int32).tobytes()
    return StepResult(number, accepted=b"", tokens=b"", record=ExpertCounts(counted, values))


def filled(mode: RecorderMode, size: int, steps: int) -> ExpertRecord:
    record = ExpertRecord(mode, size)
    for number in range(steps):
        routes = [[[0], [2]], [[1], [2]]] if mode == "per_token" else None
        record.add(0, [f"req-{number}"], result(number, [[1, 1, 0], [0, 0, number]], routes), SHAPE)
    return record


@pytest.mark.parametrize(("size", "held"), [(3, 3), (-1, 5), (10, 5)])
def test_a_record_holds_its_last_steps(size: int, held: int) -> None:
    record = filled("per_pass", size, 5)
    assert [step.number for step in record.steps] == list(range(5))[-held:]
    assert record.counts is not None
    assert record.counts.tolist() == [[held, held, 0], [0, 0, sum(range(5)[-held:])]]
    assert record.passes == held


def test_sums_alone_are_held_where_nothing_else_is_read() -> None:
    record = filled("stat", -1, 5)
    assert not record.steps
    assert record.counts is not None
    assert record.counts.tolist() == [[5, 5, 0], [0, 0, 10]]


def test_a_records_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.boards.expert_recorder._MAX_BYTES", 60)
    assert [step.number for step in filled("per_pass", -1, 5).steps] == [3, 4]


def test_results_without_counts_are_not_recorded() -> None:
    record = ExpertRecord("stat", 4)
    record.add(0, [], StepResult(1, accepted=b"", tokens=b""), (0, 0))
    assert record.passes == 0
    assert record.counts is None


def test_approximate_records_want_one_step_of_eight() -> None:
    recorder = ExpertRecorder("stat_approx", None)
    recorder.start()
    assert [number for number in range(1, 25) if recorder.for_step(number)] == [8, 16, 24]


def test_steps_belong_to_the_record_that_was_on_when_they_were_sent() -> None:
    recorder = ExpertRecorder("stat", None)
    assert recorder.for_step(1) is None
    recorder.start()
    first = recorder.for_step(1)
    assert first is not None
    recorder.stop()
    assert recorder.for_step(2) is None
    first.add(0, [], result(1, [[3, 0, 0], [0, 1, 2]]), SHAPE)  # it was in flight
    assert recorder.take() is first
    assert first.passes == 1
    recorder.start()
    assert recorder.for_step(3) is not first
    taken = recorder.take()
    assert recorder.is_recording
    assert recorder.for_step(4) not in (None, taken)


def test_steps_in_flight_at_a_dump_belong_to_the_next_record() -> None:
    recorder = ExpertRecorder("per_pass", None)
    recorder.start()
    sent = recorder.for_step(1)
    assert sent is not None
    taken = recorder.take()
    sent.add(0, ["a"], result(1, [[3, 0, 0], [0, 1, 2]]), SHAPE)
    assert (taken.passes, len(taken.steps)) == (0, 0)
    assert recorder.record is not None
    assert recorder.record.passes == 1


def test_a_record_that_was_not_written_goes_on() -> None:
    recorder = ExpertRecorder("per_pass", None)
    recorder.start()
    first = recorder.for_step(1)
    assert first is not None
    first.add(0, ["a"], result(1, [[3, 0, 0], [0, 1, 2]]), SHAPE)
    taken = recorder.take()
    later = recorder.for_step(2)
    assert later is not None
    later.add(0, ["b"], result(2, [[1, 0, 0], [0, 0, 1]]), SHAPE)
    recorder.restore(taken)
    later.add(0, ["c"], result(3, [[1, 0, 0], [0, 0, 1]]), SHAPE)
    assert recorder.take() is taken
    assert taken.counts is not None
    assert (taken.counts.tolist(), taken.passes) == ([[5, 0, 0], [0, 1, 4]], 3)
    assert [step.number for step in taken.steps] == [1, 2, 3]


def test_balancedness_is_the_mean_by_the_maximum() -> None:
    counts = np.array([[4, 4], [0, 0], [6, 2]], np.int64)
    assert balancedness(counts) == {0: 1.0, 2: pytest.approx(4 / 6)}


def test_a_file_of_single_steps_names_requests_and_experts(tmp_path: Path) -> None:
    path = write_record(filled("per_token", 2, 4), str(tmp_path / "new"), {"model": "tiny"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = json.loads(path.read_bytes())
    assert (found["model"], found["mode"], found["passes"]) == ("tiny", "per_token", 2)
    assert found["logical_count"] == [[2, 2, 0], [0, 0, 5]]
    assert [step["requests"] for step in found["records"]] == [["req-2"], ["req-3"]]
    assert found["records"][0]["tokens"] == [2]
    assert found["records"][0]["experts"] == [[[0], [2]], [[1], [2]]]
