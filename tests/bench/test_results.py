"""Rows of benchmarks: recording, reading, and the page that is generated from them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.bench import _record
from tests.bench.__main__ import names
from tests.bench._goals import Goal, read_goals
from tests.bench._record import RESULTS, Machine, Row, newest, read, record, write
from tests.bench.results import PAGE, main, number, page, verdict

XEON = Machine("Xeon", "amx", 2)
RECORDED = {
    "adapter_loading", "adapters", "chaos", "clients", "context_parallel", "cpu", "crowd", "device", "embeddings",
    "engine", "expert_exchange", "expert_moves", "grammar", "hop", "latent", "neighbours", "npu_host",
    "observability", "online", "overlap", "peers", "pipeline", "planner", "products", "quantization", "recording",
    "sampling", "scale", "serving", "soak", "speculative", "understudy",
}  # fmt: skip


def row(point: str, median: float, date: str = "2026-11-26") -> Row:
    return Row(date=date, machine=XEON, command="hop", point=point, metric="time", median=median, unit="ms")


def goal(**bounds: float | bool) -> Goal:
    return Goal(what="w", goal="g", benchmark="hop", points=("a*",), metric="time", **bounds)  # type: ignore[arg-type]


def test_page_is_current() -> None:
    assert main(["--check"]) == 0


def test_page_that_is_not_current_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = tmp_path / PAGE.name
    stale.write_text(page() + "| one more |\n", encoding="utf-8")
    monkeypatch.setattr("tests.bench.results.PAGE", stale)
    with pytest.raises(SystemExit, match=r"RESULTS\.md is not current"):
        main(["--check"])


def test_page_is_short_and_measures_every_goal() -> None:
    text = page()
    assert text.count("\n") <= 164
    assert "not measured" not in text
    assert len(read_goals().goal) > 40


def test_all_rows_are_readable_and_name_what_they_measured() -> None:
    for path in RESULTS.glob("*.jsonl"):
        rows = read(path.stem)
        assert rows, path
        assert all(each.point and each.metric and each.command.startswith(path.stem) for each in rows), path
        assert all(each.spread is None or each.spread[0] <= each.median <= each.spread[1] for each in rows), path


def test_newest_row_of_a_point_counts_whatever_the_order_of_lines(tmp_path: Path) -> None:
    lines = [row("a", 1, "2026-11-25"), row("a", 3, "2026-11-24"), row("b", 2)]
    with (tmp_path / "hop.jsonl").open("wb") as file:
        file.writelines(_record.msgspec.json.encode(line) + b"\n" for line in lines)
    assert {point: each.median for (point, _), each in newest(read("hop", tmp_path)).items()} == {"a": 1, "b": 2}


def test_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "hop.jsonl").write_text('{"date": "2026-11-26"}\n')
    with pytest.raises(ValueError, match=r"hop\.jsonl:1: .*missing required field"):
        read("hop", tmp_path)


@pytest.mark.parametrize(
    ("bounds", "values", "expected"),
    [
        ({"maximum": 2}, (1, 2), ("1 to 2 ms", "met")),
        ({"maximum": 2}, (1, 3), ("1 to 3 ms", "not met")),
        ({"maximum": 200}, (203,), ("203 ms", "within 2%")),
        ({"minimum": 200}, (197,), ("197 ms", "within 2%")),
        ({"maximum": 0}, (0.01,), ("0.01 ms", "not met")),
        ({"minimum": 2}, (2.5, 2), ("2 to 2.50 ms", "met")),
        ({"minimum": 2}, (1.5, 3), ("1.50 to 3 ms", "not met")),
        ({"minimum": 2, "best": True}, (1.5, 3), ("3 ms", "met")),
        ({"minimum": 2}, (), ("", "not measured")),
    ],
)
def test_verdict_of_a_goal(bounds, values, expected) -> None:
    rows = [row(f"a{at}", value) for at, value in enumerate(values)] + [row("other", 1000)]
    assert verdict(goal(**bounds), rows) == expected


@pytest.mark.parametrize(("value", "text"), [(7000, "7,000"), (-0.0, "0"), (0.25, "0.25"), (145.52, "145.5")])
def test_numbers_have_as_many_digits_as_count(value: float, text: str) -> None:
    assert number(value) == text


def test_recorded_rows_have_medians_spreads_and_their_command(tmp_path: Path) -> None:
    record("a point", "time", [3.0, 1.0, 2.0], "ms")
    record("a point", "deaths", 4)
    assert write("hop", ["--rounds", "3", "--record"], tmp_path) == 2
    assert write("hop", [], tmp_path) == 0
    timed, counted = read("hop", tmp_path)
    assert (timed.median, timed.spread, timed.unit, timed.command) == (2.0, (1.0, 3.0), "ms", "hop --rounds 3")
    assert (counted.median, counted.spread) == (4.0, None)
    assert timed.machine.processor
    assert timed.machine.cores > 0


@pytest.mark.parametrize("name", names())
def test_benchmarks_that_record_have_the_switch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module(f"tests.bench.{name}").main(["--help"])
    assert (f"tests/bench/results/{name}.jsonl" in capsys.readouterr().out) is (name in RECORDED)
