"""Metrics of one engine: a registry of its own, in one process. Workers never write here; their replies carry the
numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineMetrics", "Readings"]

# The buckets of OpenTelemetry's GenAI conventions; the long tail of the time to the first token is for large prefills.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 655.36)

Readings = Callable[[], "Mapping[str, float]"]


class _Live(Collector):
    """Gauges and counters that are read at the scrape, so that nobody pays for them in between."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, value in self._readings().items():
            if name.endswith("_total"):
                yield CounterMetricFamily(name.removesuffix("_total"), _LIVE_HELP.get(name, name), value=value)
            else:
                yield GaugeMetricFamily(name, _LIVE_HELP.get(name, name), value=value)


_LIVE_HELP = {
    "troupe_requests_running": "Sequences with a slot on the device.",
    "troupe_requests_waiting": "Sequences in the queue.",
    "troupe_waiting_tokens": "Prompt tokens in the queue.",
    "troupe_steps_in_flight": "Steps the device has not answered.",
    "troupe_step_age_seconds": "Age of the oldest step without an answer.",
    "troupe_preemptions_total": "Sequences that gave their pages back and are computed again.",
    "troupe_steps_total": "Steps the device has answered.",
    "troupe_step_run_seconds_total": "Seconds of model and sampling in all steps.",
    "troupe_cache_pages": "Pages of the key-value cache.",
    "troupe_cache_pages_free": "Pages that hold nothing.",
    "troupe_cache_pages_evictable": "Pages that hold prefixes nobody uses now.",
    "troupe_cache_pages_used": "Pages of running sequences.",
    "troupe_cache_hit_tokens_total": "Prompt tokens found in the prefix cache.",
    "troupe_cache_queried_tokens_total": "Prompt tokens looked up in the prefix cache.",
    "troupe_admission_rejections_total": "Requests refused at the door.",
    "troupe_ready": "1 when requests are admitted.",
}


class EngineMetrics:
    """What happens to requests, as Prometheus metrics. ``readings`` gives the live gauges at each scrape."""

    def __init__(self, registry: CollectorRegistry, model: str, readings: Readings) -> None:
        self.registry = registry
        labels = ("gen_ai_request_model",)
        self.request_duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From the admission of a request to its end.",
            (*labels, "error_type"),
            registry=registry,
            buckets=_DURATION,
        )
        self.time_to_first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the admission of a request to its first token.",
            labels,
            registry=registry,
            buckets=_TTFT,
        ).labels(model)
        self.time_per_output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of a request after the first.",
            labels,
            registry=registry,
            buckets=_PER_TOKEN,
        ).labels(model)
        self.tokens = Counter(
            "troupe_tokens",
            "Tokens of ended requests.",
            ("gen_ai_token_type",),
            registry=registry,
        )
        self.requests = Counter(
            "troupe_requests", "Ended requests by how they ended.", ("finish_reason",), registry=registry
        )
        self.restarts = Counter("troupe_restarts", "Restarts of actors.", ("actor",), registry=registry)
        self.dead_letters = Counter(
            "troupe_dead_letters", "Messages nobody could receive.", ("actor", "message"), registry=registry
        )
        self.unknown_fields = Counter(
            "troupe_unknown_fields", "Request fields that no API of this server knows.", ("field",), registry=registry
        )
        self.http_requests = Counter(
            "troupe_http_requests", "HTTP requests answered.", ("endpoint", "status"), registry=registry
        )
        self._model = model
        registry.register(_Live(readings))

    def request_ended(
        self,
        *,
        reason: str,
        error_type: str,
        duration: float,
        first_token: float | None,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """Count one request's end. Times in seconds; ``first_token`` since the admission, None when none came."""
        self.request_duration.labels(self._model, error_type).observe(duration)
        self.requests.labels(reason).inc()
        self.tokens.labels("input").inc(prompt_tokens)
        self.tokens.labels("output").inc(output_tokens)
        if first_token is not None:
            self.time_to_first_token.observe(first_token)
            if output_tokens > 1:
                self.time_per_output_token.observe((duration - first_token) / (output_tokens - 1))
