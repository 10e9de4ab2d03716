from __future__ import annotations

import gc
import json
import logging

import pytest
from prometheus_client import CollectorRegistry

from telemetry.logs.gc_watch import GcWatch
from telemetry.logs.request_file import RequestFile
from telemetry.logs.request_times import RequestTimes, request_times
from telemetry.logs.step_log import StepLog
from telemetry.metrics.engine import EngineMetrics
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.options import ADAPTER, MetricOptions, token_buckets
from telemetry.metrics.requests import RequestMetrics
from telemetry.metrics.steps import StepMetrics, StepShape
from telemetry.timeline import Outcome, RequestTimeline, Timelines

CHAT = ("chat", "troupe", "box")


def begin(listener: object, **request: object) -> tuple[Timelines, RequestTimeline]:
    timelines = Timelines()
    timelines.listen(listener)  # type: ignore[arg-type]
    timeline = timelines.open("req-1", operation="chat", model="box", label="mine", request=request)  # type: ignore[arg-type]
    return timelines, timeline


def live(timeline: RequestTimeline, *, tokens: int = 11, choice: int = 0) -> float:
    """A choice's life: 0.1 s to encode, 0.2 s in the queue, 0.3 s of prefill, then a token each 50 ms. Returns its
    end."""
    at = timeline.started
    timeline.prompt_tokens = 7
    timeline.finish(timeline.begin("tokenize", at), at + 0.1)
    timeline.finish(timeline.begin("queue", at + 0.1, choice), at + 0.3)
    timeline.finish(timeline.begin("prefill", at + 0.3, choice), at + 0.6)
    decode = timeline.begin("decode", at + 0.6, choice)
    timeline.mark("first_token", at + 0.6, choice)
    end = at + 0.6 + 0.05 * (tokens - 1)
    timeline.finish(decode, end, tokens=tokens)
    timeline.output_tokens += tokens
    return end


def total(family: dict[tuple[str, ...], Histogram], *labels: str) -> tuple[int, float]:
    return family[labels].count, round(family[labels].total, 6)


def test_a_request_counts_once_in_each_of_its_metrics() -> None:
    metrics = RequestMetrics("box")
    _, timeline = begin(metrics)
    end = live(timeline)
    live(timeline, choice=1)
    timeline.cached_tokens = 4
    timeline.close(Outcome(("stop", "length")), end)
    assert total(metrics.first_token, *CHAT) == (1, 0.6)
    assert total(metrics.duration, *CHAT, "") == (1, 1.1)
    assert total(metrics.per_token, *CHAT) == (2, 0.1)
    for histogram, seconds in ((metrics.queue, 0.4), (metrics.prefill, 0.6), (metrics.decode, 1.0)):
        assert (histogram.count, round(histogram.total, 6)) == (2, seconds)
    assert metrics.ended_by["stop",] == 1
    assert metrics.tokens == {("input",): 7, ("output",): 22}
    assert (metrics.cached_tokens, metrics.prompt_tokens) == (4, 7)
    assert not metrics.stream_errors


def test_a_request_that_never_got_in_is_rejected_and_counts_no_tokens() -> None:
    metrics = RequestMetrics("box")
    _, timeline = begin(metrics)
    timeline.prompt_tokens = 7
    timeline.close(Outcome(error_type="QueueFull"), timeline.started + 0.001)
    assert metrics.ended_by["rejected",] == 1
    assert total(metrics.duration, *CHAT, "QueueFull") == (1, 0.001)
    assert metrics.tokens["input",] == 0
    assert metrics.queue.count == 0


def test_a_failure_after_the_first_token_is_an_error_of_the_stream() -> None:
    metrics = RequestMetrics("box")
    _, early = begin(metrics)
    early.close(Outcome(("error",), "RequestFailed"), early.started + 1)
    assert not metrics.stream_errors
    _, late = begin(metrics)
    live(late)
    late.close(Outcome(("error",), "RequestFailed"), late.started + 2)
    assert metrics.stream_errors == {("RequestFailed",): 1}
    _, aborted = begin(metrics)
    live(aborted)
    aborted.close(Outcome(("abort",), "abort"), aborted.started + 2)
    assert metrics.stream_errors == {("RequestFailed",): 1}
    assert metrics.ended_by["error",] == 2


