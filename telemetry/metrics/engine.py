"""Metrics of one engine: one registry in one process. Workers never write here; their replies carry the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from telemetry.metrics.actor_messages import ActorMessages
from telemetry.metrics.compatible_names import foreign_exposition
from telemetry.metrics.exposition import Exposition, Readings, Samples
from telemetry.metrics.histogram import Histogram
from telemetry.metrics.loop_lag import LoopLag
from telemetry.metrics.names import METRICS
from telemetry.metrics.options import MetricOptions
from telemetry.metrics.requests import PER_TOKEN_BUCKETS, RequestMetrics
from telemetry.metrics.steps import StepMetrics
from telemetry.metrics.streams import StreamMetrics

if TYPE_CHECKING:
    from telemetry.timeline import Timelines

__all__ = ["LABELLED", "EngineMetrics"]

LABELLED = frozenset(
    {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "troupe_requests_total",
        "troupe_tokens_total",
    }
)
"""Metrics with the custom labels, and with ``adapter``."""


class EngineMetrics:
    """The counters of one engine, and how a scrape reads them.

    ``readings`` returns the metrics that are read at each scrape, by the names of
    :data:`telemetry.metrics.names.METRICS`. With ``options.enabled`` false the registry stays empty, and nothing writes
    to :attr:`actor_messages`, :attr:`requests` or :attr:`loop_lag`.
    """

    def __init__(
        self, registry: CollectorRegistry, model: str, readings: Readings, options: MetricOptions | None = None
    ) -> None:
        self.registry = registry
        self.options = options = options or MetricOptions()
        self.actor_messages = ActorMessages()
        self.steps = StepMetrics()
        self.requests = RequestMetrics(model, options)
        self.loop_lag = LoopLag()
        self.streams = StreamMetrics()
        self.http_requests: Counter[tuple[str, str]] = Counter()  # by endpoint and status
        self.unknown_fields: Counter[tuple[str]] = Counter()
        self._readings = readings
        self._inter_token = Histogram(options.inter_token_buckets or PER_TOKEN_BUCKETS)
        self.steps.inter_token.append(self._inter_token)
        self._collectors: list[Collector] = []
        if not options.enabled:
            return
        labels = (*options.custom_labels, "adapter") if options.adapters else options.custom_labels
        specs = [
            msgspec.structs.replace(spec, labels=(*spec.labels, *labels)) if spec.name in LABELLED else spec
            for spec in METRICS.values()
        ]
        self._collectors.append(Exposition(specs, (self.read,)))
        for names in options.foreign_names:
            self._collectors.append(foreign_exposition(names, model, options, self.requests, self.steps, self.read))
        for collector in self._collectors:
            registry.register(collector)

    @property
    def enabled(self) -> bool:
        return self.options.enabled

    def close(self) -> None:
        """Leave the registry, which may belong to a service and outlive the engine. Idempotent."""
        while self._collectors:
            self.registry.unregister(self._collectors.pop())

    def listen(self, timelines: Timelines) -> None:
        """Measure the requests of these timelines, if metrics are enabled."""
        if self.enabled:
            timelines.listen(self.requests)

    def count_http(self, endpoint: str, status: int) -> None:
        """Count an answered HTTP request; ``endpoint`` is one of the server's routes."""
        self.http_requests[endpoint, str(status)] += 1

    def count_unknown_field(self, field: str) -> None:
        """Count an unknown field of a request; the caller limits the number of names."""
        self.unknown_fields[field,] += 1

    def read(self) -> Mapping[str, Samples]:
        """All current samples by metric name. ``prompt_tokens``, which has no metric, counts tokens of prompts that
        were run."""
        return {
            **self.requests.readings(),
            **self.steps.readings(),
            **self.streams.readings(),
            **self._actor_messages(),
            "prompt_tokens": self.requests.prompt_tokens,
            "troupe_inter_token_latency_seconds": self._inter_token,
            "troupe_loop_lag_seconds": self.loop_lag.histogram,
            "troupe_tasks": self.loop_lag.tasks,
            "troupe_http_requests_total": self.http_requests,
            "troupe_unknown_fields_total": self.unknown_fields,
            **self._readings(),
        }

    def _actor_messages(self) -> Mapping[str, Samples]:
        messages = self.actor_messages
        flows = list(messages.flows.items())
        return {
            "troupe_mailbox_wait_seconds": {key: flow.waiting for key, flow in flows},
            "troupe_handler_seconds": {key: flow.handling for key, flow in flows},
            "troupe_handler_errors_total": {key: flow.errors for key, flow in flows},
            "troupe_ask_timeouts_total": messages.ask_timeouts,
            "troupe_dead_letters_total": messages.dead_letters,
            "troupe_restarts_total": messages.restarts,
            "troupe_recovery_seconds": messages.recovery,
        }
