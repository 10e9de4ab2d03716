"""What a record looks like, and that no text in it can look like another record."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from telemetry.logs.lines import Event, JsonLines, TextLines, clip

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NASTY = "a\nERROR forged\r\x1b[31mred\x9b2J\u2028next\u202egnissim\x00\ud800"


def record(message: object, *args: object, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("troupe.test", logging.WARNING, "file.py", 1, message, args, exc_info)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_a_line_of_text_reports_what_is_known_of_the_work() -> None:
    line = TextLines().format(record("slow by %d s", 3, traceparent=TRACE, request_id="req-1", actor="worker-0"))
    assert line.partition(" WARNING ")[2] == (
        "troupe.test: slow by 3 s request_id=req-1 actor=worker-0"
        " trace_id=4bf92f3577b34da6a3ce929d0e0e4736 span_id=00f067aa0ba902b7"
    )


def test_an_object_of_json_reports_the_same() -> None:
    reported = json.loads(JsonLines().format(record("slow by %d s", 3, traceparent=TRACE, request_id="r", actor="w")))
    assert reported["time"].endswith("Z")
    assert isinstance(reported.pop("pid"), int)
    del reported["time"]
    assert reported == {
        "level": "warning",
        "logger": "troupe.test",
        "message": "slow by 3 s",
        "request_id": "r",
        "actor": "w",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "span_id": "00f067aa0ba902b7",
    }


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_no_text_makes_a_line_or_commands_a_terminal(formatter: logging.Formatter) -> None:
    records = [
        record("the model %s", NASTY),
        record(NASTY),
        record("of a client", request_id=NASTY, actor=NASTY, traceparent=NASTY),
        record(Event(f"GET {NASTY}", {"label": NASTY, "list": [NASTY], NASTY: 1}, details={"path": NASTY})),
        record(Event(NASTY, {"label": NASTY}, as_json=True)),
    ]
    for made in records:
        line = formatter.format(made)
        assert line.isprintable(), line
        assert "forged" in line or made.args == ()
    assert (
        TextLines()
        .format(records[0])
        .endswith("the model a\\nERROR forged\\r\\x1b[31mred\\x9b2J\\u2028next\\u202egnissim\\x00\\ud800")
    )
    assert json.loads(JsonLines().format(records[0]))["message"] == f"the model {NASTY}"


def test_a_traceback_stands_behind_a_bar() -> None:
    try:
        raise ValueError("bad\n2026-11-21 00:00:00,000 ERROR   troupe: forged")
    except ValueError as error:
        made = record("failed", error=error)
    first, *others = TextLines().format(made).split("\n")
    assert first.endswith("troupe.test: failed")
    assert others[0] == "    | Traceback (most recent call last):"
    assert all(line.startswith("    | ") for line in others)
    reported = json.loads(JsonLines().format(made))
    assert reported["exception"].startswith("Traceback (most recent call last):")
    assert "\n" not in JsonLines().format(made)


def test_the_fields_of_an_event_are_pairs_or_keys() -> None:
    made = record(
        Event("request ended", {"id": "r", "name": "a b", "ok": True, "s": 0.25, "none": None, "all": ("x", "y")}),
        request_id="r",
    )
    assert (
        TextLines()
        .format(made)
        .endswith('troupe.test: request ended id=r name="a b" ok=true s=0.25 all=x,y request_id=r')
    )
    reported = json.loads(JsonLines().format(made))
    assert (reported["message"], reported["name"], reported["all"], "none" in reported) == (
        "request ended",
        "a b",
        ["x", "y"],
        False,
    )


def test_an_event_is_whole_under_any_handler() -> None:
    fields, details = {"label": "a b"}, {"status": 200}
    made = record(Event("GET / 200", fields, details=details))
    assert logging.Formatter("%(message)s").format(made) == 'GET / 200 label="a b"'
    made = record(Event("GET / 200", fields, details=details, as_json=True))
    assert json.loads(logging.Formatter("%(message)s").format(made)) == {
        "message": "GET / 200",
        "label": "a b",
        "status": 200,
    }


def test_arguments_that_do_not_fit_cost_no_record() -> None:
    line = TextLines().format(record("%d of %d", "x"))
    assert "%d of %d (its arguments do not fit: TypeError, at file.py:1)" in line


def test_long_texts_are_clipped_in_their_middle() -> None:
    assert clip("a" * 10, 10) == "a" * 10
    assert clip("a" * 10 + "b" * 10, 4) == "aa...(16 characters left out)...bb"
    assert len(TextLines().format(record("x" * 1_000_000))) < 20_000
    assert len(JsonLines().format(record("failed", exc_text="y" * 1_000_000))) < 40_000
