"""Metrics under other engines' names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from telemetry.metrics.engine import EngineMetrics
from telemetry.metrics.options import MetricOptions
from telemetry.metrics.steps import StepShape
from telemetry.timeline import Outcome, Timelines

READINGS: dict[str, Any] = {
    "troupe_requests_running": 3,
    "troupe_requests_waiting": 5,
    "troupe_preemptions_total": 2,
    "troupe_cache_pages": 100,
    "troupe_cache_pages_free": 60,
    "troupe_cache_pages_evictable": 15,
    "troupe_cache_pages_used": 25,
    "troupe_cache_page_tokens": 16,
    "troupe_cache_hit_tokens_total": 30,
    "troupe_cache_queried_tokens_total": 40,
    "troupe_context_tokens": 4096,
    "troupe_adapter_slots": 8,
    "troupe_adapter_slots_used": 2,
    "adapter_states": {("8", "pirate", "other,poet"): 1.0},
}

VLLM = {
    "vllm:num_requests_running": ("gauge", 3),
    "vllm:num_requests_waiting": ("gauge", 5),
    "vllm:kv_cache_usage_perc": ("gauge", 0.25),
    "vllm:prefix_cache_queries": ("counter", 40),
    "vllm:prefix_cache_hits": ("counter", 30),
    "vllm:num_preemptions": ("counter", 2),
    "vllm:prompt_tokens": ("counter", 7),
    "vllm:generation_tokens": ("counter", 3),
    "vllm:request_success": ("counter", 1),
    "vllm:cache_config_info": ("gauge", 1),
    "vllm:time_to_first_token_seconds": ("histogram", 1),
    "vllm:inter_token_latency_seconds": ("histogram", 2),
    "vllm:request_time_per_output_token_seconds": ("histogram", 1),
    "vllm:e2e_request_latency_seconds": ("histogram", 1),
    "vllm:request_queue_time_seconds": ("histogram", 1),
    "vllm:request_prefill_time_seconds": ("histogram", 1),
    "vllm:request_decode_time_seconds": ("histogram", 1),
    "vllm:request_inference_time_seconds": ("histogram", 1),
    "vllm:request_prompt_tokens": ("histogram", 1),
    "vllm:request_generation_tokens": ("histogram", 1),
    "vllm:request_max_num_generation_tokens": ("histogram", 1),
    "vllm:request_params_n": ("histogram", 1),
    "vllm:request_params_max_tokens": ("histogram", 1),
    "vllm:iteration_tokens_total": ("histogram", 2),
}

SGLANG = {
    "sglang:num_running_reqs": ("gauge", 3),
    "sglang:num_queue_reqs": ("gauge", 5),
    "sglang:gen_throughput": ("gauge", 0),
    "sglang:cache_hit_rate": ("gauge", 0),
    "sglang:token_usage": ("gauge", 0.25),
    "sglang:num_used_tokens": ("gauge", 400),
    "sglang:kv_used_tokens": ("gauge", 400),
    "sglang:kv_available_tokens": ("gauge", 960),
    "sglang:kv_evictable_tokens": ("gauge", 240),
    "sglang:max_total_num_tokens": ("gauge", 1600),
    "sglang:page_size": ("gauge", 16),
    "sglang:num_pages": ("gauge", 100),
    "sglang:context_len": ("gauge", 4096),
    "sglang:lora_pool_slots_used": ("gauge", 2),
    "sglang:lora_pool_slots_total": ("gauge", 8),
    "sglang:lora_pool_utilization": ("gauge", 0.25),
    "sglang:num_requests": ("counter", 1),
    "sglang:num_aborted_requests": ("counter", 0),
    "sglang:prompt_tokens": ("counter", 7),
    "sglang:generation_tokens": ("counter", 3),
    "sglang:cached_tokens": ("counter", 4),
    "sglang:num_retracted_requests": ("counter", 2),
    "sglang:time_to_first_token_seconds": ("histogram", 1),
    "sglang:inter_token_latency_seconds": ("histogram", 2),
    "sglang:request_time_per_output_token_seconds": ("histogram", 1),
    "sglang:e2e_request_latency_seconds": ("histogram", 1),
    "sglang:queue_time_seconds": ("histogram", 1),
    "sglang:prompt_tokens_histogram": ("histogram", 1),
    "sglang:generation_tokens_histogram": ("histogram", 1),
}


def families(options: MetricOptions) -> dict[str, Metric]:
    """What is exported after one request of three tokens."""
    registry, timelines = CollectorRegistry(), Timelines()
    metrics = EngineMetrics(registry, "box", lambda: READINGS, options)
    metrics.listen(timelines)
    request = {"gen_ai.request.max_tokens": 8}
    timeline = timelines.open("r", operation="chat", model="box", request=request)  # type: ignore[arg-type]
    at = timeline.started
    timeline.prompt_tokens, timeline.cached_tokens, timeline.output_tokens = 7, 4, 3
    timeline.finish(timeline.begin("queue", at, 0), at + 0.25)
    decode = timeline.begin("decode", at + 0.5, 0)
    timeline.mark("first_token", at + 0.5, 0)
    for number, shape in enumerate((StepShape(0.0, 0, 1, 7), StepShape(0.1, 2))):
        metrics.steps.answered(shape, 0.2 + number, generated=2 - number, graph_rows=0, queued=0, prepare=0, run=0.1)
    timeline.finish(decode, at + 1.5, tokens=3)
    timeline.close(Outcome(("stop",)), at + 1.5)
    return {family.name: family for family in registry.collect()}


def value(family: Metric) -> float:
    """The first sample of a gauge or a counter; the observations of a histogram."""
    name = f"{family.name}_count" if family.type == "histogram" else family.samples[0].name
    return next(sample.value for sample in family.samples if sample.name == name)


@pytest.mark.parametrize(
    ("names", "expected", "constant"),
    [("vllm", VLLM, {"engine": "0"}), ("sglang", SGLANG, {"engine_type": "unified"})],
)
def test_the_names_types_values_and_labels_that_dashboards_read(names, expected, constant) -> None:
    found = families(MetricOptions(foreign_names=(names,), collect_tokens=True))
    mine = {name: (family.type, value(family)) for name, family in found.items() if name.startswith(f"{names}:")}
    assert (mine.pop("vllm:lora_requests_info", ("gauge", None))[0]) == "gauge"  # its value is a time
    assert mine == expected
    for name in expected:
        assert all(sample.labels.items() >= {"model_name": "box", **constant}.items() for sample in found[name].samples)
    assert not any(name.startswith("vllm:" if names == "sglang" else "sglang:") for name in found)
    assert "gen_ai_server_request_duration_seconds" in found


def test_without_the_flag_there_are_no_foreign_names() -> None:
    assert not any(":" in name for name in families(MetricOptions()))


def test_buckets_are_theirs_unless_chosen() -> None:
    def bounds(name: str, options: MetricOptions) -> list[str]:
        return [sample.labels["le"] for sample in families(options)[name].samples if "le" in sample.labels]

    both = MetricOptions(foreign_names=("vllm", "sglang"))
    assert bounds("vllm:e2e_request_latency_seconds", both)[:3] == ["0.3", "0.5", "0.8"]
    assert bounds("vllm:time_to_first_token_seconds", both)[-2:] == ["2560.0", "+Inf"]
    assert bounds("sglang:time_to_first_token_seconds", both)[:3] == ["0.1", "0.2", "0.4"]
    assert bounds("sglang:inter_token_latency_seconds", both)[0] == "0.002"
    chosen = MetricOptions(foreign_names=("vllm",), first_token_buckets=(1.0,))
    assert bounds("vllm:time_to_first_token_seconds", chosen) == ["1.0", "+Inf"]


def test_labels_of_ended_requests_and_of_the_cache() -> None:
    found = families(MetricOptions(foreign_names=("vllm", "sglang")))
    assert {s.labels["finished_reason"]: s.value for s in found["vllm:request_success"].samples} == {
        "stop": 1,
        "length": 0,
        "abort": 0,
    }
    info = found["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", "100")
    assert found["sglang:cached_tokens"].samples[0].labels["cache_source"] == "device"
    assert "sglang:prompt_tokens_histogram" not in found


def test_the_adapters_that_run_and_wait_are_labels_of_the_time_of_now() -> None:
    [sample] = families(MetricOptions(foreign_names=("vllm",)))["vllm:lora_requests_info"].samples
    assert abs(sample.value - time.time()) < 60
    found = {name: value for name, value in sample.labels.items() if "lora" in name}
    assert found == {"max_lora": "8", "running_lora_adapters": "pirate", "waiting_lora_adapters": "other,poet"}


def test_without_adapters_there_are_no_metrics_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in READINGS if "adapter" in name]:
        monkeypatch.delitem(READINGS, name)
    assert not any("lora" in name for name in families(MetricOptions(foreign_names=("vllm", "sglang"))))


def test_the_exposition_keeps_colons() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, "box", lambda: READINGS, MetricOptions(foreign_names=("sglang",)))
    assert b'sglang:num_running_reqs{engine_type="unified",model_name="box"} 3.0' in generate_latest(registry)
