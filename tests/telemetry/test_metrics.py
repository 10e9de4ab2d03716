from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import EngineMetrics


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_request_counts_once_in_each_of_its_metrics() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "box", dict)
    metrics.request_ended(
        reason="stop", error_type="", duration=1.1, first_token=0.1, prompt_tokens=7, output_tokens=11
    )
    metrics.request_ended(
        reason="error", error_type="RequestTimeout", duration=2.0, first_token=None, prompt_tokens=5, output_tokens=0
    )
    found = samples(registry)
    model = ("gen_ai_request_model", "box")
    assert found["gen_ai_server_time_to_first_token_seconds_count", (model,)] == 1
    assert found["gen_ai_server_time_per_output_token_seconds_sum", (model,)] == 0.1
    ended = ("error_type", "RequestTimeout"), model
    assert found["gen_ai_server_request_duration_seconds_sum", ended] == 2.0
    assert found["troupe_requests_total", (("finish_reason", "stop"),)] == 1
    assert found["troupe_tokens_total", (("gen_ai_token_type", "input"),)] == 12
    assert found["troupe_tokens_total", (("gen_ai_token_type", "output"),)] == 11


def test_live_readings_are_read_at_each_scrape() -> None:
    registry = CollectorRegistry()
    readings = {"troupe_requests_running": 3.0, "troupe_steps_total": 10.0}
    EngineMetrics(registry, "box", lambda: readings)
    assert samples(registry)["troupe_requests_running", ()] == 3
    readings["troupe_steps_total"] = 12.0
    assert samples(registry)["troupe_steps_total", ()] == 12
    assert b"# TYPE troupe_steps_total counter" in generate_latest(registry)
    assert b"# HELP troupe_requests_running Sequences with a slot on the device." in generate_latest(registry)


def test_two_engines_share_nothing_with_each_other_or_the_process() -> None:
    before = generate_latest(prometheus_client.REGISTRY)
    first, second = CollectorRegistry(), CollectorRegistry()
    EngineMetrics(first, "a", dict).restarts.labels("worker-0").inc()
    EngineMetrics(second, "b", dict)
    assert ("troupe_restarts_total", (("actor", "worker-0"),)) in samples(first)
    assert ("troupe_restarts_total", (("actor", "worker-0"),)) not in samples(second)
    assert b"troupe" not in generate_latest(prometheus_client.REGISTRY)
    assert b"troupe" not in before