@pytest.mark.parametrize(
    ("hops", "stage"),
    [((), "admission"), (("tokenize",), "tokenize"), (("tokenize", "queue"), "queue"), (("queue", "decode"), "decode")],
)
def test_a_hang_up_is_counted_at_what_the_request_had_come_to(hops: tuple[str, ...], stage: str) -> None:
    metrics = RequestMetrics("box")
    _, timeline = begin(metrics)
    for name in hops:
        timeline.begin(name, timeline.started, 0)
    timeline.mark("client_gone", timeline.started + 1)
    timeline.close(Outcome(("abort",), "abort"), timeline.started + 1)
    assert metrics.disconnects == {(stage,): 1}
    assert metrics.ended_by["abort",] == 1


def test_a_workers_death_shows_as_the_gap_in_the_stream() -> None:
    metrics = RequestMetrics("box")
    _, timeline = begin(metrics)
    end = live(timeline)
    timeline.mark("worker_died", end, 0)
    timeline.finish(timeline.begin("queue", end, 0, resumed=True), end + 2)
    timeline.mark("resumed", end + 2, 0)
    timeline.finish(timeline.begin("decode", end + 2.5, 0), end + 3, tokens=2)
    timeline.close(Outcome(("stop",)), end + 3)
    assert (metrics.stream_gap.count, round(metrics.stream_gap.total, 6)) == (1, 2.5)
    assert metrics.resumed == 1
    assert metrics.queue.count == 1  # the wait of a resumed one is no queue time
    # From the first place in a step to the first token, and from that to the last, over the pause.
    assert (metrics.prefill.count, round(metrics.prefill.total, 6)) == (1, 0.3)
    assert (metrics.decode.count, round(metrics.decode.total, 6)) == (1, 3.5)
    assert total(metrics.per_token, *CHAT) == (1, round(3.5 / 12, 6))


def test_the_gap_is_that_of_the_choice_whose_worker_died() -> None:
    metrics = RequestMetrics("box")
    _, timeline = begin(metrics)
    end = live(timeline)
    live(timeline, choice=1)
    timeline.mark("worker_died", end, 0)
    for at, choice in ((end + 1, 1), (end + 2, 0), (end + 3, 0)):
        timeline.finish(timeline.begin("decode", at, choice), at + 0.5, tokens=1)
    timeline.close(Outcome(("stop", "stop")), end + 4)
    assert (metrics.stream_gap.count, round(metrics.stream_gap.total, 6)) == (1, 2.0)


def test_what_others_measure_is_reported_by_its_quantity() -> None:
    metrics = RequestMetrics("box")
    reported = {
        name: Histogram((1.0,)) for name in ("duration", "inference", "choices", "longest", "max_tokens", "per_token")
    }
    for name, histogram in reported.items():
        metrics.measured[name].append(histogram)
    _, timeline = begin(metrics, **{"gen_ai.request.max_tokens": 40})
    live(timeline)
    timeline.finish(timeline.begin("queue", timeline.started, 1), timeline.started + 0.3)
    timeline.finish(timeline.begin("decode", timeline.started + 0.6, 1), timeline.started + 0.8, tokens=2)
    timeline.close(Outcome(("stop", "length")), timeline.started + 1.2)
    _, early = begin(metrics)
    early.close(Outcome((), "abort"), early.started + 1.0)
    _, refused = begin(metrics)
    refused.close(Outcome((), "QueueFull"), refused.started + 1.0)
    found = {name: (histogram.count, round(histogram.total, 6)) for name, histogram in reported.items()}
    assert found == {
        "duration": (2, 2.2),
        "inference": (2, 0.8 + 0.5),
        "choices": (2, 3.0),
        "longest": (2, 11.0),
        "max_tokens": (1, 40.0),
        "per_token": (2, 0.25),
    }


def test_custom_labels_are_on_the_metrics_of_requests_and_bounded() -> None:
    metrics = RequestMetrics("box", MetricOptions(custom_labels=("team",)))
    for number in range(150):
        _, timeline = begin(metrics, **{"troupe.label.team": f"t{number}"})
        timeline.close(Outcome(("stop",)), timeline.started + 1)
    assert metrics.ended_by["stop", "t3"] == 1
    assert metrics.ended_by["stop", "other"] == 50
    assert total(metrics.duration, *CHAT, "", "t3") == (1, 1.0)
    metrics = RequestMetrics("box", MetricOptions(custom_labels=("team",)))
    _, timeline = begin(metrics, **{"troupe.label.team": "t" * 100})
    timeline.close(Outcome(("stop",)), timeline.started + 1)
    assert metrics.ended_by["stop", "t" * 64] == 1


