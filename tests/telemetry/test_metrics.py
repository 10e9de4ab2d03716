from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics.engine import EngineMetrics
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.names import METRICS
from telemetry.metrics.options import MetricOptions
from telemetry.metrics.steps import StepMetrics, StepShape


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_live_readings_are_read_at_each_scrape() -> None:
    registry = CollectorRegistry()
    readings = {"troupe_requests_running": 3.0, "troupe_preemptions_total": 10.0}
    EngineMetrics(registry, "box", lambda: readings)
    assert samples(registry)["troupe_requests_running", ()] == 3
    readings["troupe_preemptions_total"] = 12.0
    assert samples(registry)["troupe_preemptions_total", ()] == 12
    assert b"# TYPE troupe_preemptions_total counter" in generate_latest(registry)
    assert b"# HELP troupe_requests_running Sequences with a slot on the device." in generate_latest(registry)


def test_two_engines_share_nothing_with_each_other_or_the_process() -> None:
    before = generate_latest(prometheus_client.REGISTRY)
    first, second = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(first, "a", dict).actor_messages.restarted("worker-0")
    EngineMetrics(second, "b", dict)
    label = (("actor", "worker-0"), ("cause", "group"))
    assert samples(first)["troupe_restarts_total", label] == 1
    assert ("troupe_restarts_total", label) not in samples(second)
    assert b"troupe" not in generate_latest(prometheus_client.REGISTRY)
    assert b"troupe" not in before


def test_what_the_server_counts_is_exposed() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "box", dict)
    metrics.count_http("/v1/models", 200)
    metrics.count_http("/v1/models", 200)
    metrics.count_unknown_field("colour")
    found = samples(registry)
    assert found["troupe_http_requests_total", (("endpoint", "/v1/models"), ("status", "200"))] == 2
    assert found["troupe_unknown_fields_total", (("field", "colour"),)] == 1


def test_without_metrics_the_registry_stays_empty_and_nothing_listens() -> None:
    from telemetry.timeline import Outcome, Timelines

    registry, timelines = CollectorRegistry(), Timelines()
    metrics = EngineMetrics(registry, "box", dict, MetricOptions(enabled=False))
    metrics.listen(timelines)
    timelines.close(timelines.open("r", operation="chat", model="box"), Outcome(("stop",)))
    assert generate_latest(registry) == b""
    assert sum(metrics.requests.ended_by.values()) == 0


def test_every_exposed_metric_is_in_the_table_with_its_type_and_labels() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "box", dict, MetricOptions(collect_tokens=True))
    metrics.actor_messages.handled("scheduler", "Submit", wait=0.1, duration=0.2, depth=3, traceparent=None, error=None)
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        spec = METRICS[name]
        assert spec.kind == family.type
        assert spec.help == family.documentation
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), name


def test_a_histogram_puts_a_value_at_its_bound_and_takes_many_at_once() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.add(0.1)
    histogram.add(0.5, 3)
    histogram.add(7.0)
    assert histogram.cumulative() == [("0.1", 1), ("1.0", 4), ("+Inf", 5)]
    assert histogram.count == 5
    assert abs(histogram.total - 8.6) < 1e-9


def answered(steps: StepMetrics, shape: StepShape, now: float, *, generated: int, graph_rows: int = 0) -> None:
    steps.answered(shape, now, generated=generated, graph_rows=graph_rows, queued=0.002, prepare=0.001, run=0.01)


def test_inter_token_latency_is_the_time_between_two_steps() -> None:
    steps, latency = StepMetrics(), Histogram((0.02, 0.1))
    steps.inter_token.append(latency)
    answered(steps, StepShape(0.0, decodes=0, prefills=3, prefill_tokens=48), 0.5, generated=3)
    answered(steps, StepShape(0.4, decodes=3), 0.55, generated=3, graph_rows=3)
    answered(steps, StepShape(0.5, decodes=2, prefills=1, prefill_tokens=7), 0.56, generated=3)
    assert latency.counts == [2, 3, 0]
    assert abs(latency.total - (3 * 0.05 + 2 * 0.01)) < 1e-9
    assert (steps.prefill_tokens, steps.decode_tokens, steps.generated_tokens) == (55, 5, 9)
    assert (steps.graph_rows, steps.eager_rows) == (3, 6)
    phases = steps.readings()["troupe_step_phase_seconds_total"]
    assert isinstance(phases, dict)
    assert {phase: round(seconds, 6) for (phase,), seconds in phases.items()} == {
        "queued": 0.006,
        "prepare": 0.003,
        "run": 0.03,
    }


def test_the_gap_after_lost_steps_is_no_latency_between_tokens() -> None:
    steps, latency = StepMetrics(), Histogram((0.02, 0.1))
    steps.inter_token.append(latency)
    answered(steps, StepShape(0.0, decodes=1), 1.0, generated=1)
    steps.interrupted()
    answered(steps, StepShape(8.9, decodes=1), 9.0, generated=1)
    assert latency.count == 0
