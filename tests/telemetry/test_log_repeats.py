"""Repeated warnings are counted."""

from __future__ import annotations

import logging
import math

from telemetry.logs.repeats import Repeats


def record(level: int = logging.WARNING, line: int = 1, name: str = "troupe.test") -> logging.LogRecord:
    return logging.LogRecord(name, level, "file.py", line, "", None, None)


def test_the_same_warning_is_logged_once_and_counted() -> None:
    repeats = Repeats(window=30)
    assert [repeats.admit(record(), "slow", now) for now in range(20)] == [True] + [False] * 19
    assert repeats.due(29) == []
    (reported,) = repeats.due(30)
    assert (reported.name, reported.level) == ("troupe.test", logging.WARNING)
    assert reported.text == "slow (seen 20 times within 30 s)"
    assert repeats.due(1000) == []
    assert not repeats.counting
    assert repeats.admit(record(), "slow", 1000)


def test_a_window_ends_without_anybody_asking() -> None:
    repeats = Repeats(window=30)
    assert repeats.admit(record(), "slow", 0)
    assert not repeats.admit(record(), "slow", 1)
    assert repeats.admit(record(), "slow", 31)
    assert [reported.text for reported in repeats.due(31)] == ["slow (seen 2 times within 30 s)"]


def test_a_storm_of_one_line_of_code_is_counted_whatever_it_says() -> None:
    repeats = Repeats(window=30, burst=3)
    admitted = [repeats.admit(record(), f"request {number} aborted", 0) for number in range(15_000)]
    assert sum(admitted) == 3
    assert [reported.text for reported in repeats.due(math.inf)] == [
        "request 14999 aborted (the last of 14997 more like it within 30 s)"
    ]


def test_long_texts_differ_by_their_ends_too() -> None:
    """There an event's fields stand, behind what an actor died of."""
    repeats = Repeats()
    assert [repeats.admit(record(), f"{'x' * 5000} batch={batch}", 0) for batch in "abb"] == [True, True, False]
    (reported,) = repeats.due(math.inf)
    assert reported.text.endswith("xxx batch=b (seen 2 times within 30 s)")
    assert len(reported.text) < 1000


def test_other_records_are_not_touched() -> None:
    repeats = Repeats(burst=1)
    assert all(repeats.admit(record(logging.INFO), "GET /", 0) for _ in range(100))
    assert all(repeats.admit(record(logging.CRITICAL), "over", 0) for _ in range(100))
    assert repeats.admit(record(), "slow", 0)
    assert repeats.admit(record(logging.ERROR), "slow", 0)
    assert repeats.admit(record(name="troupe.other"), "slow", 0)
    assert repeats.admit(record(line=2), "slower", 0)
    assert repeats.due(math.inf) == []


def test_memory_is_bounded_and_what_is_forgotten_is_reported() -> None:
    repeats = Repeats(max_records=8, burst=10**9)
    for number in range(1000):
        repeats.admit(record(line=number), f"warning {number}", 0)
        repeats.admit(record(line=number), f"warning {number}", 0)
    assert len(repeats._texts) <= 8
    assert len(repeats._places) <= 8
    assert len(repeats._forgotten) <= 8
    assert "warning 991 (seen 2 times within 30 s)" in [reported.text for reported in repeats.due(0)]