def test_requests_have_the_label_of_their_adapter_and_of_at_most_a_hundred() -> None:
    metrics = RequestMetrics("box", MetricOptions(adapters=True, custom_labels=("team",)))
    for number in range(150):
        _, timeline = begin(metrics, **{ADAPTER: f"a{number}", "troupe.label.team": "t"})
        timeline.close(Outcome(("stop",)), live(timeline))
    assert metrics.ended_by["stop", "t", "a3"] == 1
    assert metrics.ended_by["stop", "t", "other"] == 50
    assert total(metrics.first_token, *CHAT, "t", "a99")[0] == 1
    assert metrics.adapter_label("a120") == "other"
    _, timeline = begin(metrics, **{"troupe.label.team": "t"})
    timeline.close(Outcome(("stop",)), live(timeline))
    assert metrics.ended_by["stop", "t", ""] == 1  # a request without an adapter is never one of the others


def test_the_label_of_adapters_is_there_only_with_adapters() -> None:
    for adapters in (False, True):
        registry = CollectorRegistry()
        metrics = EngineMetrics(registry, "box", dict, MetricOptions(adapters=adapters))
        _, timeline = begin(metrics.requests)
        timeline.close(Outcome(("stop",)), live(timeline))
        found = {family.name: {name for s in family.samples for name in s.labels} for family in registry.collect()}
        for name in ("troupe_requests", "troupe_tokens", "gen_ai_server_time_to_first_token_seconds"):
            assert ("adapter" in found[name]) is adapters
        assert "adapter" not in found["troupe_request_queue_seconds"]


def test_chosen_buckets_are_those_exported() -> None:
    options = MetricOptions(
        first_token_buckets=(0.5, 5.0),
        duration_buckets=(1.5,),
        inter_token_buckets=(0.25,),
        collect_tokens=True,
        prompt_token_buckets=(8.0,),
        generation_token_buckets=(3.0, 9.0),
    )
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "box", dict, options)
    _, timeline = begin(metrics.requests)
    timeline.close(Outcome(("stop",)), live(timeline))
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        found.update({family.name: {s.labels["le"] for s in family.samples if "le" in s.labels}})
    assert found["gen_ai_server_time_to_first_token_seconds"] == {"0.5", "5.0", "+Inf"}
    assert found["gen_ai_server_request_duration_seconds"] == {"1.5", "+Inf"}
    assert found["gen_ai_server_time_per_output_token_seconds"] == {"0.25", "+Inf"}
    assert found["troupe_inter_token_latency_seconds"] == {"0.25", "+Inf"}
    assert found["troupe_input_tokens"] == {"8.0", "+Inf"}
    assert found["troupe_output_tokens"] == {"3.0", "9.0", "+Inf"}
    assert not {"troupe_input_tokens", "troupe_output_tokens"} & set(RequestMetrics("box").readings())


def test_rules_of_token_buckets() -> None:
    assert token_buckets(()) is None
    assert token_buckets(("default",)) is None
    assert token_buckets(("custom", "100", "10", "10")) == (10, 100)
    assert token_buckets(("tse", "1000", "2", "8")) == (984, 992, 996, 998, 1000, 1002, 1004, 1008, 1016)
    assert token_buckets(("tse", "3", "2", "4")) == (0, 1, 3, 5, 7)
    for wrong in (
        ("tse", "1"),
        ("custom",),
        ("custom", "x"),
        ("tse", "1", "1", "4"),
        ("tse", "1", "2", "9999"),
        ("1",),
    ):
        with pytest.raises(ValueError, match="tse 1000 2 8"):
            token_buckets(wrong)


