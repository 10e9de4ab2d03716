"""One record for each request, and what it may hold at which level."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from telemetry.logs.request_log import RequestLog
from telemetry.timeline import Content, Outcome, RequestTimeline, Timelines

PROMPT = "the prompt is private"
ANSWER = "and so is the answer"
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"

Told = Callable[..., dict[str, Any]]


def lived(timelines: Timelines, *, prompt: object = PROMPT, answer: str = ANSWER, **more: Any) -> RequestTimeline:
    """A request of two choices that was preempted once."""
    timeline = timelines.open(
        "req-1",
        operation="chat",
        model="understudy",
        label=more.get("label"),
        traceparent=TRACE,
        request={"gen_ai.request.temperature": 0.5, "gen_ai.request.stop_sequences": ("END", "a b")},
    )
    start = timeline.started
    for choice in (0, 1):
        queue = timeline.begin("queue", start, choice)
        timeline.finish(queue, start + 1)
        for chunk in (0, 1):
            prefill = timeline.begin("prefill", start + 1 + chunk, choice)
            timeline.finish(prefill, start + 1.5 + chunk)
    timeline.mark("first_token", start + 2.5, 0)
    timeline.mark("preempted", start + 3, 1)
    again = timeline.begin("queue", start + 3, 1, resumed=True)
    timeline.finish(again, start + 4)
    timeline.prompt_tokens, timeline.output_tokens, timeline.cached_tokens = 9, 5, 3
    if timeline.content is not None:
        timeline.content.input = prompt
        for part in answer.split(" "):
            timeline.content.add(0, part + " ")
            timeline.content.add(1, "x")
    timelines.close(timeline, more.get("outcome", Outcome(finish_reasons=("stop", "length"))))
    return timeline


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Told:
    """The fields of the one record of a request's life, at a level of the request log."""

    def tell(level: int, **more: Any) -> dict[str, Any]:
        caplog.clear()
        timelines = Timelines()
        timelines.listen(RequestLog(level=level, as_json=True))
        with caplog.at_level(logging.INFO, logger="troupe.requests"):
            timeline = lived(timelines, **more)
        assert timeline.content is None
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("troupe.requests", logging.INFO)
        assert record.__dict__["traceparent"] == TRACE
        fields: dict[str, Any] = json.loads(record.getMessage())
        return fields

    return tell


def test_level_0_reports_ids_counts_and_times(reported: Told) -> None:
    fields = reported(0, label="client-7")
    assert fields.pop("duration_s") >= 0
    assert fields == {
        "message": "request ended",
        "request_id": "req-1",
        "label": "client-7",
        "operation": "chat",
        "model": "understudy",
        "finish_reasons": ["stop", "length"],
        "prompt_tokens": 9,
        "cached_tokens": 3,
        "output_tokens": 5,
        "first_token_s": 2.5,
        "queue_s": 2.0,
        "prefill_s": 1.0,
        "preemptions": 1,
    }


def test_level_1_adds_the_sampling_parameters(reported: Told) -> None:
    fields = reported(1)
    assert fields["temperature"] == 0.5
    assert fields["stop_sequences"] == ["END", "a b"]
    assert not {"temperature", "stop_sequences"} & reported(0).keys()


@pytest.mark.parametrize("level", [0, 1])
def test_below_level_2_no_text_is_kept_or_logged(reported: Told, level: int) -> None:
    quoting = Outcome(error_type="InvalidRequest", message=f"what is {PROMPT!r}?")
    text = json.dumps(reported(level)) + json.dumps(reported(level, outcome=quoting))
    assert PROMPT not in text
    assert "answer" not in text
    timelines = Timelines()
    timelines.listen(RequestLog(level=level))
    assert timelines.open("req-2", operation="chat", model="m").content is None


def test_level_2_adds_part_of_the_texts_and_level_3_all(reported: Told) -> None:
    long = "a" * 2000 + "b" * 2000
    fields = reported(2, prompt=long)
    assert fields["input"] == "a" * 1024 + "...(1952 characters left out)..." + "b" * 1024
    assert fields["output"] == [ANSWER + " ", "xxxxx"]
    assert reported(3, prompt=long)["input"] == long
    assert len(reported(2, answer=long)["output"][0]) < 1100
    assert reported(3, answer=long)["output"][0] == long + " "


def test_a_conversation_and_ids_are_logged_as_json(reported: Told) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    assert json.loads(reported(3, prompt=chat)["input"]) == chat
    assert reported(3, prompt=[1, 2, 3])["input"] == "[1,2,3]"


def test_errors_are_reported_by_type_and_own_words_in_full(reported: Told) -> None:
    invalid = Outcome(error_type="InvalidRequest", message="max_tokens: must be at least 1")
    assert reported(1, outcome=invalid)["error_type"] == "InvalidRequest"
    assert "error_message" not in reported(1, outcome=invalid)
    assert reported(2, outcome=invalid)["error_message"] == "max_tokens: must be at least 1"
    full = Outcome(error_type="QueueFull", message="The queue is full.")
    assert reported(0, outcome=full)["error_message"] == "The queue is full."
    assert "finish_reasons" not in reported(0, outcome=full)


def test_as_text_it_is_one_line_whatever_the_client_chose(caplog: pytest.LogCaptureFixture) -> None:
    timelines = Timelines()
    timelines.listen(RequestLog(level=3))
    with caplog.at_level(logging.INFO, logger="troupe.requests"):
        lived(timelines, label="x\nERROR forged\x1b[0m", prompt="line\nline\x1b", answer="tab\tbell\x07")
    text = caplog.records[0].getMessage()
    assert text.isprintable()
    assert text.startswith('request ended request_id=req-1 label="x\\nERROR forged\\u001b[0m" operation=chat')
    assert ' stop_sequences=["END","a b"] ' in text
    assert ' input="line\\nline\\u001b" ' in text


def test_nothing_is_done_when_nothing_listens(caplog: pytest.LogCaptureFixture) -> None:
    timelines = Timelines()
    timelines.listen(RequestLog(level=3))
    with caplog.at_level(logging.WARNING, logger="troupe.requests"):
        assert lived(timelines).content is None
    assert not caplog.records


def test_content_of_two_requests_is_apart() -> None:
    one, other = Content(), Content()
    one.add(0, "a")
    assert other.output == {}