def test_times_of_a_request_are_logged_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    _, timeline = begin(RequestTimes())
    end = live(timeline)
    with caplog.at_level(logging.INFO, "troupe.request_times"):
        assert not caplog.records
        timeline.close(Outcome(("stop",)), end)
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("Times of req-1: tokenize 100.0 ms, queue 200.0 ms, prefill 300.0 ms, decode 500.0 ms")
    assert "output_tokens 11" in text
    assert request_times(timeline)["first_token"] == pytest.approx(0.6)


def test_time_in_overlapping_stays_counts_once_and_that_of_later_ones_too() -> None:
    _, timeline = begin(RequestTimes())
    at = timeline.started
    for choice, scale in ((0, 1.0), (1, 0.5)):
        stays = [("queue", 0, 1), ("prefill", 1, 3), ("prefill", 1.5, 5), ("prefill", 2, 4), ("queue", 6, 8)]
        for name, start, end in stays:
            timeline.finish(timeline.begin(name, at + start * scale, choice), at + end * scale)
    timeline.close(Outcome(("stop",)), at + 9)
    times = request_times(timeline)
    assert times["queue"] == pytest.approx(3)
    assert times["prefill"] == pytest.approx(4)
    assert (times["tokenize"], times["decode"], times["total"]) == (None, None, pytest.approx(9))


async def test_each_request_is_a_json_line_of_its_hour(tmp_path) -> None:
    file = RequestFile(str(tmp_path / "made"), largest=400)
    for number in range(3):
        _, timeline = begin(file, **{"gen_ai.request.max_tokens": 9})
        timeline.label = "half a pair: \ud800"
        timeline.started_unix = 1_700_000_000.0 + 3600 * (number == 2)
        timeline.close(Outcome(("stop",)), live(timeline))
    assert not (tmp_path / "made").exists()
    file.flush()
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "made").iterdir()}
    assert {name: len(lines) for name, lines in files.items()} == {
        "troupe-requests-20231114T22-000.jsonl": 1,
        "troupe-requests-20231114T22-001.jsonl": 1,  # a file of 400 bytes is full with one line
        "troupe-requests-20231114T23-000.jsonl": 1,
    }
    record = json.loads(files["troupe-requests-20231114T22-000.jsonl"][0])
    assert record["request_id"] == "req-1"
    assert record["label"] == "half a pair: \ud800"
    assert record["finish_reasons"] == ["stop"]
    assert record["parameters"] == {"max_tokens": 9}
    assert record["output_tokens"] == 11
    assert record["queue"] == pytest.approx(0.2)


def test_a_directory_that_cannot_be_written_is_logged_once(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file")
    file = RequestFile(str(tmp_path / "taken"))
    for _ in range(2):
        _, timeline = begin(file)
        timeline.close(Outcome(("stop",)), timeline.started)
        file.flush()
    assert len([record for record in caplog.records if "cannot be written" in record.getMessage()]) == 1


def test_the_load_is_logged_once_in_so_many_decodes(caplog: pytest.LogCaptureFixture) -> None:
    steps = StepMetrics()
    readings = {"troupe_requests_running": 4, "troupe_cache_pages": 100, "troupe_cache_pages_used": 25}
    steps.log = StepLog(3, lambda: {**readings, "troupe_cache_page_tokens": 16})
    with caplog.at_level(logging.INFO, "troupe.steps"):
        for number in range(7):
            shape = StepShape(number * 0.1, decodes=0 if number == 0 else 4, prefills=1, prefill_tokens=8)
            steps.answered(shape, number * 0.1 + 0.1, generated=4, graph_rows=4, queued=0.0, prepare=0.0, run=0.1)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == (
        "Decode: 4 rows in the step, 4 running, 0 waiting; cache 400 of 1600 tokens (25 %); graph; 40.0 tokens/s"
    )
    assert len(messages) == 2


def test_long_collections_are_warned_of_while_it_watches(caplog: pytest.LogCaptureFixture) -> None:
    before = list(gc.callbacks)
    watch = GcWatch(1e-9)
    watch.start()
    gc.collect()
    watch.stop()
    watch.stop()
    seen = [record for record in caplog.records if record.name == "troupe.gc"]
    assert seen
    assert "generation 2" in seen[0].getMessage()
    assert gc.callbacks == before
    patient = GcWatch(3600)
    patient.start()
    gc.collect()
    patient.stop()
    assert len([record for record in caplog.records if record.name == "troupe.gc"]) == len(seen)
